"""Cost tables of each device: seconds, bytes and errors of every operator in every type.

A cast costs a straight line in the number of elements, for each pair of types. Exchanges of gradients run during the
backward pass, across unlike devices. QSync's rule for an exchange between devices A and B: it starts on each device
when that device is ready (s = max(end of its last exchange, ready)). It lasts until the other device is ready too,
plus the longer of the two durations. So it ends on both at max(s_A, s_B) + duration. The last exchange therefore ends
at the maximum, over devices and buckets, of (ready + durations of this bucket and all later ones). This is a set of
limits that can be checked for each device alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cdmpp.devices.loading import resolve_device
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, FieldError
from cdmpp.plan.precision.network import Network, gradient_dtype, read_network
from cdmpp.plan.precision.pricing import DeviceCosts, Edge, KeptTensor
from cdmpp.plan.precision.schema import CastSource, DeviceLine, ExchangeForm, OperatorForm, PrecisionRequest
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.memory import memory_limit
from cdmpp.predict.requests.pricing import Cost
from cdmpp.predict.requests.request import PriceRequest, Work
from cdmpp.programs.elements import DTYPE_BYTES
from cdmpp.programs.query_options import FLOOR_S, Protocol
from cdmpp.simulate.replay.build import read_link
from cdmpp.simulate.replay.data_parallel import GradientLayer, fill_buckets
from cdmpp.simulate.replay.links import Algorithm, collective_s

#: Bytes per second that a plain copy read and wrote on the machine of :data:`MEASURED`.
MEASURED_COPY_BYTES_PER_S = 1.75e10


@dataclass(frozen=True)
class CastCost:
    """Seconds = overhead_s + s_per_element x elements."""

    s_per_element: float
    overhead_s: float

    def seconds(self, elements: float) -> float:
        """Seconds of one cast; 0 for no elements."""
        return self.overhead_s + self.s_per_element * elements if elements else 0.0


#: (from, to), measured on one core of an idle x86 server CPU with PyTorch on one thread
#: (`planning.casts` in docs/benchmarks.md). One line for small and large tensors is off by 8 to 40 % on average:
#: too slow for tensors that fit into a cache, too fast for the others.
MEASURED: dict[tuple[str, str], CastCost] = {
    ("int8", "float16"): CastCost(1.00e-09, 2.82e-06),
    ("int8", "bfloat16"): CastCost(3.84e-10, 2.80e-06),
    ("int8", "float32"): CastCost(2.38e-10, 2.63e-06),
    ("float16", "int8"): CastCost(1.05e-09, 8.84e-06),
    ("float16", "bfloat16"): CastCost(9.27e-10, 7.70e-07),
    ("float16", "float32"): CastCost(1.57e-10, 5.10e-07),
    ("bfloat16", "int8"): CastCost(8.31e-10, 8.14e-06),
    ("bfloat16", "float16"): CastCost(6.11e-10, 7.40e-07),
    ("bfloat16", "float32"): CastCost(1.53e-10, 7.10e-07),
    ("float32", "int8"): CastCost(9.68e-10, 8.36e-06),
    ("float32", "float16"): CastCost(1.41e-10, 5.50e-07),
    ("float32", "bfloat16"): CastCost(1.94e-10, 7.10e-07),
}


def scaled(device: DeviceSpec, protocol: Protocol) -> dict[tuple[str, str], CastCost]:
    """The measured lines scaled to a device by the ratio of memory bandwidths, with its launch cost.

    This is an estimate: casts on a GPU are limited by memory bandwidth, and some of the measured ones by the
    arithmetic of the core. Give ``casts`` where they matter.
    """
    ratio = MEASURED_COPY_BYTES_PER_S / device.mem_bandwidth_bytes_per_s
    launch_s = FLOOR_S[protocol]
    return {pair: CastCost(cost.s_per_element * ratio, launch_s) for pair, cost in MEASURED.items()}


_GRADIENT_BYTES = 4.0


def buckets(
    form: ExchangeForm | None, operators: Sequence[OperatorForm], index: Mapping[str, int], workers: int
) -> list[tuple[int, float]]:
    """Slot after which the last gradient of a bucket is ready, and seconds of its exchange, in order of the slots.

    ``operators``: in topological order. ``index``: of each operator by id. ``workers``: of all devices.
    Raises FieldError: a duration or a link is missing, or a bucket names an operator that is unknown or in another
    bucket.
    """
    if form is None or (workers == 1 and form.buckets is None):
        return []
    collective = None if form.link is None else form.link.collective
    if collective is not None and collective.ranks != workers:
        raise FieldError.at(
            "communication.link.collective.ranks",
            f"{collective.ranks} ranks, and the devices have {workers} workers",
            hint="give the same number",
        )
    link = read_link(form.link, "communication.link") if form.link is not None else None
    count = len(operators)

    def exchange_s(size: float, path: str) -> float:
        if link is None:
            raise FieldError.at(
                path,
                "the seconds of an exchange depend on a link",
                hint="give communication.link, or duration_s of each bucket",
            )
        try:
            algorithm: Algorithm = "ring" if collective is None else "measured"
            return collective_s("all_reduce", workers, size, link, algorithm) if workers > 1 else 0.0
        except FieldError as error:
            raise FieldError.at("communication.link.table", error.message, hint=error.hint) from None

    out: list[tuple[int, float]] = []
    if form.buckets is None:
        layers = [
            GradientLayer(o.id, 0.0, 0.0, (_GRADIENT_BYTES * o.weight_elements,) if o.weight_elements else ())
            for o in operators
        ]
        filled = fill_buckets(layers, form.bucket_bytes)
        return [(2 * count - 1 - b.ready, exchange_s(b.bytes, "communication.link")) for b in filled]
    seen: set[str] = set()
    for b, bucket in enumerate(form.buckets):
        for k, name in enumerate(bucket.operators):
            path = f"communication.buckets.{b}.operators.{k}"
            if name not in index:
                raise FieldError.at(path, f"no operator is called {name!r}")
            if name in seen:
                raise FieldError.at(path, f"{name!r} is already in a bucket")
            seen.add(name)
        ready = max(2 * count - 1 - index[name] for name in bucket.operators)
        seconds = bucket.duration_s
        if seconds is None:
            size = sum(_GRADIENT_BYTES * operators[index[name]].weight_elements for name in bucket.operators)
            seconds = exchange_s(size, f"communication.buckets.{b}.duration_s")
        out.append((ready, seconds))
    return sorted(out, key=lambda exchange: exchange[0])


def limits(
    exchanges: Sequence[tuple[int, float]], count: int, update_s: float, slowest_update_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Slots followed by exchanges or the update: ``after`` and ``tail_s`` of a device's costs, (exchanges + 1,).

    ``exchanges``: of :func:`buckets`. ``count``: number of operators. ``update_s``, ``slowest_update_s``: seconds of
    the optimizer step on this device, and the longest of all devices.
    """
    seconds = np.array([duration for _, duration in exchanges], dtype=np.float64)
    tails = np.cumsum(seconds[::-1])[::-1] + slowest_update_s
    after = np.array([*(slot for slot, _ in exchanges), 2 * count - 1], dtype=np.int64)
    return after, np.append(tails, update_s)


