"""From a precision request and its prices to the tables that the allocator works on."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from cdmpp.compose.pricing import Cost
from cdmpp.compose.request import PriceRequest, Work
from cdmpp.devices.loading import from_mapping
from cdmpp.devices.registry import lookup
from cdmpp.errors import CdmppError, FieldError
from cdmpp.planning.precision.casts import MEASURED, CastCost, scaled
from cdmpp.planning.precision.exchange import buckets, limits
from cdmpp.planning.precision.forms import MAX_EDGES, MAX_PAIRS, DeviceLine, ExchangeForm, OperatorForm
from cdmpp.planning.precision.indicator import gradient_dtype, indicator
from cdmpp.planning.precision.pricing import DeviceCosts, Edge, Kept
from cdmpp.prediction import Prediction
from cdmpp.programs.operators import DTYPE_BYTES, DType

CastSource = Literal["given", "measured on a CPU", "measured on a CPU, scaled by memory bandwidth"]
#: float32 master weights and gradients.
_MASTER_BYTES = 8.0
MAX_ASKED = 50_000


@dataclass(frozen=True)
class Job:
    """A request with its operators in topological order.

    Attributes
    ----------
    operators : list of OperatorForm
    index : list of int
        Their places in the request.
    place : dict of str to int
        Operator -> place in ``operators``.
    sensitivity : list of dict of str to float
    """

    devices: Sequence[DeviceLine]
    operators: list[OperatorForm]
    index: list[int]
    place: dict[str, int]
    sensitivity: list[dict[str, float]]
    optimizer_bytes_per_weight: float

    def dtypes(self, device: DeviceLine, i: int) -> tuple[str, ...]:
        """Levels of an operator on a device: fewest bits first, of equal bits the larger error first."""
        form = self.operators[i]
        named = [name for name in device.dtypes if form.dtypes is None or name in form.dtypes]
        added = self.sensitivity[i]
        return tuple(sorted(set(named), key=lambda name: (DTYPE_BYTES[name], -added.get(name, 0.0), name)))


def read_job(
    devices: Sequence[DeviceLine], operators: Sequence[OperatorForm], gamma: float, optimizer_bytes: float
) -> Job:
    """Check what no schema can say, and order the operators.

    Raises
    ------
    FieldError
        Equal names, unknown dependencies, cycles, operators without a type or a sensitivity.
    """
    _distinct([device.name for device in devices], "devices", "name")
    place = _distinct([one.id for one in operators], "operators", "id")
    edges = sum(len(one.deps) for one in operators)
    if edges > MAX_EDGES:
        raise FieldError(f"operators: {edges:,} deps in all; at most {MAX_EDGES:,}", path="operators")
    pairs = len(operators) * len(devices)
    if pairs > MAX_PAIRS:
        raise FieldError(
            f"operators: {len(operators):,} on {len(devices)} devices are {pairs:,} pairs; at most {MAX_PAIRS:,}",
            path="operators",
            hint="plan equal blocks of the network once",
        )
    for at, one in enumerate(operators):
        _check_costs(at, one)
    index = _order(operators, place)
    ordered = [operators[i] for i in index]
    place = {one.id: i for i, one in enumerate(ordered)}
    depths: dict[str, int] = {}
    for one in ordered:
        depths[one.id] = 1 + max((depths[name] for name in one.deps), default=0)
    known = {one.id: one.statistics.read() for one in ordered if one.statistics is not None}
    # Depths of all operators: those without statistics make the network as deep.
    computed = indicator(known, depths, tuple(DTYPE_BYTES), gamma)
    sensitivity: list[dict[str, float]] = []
    for one in ordered:
        given = one.sensitivity.model_dump(exclude_none=True) if one.sensitivity is not None else {}
        sensitivity.append(computed.get(one.id, {"float32": 0.0, **given}))
    job = Job(devices, ordered, index, place, sensitivity, optimizer_bytes)
    for d, device in enumerate(devices):
        if len(set(device.dtypes)) < len(device.dtypes):
            raise FieldError(f"devices.{d}.dtypes: a type twice", path=f"devices.{d}.dtypes")
        for i, at in enumerate(index):
            levels = job.dtypes(device, i)
            if not levels:
                raise FieldError(
                    f"operators.{at}.dtypes: {device.name!r} has none of them", path=f"operators.{at}.dtypes"
                )
            lacking = [name for name in levels if name not in sensitivity[i]]
            if lacking:
                raise FieldError(
                    f"operators.{at}.sensitivity: nothing is said of {', '.join(lacking)}",
                    path=f"operators.{at}.sensitivity",
                    hint="give the error that each allowed type adds, or statistics",
                )
    return job


def _distinct(names: Sequence[str], where: str, field: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for i, name in enumerate(names):
        if name in found:
            raise FieldError(
                f"{where}.{i}.{field}: {name!r} is {where}.{found[name]} already", path=f"{where}.{i}.{field}"
            )
        found[name] = i
    return found


def _check_costs(at: int, one: OperatorForm) -> None:
    """Costs and sensitivities are said once, in one way."""
    path = f"operators.{at}"
    if (one.costs is None) == (one.forward is None):
        raise FieldError(f"{path}: give either costs or forward", path=f"{path}.costs")
    ways = (one.backward is not None) + (one.backward_factor is not None)
    if ways != (one.forward is not None):
        raise FieldError(
            f"{path}: with forward, and only then, one of backward and backward_factor is given",
            path=f"{path}.backward",
        )
    if one.sensitivity is not None and one.statistics is not None:
        raise FieldError(f"{path}: give either sensitivity or statistics", path=f"{path}.sensitivity")


def _order(operators: Sequence[OperatorForm], place: Mapping[str, int]) -> list[int]:
    """Topological order, of those that are ready the first in the request."""
    waits = [0] * len(operators)
    readers: list[list[int]] = [[] for _ in operators]
    for i, one in enumerate(operators):
        for k, name in enumerate(one.deps):
            path = f"operators.{i}.deps.{k}"
            if name not in place:
                raise FieldError(f"{path}: no operator is called {name!r}", path=path)
            if name in one.deps[:k]:
                raise FieldError(f"{path}: {name!r} twice", path=path)
            readers[place[name]].append(i)
            waits[i] += 1
    ready = [i for i, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for reader in readers[i]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(operators):
        held = [i for i, count in enumerate(waits) if count]
        # Walk back from one of them: whoever is met again is on a cycle.
        walk = [held[0]]
        while True:
            i = next(place[name] for name in operators[walk[-1]].deps if waits[place[name]])
            if i in walk:
                cycle = [*walk[walk.index(i) :], i]
                break
            walk.append(i)
        names = " -> ".join(operators[i].id for i in reversed(cycle[-9:]))
        raise FieldError(f"operators.{i}.deps: a cycle: {names}", path=f"operators.{i}.deps")
    return order


def asked(job: Job) -> list[PriceRequest]:
    """Programs of all operators that leave their costs open, in every type of every device.

    Raises
    ------
    FieldError
    """
    out: list[PriceRequest] = []
    for i, (at, one) in enumerate(zip(job.index, job.operators, strict=True)):
        if one.forward is None:
            continue
        for d, line in enumerate(job.devices):
            if line.device is None:
                raise FieldError(
                    f"devices.{d}.device: programs of {one.id!r} are to be priced on it", path=f"devices.{d}.device"
                )
            for dtype in job.dtypes(line, i):
                for field, works, used in _works(one, line, dtype):
                    for k, work in enumerate(works):
                        path = f"operators.{at}.{field}.{k}.program"
                        out.append(
                            PriceRequest(
                                path,
                                _in_type(work.program, used, path),
                                line.device,
                                line.backend,
                                line.protocol,
                                line.framework,
                            )
                        )
            if len(out) > MAX_ASKED:
                raise FieldError(
                    f"operators: more than {MAX_ASKED:,} programs to price",
                    path="operators",
                    hint="fewer operators, types or devices",
                )
    return out


def _works(one: OperatorForm, line: DeviceLine, dtype: str) -> list[tuple[str, list[Work], str]]:
    assert one.forward is not None
    return [("forward", one.forward, dtype), ("backward", one.backward or [], _gradient(dtype, line.dtypes))]


def _gradient(dtype: str, allowed: Sequence[DType]) -> str:
    """The type of an operator's backward pass."""
    if dtype == "int8" and "float16" not in allowed and "bfloat16" in allowed:
        return "bfloat16"
    return gradient_dtype(dtype)


