"""Streams of devices, and threads of communication libraries, as nodes that wait for what started them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cdmpp.simulate.traces.host_lanes import TINY_S
from cdmpp.simulate.traces.nodes import Cause, Role, TraceGraph, WorkNode
from cdmpp.simulate.traces.records import CollectiveCall, TraceEvent

#: Time from a launch to its kernel where a trace has no kernel that started at once.
_DEFAULT_LATENCY_S = 5e-6
#: A kernel that starts within this time after one on another stream is taken to have waited for it.
_EVENT_LATENCY_S = 10e-6


@dataclass(slots=True)
class Activity:
    """Work on a stream.

    Attributes
    ----------
    event : TraceEvent
    start_s, end_s : float
        Measured, from the beginning of the graph.
    device, stream : str
        Lane in the graph.
    role : Role
    label : str
    names : tuple of str
    launch_s : float or None
        Start of the call that launched it, if that is in the graph.
    after : int or None
        Node before that call.
    thread : object
        Thread of that call.
    operation : TraceEvent or None
    call : CollectiveCall or None
    joint : bool
        The other ranks' parts of the collective are in the graph too.
    waits : list of TraceEvent
        Work of other streams that an event of the device makes it wait for.
    """

    event: TraceEvent
    start_s: float
    end_s: float
    device: str
    stream: str
    role: Role
    label: str
    names: tuple[str, ...] = ()
    launch_s: float | None = None
    after: int | None = None
    thread: object = None
    operation: TraceEvent | None = None
    call: CollectiveCall | None = None
    joint: bool = False
    waits: list[TraceEvent] = field(default_factory=list)


@dataclass
class Streams:
    """The streams of one rank.

    Attributes
    ----------
    positions : dict of int to int
        ``id`` of an event to its node.
    arrivals : dict of int to int
        ``id`` of a joint collective's event to the node at which the rank is ready for it.
    inferred : int
        Waits between streams that follow from times, not from events.
    """

    graph: TraceGraph
    rank: int
    positions: dict[int, int] = field(default_factory=dict)
    arrivals: dict[int, int] = field(default_factory=dict)
    inferred: int = 0

    def build(self, activities: Sequence[Activity], infer: bool) -> None:
        """Add nodes of all activities.

        Parameters
        ----------
        activities : sequence of Activity
        infer : bool
            Whether work may wait for work of other streams: true of devices, not of a library's threads.
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

    def _place(
        self,
        activity: Activity,
        idle_from_s: float | None,
        typical_s: float,
        done: Sequence[tuple[float, int, Activity]],
    ) -> int:
        """Add an activity, with what lets it start when it was measured to start; its position."""
        graph, start_s = self.graph, max(activity.start_s, idle_from_s or 0.0)
        ready_s = idle_from_s if idle_from_s is not None else 0.0
        deps: list[int] = []
        queued = activity.launch_s is not None and idle_from_s is not None
        queued = queued and (activity.launch_s or 0.0) + typical_s < (idle_from_s or 0.0)
        waits = [self.positions[id(event)] for event in activity.waits if id(event) in self.positions]
        if not waits:
            waits = self._inferred(activity, start_s, ready_s, typical_s, done)
        for position in waits:
            deps.append(position)
            ready_s = max(ready_s, graph.nodes[position].end_s)
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
        residual_s = start_s - ready_s
        if residual_s > TINY_S:
            gap = WorkNode(
                activity.device, activity.stream, residual_s, deps, "gap", self.rank, ready_s, "gap", activity.names
            )
            deps = []
            graph.add(gap)
        if activity.joint:
            arrive = WorkNode(
                activity.device,
                activity.stream,
                0.0,
                deps,
                "arrive",
                self.rank,
                start_s,
                activity.label,
                activity.names,
            )
            self.arrivals[id(activity.event)] = graph.add(arrive)
            deps = []
        node = WorkNode(
            activity.device,
            activity.stream,
            max(activity.end_s - start_s, 0.0),
            deps,
            activity.role,
            self.rank,
            start_s,
            activity.label,
            activity.names,
            activity.operation,
            activity.call,
        )
        position = graph.add(node)
        self.positions[id(activity.event)] = position
        return position

    def _inferred(
        self,
        activity: Activity,
        start_s: float,
        ready_s: float,
        typical_s: float,
        done: Sequence[tuple[float, int, Activity]],
    ) -> list[int]:
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
    found = []
    for lane in lanes:
        idle_from_s = -1.0
        for activity in lane:
            alone = activity.launch_s is not None and activity.launch_s >= idle_from_s
            if alone and activity.launch_s is not None and activity.call is None:
                found.append(max(activity.start_s - activity.launch_s, 0.0))
            idle_from_s = max(idle_from_s, activity.end_s)
    return float(np.quantile(found, 0.25)) if found else _DEFAULT_LATENCY_S