@dataclass(frozen=True)
class OperatorCosts:
    """Costs on one device, by operator and level."""

    forward: list[list[Cost]] = field(default_factory=list)
    backward: list[list[Cost]] = field(default_factory=list)


def backward_dtype(dtype: str, device: DeviceLine) -> str:
    """Type in which the backward pass of an operator runs on a device."""
    if dtype == "int8" and "float16" not in device.dtypes and "bfloat16" in device.dtypes:
        return "bfloat16"
    return gradient_dtype(dtype)


def price_requests(request: PrecisionRequest) -> list[PriceRequest]:
    """Programs of all operators whose costs are not given: by operator, device, type, and pass.

    Raises FieldError: parts of the request contradict each other, a device is missing, a program has no type to change,
    or there are too many programs.
    """
    network = read_network(request)
    out: list[PriceRequest] = []
    for position, operator in zip(network.positions, network.operators, strict=True):
        if operator.forward is None:
            continue
        i = network.index[operator.id]
        for d, line in enumerate(network.devices):
            if line.device is None:
                raise FieldError.at(f"devices.{d}.device", f"needed to price the programs of {operator.id!r}")
            for dtype in network.dtypes(line, i):
                for name, works, used in _works(operator, line, dtype):
                    for k, work in enumerate(works):
                        path = f"operators.{position}.{name}.{k}.program"
                        program = _with_dtype(work.program, used, path)
                        out.append(
                            PriceRequest(path, program, line.device, line.backend, line.protocol, line.framework)
                        )
    return out


