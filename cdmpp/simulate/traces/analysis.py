"""What a replayed trace spent its time on: critical path by operator, idle time by cause, and the table of kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cdmpp.simulate.replay.engine import Timeline
from cdmpp.simulate.traces.nodes import WORKING, TraceGraph, WorkNode

#: Causes of idle time, in the order in which they are listed.
CAUSES = ("host", "communication", "other ranks", "synchronisation", "dependency")
_COMM_LABEL = re.compile(r"\(.*|_[A-Za-z0-9]*_(RING|TREE|NVLS|COLLNET).*", re.IGNORECASE)
_POINTS = ("delay", "arrive", "join")
_TEMPLATE = re.compile(r"<.*")


@dataclass(frozen=True)
class PathPart:
    """Part of the critical path."""

    label: str  # operator, or a class in brackets
    nodes: int
    seconds: float  # of one iteration
    share: float


@dataclass(frozen=True)
class RankIdle:
    """Use of one rank's main lane: the stream with most work, or the thread with the iterations.

    Attributes
    ----------
    rank : int
    lane : str
    busy_s : float
        Of one iteration: kernels and copies; on a host alone, operators.
    idle_s : dict of str to float
        Of one iteration, by cause. With ``busy_s`` it sums to the replayed iteration.
    exposed_comm_s : float
        Of one iteration: the rank transfers and does not compute.
    """

    rank: int
    lane: str
    busy_s: float
    idle_s: dict[str, float]
    exposed_comm_s: float


@dataclass(frozen=True)
class KernelRow:
    """All runs of one kernel; on a host alone, of one operator.

    Attributes
    ----------
    name : str
    operator : str
        Operator that launched it; empty where the trace does not have it.
    calls : int
        In all iterations and on all ranks.
    seconds : float
        Sum of the calls.
    mean_s : float
    share : float
        Of the time of all kernels.
    """

    name: str
    operator: str
    calls: int
    seconds: float
    mean_s: float
    share: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def label_of(node: WorkNode) -> str:
    """Operator of a node, or its class in brackets."""
    if node.operation is not None:
        return node.operation.name
    if node.role == "comm":
        return _COMM_LABEL.sub("", node.label)
    if node.role in ("kernel", "op", "copy"):
        return short_name(node.label)
    return {"delay": f"({node.cause or 'wait'} latency)", "earlier": "(earlier iterations)"}.get(
        node.role, f"({node.role})"
    )


def short_name(name: str) -> str:
    """A kernel's name without return type, template and parameters."""
    plain = _TEMPLATE.sub("", name.removeprefix("void ")).partition("(")[0].strip()
    return plain or name[:60]


def path_shares(graph: TraceGraph, timeline: Timeline) -> list[PathPart]:
    """The critical path by operator, largest first; shares sum to 1. The later start of a rank is not part of it."""
    seconds: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for i in timeline.critical_path:
        duration_s = float(timeline.duration_s[i])
        if duration_s > 0 and not _is_start(graph.nodes[i]):
            label = label_of(graph.nodes[i])
            seconds[label] += duration_s  # type: ignore[assignment]
            runs[label] += 1
    total_s = sum(seconds.values()) or 1.0
    return [PathPart(label, runs[label], s / graph.count, s / total_s) for label, s in seconds.most_common()]


def idle(graph: TraceGraph, timeline: Timeline) -> list[RankIdle]:
    """Use of the main lane of each rank."""
    lanes: dict[int, dict[tuple[str, str], list[int]]] = {rank: {} for rank in graph.ranks}
    for i, node in enumerate(graph.nodes):
        if node.device not in graph.parallel:
            lanes[node.rank].setdefault((node.device, node.stream), []).append(i)
    exposed = timeline.exposed_comm_by_device_s
    rows = []
    for rank, rank_lanes in lanes.items():
        if not rank_lanes:
            continue
        main = max(
            rank_lanes, key=lambda lane: sum(graph.nodes[i].duration_s for i in rank_lanes[lane] if _works(graph, i))
        )
        walk = _IdleWalk(graph, timeline)
        walk.lane(rank_lanes[main])
        devices = {device for device, _ in rank_lanes}
        on_gpu = {device for device in devices if " gpu" in device} or devices
        count = graph.count
        rows.append(
            RankIdle(
                rank,
                " ".join(main),
                walk.busy_s / count,
                {cause: walk.idle_s[cause] / count for cause in CAUSES if walk.idle_s[cause] > 0},
                sum(exposed.get(device, 0.0) for device in on_gpu) / count,
            )
        )
    return rows