def _in_type(program: Mapping[str, Any], dtype: str, path: str) -> dict[str, Any]:
    if "operator" not in program:
        raise FieldError(
            f"{path}: the type of this program cannot be changed",
            path=path,
            hint='give an operator object, such as {"operator": "linear", "m": 64, "n": 64, "k": 64}',
        )
    return {**program, "dtype": dtype}


@dataclass(frozen=True)
class Tables:
    """One device's tables at the predicted costs and at their bounds, and what they are made of."""

    costs: DeviceCosts
    lower: DeviceCosts
    upper: DeviceCosts
    forward: list[list[Cost]]
    backward: list[list[Cost]]
    cast_source: CastSource


def tables(job: Job, communication: ExchangeForm | None, prices: Sequence[Prediction]) -> list[Tables]:
    """Tables of every device.

    Parameters
    ----------
    job : Job
    communication : ExchangeForm or None
    prices : sequence of Prediction
        Parallel to :func:`asked`.

    Raises
    ------
    FieldError
    """
    # Operators outermost, as in asked().
    by_device: list[tuple[list[list[Cost]], list[list[Cost]]]] = [([], []) for _ in job.devices]
    left = iter(prices)
    for i, (at, one) in enumerate(zip(job.index, job.operators, strict=True)):
        for line, (forward, backward) in zip(job.devices, by_device, strict=True):
            pairs = [_costs(one, at, line, dtype, left) for dtype in job.dtypes(line, i)]
            forward.append([pair[0] for pair in pairs])
            backward.append([pair[1] for pair in pairs])
    workers = sum(line.workers for line in job.devices)
    exchanges = buckets(communication, job.operators, job.place, workers)
    slowest = max(line.update_s for line in job.devices)
    return [
        _device(job, d, forward, backward, limits(exchanges, len(job.operators), line.update_s, slowest))
        for d, (line, (forward, backward)) in enumerate(zip(job.devices, by_device, strict=True))
    ]


