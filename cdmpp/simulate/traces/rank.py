"""One rank of a trace as nodes: its threads, its streams, and what connects them.

Streams of devices and threads of communication libraries wait for what started their work.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cdmpp.simulate.traces.align import Window, collective_of
from cdmpp.simulate.traces.host import TINY_S, HostLane, HostThreads, Segment, segments
from cdmpp.simulate.traces.nodes import Cause, Role, TraceGraph, WorkNode
from cdmpp.simulate.traces.records import (
    CollectiveCall,
    RankTrace,
    Sync,
    TraceEvent,
    TraceLane,
    is_communication_kernel,
)

#: Time from a launch to its kernel where a trace has no kernel that started at once.
_DEFAULT_LATENCY_S = 5e-6
#: A kernel that starts within this time after one on another stream is taken to have waited for it.
_EVENT_LATENCY_S = 10e-6


@dataclass(slots=True)
class Activity:
    """Work on a stream."""

    event: TraceEvent
    # Measured, from the beginning of the graph.
    start_s: float
    end_s: float
    # Device and stream: its lane in the graph.
    device: str
    stream: str
    role: Role
    label: str
    names: tuple[str, ...] = ()
    launch_s: float | None = None  # start of the call that launched it, if that is in the graph
    after: int | None = None  # node before that call
    thread: object = None  # thread of that call
    operation: TraceEvent | None = None
    call: CollectiveCall | None = None
    joint: bool = False  # the other ranks' parts of the collective are in the graph too
    # Work of other streams that an event of the device makes it wait for.
    waits: list[TraceEvent] = field(default_factory=list)


#: End of work, its node and what it is, by end.
_Done = Sequence[tuple[float, int, Activity]]


@dataclass
class Streams:
    """The streams of one rank."""

    graph: TraceGraph
    rank: int
    positions: dict[int, int] = field(default_factory=dict)  # ``id`` of an event to its node
    # ``id`` of a joint collective's event to the node at which the rank is ready for it.
    arrivals: dict[int, int] = field(default_factory=dict)
    inferred: int = 0  # waits between streams that follow from times, not from events

    def build(self, activities: Sequence[Activity], infer: bool) -> None:
        """Add nodes of all activities.

        ``infer``: whether work may wait for work of other streams: true of devices, not of a library's threads.
        """
        lanes: dict[tuple[str, str], list[Activity]] = {}
        for activity in sorted(activities, key=lambda activity: (activity.start_s, activity.end_s)):
            lanes.setdefault((activity.device, activity.stream), []).append(activity)
        typical_s = _typical_latency_s(lanes.values())
        # In time order over all lanes: what a kernel waited for is there before it.
        ends: dict[tuple[str, str], float] = {}
        done: list[tuple[float, int, Activity]] = []
        for activity in sorted(activities, key=lambda activity: (activity.start_s, activity.end_s)):
            lane = (activity.device, activity.stream)
            position = self._place(activity, ends.get(lane), typical_s, done if infer else [])
            ends[lane] = max(ends.get(lane, 0.0), self.graph.nodes[position].end_s, activity.end_s)
            bisect.insort(done, (activity.end_s, position, activity), key=lambda entry: entry[0])

    def _place(self, activity: Activity, idle_from_s: float | None, typical_s: float, done: _Done) -> int:
        """Add an activity, with what lets it start when it was measured to start; its position."""
        graph, start_s = self.graph, max(activity.start_s, idle_from_s or 0.0)
        ready_s = idle_from_s if idle_from_s is not None else 0.0
        queued = activity.launch_s is not None and idle_from_s is not None
        queued = queued and (activity.launch_s or 0.0) + typical_s < (idle_from_s or 0.0)
        waits = [self.positions[id(event)] for event in activity.waits if id(event) in self.positions]
        if not waits:
            waits = self._inferred(activity, start_s, ready_s, typical_s, done)
        deps = list(waits)
        ready_s = max(ready_s, *(graph.nodes[position].end_s for position in waits)) if waits else ready_s
        if activity.launch_s is not None:
            lag_s = max(start_s - activity.launch_s, 0.0)
            if queued or waits:
                lag_s = min(lag_s, typical_s)
            cause: Cause = "launch" if activity.event.kind in ("kernel", "copy") else "issue"
            seconds = lag_s if activity.after is not None else activity.launch_s + lag_s
            deps.append(graph.delay(self.rank, seconds, activity.after, activity.launch_s, cause))
            ready_s = max(ready_s, activity.launch_s + lag_s)
        elif idle_from_s is None and not waits:
            deps.append(graph.delay(self.rank, start_s, None, 0.0, "start"))
            ready_s = start_s
        lane, named = (activity.device, activity.stream), (activity.label, activity.names)
        if start_s - ready_s > TINY_S:
            gap = (deps, "gap", self.rank, ready_s, "gap", activity.names)
            graph.add(WorkNode(*lane, start_s - ready_s, *gap))  # type: ignore[arg-type]
            deps = []
        if activity.joint:
            self.arrivals[id(activity.event)] = graph.add(
                WorkNode(*lane, 0.0, deps, "arrive", self.rank, start_s, *named)
            )
            deps = []
        seconds, what = max(activity.end_s - start_s, 0.0), (activity.operation, activity.call)
        position = graph.add(WorkNode(*lane, seconds, deps, activity.role, self.rank, start_s, *named, *what))
        self.positions[id(activity.event)] = position
        return position

    def _inferred(self, activity: Activity, start_s: float, ready_s: float, typical_s: float, done: _Done) -> list[int]:
        """Work of another stream that ended just before: NCCL's streams wait so for what computes their data."""
        if activity.launch_s is None or activity.launch_s + typical_s > start_s - TINY_S:
            return []  # it started as soon as it was launched
        if start_s - ready_s < TINY_S:
            return []
        at = bisect.bisect_right(done, start_s + TINY_S, key=lambda entry: entry[0]) - 1
        while at >= 0 and done[at][0] >= start_s - _EVENT_LATENCY_S:
            end_s, position, other = done[at]
            if other.device == activity.device and other.stream != activity.stream and end_s > ready_s:
                self.inferred += 1
                return [position]
            at -= 1
        return []