def operator_costs(network: Network, prices: Sequence[Prediction]) -> list[OperatorCosts]:
    """Costs by device from the prices of :func:`price_requests`. Raises FieldError: a given cost is missing."""
    by_device = [OperatorCosts() for _ in network.devices]
    remaining = iter(prices)
    # The loops are nested as in price_requests().
    for i, operator in enumerate(network.operators):
        for line, costs in zip(network.devices, by_device, strict=True):
            path = f"operators.{network.positions[i]}.costs"
            pairs = [_costs(operator, path, line, dtype, remaining) for dtype in network.dtypes(line, i)]
            costs.forward.append([forward for forward, _ in pairs])
            costs.backward.append([backward for _, backward in pairs])
    return by_device


def _works(operator: OperatorForm, line: DeviceLine, dtype: str) -> list[tuple[str, list[Work], str]]:
    """Field, programs and type of the forward and of the backward pass."""
    assert operator.forward is not None
    return [("forward", operator.forward, dtype), ("backward", operator.backward or [], backward_dtype(dtype, line))]


def _with_dtype(program: Mapping[str, Any], dtype: str, path: str) -> dict[str, Any]:
    if "operator" not in program:
        raise FieldError.at(
            path,
            "the type of this program cannot be changed",
            hint='give an operator object, such as {"operator": "linear", "m": 64, "n": 64, "k": 64}',
        )
    return {**program, "dtype": dtype}


def _costs(
    operator: OperatorForm, path: str, line: DeviceLine, dtype: str, prices: Iterator[Prediction]
) -> tuple[Cost, Cost]:
    """Forward and backward cost of an operator in one type on one device."""
    if operator.costs is not None:
        matching = [given for given in operator.costs if given.dtype == dtype and given.device in (None, line.name)]
        if not matching:
            raise FieldError.at(
                path, f"none for {dtype} on {line.name!r}", hint="give its seconds, or narrow the operator's dtypes"
            )
        # A cost for this device comes before one for all devices.
        cost = next((given for given in matching if given.device is not None), matching[0])
        return Cost.given(cost.forward_s), Cost.given(cost.backward_s)
    sums = []
    for _, works, _ in _works(operator, line, dtype):
        counts = [work.count for work in works]
        sums.append(Cost.of(counts, [next(prices) for _ in counts]))
    forward, backward = sums
    if operator.backward_factor is not None:
        backward = _scaled(forward, operator.backward_factor)
    return forward, backward


def _scaled(cost: Cost, factor: float) -> Cost:
    return Cost(
        factor * cost.latency_s,
        factor * cost.lower_s,
        factor * cost.upper_s,
        tuple(replace(part, latency_s=factor * part.latency_s) for part in cost.parts),
    )


#: Bytes of a float32 master weight and its gradient.
_MASTER_BYTES = 8.0


@dataclass(frozen=True)
class DeviceTables:
    """One device's tables at the predicted costs and at their bounds."""

    costs: DeviceCosts
    lower: DeviceCosts
    upper: DeviceCosts
    operators: OperatorCosts  # the costs that they are made of
    cast_source: CastSource


def build_tables(request: PrecisionRequest, network: Network) -> list[DeviceTables]:
    """Tables of every device of a priced request.

    Raises FieldError: a cost of an operator, a cast or an exchange is missing, or a device is unknown.
    """
    costs = operator_costs(network, request.prices)
    workers = sum(line.workers for line in network.devices)
    exchanges = buckets(request.communication, network.operators, network.index, workers)
    slowest_s = max(line.update_s for line in network.devices)
    tables = []
    for d, line in enumerate(network.devices):
        after, tail_s = limits(exchanges, len(network.operators), line.update_s, slowest_s)
        device = _DeviceReader(network, d)
        tables.append(device.tables(costs[d], request.optimizer_bytes_per_weight, after, tail_s))
    return tables