def _is_start(node: WorkNode) -> bool:
    return node.role == "delay" and node.cause == "start"


def _works(graph: TraceGraph, i: int) -> bool:
    return graph.nodes[i].role in WORKING


class _IdleWalk:
    """Sums of one lane over time."""

    def __init__(self, graph: TraceGraph, timeline: Timeline) -> None:
        self._graph, self._timeline = graph, timeline
        self.busy_s = 0.0
        self.idle_s: Counter[str] = Counter()

    def lane(self, positions: Sequence[int]) -> None:
        """Add the nodes of a lane, in order, and the time between them."""
        timeline, at_s = self._timeline, 0.0
        for i in positions:
            start_s, end_s = float(timeline.start_s[i]), float(timeline.end_s[i])
            if start_s > at_s:
                self._blame(int(timeline.cause[i]), at_s, start_s)
            self._spend(self._graph.nodes[i], end_s - start_s, start_s)
            at_s = end_s
        rank = self._graph.nodes[positions[0]].rank
        of_rank = [i for i, node in enumerate(self._graph.nodes) if node.rank == rank and node.role not in _POINTS]
        last = max(of_rank, key=lambda i: float(timeline.end_s[i]))
        ended_s = float(timeline.end_s[last])
        if ended_s > at_s:
            self._blame(last, at_s, ended_s)
        if timeline.makespan_s > max(ended_s, at_s):
            self._blame(-1, max(ended_s, at_s), timeline.makespan_s)

    def _spend(self, node: WorkNode, seconds: float, start_s: float) -> None:
        if node.role in WORKING or node.role == "earlier":
            self.busy_s += seconds
        elif node.role == "comm":
            self._add("communication", seconds)
        elif node.role == "sync":
            self._add("synchronisation", seconds)
        elif node.role == "gap":
            self._add("dependency", seconds)
        else:
            self._add("host", seconds)

    def _blame(self, cause: int, from_s: float, to_s: float) -> None:
        """Divide idle time before a node among what it waited for, from the last cause back."""
        nodes, timeline = self._graph.nodes, self._timeline
        while to_s > from_s and cause >= 0:
            node = nodes[cause]
            begin_s = max(float(timeline.start_s[cause]), from_s)
            if begin_s < to_s:
                self._add(self._name(cause), to_s - begin_s)
                to_s = begin_s
            if node.role in ("arrive", "join"):
                break
            cause = int(timeline.cause[cause])
        if to_s > from_s:
            self._add("other ranks" if len(self._graph.ranks) > 1 else "dependency", to_s - from_s)

    def _name(self, cause: int) -> str:
        node = self._graph.nodes[cause]
        if node.role == "comm":
            return "communication"
        if node.role == "sync":
            return "synchronisation"
        if node.role in ("host", "launch", "op") or (node.role == "delay" and node.cause == "launch"):
            return "host"
        if _is_start(node):
            return "other ranks" if len(self._graph.ranks) > 1 else "host"
        return "communication" if node.role == "delay" and node.cause == "issue" else "dependency"

    def _add(self, cause: str, seconds: float) -> None:
        self.idle_s[cause] += seconds  # type: ignore[assignment]


def kernel_table(graph: TraceGraph) -> list[KernelRow]:
    """Kernels by total time, largest first; on a host alone, operators. Collectives have their measured times."""
    seconds: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        if node.role not in (*WORKING, "comm"):
            continue
        operator = node.operation.name if node.operation is not None and node.role != "op" else ""
        key = (node.label, operator)
        seconds[key] += node.duration_s  # type: ignore[assignment]
        calls[key] += 1
    total_s = sum(seconds.values()) or 1.0
    return [
        KernelRow(name, operator, calls[name, operator], s, s / calls[name, operator], s / total_s)
        for (name, operator), s in seconds.most_common()
    ]