def _typical_latency_s(lanes: Iterable[list[Activity]]) -> float:
    """Time from a launch to its kernel, where the stream was idle: the lower quartile, as some wait for more."""
    segments = []
    for lane in lanes:
        idle_from_s = -1.0
        for activity in lane:
            alone = activity.launch_s is not None and activity.launch_s >= idle_from_s
            if alone and activity.launch_s is not None and activity.call is None:
                segments.append(max(activity.start_s - activity.launch_s, 0.0))
            idle_from_s = max(idle_from_s, activity.end_s)
    return float(np.quantile(segments, 0.25)) if segments else _DEFAULT_LATENCY_S


#: A copy that the host waits for keeps its call busy at least this long.
_BLOCKING_S = 20e-6
#: A queue of launches is full from this number on (CUDA's holds about 1,024), and from this share of the most.
_LEAST_QUEUE, _FULL = 256, 0.9
#: A launch that takes this many times the median of the others waits for room.
_BLOCKED = 1.5


@dataclass
class TracedRank:
    """One rank: what of its trace is in the window, and its nodes."""

    graph: TraceGraph  # takes the nodes
    trace: RankTrace
    window: Window
    shift_s: float  # seconds that are added to times of the trace for times of the graph
    host: HostThreads = field(init=False)
    streams: Streams = field(init=False)
    _segments: dict[TraceLane, list[Segment]] = field(default_factory=dict)
    _work: list[tuple[TraceLane, Segment]] = field(default_factory=list)
    _device: list[Activity] = field(default_factory=list)
    _launches: dict[int, list[tuple[HostLane, int]]] = field(default_factory=dict)
    _main: TraceLane | None = None

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return self.trace.rank or 0

    def collect(self) -> None:
        """Find the segments and device work of the window."""
        begin_s, end_s = self.window.start_s, self.window.end_s
        by_lane: dict[TraceLane, list[TraceEvent]] = {}
        launched: dict[int, float] = {}
        for event in self.trace.events:
            if event.lane.where == "host":
                by_lane.setdefault(event.lane, []).append(event)
                if event.kind == "runtime" and event.correlation >= 0:
                    launched[event.correlation] = event.start_s
        on_device = self.trace.on_device
        shift_s = self.shift_s
        for lane, events in by_lane.items():
            for segment in segments(events, on_device):
                segment.start_s = max(segment.start_s, begin_s) if segment.role != "work" else segment.start_s
                if segment.end_s <= begin_s or segment.start_s >= end_s or segment.start_s < begin_s:
                    continue
                segment.start_s += shift_s
                # Of a collective that ends after the window, nothing in the window waits.
                segment.end_s = min(segment.end_s, end_s) + shift_s
                if segment.role == "work":
                    self._work.append((lane, segment))
                else:
                    self._segments.setdefault(lane, []).append(segment)
        self._main = self._main_lane(by_lane)
        work = [event for event in self.trace.events if event.kind in ("kernel", "copy")]
        first: dict[TraceLane, float] = {}
        for event in work:
            if event.correlation in launched and self.window.names:
                first[event.lane] = min(event.start_s, first.get(event.lane, event.start_s))
        for event in work:
            # What a stream runs without a launch in the file, before all else, was launched before the recording.
            unseen = -math.inf if event.start_s < first.get(event.lane, -math.inf) else event.start_s
            at_s = launched.get(event.correlation, unseen)
            if at_s >= end_s or event.end_s <= begin_s:
                continue
            self._device.append(self._activity(event, at_s < begin_s))

    def _main_lane(self, by_lane: dict[TraceLane, list[TraceEvent]]) -> TraceLane | None:
        """The thread with the marks, or with the most time in operators."""
        if not self._segments:
            return None
        for lane in self._segments:
            if any(event.kind == "annotation" and event.name in self.window.names for event in by_lane[lane]):
                return lane
        return max(self._segments, key=lambda lane: sum(s.end_s - s.start_s for s in self._segments[lane]))

    def _activity(self, event: TraceEvent, earlier: bool) -> Activity:
        name = f"rank{self.rank} gpu{event.lane.owner}"
        start_s = max(event.start_s, self.window.start_s) + self.shift_s
        call = collective_of(event)
        role: Role = "earlier" if earlier else "comm" if call is not None else "copy"
        if role == "copy" and event.kind == "kernel":
            role = "kernel"
        end_s, stream = event.end_s + self.shift_s, f"stream {event.lane.name}"
        return Activity(event, start_s, end_s, name, stream, role, event.name, (event.name,), call=call)

    def collectives(self) -> list[TraceEvent]:
        """Collectives of the window."""
        events = [segment.event for _, segment in self._work if segment.event is not None]
        return events + [activity.event for activity in self._device if activity.role == "comm"]

    def build(self, joint: set[int]) -> None:
        """Add the nodes of all threads and streams."""
        device = f"rank{self.rank} host" if self.trace.on_device else f"rank{self.rank}"
        begin_s, end_s = self.window.start_s + self.shift_s, self.window.end_s + self.shift_s
        marked = bool(self.window.names) or not self.trace.on_device
        self.host = HostThreads(self.graph, self.rank, device, self.trace.threads, begin_s, end_s, marked)
        self.host.build(self._segments, self._main)
        work = self._host_work(device, joint)
        self.streams = Streams(self.graph, self.rank)
        self.streams.build(work, infer=False)
        self._link_launches(joint)
        self.streams.build(self._device, infer=True)
        self.host.connect_waits([self.streams.positions[id(activity.event)] for activity in work])
        if self._device:
            self._synchronise()
            self._queue()

    def _host_work(self, device: str, joint: set[int]) -> list[Activity]:
        """Collectives on threads of their library, with the calls that issued them."""
        pending = self.host.issues()
        spans = []
        for lane, segment in sorted(self._work, key=lambda item: item[1].start_s):
            event = segment.event
            assert event is not None
            call = collective_of(event)
            times, where = (segment.start_s, segment.end_s), (device, self.host.stream(lane))
            activity = Activity(event, *times, *where, "comm", event.name, segment.names, call=call)
            activity.joint = id(event) in joint
            fitting = [issue for issue in pending if issue[0] <= segment.start_s and call and issue[2] == call.kind]
            same = [issue for issue in fitting if call and issue[3] == call.bytes]
            for issue in (same or fitting)[:1]:
                pending.remove(issue)
                activity.launch_s, activity.after = issue[0], issue[1]
            spans.append(activity)
        return spans

    def _link_launches(self, joint: set[int]) -> None:
        """Connect device work with its launches, and streams with what their events wait for."""
        for host in self.host.lanes:
            for k, segment in enumerate(host.segments):
                if segment.event is not None and segment.event.kind == "runtime" and segment.event.correlation >= 0:
                    self._launches.setdefault(segment.event.correlation, []).append((host, k))
        for activity in self._device:
            activity.joint = activity.role == "comm" and id(activity.event) in joint
            place = self._launches.get(activity.event.correlation)
            if place is None or activity.role == "earlier":
                continue
            host, k = place[0]
            segment = host.segments[k]
            activity.launch_s, activity.after, activity.thread = segment.start_s, host.before[k], host.lane
            activity.operation = segment.operation
            activity.names = (*segment.names[:-1], activity.event.name)
        by_launch = sorted((a for a in self._device if a.launch_s is not None), key=lambda a: a.launch_s or 0.0)
        self._reported_waits(by_launch)
        compute: dict[tuple[object, str], Activity] = {}
        for activity in by_launch:
            key = (activity.thread, activity.device)
            if not is_communication_kernel(activity.event.name):
                compute[key] = activity
            elif not activity.waits and key in compute and compute[key].end_s <= activity.start_s + TINY_S:
                # Process groups let their stream wait for the stream that computes, at the launch.
                activity.waits.append(compute[key].event)

    def _reported_waits(self, by_launch: Sequence[Activity]) -> None:
        """Waits of streams for events that the trace has (synchronisation events of CUPTI)."""
        streams: dict[str, list[Activity]] = {}
        for activity in by_launch:
            streams.setdefault(activity.stream, []).append(activity)
        for event in self.trace.events:
            detail = event.detail
            if not isinstance(detail, Sync) or detail.kind != "stream_wait" or event.correlation not in self._launches:
                continue
            host, k = self._launches[event.correlation][0]
            waits_s = recorded_s = host.segments[k].start_s
            if detail.record in self._launches:
                other, j = self._launches[detail.record][0]
                recorded_s = other.segments[j].start_s
            waiting = streams.get(f"stream {detail.stream}", [])
            sources = streams.get(f"stream {detail.wait_on_stream}", [])
            at = bisect.bisect_left(waiting, waits_s, key=_launched_s)
            last = bisect.bisect_left(sources, recorded_s, key=_launched_s) - 1
            if at < len(waiting) and last >= 0 and sources[last].end_s <= waiting[at].start_s + TINY_S:
                waiting[at].waits.append(sources[last].event)

    def _synchronise(self) -> None:
        """Let calls that synchronise return when the device's work has ended."""
        reported = {e.correlation: e.detail for e in self.trace.events if isinstance(e.detail, Sync)}
        by_stream: dict[str, list[Activity]] = {}
        copies: dict[int, list[Activity]] = {}
        for activity in sorted(self._device, key=_launched_s):
            by_stream.setdefault(activity.stream, []).append(activity)
            if activity.event.kind == "copy":
                copies.setdefault(activity.event.correlation, []).append(activity)
        for host in self.host.lanes:
            for segment, position in zip(host.segments, host.positions, strict=True):
                if segment.role == "sync":
                    detail = reported.get(segment.event.correlation) if segment.event is not None else None
                    self._wait(position, segment, by_stream, detail)
                elif segment.role == "launch" and segment.end_s - segment.start_s > _BLOCKING_S:
                    # A copy of pageable memory: its call returns after it.
                    correlated = copies.get(segment.event.correlation, []) if segment.event is not None else []
                    done = [a for a in correlated if segment.start_s < a.end_s <= segment.end_s + TINY_S]
                    self._let_wait(position, done)

    def _wait(self, position: int, segment: Segment, by_stream: dict[str, list[Activity]], detail: Sync | None) -> None:
        name = segment.names[-1]
        at_s = segment.start_s
        if detail is not None and detail.record in self._launches:
            host, k = self._launches[detail.record][0]
            at_s = host.segments[k].start_s
        wanted = "" if detail is None else detail.wait_on_stream or detail.stream
        last: list[Activity] = []
        for stream, activities in by_stream.items():
            if wanted and stream != f"stream {wanted}":
                continue
            at = bisect.bisect_left(activities, at_s, key=_launched_s)
            if at and activities[at - 1].end_s <= segment.end_s + TINY_S:
                last.append(activities[at - 1])
        if not last:
            # It waits for an event that the trace does not name: for the work that ended last.
            ended = [a for activities in by_stream.values() for a in activities if a.end_s <= segment.end_s + TINY_S]
            last = [max(ended, key=lambda a: a.end_s)] if ended else []
        if not last:
            return
        if "Device" not in name and "Ctx" not in name and not wanted:
            last = [max(last, key=lambda a: a.end_s)]
        self._let_wait(position, [a for a in last if a.end_s > segment.start_s])

    def _queue(self) -> None:
        """Let launches that found the queue full return when the work has ended whose end made room."""
        work = sorted(self._device, key=lambda activity: activity.end_s)
        by_correlation = {activity.event.correlation: activity for activity in work}
        begun, ended = sorted(map(_launched_s, work)), [activity.end_s for activity in work]
        calls: list[tuple[int, Segment, int, int | None]] = []
        for host in self.host.lanes:
            for segment, position, before in zip(host.segments, host.positions, host.before, strict=True):
                if segment.role == "launch":
                    at_s = segment.start_s
                    depth = bisect.bisect_left(begun, at_s) - bisect.bisect_right(ended, at_s)
                    calls.append((depth, segment, position, before))
        full = max(_LEAST_QUEUE, _FULL * max((depth for depth, *_ in calls), default=0))
        usual_s = [segment.end_s - segment.start_s for depth, segment, *_ in calls if depth < full]
        own_s = statistics.median(usual_s) if usual_s else _DEFAULT_LATENCY_S
        for depth, segment, position, before in calls:
            node = self.graph.nodes[position]
            if depth < full or segment.end_s - segment.start_s < _BLOCKED * own_s or node.start_s > segment.start_s:
                continue
            launched = by_correlation.get(segment.event.correlation) if segment.event is not None else None
            at = bisect.bisect_right(ended, segment.end_s + TINY_S) - 1
            while at >= 0 and ended[at] > segment.start_s and launched and work[at].stream != launched.stream:
                at -= 1
            if at >= 0 and ended[at] > segment.start_s:
                self._let_wait(position, [work[at]])
                self.graph.full_queue += 1
                # Without a wait, the call has its own work still.
                rest_s = min(own_s - node.duration_s, node.start_s - segment.start_s)
                if rest_s > 0:
                    node.deps.append(self.graph.delay(self.rank, rest_s, before, segment.start_s, "launch"))

    def _let_wait(self, position: int, activities: Sequence[Activity]) -> None:
        if not activities:
            return
        node = self.graph.nodes[position]
        end_s = node.end_s
        node.deps += [self.streams.positions[id(a.event)] for a in activities]
        done_s = max(a.end_s for a in activities)
        node.duration_s = max(end_s - done_s, 0.0)
        node.start_s = done_s


def _launched_s(activity: Activity) -> float:
    """When work was launched; -1 where its launch is not in the graph: before all others."""
    return -1.0 if activity.launch_s is None else activity.launch_s
