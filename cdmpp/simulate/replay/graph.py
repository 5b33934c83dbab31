"""Graphs to replay: nodes with devices, streams, durations and dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from cdmpp.errors import FieldError

#: Kinds of nodes for exposed communication: computation, transfer, or named idle time.
NodeKind = Literal["compute", "comm", "gap"]
#: "ready": a stream runs the node that is ready first, as the device queues of dPRO. "listed": a stream runs its
#: nodes in the order of the list, as a GPU stream.
Order = Literal["ready", "listed"]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Node:
    """One unit of work on a stream, which runs one node at a time."""

    id: str  # unique in the graph
    device: str
    duration_s: float  # seconds, 0 or more
    # Nodes that must end before, on any stream. A dependency between streams is an event that one stream records and
    # the other waits for.
    deps: tuple[str, ...] = ()
    stream: str = "0"
    kind: NodeKind = "compute"
    # Seconds after its end in which its stream and its dependents wait (overhead of a framework). The makespan ends
    # with the last node, not with the gap after it.
    gap_s: float = 0.0
    # Further streams that it occupies from start to end: a collective occupies one on each rank.
    also: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Graph:
    """Nodes, and the order in which streams run them."""

    nodes: Sequence[Node]  # in any order, unless ``order`` is "listed"
    parallel: frozenset[str] = frozenset()  # devices that run all ready nodes at the same time
    order: Order = "ready"


@dataclass(frozen=True)
class Follow:
    """Edges between nodes, by sorted position."""

    waits: Ints  # number of edges into each node
    # Nodes that wait for node i: ``next[start[i]:start[i + 1]]``.
    start: Ints
    next: Ints


@dataclass(frozen=True)
class Arrays:
    """A graph as arrays. Nodes are sorted by id, so that results do not depend on their order in a file."""

    place: Ints  # sorted position -> position in ``Graph.nodes``; all other arrays are in sorted positions
    duration_s: Floats
    gap_s: Floats
    depends: Follow  # the dependencies alone
    walked: Follow  # with ``order="listed"`` also an edge from each node to the next one of its streams
    # Streams that node i occupies; none on devices that are infinitely parallel.
    uses_start: Ints
    uses: Ints
    streams: tuple[tuple[str, str], ...]  # by index; those of parallel devices are not among them

    @property
    def size(self) -> int:
        """Number of nodes, edges and held streams; the time of a replay is proportional to it."""
        return len(self.place) + len(self.walked.next) + len(self.uses)


def to_arrays(graph: Graph) -> Arrays:
    """Check a graph and write it as arrays.

    Raises FieldError: two nodes with one id, a dependency on an unknown node, or an invalid duration. Cycles are found
    later, by :class:`cdmpp.simulate.replay.engine.Replayer`.
    """
    nodes = graph.nodes
    ids = [node.id for node in nodes]
    order = sorted(range(len(nodes)), key=ids.__getitem__)
    rank = dict(zip(map(ids.__getitem__, order), range(len(nodes)), strict=True))
    if len(rank) < len(nodes):
        _refuse_twice(nodes)
    place = np.array(order, dtype=np.int64)
    durations = np.array([nodes[i].duration_s for i in order], dtype=np.float64)
    gaps = np.array([nodes[i].gap_s for i in order], dtype=np.float64)
    for what, values in (("duration_s", durations), ("gap_s", gaps)):
        if not (np.isfinite(values) & (values >= 0)).all():
            i = order[int(np.argmin(np.isfinite(values) & (values >= 0)))]
            raise FieldError(
                f"node {nodes[i].id!r}: {what} is {getattr(nodes[i], what)}",
                path=f"nodes.{i}.{what}",
                hint="seconds, 0 or more",
            )
    sources, targets = _edges(nodes, order, rank)
    uses_start, uses, streams = _uses(graph, order)
    depends = walked = _follow(sources, targets, len(nodes))
    if graph.order == "listed":
        more = _listed(place, uses_start, uses)
        walked = _follow(np.concatenate([sources, more[0]]), np.concatenate([targets, more[1]]), len(nodes))
    return Arrays(place, durations, gaps, depends, walked, uses_start, uses, streams)


def _follow(sources: Ints, targets: Ints, nodes: int) -> Follow:
    counts = np.bincount(sources, minlength=nodes)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    waits = np.bincount(targets, minlength=nodes).astype(np.int64)
    return Follow(waits, start, targets[np.argsort(sources, kind="stable")])


def _refuse_twice(nodes: Sequence[Node]) -> None:
    seen: dict[str, int] = {}
    for i, node in enumerate(nodes):
        if node.id in seen:
            raise FieldError(
                f"nodes {seen[node.id]} and {i} are both called {node.id!r}",
                path=f"nodes.{i}.id",
                hint="each node needs an id of its own",
            )
        seen[node.id] = i


def _edges(nodes: Sequence[Node], order: Sequence[int], rank: Mapping[str, int]) -> tuple[Ints, Ints]:
    """Positions before and after, an edge each; in the order of the later node."""
    deps = [nodes[i].deps for i in order]
    counts = np.fromiter(map(len, deps), np.int64, len(deps))
    try:
        sources = np.fromiter((rank[dep] for ids in deps for dep in ids), np.int64, int(counts.sum()))
    except KeyError as error:
        (unknown,) = error.args
        i, k = next((i, node.deps.index(unknown)) for i, node in enumerate(nodes) if unknown in node.deps)
        raise FieldError(
            f"node {nodes[i].id!r} depends on {unknown!r}, which is not there",
            path=f"nodes.{i}.deps.{k}",
            hint="deps are ids of nodes of this graph",
        ) from None
    return sources, np.repeat(np.arange(len(deps)), counts)


def _uses(graph: Graph, order: Sequence[int]) -> tuple[Ints, Ints, tuple[tuple[str, str], ...]]:
    index: dict[tuple[str, str], int] = {}
    uses: list[int] = []
    starts = [0]
    for i in order:
        node = graph.nodes[i]
        lane = node.device, node.stream
        for held in dict.fromkeys((lane, *node.also)) if node.also else (lane,):
            if held[0] not in graph.parallel:
                uses.append(index.setdefault(held, len(index)))
        starts.append(len(uses))
    return np.array(starts, dtype=np.int64), np.array(uses, dtype=np.int64), tuple(index)


def _listed(place: Ints, uses_start: Ints, uses: Ints) -> tuple[Ints, Ints]:
    """Edges from each node to the next one in its stream, in the order of the file."""
    users = np.repeat(np.arange(len(place)), np.diff(uses_start))
    by_file = np.lexsort((place[users], uses))
    nodes, held = users[by_file], uses[by_file]
    same = held[1:] == held[:-1]
    return nodes[:-1][same], nodes[1:][same]
