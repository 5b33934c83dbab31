"""Result of a replay: times and causes of each node, use of each stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np
import numpy.typing as npt

from cdmpp.simulate.replay.graph import Floats, Graph, Ints, NodeKind

_KINDS = get_args(NodeKind)
_COMPUTE, _COMM, _GAP = map(_KINDS.index, ("compute", "comm", "gap"))


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
            own = (node.device, node.stream)
            held.setdefault(own, []).append(i)
            for where in dict.fromkeys(node.also):
                if where != own:
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
