"""Threads of a trace: nested events flattened into consecutive segments, and their chains as nodes.

The time between the segments is a node too.
"""

from __future__ import annotations

import bisect
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cdmpp.simulate.traces.align import collective_of
from cdmpp.simulate.traces.nodes import TraceGraph, WorkNode
from cdmpp.simulate.traces.records import (
    Arguments,
    TraceEvent,
    TraceLane,
    is_host_work,
    issues_work,
    kind_of,
    shaped_call,
)
from cdmpp.simulate.traces.shapes import computes, is_free

#: "op": an operator that computes on the host; "host": other work of the host; "launch": a call that starts work on a
#: device; "sync": a call that waits for a device; "work": a collective on a thread of its library.
SegmentRole = Literal["op", "host", "launch", "sync", "work"]
_RUNTIME = r"(cuda|cu|hip)"
_SYNC = re.compile(rf"{_RUNTIME}((Stream|Device|Event|Ctx|Thread)Synchronize|(Mem)?Free(_v2)?$)")
_WAITS = re.compile(r"wait_tensor|::wait\b|barrier", re.IGNORECASE)


@dataclass(slots=True)
class Segment:
    """A piece of a thread's time."""

    # Seconds from the origin of the trace.
    start_s: float
    end_s: float
    role: SegmentRole
    names: tuple[str, ...]  # names of the events that enclose it and of its own, outermost first
    ranges: int  # how many of the names, from the first on, are annotations
    event: TraceEvent | None = None  # its own event; of an operator the one that computes
    operation: TraceEvent | None = None  # the innermost operator with a known computation around a launch
    waits: bool = False  # its operator's purpose is to wait


@dataclass(slots=True)
class _Tree:
    event: TraceEvent
    end_s: float
    children: list[_Tree] = field(default_factory=list)
    anchored: bool = False  # launches, synchronises, or hands work to a library, itself or inside
    computing: list[TraceEvent] = field(default_factory=list)


def segments(events: Iterable[TraceEvent], on_device: bool) -> list[Segment]:
    """Segments of one thread, in time order; time between them is in no event but annotations.

    An operator is one segment where nothing inside it matters alone: at most one operator that computes, and no launch,
    synchronisation or collective. Others are divided at their children.

    ``events``: of one thread, in any order.
    ``on_device``: the process works on a device: operators of the host only prepare its work.
    """
    roots: list[_Tree] = []
    stack: list[_Tree] = []
    for event in sorted(events, key=lambda event: (event.start_s, -event.duration_s)):
        while stack and event.start_s >= stack[-1].end_s:
            _close(stack)
        # Clocks are rounded: a child may seem to end after its parent.
        end_s = min(event.end_s, stack[-1].end_s) if stack else event.end_s
        tree = _Tree(event, max(end_s, event.start_s))
        tree.anchored = event.kind == "runtime" or is_host_work(event.name) or issues_work(event.name)
        (stack[-1].children if stack else roots).append(tree)
        stack.append(tree)
    while stack:
        _close(stack)
    listed: list[Segment] = []
    for root in roots:
        _emit(root, (), 0, None, on_device, listed)
    return listed


def _close(stack: list[_Tree]) -> None:
    tree = stack.pop()
    if tree.event.kind == "op" and computes(tree.event.name):
        tree.computing = [tree.event]
    if stack:
        stack[-1].anchored |= tree.anchored
        stack[-1].computing += tree.computing


