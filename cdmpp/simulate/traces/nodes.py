"""Nodes of a trace as a replay graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from cdmpp.predict.requests.request import MAX_NAME
from cdmpp.simulate.replay.graph import Floats, Graph, Ints, Node, NodeKind
from cdmpp.simulate.traces.records import CollectiveCall, TraceEvent

#: "op": an operator that computes on the host. "host": other time of a thread. "launch", "sync": runtime calls.
#: "kernel", "copy": work of a device. "comm": a collective. "delay": time between a cause and its effect on another
#: lane. "gap": idle time of a stream that no cause explains. "arrive", "join": the moments when a rank, and the last
#: rank, is ready for a collective. "earlier": work of a stream that was launched before the first iteration.
Role = Literal["op", "host", "launch", "sync", "kernel", "copy", "comm", "delay", "gap", "arrive", "join", "earlier"]
#: Why a delay is there.
Cause = Literal["", "launch", "issue", "event", "thread", "start"]
_KINDS: dict[Role, NodeKind] = {"comm": "comm", "delay": "gap", "gap": "gap", "arrive": "gap", "join": "gap"}
#: Roles whose time is that of a device or, without one, of operators: what another device changes.
WORKING: tuple[Role, ...] = ("op", "kernel", "copy")


@dataclass(slots=True)
class WorkNode:
    """A node of the graph and what it stands for."""

    # Device and stream: its lane in the graph.
    device: str
    stream: str
    duration_s: float
    deps: list[int]  # positions of nodes that end before
    role: Role
    rank: int
    start_s: float  # measured, from the beginning of the graph
    label: str  # operator, call or class, for tables
    # The event with the events around it, outermost first; of a kernel, those of its launch and its own.
    names: tuple[str, ...] = ()
    operation: TraceEvent | None = None  # operator that it runs, with its recorded inputs
    call: CollectiveCall | None = None
    cause: Cause = ""  # of a delay

    @property
    def end_s(self) -> float:
        """Measured end."""
        return self.start_s + self.duration_s


@dataclass
class TraceGraph:
    """The graph of one or more iterations on all ranks."""

    nodes: list[WorkNode] = field(default_factory=list)  # of each lane in the order in which it ran them
    parallel: set[str] = field(default_factory=set)  # devices without order: delays and collectives' meeting points
    measured_s: float = 0.0  # the longest of the ranks, by :meth:`longest_s`
    # When each rank begins its first iteration, after the first rank to do so.
    begins_s: dict[int, float] = field(default_factory=dict)
    iterations: tuple[str, ...] = ()  # marks; empty where the trace has none
    ranks: tuple[int, ...] = ()
    on_device: bool = False  # kernels ran on a device
    has_shapes: bool = False
    device_names: tuple[str, ...] = ()  # marketing names of the devices
    alignment_residual_s: float = 0.0  # median distance between the ends of a collective on two ranks
    full_queue: int = 0  # launches that waited because the device's queue was full
    remarks: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of iterations."""
        return max(len(self.iterations), 1)

    def add(self, node: WorkNode) -> int:
        """Append a node; its position."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def delay(self, rank: int, seconds: float, after: int | None, at_s: float, cause: Cause) -> int:
        """Append time that passes on no lane; its position."""
        device = f"rank{rank} latency"
        self.parallel.add(device)
        deps = [] if after is None else [after]
        return self.add(WorkNode(device, "0", max(seconds, 0.0), deps, "delay", rank, at_s, cause, cause=cause))

    def longest_s(self, end_s: Floats, duration_s: Floats) -> float:
        """Time of all iterations on the rank that needs longest, in the steady state.

        A marked iteration may leave work on a device that runs beside the next one. So its time is the longer of two:
        that of the threads, from the rank's own beginning to its last mark's end, and that of the longest chain of
        device work that was launched in the iterations. Without marks, it lasts until the last end.

        ``end_s``, ``duration_s``: end and duration of each node.
        """
        hosts_s = [float(end_s[own].max()) - self.begins_s.get(rank, 0.0) for rank, own in self._by_rank.items()]
        chain_s = np.zeros(len(self.nodes))
        for i, before in self._device_work:
            chain_s[i] = duration_s[i] + max((chain_s[k] for k in before), default=0.0)
        return max(*hosts_s, float(chain_s.max()), 0.0)

    @cached_property
    def _device_work(self) -> list[tuple[int, list[int]]]:
        """Nodes of devices in time order, each with those that it follows; empty without marks."""
        if not self.iterations:
            return []
        lanes: dict[tuple[str, str], int] = {}
        work: list[tuple[int, list[int]]] = []
        kept: set[int] = set()
        for i in sorted(range(len(self.nodes)), key=lambda i: (self.nodes[i].start_s, self.nodes[i].end_s)):
            node = self.nodes[i]
            if node.role == "earlier":
                lanes.pop((node.device, node.stream), None)
            if node.role in ("delay", "earlier") or (node.role != "join" and not _on_device(node)):
                continue
            lane = (node.device, node.stream)
            before = [*node.deps, *([lanes[lane]] if lane in lanes and node.role != "join" else [])]
            work.append((i, [k for k in before if k in kept]))
            lanes[lane] = i
            kept.add(i)
        return work

    @cached_property
    def _by_rank(self) -> dict[int, Ints]:
        """Positions of each rank's nodes on its lanes, with marks on its threads; only once the graph is complete."""
        by_rank: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.role not in ("join", "delay") and not (self.iterations and _on_device(node)):
                by_rank.setdefault(node.rank, []).append(i)
        return {rank: np.array(positions, dtype=np.int64) for rank, positions in by_rank.items()}

    def durations(self) -> Floats:
        """Seconds of each node."""
        return np.array([node.duration_s for node in self.nodes], dtype=np.float64)

    def ids(self) -> list[str]:
        """Unique names of the nodes: rank, event and position."""
        return [_id(node, i) for i, node in enumerate(self.nodes)]

    def to_graph(self) -> Graph:
        """The graph for :class:`cdmpp.simulate.replay.Replayer`."""
        ids = self.ids()
        nodes = [
            Node(name, node.device, node.duration_s, tuple(ids[dep] for dep in node.deps), node.stream, kind)
            for name, node in zip(ids, self.nodes, strict=True)
            for kind in (_KINDS.get(node.role, "compute"),)
        ]
        return Graph(nodes, frozenset(self.parallel), "listed")

    def to_request(self) -> dict[str, Any]:
        """The graph as a replay request (docs/replay.md), as JSON values."""
        ids = self.ids()
        nodes = []
        for i, node in enumerate(self.nodes):
            kind = _KINDS.get(node.role, "compute")
            form: dict[str, Any] = {"id": ids[i], "device": node.device, "stream": node.stream}
            form |= {"duration_s": node.duration_s, "class": kind}
            if kind == "compute":  # what it runs
                form["class"] = (node.label or node.role)[:MAX_NAME]
            if node.deps:
                form["deps"] = [ids[dep] for dep in node.deps]
            nodes.append(form)
        used = {node.device for node in self.nodes}
        devices = {name: {"parallel": True} for name in sorted(self.parallel & used)}
        return {"nodes": nodes, "devices": devices, "order": "listed"}


def _on_device(node: WorkNode) -> bool:
    return " gpu" in node.device


def _id(node: WorkNode, position: int) -> str:
    name = node.label or node.role
    if node.role in ("delay", "arrive", "join"):
        name = f"{node.role} {name}"
    return f"rank{node.rank} {name[: MAX_NAME - 40]} {position}"
