"""Result of a replay: times and causes of each node, use of each stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cdmpp.replay.graph import Floats, Graph, Ints


@dataclass(frozen=True)
class StreamUse:
    """One stream of a timeline.

    Attributes
    ----------
    device, stream : str
    busy_s, idle_s : float
        Their sum is the makespan. Gaps are idle; overlapping nodes (on parallel devices) count once.
    nodes : int
        Number of nodes.
    """

    device: str
    stream: str
    busy_s: float
    idle_s: float
    nodes: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times of each node. Arrays are in the order of ``graph.nodes``.

    Attributes
    ----------
    graph : Graph
    duration_s, start_s, end_s : Floats, length nodes
    cause : Ints, length nodes
        The node whose end (and gap) each start waited for, as a dependency or as the holder of its
        stream; -1 where it started at once.
    """

    graph: Graph
    duration_s: Floats
    start_s: Floats
    end_s: Floats
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
        held: dict[tuple[str, str], list[int]] = {}
        for i, node in enumerate(self.graph.nodes):
            for where in dict.fromkeys(((node.device, node.stream), *node.also)):
                held.setdefault(where, []).append(i)
        makespan = self.makespan_s
        uses = []
        for (device, stream), nodes in sorted(held.items()):
            working = [i for i in nodes if self.graph.nodes[i].kind != "gap"]
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
        kinds = np.array([node.kind for node in self.graph.nodes])
        return exposed_s(self.start_s, self.end_s, kinds == "comm", kinds == "compute")

    @cached_property
    def exposed_comm_by_device_s(self) -> dict[str, float]:
        """Seconds of each device in which it transfers and does not compute."""
        there: dict[str, list[int]] = {}
        for i, node in enumerate(self.graph.nodes):
            for device in dict.fromkeys((node.device, *(other for other, _ in node.also))):
                there.setdefault(device, []).append(i)
        uses = {}
        for device, nodes in sorted(there.items()):
            kinds = np.array([self.graph.nodes[i].kind for i in nodes])
            uses[device] = exposed_s(self.start_s[nodes], self.end_s[nodes], kinds == "comm", kinds == "compute")
        return uses


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