def _emit(
    tree: _Tree, names: tuple[str, ...], ranges: int, operation: TraceEvent | None, on_device: bool, out: list[Segment]
) -> None:
    event = tree.event
    outer, names = names, (*names, event.name)
    if is_host_work(event.name):
        out.append(Segment(event.start_s, tree.end_s, "work", names, ranges, event))
        return
    if event.kind == "annotation":
        for child in tree.children:
            _emit(child, names, ranges + (ranges == len(outer)), operation, on_device, out)
        return
    if event.kind == "runtime":
        role: SegmentRole = "sync" if _SYNC.match(event.name) else "launch" if event.correlation >= 0 else "host"
        out.append(Segment(event.start_s, tree.end_s, role, names, ranges, event, operation))
        return
    waits = bool(_WAITS.search(event.name))
    plain = not tree.anchored or (issues_work(event.name) and not any(child.anchored for child in tree.children))
    if plain and len(tree.computing) < 2:
        inner = tree.computing[0] if tree.computing else event
        if inner is not event:
            names = (*names, inner.name)
        prepares = waits or issues_work(event.name) or (not tree.computing and is_free(event))
        role = "host" if on_device or prepares else "op"
        out.append(Segment(event.start_s, tree.end_s, role, names, ranges, inner, waits=waits))
        return
    if computes(event.name):
        operation = event
    at_s = event.start_s
    for child in tree.children:
        if child.event.start_s > at_s:
            out.append(Segment(at_s, child.event.start_s, "host", names, ranges, waits=waits))
        _emit(child, names, ranges, operation, on_device, out)
        at_s = max(at_s, child.end_s)
    if tree.end_s > at_s:
        out.append(Segment(at_s, tree.end_s, "host", names, ranges, waits=waits))


#: A thread's idle time that is no wait is at most this, or this many times its median.
_LEAST_WAIT_S, _WAIT_FACTOR = 20e-6, 3.0
#: Share of a wait in which what is waited for was under way.
_COVERED = 0.5
#: Shorter times between segments are rounding.
TINY_S = 1e-9
#: DDP copies a bucket back as soon as its all-reduce has ended.
_AFTER_WAIT = "copy_bucket_to_grad"


@dataclass
class HostLane:
    """A thread in the graph."""

    lane: TraceLane
    segments: list[Segment]  # inside of the window, in time order; times from the beginning of the graph
    positions: list[int] = field(default_factory=list)  # node of each segment
    # Node before each segment in the chain: what a launch in the segment follows.
    before: list[int | None] = field(default_factory=list)
    # Nodes of idle time, or of calls that wait, and whether they certainly wait.
    gaps: list[tuple[int, bool]] = field(default_factory=list)


