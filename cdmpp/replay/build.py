"""From the nodes of a request to a graph, and from its predictions to durations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cdmpp.compose.request import PriceRequest, Work
from cdmpp.errors import FieldError
from cdmpp.prediction import Prediction
from cdmpp.programs.query_options import Backend, Framework, Protocol
from cdmpp.replay.forms import DeviceEntry, LinkForm, NodeForm
from cdmpp.replay.graph import Floats, Graph, Ints, Node, NodeKind, Order
from cdmpp.replay.links import Link, collective_steps

_COSTS = ("duration_s", "program", "programs", "bytes", "collective")


@dataclass(frozen=True)
class Settings:
    """Which latency is meant wherever a program is priced."""

    backend: Backend | None
    protocol: Protocol
    framework: Framework | None


@dataclass
class Plan:
    """Nodes of a request, checked, and what there is to price.

    Attributes
    ----------
    seconds : list of float, length nodes
        Known durations; 0 where it is to be predicted.
    classes, kinds : list, length nodes
    asked : list of PriceRequest
        Distinct programs on distinct devices.
    parts : list of (node, asked, count)
        What the predicted nodes are made of.
    remarks : list of str
        What a reader should know about figures outside of what was measured.
    """

    nodes: Sequence[NodeForm]
    devices: Mapping[str, DeviceEntry]
    deps: list[tuple[str, ...]]
    seconds: list[float] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    kinds: list[NodeKind] = field(default_factory=list)
    held: list[list[tuple[str, str]]] = field(default_factory=list)
    asked: list[PriceRequest] = field(default_factory=list)
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def graph(self, order: Order) -> Graph:
        """The graph, with the durations that are known."""
        made = []
        for i, form in enumerate(self.nodes):
            (device, stream), *also = self.held[i]
            if form.gap_s is not None:
                gap_s = form.gap_s
            else:
                entry = self.devices.get(device) if form.collective is None else None
                gap_s = entry.gap_s if entry is not None else 0.0
            made.append(Node(form.id, device, self.seconds[i], self.deps[i], stream, self.kinds[i], gap_s, tuple(also)))
        parallel = frozenset(name for name, entry in self.devices.items() if entry.parallel)
        return Graph(made, parallel, order)


def plan_nodes(
    nodes: Sequence[NodeForm], devices: Mapping[str, DeviceEntry], links: Mapping[str, LinkForm], settings: Settings
) -> Plan:
    """Check the nodes of a request and gather what they cost.

    Raises
    ------
    FieldError
        A node with no cost or with two, an unknown link or event, a device entry that no node uses.
    """
    plan = Plan(nodes, devices, _dependencies(nodes))
    known = {name: read_link(link, f"links.{name}") for name, link in links.items()}
    outside: dict[str, int] = {}
    numbers: dict[tuple[str, str], int] = {}
    for i, node in enumerate(nodes):
        path = f"nodes.{i}"
        cost = _cost(node, path)
        stream = str(node.stream) if node.stream is not None else "comm" if cost == "collective" else "0"
        held = [(device, stream) for device in _devices(node, path)]
        seconds = 0.0
        if cost == "duration_s":
            seconds = float(node.duration_s or 0.0)
        elif cost in ("bytes", "collective"):
            seconds, name, inside = _transfer(node, known, path)
            if not inside:
                outside[name] = outside.get(name, 0) + 1
            if links[name].exclusive:
                held.append((f"link:{name}", "0"))
        else:
            _ask(plan, i, node, settings, numbers)
        plan.seconds.append(seconds)
        plan.held.append(held)
        plan.classes.append(node.class_ or ("comm" if cost in ("bytes", "collective") else "compute"))
        plan.kinds.append(_kind(plan.classes[-1], cost))
    _check_devices(plan)
    for name, count in sorted(outside.items()):
        plan.remarks.append(f"link {name}: {count} transfers lie outside its table; their times extend it")
    return plan


def _cost(node: NodeForm, path: str) -> str:
    given = [name for name in _COSTS if getattr(node, name) is not None]
    if len(given) != 1:
        what = " and ".join(given) if given else "none of " + ", ".join(_COSTS)
        raise FieldError(
            f"node {node.id!r} has {what}",
            path=f"{path}.{given[1]}" if given else path,
            hint="what it costs is said once",
        )
    if node.count is not None and given[0] != "program":
        raise FieldError(
            f"node {node.id!r}: count goes with program",
            path=f"{path}.count",
            hint="each of programs has a count of its own",
        )
    if (node.link is not None) != (given[0] == "bytes"):
        missing = given[0] == "bytes"
        raise FieldError(
            f"node {node.id!r}: " + ("bytes need a link" if missing else "a link goes with bytes"),
            path=f"{path}.link",
            hint='name one of links: {"id": "c", "bytes": 1e6, "link": "nvlink", ...}',
        )
    return given[0]


def _devices(node: NodeForm, path: str) -> list[str]:
    if node.collective is None:
        if node.device is None:
            raise FieldError(
                f"node {node.id!r} has no device",
                path=f"{path}.device",
                hint="a known device, or a name of your own, such as rank0",
            )
        return [node.device]
    ranks = node.collective.ranks
    if node.device is not None:
        raise FieldError(
            f"node {node.id!r} has a device, and is a collective",
            path=f"{path}.device",
            hint="a collective runs on its ranks",
        )
    if len(set(ranks)) < len(ranks):
        twice = next(i for i, rank in enumerate(ranks) if rank in ranks[:i])
        raise FieldError(
            f"node {node.id!r}: rank {ranks[twice]!r} is there twice",
            path=f"{path}.collective.ranks.{twice}",
            hint="name each rank once",
        )
    return list(ranks)


def _kind(class_: str, cost: str) -> NodeKind:
    if class_ == "comm" or cost in ("bytes", "collective"):
        return "comm"
    return "gap" if class_ == "gap" else "compute"


def read_link(form: LinkForm, path: str) -> Link:
    """A link from its JSON.

    Raises
    ------
    FieldError
        It has a table and figures, or two rates, or a table whose bytes do not rise.
    """
    figures = [
        name for name in ("alpha_s", "beta_s_per_byte", "bandwidth_bytes_per_s") if getattr(form, name) is not None
    ]
    rates = [name for name in figures if name != "alpha_s"]
    if form.table is not None and figures:
        raise FieldError(f"{path} has a table and {figures[0]}", path=f"{path}.table", hint="give one")
    if len(rates) > 1:
        raise FieldError(f"{path} has {rates[0]} and {rates[1]}", path=f"{path}.{rates[1]}", hint="give one")
    if form.table is None and not figures:
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


def _transfer(node: NodeForm, links: Mapping[str, Link], path: str) -> tuple[float, str, bool]:
    """Seconds of a transfer, its link, and whether the link's table covers it."""
    collective = node.collective
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
            steps, each = 1, float(node.bytes or 0.0)
        else:
            steps, each = collective_steps(collective.op, len(collective.ranks), collective.bytes, collective.algorithm)
        seconds = steps * link.seconds(each) if steps else 0.0
    except FieldError as error:
        raise FieldError(f"node {node.id!r}: {error.message}", path=where, hint=error.hint) from None
    return seconds, name, not steps or link.measured(each)


