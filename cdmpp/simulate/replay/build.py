"""Graphs from the nodes of a request, and durations from predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.request import PriceRequest, Work
from cdmpp.programs.collectives import is_collective
from cdmpp.programs.query_options import Backend, Framework, Protocol
from cdmpp.simulate.replay.forms import DeviceEntry, LinkForm, PredictedCollectiveForm
from cdmpp.simulate.replay.graph import Floats, Graph, Ints, Node, NodeKind, Order
from cdmpp.simulate.replay.links import Link, collective_steps
from cdmpp.simulate.replay.records import NodeRecord

_COSTS = ("duration_s", "program", "programs", "bytes", "collective")
_costs = attrgetter(*_COSTS)
#: Figures of a link without a table.
FIGURES = ("alpha_s", "beta_s_per_byte", "bandwidth_bytes_per_s")


@dataclass(frozen=True)
class PriceOptions:
    """Options of all predictions of a request."""

    backend: Backend | None
    protocol: Protocol
    framework: Framework | None


@dataclass
class CheckedNodes:
    """Nodes of a request, checked, and their programs to price."""

    nodes: Sequence[NodeRecord]
    devices: Mapping[str, DeviceEntry]
    deps: list[tuple[str, ...]]
    seconds: list[float] = field(default_factory=list)  # known durations; 0 where it is to be predicted
    classes: list[str] = field(default_factory=list)
    kinds: list[NodeKind] = field(default_factory=list)
    held: list[list[tuple[str, str]]] = field(default_factory=list)  # streams that each node occupies
    price_requests: list[PriceRequest] = field(default_factory=list)  # each combination of program and device once
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # (node, price request, count) of predicted nodes
    remarks: list[str] = field(default_factory=list)  # warnings about transfers outside of the measured range

    def graph(self, order: Order) -> Graph:
        """The graph with the known durations."""
        made = []
        for i, form in enumerate(self.nodes):
            (device, stream), *also = self.held[i]
            entry = self.devices.get(device) if form.collective is None else None
            gap_s = form.gap_s if form.gap_s is not None else entry.gap_s if entry is not None else 0.0
            made.append(Node(form.id, device, self.seconds[i], self.deps[i], stream, self.kinds[i], gap_s, tuple(also)))
        parallel = frozenset(name for name, entry in self.devices.items() if entry.parallel)
        return Graph(made, parallel, order)


def check_nodes(
    nodes: Sequence[NodeRecord],
    devices: Mapping[str, DeviceEntry],
    links: Mapping[str, LinkForm],
    options: PriceOptions,
) -> CheckedNodes:
    """Check the nodes of a request and collect their costs.

    Raises FieldError: a node with no cost or with two, an unknown link or event, or a device entry that no node uses.
    """
    checked = CheckedNodes(nodes, devices, _dependencies(nodes))
    for name, link in links.items():
        if link.collective is not None or link.device is not None:
            raise FieldError(
                f"links.{name}: a replay predicts the collectives of its nodes",
                path=f"links.{name}.collective",
                hint='{"id": "c", "collective": {"operator": "all_reduce", "bytes": 1e6, "ranks": 8}, "device": ...}',
            )
    known = {name: read_link(link, f"links.{name}") for name, link in links.items()}
    outside: dict[str, int] = {}
    numbers: dict[tuple[str, str], int] = {}
    streams: dict[tuple[str, str], tuple[str, str]] = {}  # one object for each: a graph has many nodes on few
    for i, node in enumerate(nodes):
        path = f"nodes.{i}"
        cost = _cost(node, path)
        stream = str(node.stream) if node.stream is not None else "comm" if cost == "collective" else "0"
        held = [streams.setdefault((device, stream), (device, stream)) for device in _devices(node, path)]
        seconds = 0.0
        if cost == "duration_s":
            seconds = float(node.duration_s or 0.0)
        elif isinstance(node.collective, PredictedCollectiveForm):
            form, name = node.collective, node.collective.devices[0] if node.collective.devices else str(node.device)
            alone = PriceOptions(None, options.protocol, None)
            _add_program(checked, i, name, Work(program=form.program()), f"{path}.collective", alone, numbers)
        elif cost in ("bytes", "collective"):
            seconds, name, inside = _transfer(node, known, path)
            if not inside:
                outside[name] = outside.get(name, 0) + 1
            if links[name].exclusive:
                held.append((f"link:{name}", "0"))
        elif node.programs is None:
            work = Work(program=node.program or {}, count=node.count or 1)
            _add_program(checked, i, str(node.device), work, f"{path}.program", options, numbers)
        else:
            for k, work in enumerate(node.programs):
                where = f"{path}.programs.{k}.program"
                _add_program(checked, i, str(node.device), work, where, options, numbers)
        checked.seconds.append(seconds)
        checked.held.append(held)
        comm = cost in ("bytes", "collective") or is_collective((node.program or {}).get("operator"))
        checked.classes.append(node.class_ or ("comm" if comm else "compute"))
        checked.kinds.append(_kind(checked.classes[-1], cost))
    used = {device for held in checked.held for device, _ in held}
    for name in checked.devices:
        if name not in used:
            hint = "nodes run on: " + ", ".join(sorted(used)[:20])
            raise FieldError(f"devices has {name!r}, and no node runs there", path=f"devices.{name}", hint=hint)
    for name, count in sorted(outside.items()):
        checked.remarks.append(f"link {name}: {count} transfers lie outside its table; their times extend it")
    return checked


def _cost(node: NodeRecord, path: str) -> str:
    given = [name for name, value in zip(_COSTS, _costs(node), strict=True) if value is not None]
    if len(given) != 1:
        what = " and ".join(given) if given else "none of " + ", ".join(_COSTS)
        raise FieldError(
            f"node {node.id!r} has {what}", path=f"{path}.{given[1]}" if given else path, hint="give exactly one cost"
        )
    if node.count is not None and given[0] != "program":
        raise FieldError(
            f"node {node.id!r}: count goes with program",
            path=f"{path}.count",
            hint="put the count into each entry of programs",
        )
    if (node.link is not None) != (given[0] == "bytes"):
        missing = given[0] == "bytes"
        raise FieldError(
            f"node {node.id!r}: " + ("bytes need a link" if missing else "a link goes with bytes"),
            path=f"{path}.link",
            hint='name one of links: {"id": "c", "bytes": 1e6, "link": "nvlink", ...}',
        )
    return given[0]


def named_ranks(node: NodeRecord) -> list[str] | None:
    """Devices of a collective that names its ranks."""
    if isinstance(node.collective, PredictedCollectiveForm):
        return node.collective.devices
    return None if node.collective is None else list(node.collective.ranks)


def _devices(node: NodeRecord, path: str) -> list[str]:
    ranks = named_ranks(node)
    if ranks is None:
        if node.device is None:
            raise FieldError(
                f"node {node.id!r} has no device",
                path=f"{path}.device",
                hint="give a known device, or a name such as rank0 with an entry in devices",
            )
        return [node.device]
    if node.device is not None:
        raise FieldError(
            f"node {node.id!r} has a device, and is a collective",
            path=f"{path}.device",
            hint="a collective runs on its ranks: remove device",
        )
    if len(set(ranks)) < len(ranks):
        twice = next(i for i, rank in enumerate(ranks) if rank in ranks[:i])
        raise FieldError(
            f"node {node.id!r}: rank {ranks[twice]!r} occurs twice",
            path=f"{path}.collective.ranks.{twice}",
            hint="name each rank once",
        )
    return list(ranks)


def _kind(class_: str, cost: str) -> NodeKind:
    if class_ == "comm" or cost in ("bytes", "collective"):
        return "comm"
    return "gap" if class_ == "gap" else "compute"


def read_link(form: LinkForm, path: str, operator: str = "all_reduce", figure: str = "latency_s") -> Link:
    """A link from its request form.

    ``operator``, ``figure``: of a predicted link: which collective, and "latency_s", "lower_s" or "upper_s". Its times
    are of whole collectives: use them with the algorithm "measured".
    Raises FieldError: it has a table and other figures, or two rates, or a table whose bytes do not grow; or it is
    predicted, and has figures too or predicts another operation.
    """
    given = [name for name in (*FIGURES, "table") if getattr(form, name) is not None]
    rates = [name for name in given if name in FIGURES[1:]]
    if form.collective is not None:
        if given:
            raise FieldError(f"{path} has collective and {given[0]}", path=f"{path}.{given[0]}", hint="give one")
        return Link(table=form.rows(operator, path, figure))
    if form.table is not None and len(given) > 1:
        raise FieldError(f"{path} has a table and {given[0]}", path=f"{path}.table", hint="give one")
    if len(rates) > 1:
        raise FieldError(f"{path} has {rates[0]} and {rates[1]}", path=f"{path}.{rates[1]}", hint="give one")
    if not given:
        raise FieldError(
            f"{path} has no figures", path=path, hint='{"alpha_s": 1e-5, "bandwidth_bytes_per_s": 1e10}, or a table'
        )
    beta = form.beta_s_per_byte or 0.0
    if form.bandwidth_bytes_per_s is not None:
        beta = 1.0 / form.bandwidth_bytes_per_s
    try:
        return Link(form.alpha_s or 0.0, beta, tuple((row[0], row[1]) for row in form.table or ()))
    except FieldError as error:
        raise FieldError(f"{path}: {error.message}", path=f"{path}.table", hint=error.hint) from None


def _transfer(node: NodeRecord, links: Mapping[str, Link], path: str) -> tuple[float, str, bool]:
    """Seconds of a transfer, its link, and whether the table of the link covers it."""
    collective = node.collective
    assert not isinstance(collective, PredictedCollectiveForm), "it has no link"
    name = collective.link if collective is not None else str(node.link)
    where = f"{path}.collective" if collective is not None else path
    if name not in links:
        raise FieldError(
            f"node {node.id!r}: no link is called {name!r}",
            path=f"{where}.link",
            hint="one of: " + ", ".join(sorted(links)[:20]) if links else "links is empty",
        )
    link = links[name]
    try:
        if collective is None:
            steps, size = 1, float(node.bytes or 0.0)
        else:
            steps, size = collective_steps(collective.op, len(collective.ranks), collective.bytes, collective.algorithm)
        seconds = steps * link.seconds(size) if steps else 0.0
    except FieldError as error:
        raise FieldError(f"node {node.id!r}: {error.message}", path=where, hint=error.hint) from None
    return seconds, name, not steps or link.measured(size)


def _add_program(
    checked: CheckedNodes,
    i: int,
    name: str,
    work: Work,
    path: str,
    options: PriceOptions,
    numbers: dict[tuple[str, str], int],
) -> None:
    """A program of node ``i`` on a device of the graph; equal ones are priced once."""
    entry = checked.devices.get(name)
    device = entry.device if entry is not None and entry.device is not None else name
    key = (_text(work.program), _text(device))
    if key not in numbers:
        numbers[key] = len(checked.price_requests)
        checked.price_requests.append(
            PriceRequest(path, work.program, device, options.backend, options.protocol, options.framework)
        )
    checked.parts.append((i, numbers[key], work.count))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _dependencies(nodes: Sequence[NodeRecord]) -> list[tuple[str, ...]]:
    """Ids that each node waits for: its deps, and the nodes that record its events."""
    recorded: dict[str, str] = {}
    for i, node in enumerate(nodes):
        for k, event in enumerate(node.records):
            if event in recorded:
                raise FieldError(
                    f"event {event!r} is recorded by {recorded[event]!r} and {node.id!r}",
                    path=f"nodes.{i}.records.{k}",
                    hint="each event is recorded once",
                )
            recorded[event] = node.id
    dependencies = []
    for i, node in enumerate(nodes):
        for k, event in enumerate(node.waits):
            if event not in recorded:
                raise FieldError(
                    f"node {node.id!r} waits for event {event!r}, which nothing records",
                    path=f"nodes.{i}.waits.{k}",
                    hint="name it in the records of a node",
                )
        dependencies.append((*node.deps, *(recorded[event] for event in node.waits)))
    return dependencies


@dataclass(frozen=True)
class NodeDurations:
    """Durations of nodes, given or predicted."""

    given_s: Floats  # by node
    # By program of a predicted node.
    part_node: Ints
    part_price: Ints
    part_s: Floats  # count times predicted seconds

    def durations(self, factors: Floats | None = None) -> Floats:
        """Seconds of each node; ``factors``, one for each price, scale the predictions."""
        weights = self.part_s if factors is None else self.part_s * factors[self.part_price]
        summed = np.bincount(self.part_node, weights, minlength=len(self.given_s))
        return self.given_s + summed if len(self.part_node) else self.given_s.copy()


def price_nodes(checked: CheckedNodes, prices: Sequence[Prediction]) -> NodeDurations:
    """Durations from predictions, one for each of ``checked.price_requests``."""
    parts = np.array(checked.parts, dtype=np.int64).reshape(-1, 3)
    latencies = np.array([price.latency_s for price in prices], dtype=np.float64)
    part_s = latencies[parts[:, 1]] * parts[:, 2] if len(parts) else np.zeros(0)
    return NodeDurations(np.array(checked.seconds, dtype=np.float64), parts[:, 0], parts[:, 1], part_s)