class _DeviceReader:
    """Builds the tables of one device."""

    def __init__(self, network: Network, d: int) -> None:
        self.network, self.line, self.path = network, network.devices[d], f"devices.{d}"
        self.levels = [network.dtypes(self.line, i) for i in range(len(network.operators))]
        self.casts, self.cast_source = _casts(self.line, self.path)

    def tables(
        self, costs: OperatorCosts, optimizer_bytes: float, after: np.ndarray, tail_s: np.ndarray
    ) -> DeviceTables:
        operators, levels, line = self.network.operators, self.levels, self.line
        element_bytes = [np.array([float(DTYPE_BYTES[name]) for name in names]) for names in levels]
        own_bytes = [
            np.where(size < DTYPE_BYTES["float32"], size, 0.0) * operator.weight_elements
            + size * operator.kept_elements
            for operator, size in zip(operators, element_bytes, strict=True)
        ]
        # Master weights are float32: the forward pass copies them, and the backward pass casts gradients back.
        copy_s = [
            np.array([self._cast_s("float32", name, operator.weight_elements) for name in names])
            for names, operator in zip(levels, operators, strict=True)
        ]
        gradient_s = [
            np.array([self._cast_s(backward_dtype(name, line), "float32", operator.weight_elements) for name in names])
            for names, operator in zip(levels, operators, strict=True)
        ]
        edges, kept = self._edges()
        weights = sum(operator.weight_elements for operator in operators)
        predicted = DeviceCosts(
            name=line.name,
            workers=line.workers,
            dtypes=levels,
            element_bytes=element_bytes,
            forward_s=_seconds(costs.forward, copy_s, "latency_s"),
            backward_s=_seconds(costs.backward, gradient_s, "latency_s"),
            sensitivity=[
                np.array([errors[name] for name in names])
                for errors, names in zip(self.network.sensitivity, levels, strict=True)
            ],
            own_bytes=own_bytes,
            edges=edges,
            kept=kept,
            fixed_bytes=line.base_bytes + weights * (_MASTER_BYTES + optimizer_bytes),
            memory_bytes=memory_limit(line.memory_bytes, [line.device], self.network.ignore_memory),
            after=after,
            tail_s=tail_s,
        )
        lower, upper = (
            replace(
                predicted,
                forward_s=_seconds(costs.forward, copy_s, figure),
                backward_s=_seconds(costs.backward, gradient_s, figure),
            )
            for figure in ("lower_s", "upper_s")
        )
        return DeviceTables(predicted, lower, upper, costs, self.cast_source)

    def _edges(self) -> tuple[tuple[Edge, ...], tuple[KeptTensor, ...]]:
        """Tensors between operators with their casts, and tensors that are kept for the backward pass."""
        operators, levels, line = self.network.operators, self.levels, self.line
        edges: list[Edge] = []
        # Tensors of one size between operators with the same levels share one table.
        tables: dict[tuple[tuple[str, ...], tuple[str, ...], int], tuple[np.ndarray, np.ndarray]] = {}
        readers: list[list[int]] = [[] for _ in operators]
        for i, operator in enumerate(operators):
            for name in operator.deps:
                producer = self.network.index[name]
                readers[producer].append(i)
                size = operators[producer].output_elements
                key = levels[producer], levels[i], size
                if key not in tables:
                    forward = [[self._cast_s(a, b, size) for b in levels[i]] for a in levels[producer]]
                    backward = [
                        [self._cast_s(backward_dtype(b, line), backward_dtype(a, line), size) for b in levels[i]]
                        for a in levels[producer]
                    ]
                    tables[key] = np.array(forward), np.array(backward)
                edges.append(Edge(producer, i, *tables[key]))
        kept = tuple(
            KeptTensor(tuple(sorted(consumers)), operators[producer].output_elements)
            for producer, consumers in enumerate(readers)
            if consumers and operators[producer].output_elements
        )
        return tuple(edges), kept

    def _cast_s(self, source: str, target: str, elements: int) -> float:
        if source == target or not elements:
            return 0.0
        if (source, target) not in self.casts:
            raise FieldError.at(
                f"{self.path}.casts",
                f"none from {source} to {target}",
                hint="give each pair of types that can meet, those of float32 and of the backward pass included",
            )
        return self.casts[source, target].seconds(elements)


def _seconds(costs: list[list[Cost]], casts: list[np.ndarray], figure: str) -> list[np.ndarray]:
    """One figure of the costs plus the casts of the operator's weights, by operator and level."""
    return [np.array([getattr(cost, figure) for cost in row]) + extra for row, extra in zip(costs, casts, strict=True)]


def _casts(line: DeviceLine, path: str) -> tuple[Mapping[tuple[str, str], CastCost], CastSource]:
    """Cost of each cast on a device, and its source."""
    if line.casts is not None:
        given: dict[tuple[str, str], CastCost] = {}
        for k, cast in enumerate(line.casts):
            pair = (cast.source, cast.target)
            if cast.source == cast.target or pair in given:
                problem = "source and target are the same type" if cast.source == cast.target else "a pair twice"
                raise FieldError.at(f"{path}.casts.{k}", problem)
            given[pair] = CastCost(cast.s_per_element, cast.overhead_s)
        return given, "given"
    if line.device is None:
        return MEASURED, "measured on a CPU"
    try:
        spec = resolve_device(line.device, lookup)
    except CdmppError as error:
        raise FieldError.at(f"{path}.device", error.message, hint=error.hint) from None
    return scaled(spec, line.protocol), "measured on a CPU, scaled by memory bandwidth"