@dataclass
class HostThreads:
    """The threads of one rank; :meth:`build` adds their nodes to the graph.

    A thread whose window is not ``marked`` has no time after its last event.
    """

    graph: TraceGraph
    rank: int
    device: str
    names: dict[TraceLane, str]
    begin_s: float
    end_s: float
    marked: bool = True
    lanes: list[HostLane] = field(default_factory=list)

    def build(self, lanes: dict[TraceLane, list[Segment]], main: TraceLane | None) -> None:
        """Add the nodes of all threads; that of the iterations first.

        ``lanes``: without those of collectives, which :class:`cdmpp.simulate.traces.rank.TracedRank` adds.
        ``main``: the thread that has the iterations' marks.
        """
        order = sorted(lanes, key=lambda lane: (lane != main, lane.owner, lane.name))
        for lane in order:
            host = HostLane(lane, lanes[lane])
            self.lanes.append(host)
            self._chain(host, lane == main)

    def stream(self, lane: TraceLane) -> str:
        """Name of a thread's stream in the graph."""
        return (self.names.get(lane) or f"thread {lane.name}")[:100]

    def _chain(self, host: HostLane, main: bool) -> None:
        last: int | None = None
        at_s = self.begin_s
        stream = self.stream(host.lane)
        if main and self.begin_s > TINY_S:
            last = self.graph.delay(self.rank, self.begin_s, None, 0.0, "start")
        for segment in host.segments:
            start_s, end_s = max(segment.start_s, at_s), max(segment.end_s, at_s)
            deps = [last] if last is not None and not host.positions else []
            if start_s - at_s > TINY_S or (not main and not host.positions):
                cause = None if main else self._cause(at_s if host.positions else -1.0, start_s)
                if cause is not None:
                    lag_s = start_s - self.graph.nodes[cause].end_s
                    deps = [self.graph.delay(self.rank, lag_s, cause, start_s - lag_s, "thread")]
                elif start_s - at_s > TINY_S:
                    ranges = segment.names[: segment.ranges]
                    gap = WorkNode(
                        self.device, stream, start_s - at_s, deps, "host", self.rank, at_s, "host", (*ranges, "host")
                    )
                    last, deps = self.graph.add(gap), []
                    host.gaps.append((last, _AFTER_WAIT in segment.names[-1]))
            host.before.append(last if not deps else deps[0])
            last = self._node(host, segment, start_s, end_s, deps, stream)
            at_s = end_s
        if main and self.marked and self.end_s - at_s > TINY_S and last is not None:
            tail = WorkNode(self.device, stream, self.end_s - at_s, [], "host", self.rank, at_s, "host", ("host",))
            host.gaps.append((self.graph.add(tail), False))

    def _node(
        self, host: HostLane, segment: Segment, start_s: float, end_s: float, deps: list[int], stream: str
    ) -> int:
        event = segment.event
        label = event.name if event is not None else segment.names[-1]
        role = segment.role if segment.role != "work" else "host"
        node = WorkNode(self.device, stream, end_s - start_s, deps, role, self.rank, start_s, label, segment.names)
        if role == "op":
            node.operation = event
        elif role == "host":
            node.label = "host"
        position = self.graph.add(node)
        host.positions.append(position)
        if segment.waits:
            host.gaps.append((position, True))
        return position

    def _cause(self, idle_from_s: float, start_s: float) -> int | None:
        """The last node of the main thread that ended in another thread's idle time."""
        if not self.lanes or not self.lanes[0].positions:
            return None
        positions = self.lanes[0].positions
        at = bisect.bisect_right(positions, start_s, key=lambda i: self.graph.nodes[i].end_s) - 1
        if at < 0 or self.graph.nodes[positions[at]].end_s <= idle_from_s:
            return None
        return positions[at]

    def connect_waits(self, work: Sequence[int]) -> None:
        """Let idle time of threads end with what it waited for.

        Idle time is a wait if it is long, and a collective or another thread was active in most of it and ended before
        the thread went on. What is left after that end is the thread's own time.

        ``work``: nodes of collectives that ran on threads of their library.
        """
        nodes = self.graph.nodes
        for number, host in enumerate(self.lanes):
            idle = [nodes[i].duration_s for i, certain in host.gaps if not certain]
            least_s = max(_LEAST_WAIT_S, _WAIT_FACTOR * statistics.median(idle)) if idle else _LEAST_WAIT_S
            others = [i for other in self.lanes[1:] for i in other.positions] if number == 0 else []
            ends = sorted((*work, *others), key=lambda i: nodes[i].end_s)
            for gap, certain in host.gaps:
                self._connect(gap, certain, least_s, ends)

    def _connect(self, gap: int, certain: bool, least_s: float, ends: Sequence[int]) -> None:
        nodes = self.graph.nodes
        node = nodes[gap]
        begin_s, end_s = node.start_s, node.end_s
        if not certain and node.duration_s < _LEAST_WAIT_S:
            return
        at = bisect.bisect_right(ends, end_s, key=lambda i: nodes[i].end_s) - 1
        if at < 0 or nodes[ends[at]].end_s <= begin_s:
            return
        last = nodes[ends[at]]
        # A collective may end by chance in a short pause; another thread's work begins and ends in a pause with reason.
        if not certain and last.role == "comm" and node.duration_s < least_s:
            return
        first_s = last.start_s
        before = at
        while before >= 0 and nodes[ends[before]].end_s > begin_s:
            other = nodes[ends[before]]
            if other.stream == last.stream:
                first_s = min(first_s, other.start_s)
            before -= 1
        if certain or last.end_s - max(first_s, begin_s) >= _COVERED * node.duration_s:
            node.deps.append(ends[at])
            node.duration_s = end_s - last.end_s
            node.start_s = last.end_s

    def issues(self) -> list[tuple[float, int | None, str, float | None]]:
        """Calls that hand a collective to a library: start, node before, kind and size, in time order."""
        calls = []
        for host in self.lanes:
            for segment, before in zip(host.segments, host.before, strict=True):
                event = segment.event
                if event is not None and issues_work(event.name) and collective_of(event) is None:
                    detail = event.detail
                    call = shaped_call(event.name, detail if isinstance(detail, Arguments) else None, None)
                    calls.append((segment.start_s, before, kind_of(event.name), call.bytes))
        return sorted(calls, key=lambda issue: issue[0])
