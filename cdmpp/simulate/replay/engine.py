"""The discrete-event engine, and the timeline that it makes: Kahn's walk with a clock for each stream (dPRO).

A node is ready when all that it waits for has ended, gaps included; the streams serve in the order in which
nodes become ready, ties by id. A node that holds several streams (a collective) waits in all of their
queues and starts when it is the first in each: nothing overtakes it.
"""

from __future__ import annotations

import copy
import heapq
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from cdmpp.errors import FieldError
from cdmpp.simulate.replay.graph import Arrays, Floats, Follow, Graph, Ints, NodeKind, to_arrays
from cdmpp.utils.jit import COMPILED, jit

_MOST_NAMED = 12


def replay(graph: Graph) -> Timeline:
    """Compute start and end of each node of a graph.

    Raises FieldError: a cycle, an unknown dependency, two nodes of one id, a negative duration.

    Examples
    --------
    >>> from cdmpp.simulate.replay import Graph, Node
    >>> nodes = [Node("a", "gpu", 2.0), Node("b", "gpu", 3.0), Node("c", "gpu", 1.0, ("a",), stream="1")]
    >>> replay(Graph(nodes)).makespan_s
    5.0
    """
    return Replayer(graph).run()


class Replayer:
    """Replays one graph many times with different durations, for what-ifs, samples and searches.

    ``longest_path_s`` is the makespan if every device were infinitely parallel. With ``order="ready"`` a longer node
    can let another one overtake it and so shorten the whole (Graham's anomalies of list scheduling); with
    ``order="listed"`` or parallel devices it cannot.
    Raises FieldError: as :func:`replay`.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.arrays: Arrays = to_arrays(graph)
        a = self.arrays
        self._fixed = _prepared(a, a.walked, a.uses_start, a.uses)
        self.longest_path_s = self._longest_path_s(a.depends)
        if a.walked is not a.depends:
            self._longest_path_s(a.walked)

    def with_durations(self, duration_s: Floats) -> Replayer:
        """The same graph with other durations (see :meth:`run`), and their bounds, without another check."""
        other = copy.copy(self)
        other.__dict__.pop("busiest_stream_s", None)
        durations = np.asarray(duration_s, np.float64)[self.arrays.place]
        other.arrays = replace(self.arrays, duration_s=durations)
        other.longest_path_s = other._longest_path_s(self.arrays.depends)
        return other

    def _longest_path_s(self, edges: Follow) -> float:
        """End of a walk without streams. It does not reach nodes on or after a cycle. Raises FieldError: a cycle."""
        a = self.arrays
        _, end, _ = self._walked(a.duration_s, _prepared(a, edges, np.zeros_like(a.uses_start), a.uses[:0]))
        if len(end) and end.min() < 0:
            raise _cycle(self.graph, a, edges, end >= 0)
        return float(end.max(initial=0.0))

    def run(self, duration_s: Floats | None = None) -> Timeline:
        """Replay.

        ``duration_s``: in the order of ``graph.nodes``; default: the graph's. Finite and not negative: not checked.
        """
        a = self.arrays
        durations = a.duration_s if duration_s is None else np.asarray(duration_s, np.float64)[a.place]
        start, end, cause = self._walked(durations, self._fixed)
        back = np.empty_like(a.place)
        back[a.place] = np.arange(len(back))
        because = np.where(cause >= 0, a.place[cause], -1) if len(cause) else cause
        return Timeline(self.graph, durations[back], start[back], end[back], because[back])

    @staticmethod
    def _walked(durations: Floats, fixed: tuple[Any, ...]) -> tuple[Floats, Floats, Ints]:
        n = len(durations)
        if COMPILED:
            start, end, cause = np.zeros(n), np.full(n, -1.0), np.full(n, -1, dtype=np.int64)
            compiled: tuple[Any, ...] = (durations, *fixed, start, end, cause)
            walk(*compiled)
            return start, end, cause
        lists: tuple[list[float], list[float], list[int]] = ([0.0] * n, [-1.0] * n, [-1] * n)
        plain: tuple[Any, ...] = (durations.tolist(), *fixed, *lists)
        walk(*plain)  # plain Python is several times faster on lists
        return np.array(lists[0]), np.array(lists[1]), np.array(lists[2], dtype=np.int64)

    def makespans(self, duration_s: Floats) -> Floats:
        """Makespans of many replays. ``duration_s`` (replays, nodes): seconds, in the order of ``graph.nodes``."""
        durations = np.ascontiguousarray(np.asarray(duration_s, np.float64)[:, self.arrays.place])
        if COMPILED:
            return _many(durations, *self._fixed)
        return np.array([self._walked(row, self._fixed)[1].max(initial=0.0) for row in durations])

    @cached_property
    def busiest_stream_s(self) -> float:
        """Busy time of the busiest stream in any order: its nodes and all gaps but one."""
        a = self.arrays
        if not len(a.uses):
            return 0.0
        users = np.repeat(np.arange(len(a.place)), np.diff(a.uses_start))
        gaps = a.gap_s[users]
        held = np.bincount(a.uses, a.duration_s[users] + gaps)
        busiest = np.zeros(len(a.streams))
        np.maximum.at(busiest, a.uses, gaps)
        return float((held - busiest).max())


def _prepared(a: Arrays, edges: Follow, uses_start: Ints, uses: Ints) -> tuple[Any, ...]:
    """The constant arguments of :func:`walk`, in the fastest types."""
    fixed = (a.gap_s, edges.waits, edges.start, edges.next, uses_start, uses)
    return (*(fixed if COMPILED else (array.tolist() for array in fixed)), len(a.streams))


@jit
def walk(
    duration_s: Any,
    gap_s: Any,
    waits: Any,
    next_start: Any,
    following: Any,
    uses_start: Any,
    uses: Any,
    streams: int,
    start: Any,
    end: Any,
    cause: Any,
) -> float:
    """Fill start, end and cause (the last node that it waited for, -1: none); return the makespan."""
    n = len(duration_s)
    left = waits.copy()
    ready = [0.0] * n
    awaited = [-1] * n
    free = [0.0] * streams
    holder = [-1] * streams
    queue = [(0.0, 0)]
    queue.pop()
    for i in range(n):
        if left[i] == 0:
            queue.append((0.0, i))  # ascending: a heap already
    makespan = 0.0
    while len(queue) > 0:
        begin, i = heapq.heappop(queue)
        because = awaited[i]
        for k in range(uses_start[i], uses_start[i + 1]):
            held = uses[k]
            if free[held] > begin:
                begin = free[held]
                because = holder[held]
        finish = begin + duration_s[i]
        start[i] = begin
        end[i] = finish
        cause[i] = because
        if finish > makespan:
            makespan = finish
        clear = finish + gap_s[i]
        for k in range(uses_start[i], uses_start[i + 1]):
            free[uses[k]] = clear
            holder[uses[k]] = i
        for k in range(next_start[i], next_start[i + 1]):
            j = following[k]
            if awaited[j] < 0 or clear > ready[j]:
                ready[j] = clear
                awaited[j] = i
            left[j] -= 1
            if left[j] == 0:
                heapq.heappush(queue, (ready[j], j))
    return makespan


@jit
def _many(
    durations: Floats,
    gap_s: Floats,
    waits: Ints,
    next_start: Ints,
    following: Ints,
    uses_start: Ints,
    uses: Ints,
    streams: int,
) -> Floats:
    replays, n = durations.shape
    makespans = np.zeros(replays)
    start, end, cause = np.zeros(n), np.zeros(n), np.zeros(n, dtype=np.int64)
    for row in range(replays):
        makespans[row] = walk(
            durations[row], gap_s, waits, next_start, following, uses_start, uses, streams, start, end, cause
        )
    return makespans


def _cycle(graph: Graph, a: Arrays, edges: Follow, reached: npt.NDArray[np.bool_]) -> FieldError:
    """The error that names the nodes of one cycle among those that no walk reaches."""
    before: dict[int, int] = {}  # unreached node to an unreached node that it waits for
    for i in np.flatnonzero(~reached).tolist():
        for j in edges.next[edges.start[i] : edges.start[i + 1]].tolist():
            before.setdefault(j, i)
    at = min(before)
    seen: dict[int, None] = {}
    while at not in seen:
        seen[at] = None
        at = before[at]
    around = list(seen)[list(seen).index(at) :][::-1]
    first = around.index(min(around))
    around = around[first:] + around[:first]
    names = [graph.nodes[a.place[i]].id for i in (*around, around[0])]
    shown = names if len(names) <= _MOST_NAMED else [*names[: _MOST_NAMED - 2], "...", names[-1]]
    why = "" if edges is a.depends else "; in their streams nodes run in the order of the list"
    return FieldError(
        f"{len(around)} nodes wait for each other: " + " -> ".join(shown) + why,
        path=f"nodes.{a.place[around[0]]}.deps",
        hint="take one of these dependencies out",
    )


_KINDS = get_args(NodeKind)
_COMPUTE, _COMM, _GAP = map(_KINDS.index, ("compute", "comm", "gap"))


@dataclass(frozen=True)
class StreamUse:
    """One stream of a timeline."""

    device: str
    stream: str
    # Their sum is the makespan. Gaps are idle; overlapping nodes (on parallel devices) count once.
    busy_s: float
    idle_s: float
    nodes: int  # number of nodes


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times of each node. Arrays are in the order of ``graph.nodes``."""

    graph: Graph
    duration_s: Floats
    start_s: Floats
    end_s: Floats
    # The node whose end (and gap) each start waited for, as a dependency or as the holder of its stream; -1 where it
    # started at once.
    cause: Ints

    @property
    def makespan_s(self) -> float:
        """End of the last node, in seconds from the start; 0 without nodes."""
        return float(self.end_s.max(initial=0.0))

    @cached_property
    def critical_path(self) -> list[int]:
        """Positions in ``graph.nodes``, in time order: each starts when the one before allows it.

        The longest path of dPRO's execution graph, in which neighbours in a stream have an edge too. Of
        several that end last, the one whose id comes first.
        """
        if not len(self.end_s):
            return []
        last = np.flatnonzero(self.end_s == self.end_s.max()).tolist()
        at = min(last, key=lambda i: self.graph.nodes[i].id)
        path = []
        while at >= 0:
            path.append(at)
            at = int(self.cause[at])
        return path[::-1]

    @cached_property
    def streams(self) -> list[StreamUse]:
        """Each (device, stream), sorted by name."""
        makespan = self.makespan_s
        uses = []
        for (device, stream), nodes in sorted(self._held.items()):
            working = nodes[self._kinds[nodes] != _GAP]
            if device in self.graph.parallel:
                busy = covered_s(self.start_s[working], self.end_s[working])
            else:
                busy = float(self.duration_s[working].sum())
            busy = min(busy, makespan)  # sums have rounding errors
            uses.append(StreamUse(device, stream, busy, makespan - busy, len(nodes)))
        return uses

    @cached_property
    def exposed_comm_s(self) -> float:
        """Seconds in which something is transferred and nothing computes, on any device."""
        return exposed_s(self.start_s, self.end_s, self._kinds == _COMM, self._kinds == _COMPUTE)

    @cached_property
    def exposed_comm_by_device_s(self) -> dict[str, float]:
        """Seconds of each device in which it transfers and does not compute."""
        there: dict[str, list[Ints]] = {}
        for (device, _), nodes in self._held.items():
            there.setdefault(device, []).append(nodes)
        uses = {}
        for device, parts in sorted(there.items()):
            nodes = np.unique(np.concatenate(parts))
            kinds = self._kinds[nodes]
            uses[device] = exposed_s(self.start_s[nodes], self.end_s[nodes], kinds == _COMM, kinds == _COMPUTE)
        return uses

    @cached_property
    def _kinds(self) -> npt.NDArray[np.int8]:
        """Kind of each node, as its position in :data:`_KINDS`."""
        number = {kind: i for i, kind in enumerate(_KINDS)}
        return np.array([number[node.kind] for node in self.graph.nodes], dtype=np.int8)

    @cached_property
    def _held(self) -> dict[tuple[str, str], Ints]:
        """Nodes of each stream, in their order."""
        held: dict[tuple[str, str], list[int]] = {}
        for i, node in enumerate(self.graph.nodes):
            lane = (node.device, node.stream)
            held.setdefault(lane, []).append(i)
            for where in dict.fromkeys(node.also):
                if where != lane:
                    held.setdefault(where, []).append(i)
        return {where: np.array(nodes, dtype=np.int64) for where, nodes in held.items()}


def covered_s(start_s: Floats, end_s: Floats) -> float:
    """Length of the union of intervals."""
    if not len(start_s):
        return 0.0
    order = np.argsort(start_s, kind="stable")
    start, end = start_s[order], np.maximum.accumulate(end_s[order])
    reached = np.concatenate([[start[0]], end[:-1]])
    return float(np.maximum(end - np.maximum(start, reached), 0.0).sum())


def exposed_s(start_s: Floats, end_s: Floats, ours: npt.NDArray[np.bool_], theirs: npt.NDArray[np.bool_]) -> float:
    """Length of the union of the first intervals, less the second ones."""
    either = ours | theirs
    both = covered_s(start_s[either], end_s[either])
    return max(both - covered_s(start_s[theirs], end_s[theirs]), 0.0)