def _ask(plan: Plan, i: int, node: NodeForm, settings: Settings, numbers: dict[tuple[str, str], int]) -> None:
    entry = plan.devices.get(str(node.device))
    device = entry.device if entry is not None and entry.device is not None else str(node.device)
    works = node.programs
    if works is None:
        works = [Work(program=node.program or {}, count=node.count or 1)]
    for k, work in enumerate(works):
        key = (_text(work.program), _text(device))
        if key not in numbers:
            numbers[key] = len(plan.asked)
            path = f"nodes.{i}.program" if node.programs is None else f"nodes.{i}.programs.{k}.program"
            plan.asked.append(
                PriceRequest(path, work.program, device, settings.backend, settings.protocol, settings.framework)
            )
        plan.parts.append((i, numbers[key], work.count))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _dependencies(nodes: Sequence[NodeForm]) -> list[tuple[str, ...]]:
    """Ids that each node waits for: its deps, and who records its events."""
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
    found = []
    for i, node in enumerate(nodes):
        if not node.waits:
            found.append(tuple(node.deps))
            continue
        for k, event in enumerate(node.waits):
            if event not in recorded:
                raise FieldError(
                    f"node {node.id!r} waits for event {event!r}, which nothing records",
                    path=f"nodes.{i}.waits.{k}",
                    hint="name it in the records of a node",
                )
        found.append((*node.deps, *(recorded[event] for event in node.waits)))
    return found


def _check_devices(plan: Plan) -> None:
    used = {device for held in plan.held for device, _ in held}
    for name in plan.devices:
        if name not in used:
            raise FieldError(
                f"devices has {name!r}, and no node runs there",
                path=f"devices.{name}",
                hint="nodes run on: " + ", ".join(sorted(used)[:20]),
            )


@dataclass(frozen=True)
class Priced:
    """Durations of a plan with their predictions.

    Attributes
    ----------
    given_s : Floats, length nodes
    part_node, part_price : Ints, length parts
    part_s : Floats, length parts
        count x predicted seconds.
    """

    given_s: Floats
    part_node: Ints
    part_price: Ints
    part_s: Floats

    def durations(self, factors: Floats | None = None) -> Floats:
        """Seconds of each node; ``factors`` (length prices) scale the predictions."""
        weights = self.part_s if factors is None else self.part_s * factors[self.part_price]
        summed = np.bincount(self.part_node, weights, minlength=len(self.given_s))
        return self.given_s + summed if len(self.part_node) else self.given_s.copy()


def put_prices(plan: Plan, prices: Sequence[Prediction]) -> Priced:
    """Durations from predictions, which are parallel to ``plan.asked``."""
    parts = np.array(plan.parts, dtype=np.int64).reshape(-1, 3)
    latencies = np.array([price.latency_s for price in prices], dtype=np.float64)
    each = latencies[parts[:, 1]] * parts[:, 2] if len(parts) else np.zeros(0)
    return Priced(np.array(plan.seconds, dtype=np.float64), parts[:, 0], parts[:, 1], each)