def _costs(one: OperatorForm, at: int, line: DeviceLine, dtype: str, prices: Iterator[Prediction]) -> tuple[Cost, Cost]:
    if one.costs is not None:
        named = [given for given in one.costs if given.dtype == dtype and given.device == line.name]
        common = [given for given in one.costs if given.dtype == dtype and given.device is None]
        found = named or common
        if not found:
            raise FieldError(
                f"operators.{at}.costs: nothing for {dtype} on {line.name!r}",
                path=f"operators.{at}.costs",
                hint="give its seconds, or narrow the operator's dtypes",
            )
        return Cost.given(found[0].forward_s), Cost.given(found[0].backward_s)
    sums = []
    for _, works, _ in _works(one, line, dtype):
        counts = [work.count for work in works]
        sums.append(Cost.of(counts, [next(prices) for _ in counts]))
    forward, backward = sums
    if one.backward_factor is not None:
        backward = _times(forward, one.backward_factor)
    return forward, backward


def _times(cost: Cost, factor: float) -> Cost:
    return Cost(
        factor * cost.latency_s,
        factor * cost.lower_s,
        factor * cost.upper_s,
        tuple(replace(part, latency_s=factor * part.latency_s) for part in cost.parts),
    )


def _device(
    job: Job, d: int, forward: list[list[Cost]], backward: list[list[Cost]], ends: tuple[np.ndarray, np.ndarray]
) -> Tables:
    line = job.devices[d]
    casts, source = _casts(line, d)
    levels = [job.dtypes(line, i) for i in range(len(job.operators))]
    element_bytes = [np.array([float(DTYPE_BYTES[name]) for name in names]) for names in levels]

    def cast_s(a: str, b: str, elements: int) -> float:
        if a == b or not elements:
            return 0.0
        if (a, b) not in casts:
            raise FieldError(
                f"devices.{d}.casts: nothing from {a} to {b}",
                path=f"devices.{d}.casts",
                hint="give each pair of types that can meet, float32 and the backward pass's included",
            )
        return casts[a, b].seconds(elements)

    weights = [one.weight_elements for one in job.operators]
    # Master weights are float32: a copy is made in the forward pass, and gradients are cast back.
    to_copy = [
        np.array([cast_s("float32", name, n) for name in names]) for names, n in zip(levels, weights, strict=True)
    ]
    from_gradient = [
        np.array([cast_s(_gradient(name, line.dtypes), "float32", n) for name in names])
        for names, n in zip(levels, weights, strict=True)
    ]
    edges: list[Edge] = []
    # Tensors of one size between operators of the same levels have one table.
    known: dict[tuple[tuple[str, ...], tuple[str, ...], int], tuple[np.ndarray, np.ndarray]] = {}
    readers: list[list[int]] = [[] for _ in job.operators]
    for i, one in enumerate(job.operators):
        for name in one.deps:
            p = job.place[name]
            readers[p].append(i)
            n = job.operators[p].output_elements
            key = levels[p], levels[i], n
            if key not in known:
                down = [[cast_s(a, b, n) for b in levels[i]] for a in levels[p]]
                up = [
                    [cast_s(_gradient(b, line.dtypes), _gradient(a, line.dtypes), n) for b in levels[i]]
                    for a in levels[p]
                ]
                known[key] = np.array(down), np.array(up)
            edges.append(Edge(p, i, *known[key]))
    kept = tuple(
        Kept(tuple(sorted(who)), job.operators[p].output_elements)
        for p, who in enumerate(readers)
        if who and job.operators[p].output_elements
    )
    own = [
        np.where(size < DTYPE_BYTES["float32"], size, 0.0) * one.weight_elements + size * one.kept_elements
        for one, size in zip(job.operators, element_bytes, strict=True)
    ]

    def at(figure: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        def rows(costs: list[list[Cost]], more: list[np.ndarray]) -> list[np.ndarray]:
            return [
                np.array([getattr(cost, figure) for cost in row]) + extra
                for row, extra in zip(costs, more, strict=True)
            ]

        return rows(forward, to_copy), rows(backward, from_gradient)

    middle = at("latency_s")
    costs = DeviceCosts(
        name=line.name,
        workers=line.workers,
        dtypes=levels,
        element_bytes=element_bytes,
        forward_s=middle[0],
        backward_s=middle[1],
        sensitivity=[
            np.array([added[name] for name in names]) for added, names in zip(job.sensitivity, levels, strict=True)
        ],
        own_bytes=own,
        edges=tuple(edges),
        kept=kept,
        fixed_bytes=line.base_bytes + sum(weights) * (_MASTER_BYTES + job.optimizer_bytes_per_weight),
        memory_bytes=line.memory_bytes if line.memory_bytes is not None else float("inf"),
        after=ends[0],
        tail_s=ends[1],
    )
    bounds = [at("lower_s"), at("upper_s")]
    lower, upper = (replace(costs, forward_s=f, backward_s=b) for f, b in bounds)
    return Tables(costs, lower, upper, forward, backward, source)


def _casts(line: DeviceLine, d: int) -> tuple[Mapping[tuple[str, str], CastCost], CastSource]:
    if line.casts is not None:
        given: dict[tuple[str, str], CastCost] = {}
        for k, cast in enumerate(line.casts):
            pair = (cast.source, cast.target)
            if cast.source == cast.target or pair in given:
                what = "the same type" if cast.source == cast.target else "a pair twice"
                raise FieldError(f"devices.{d}.casts.{k}: {what}", path=f"devices.{d}.casts.{k}")
            given[pair] = CastCost(cast.s_per_element, cast.overhead_s)
        return given, "given"
    if line.device is None:
        return MEASURED, "measured on a CPU"
    try:
        spec = lookup(line.device) if isinstance(line.device, str) else from_mapping(line.device)
    except CdmppError as error:
        path = f"devices.{d}.device"
        raise FieldError(f"{path}: {error.message}", path=path, hint=error.hint) from None
    return scaled(spec, line.protocol), "measured on a CPU, scaled by memory bandwidth"
