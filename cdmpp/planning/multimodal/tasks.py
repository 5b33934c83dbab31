"""The tasks of one step: which waits for which, how long each takes, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from cdmpp.planning.multimodal.dispatch import longest_ways, preemptive_s
from cdmpp.planning.multimodal.modules import Links, Module, ordered
from cdmpp.planning.multimodal.placement import Placement

Knob = Literal["keep", "recompute", "offload"]
#: By module and chunk.
Knobs = tuple[tuple[Knob, ...], ...]


@dataclass(frozen=True)
class Memory:
    """What limits the ranks' memory, and what may be done about it.

    Attributes
    ----------
    limit_bytes : float
        Of each rank; infinite without a limit.
    knobs : tuple of {"keep", "recompute", "offload"}
        What may be done with activations.
    host_bytes_per_s : float
        Of a rank's link to the host, in each direction; for "offload".
    """

    limit_bytes: float = float("inf")
    knobs: tuple[Knob, ...] = ("keep",)
    host_bytes_per_s: float = float("inf")


@dataclass(frozen=True)
class Tasks:
    """One step as tasks: forward tasks 0 to ``half - 1``, and the backward pass of each ``half`` further on.

    A *unit* is a sub-micro-batch of a module; a *segment* is a unit's pass over the chunks of one of the
    module's segments; a *class* is a module's segment, and stands for one segment of each unit. Forward tasks
    are numbered by class, unit and chunk. Units of different modules wait for each other where their items
    belong together.

    Attributes
    ----------
    modules : tuple of Module
    placement : Placement
    items : tuple of tuple of int
        Of each unit, by module; empty for a module without items.
    memory : Memory
    belong : Links
    knobs : Knobs
    """

    modules: tuple[Module, ...]
    placement: Placement
    items: tuple[tuple[int, ...], ...]
    ranks: int
    memory: Memory
    belong: Links
    knobs: Knobs
    ids: tuple[np.ndarray, ...]  # (units, chunks) of each module
    rank: np.ndarray
    duration_s: np.ndarray
    before: np.ndarray
    first_after: np.ndarray
    after: np.ndarray
    first_task: np.ndarray
    first_segment: np.ndarray
    need_ptr: np.ndarray
    need_class: np.ndarray
    need_count: np.ndarray
    classes: tuple[tuple[int, int], ...]  # (module, segment)
    kept: np.ndarray
    more_forward: np.ndarray
    more_backward: np.ndarray

    @cached_property
    def lanes(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each rank's lanes begin, and the lanes: see :func:`dispatch`."""
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(self.ranks)]
        for i, grid in enumerate(self.ids):
            for at, chunk in enumerate(self.placement.chunks[i]):
                if len(grid):
                    step = int(grid[1, at] - grid[0, at]) if len(grid) > 1 else 0
                    rows[chunk.rank].append((int(grid[0, at]), step, len(grid)))
        begins = np.cumsum([0, *map(len, rows)])
        return begins, np.array([lane for row in rows for lane in row], np.int64)

    @property
    def half(self) -> int:
        """Forward tasks."""
        return len(self.rank)

    @property
    def segments(self) -> int:
        """Segments of all units."""
        return len(self.first_task) - 1

    @cached_property
    def ways_s(self) -> tuple[np.ndarray, np.ndarray]:
        """Longest way to each task's start and from its end."""
        head_s, tail_s = longest_ways(self.duration_s, self.before, self.first_after, self.after)
        return head_s, tail_s

    @cached_property
    def static_bytes(self) -> np.ndarray:
        """Bytes of each rank that do not change: weights and what goes with them."""
        out = np.zeros(self.ranks)
        for module, chunks in zip(self.modules, self.placement.chunks, strict=True):
            for chunk in chunks:
                out[chunk.rank] += chunk.layers * module.weight_bytes
        return out

    @cached_property
    def room(self) -> np.ndarray:
        """Bytes of each rank for activations."""
        return self.memory.limit_bytes - self.static_bytes

    @cached_property
    def bound_s(self) -> float:
        """No schedule of these tasks is shorter: :func:`bound_s`."""
        return bound_s(self)

    def with_costs(self, modules: Sequence[Module]) -> Tasks:
        """The same tasks where layers cost something else."""
        figures = _figures(modules, self.placement, self.items, self.memory, self.knobs, self.ids, self.half)
        return replace(self, modules=tuple(modules), duration_s=figures[0])

    def with_knobs(self, knobs: Knobs) -> Tasks:
        """The same with other memory knobs: other durations and bytes."""
        if knobs == self.knobs:
            return self
        duration_s, kept, forward, backward = _figures(
            self.modules, self.placement, self.items, self.memory, knobs, self.ids, self.half
        )
        return replace(
            self, knobs=knobs, duration_s=duration_s, kept=kept, more_forward=forward, more_backward=backward
        )


def make_tasks(
    modules: Sequence[Module],
    placement: Placement,
    items: Sequence[Sequence[int]],
    ranks: int,
    memory: Memory,
    belong: Links,
) -> Tasks:
    """Tasks of a step whose units have these items; activations are kept."""
    topological = ordered(modules)
    waits = _waits(items, belong)
    # Classes in the order of data, so that a smaller class never waits for a larger one of the same share.
    classes = [(i, k) for i in topological if len(items[i]) for k in range(placement.segments(i))]
    chunk_ids = {(i, k): [at for at, chunk in enumerate(placement.chunks[i]) if chunk.segment == k] for i, k in classes}
    ids = [np.empty((len(units), len(placement.chunks[i])), np.int64) for i, units in enumerate(items)]
    first_task, first_segment, count = [0], [0], 0
    for i, k in classes:
        chunks = chunk_ids[i, k]
        for unit in range(len(items[i])):
            ids[i][unit, chunks] = np.arange(count, count + len(chunks))
            count += len(chunks)
            first_task.append(count)
        first_segment.append(first_segment[-1] + len(items[i]))
    half = count
    rank = np.empty(half, np.int64)
    source: list[np.ndarray] = []
    target: list[np.ndarray] = []
    for i, grid in enumerate(ids):
        if not grid.size:
            continue
        rank[grid] = np.array([chunk.rank for chunk in placement.chunks[i]])
        source += [grid[:, :-1].ravel(), half + grid[:, 1:].ravel(), grid[:, -1]]
        target += [grid[:, 1:].ravel(), half + grid[:, :-1].ravel(), half + grid[:, -1]]
    for (i, j), pairs in waits.items():
        mine, theirs = pairs[:, 0], pairs[:, 1]
        source += [ids[j][theirs, -1], half + ids[i][mine, 0]]
        target += [ids[i][mine, 0], half + ids[j][theirs, -1]]
    sources, targets = np.concatenate(source), np.concatenate(target)
    by_source = np.argsort(sources, kind="stable")
    need_ptr, need_class, need_count = _needs(classes, items, waits, placement)
    knobs: Knobs = tuple(tuple("keep" for _ in chunks) for chunks in placement.chunks)
    units = tuple(tuple(each) for each in items)
    duration_s, kept, forward, backward = _figures(modules, placement, units, memory, knobs, ids, half)
    return Tasks(
        modules=tuple(modules),
        placement=placement,
        items=units,
        ranks=ranks,
        memory=memory,
        belong=belong,
        knobs=knobs,
        ids=tuple(ids),
        rank=rank,
        duration_s=duration_s,
        before=np.bincount(targets, minlength=2 * half),
        first_after=np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=2 * half))]),
        after=targets[by_source],
        first_task=np.array(first_task),
        first_segment=np.array(first_segment),
        need_ptr=need_ptr,
        need_class=need_class,
        need_count=need_count,
        classes=tuple(classes),
        kept=kept,
        more_forward=forward,
        more_backward=backward,
    )


def _waits(items: Sequence[Sequence[int]], belong: Links) -> dict[tuple[int, int], np.ndarray]:
    """For modules (i, j): units (of i, of j) of which the former's forward pass waits for the latter's."""
    out = {}
    for link in belong.all:
        pairs = link.pairs(items[link.single], items[link.other])
        if link.forward:
            out[link.other, link.single] = pairs[:, ::-1]
        else:
            out[link.single, link.other] = pairs
    return out


def _needs(
    classes: Sequence[tuple[int, int]],
    items: Sequence[Sequence[int]],
    waits: dict[tuple[int, int], np.ndarray],
    placement: Placement,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    at = {each: c for c, each in enumerate(classes)}
    ptr, named, counts = [0], list[int](), list[int]()
    # The last unit that each waits for; pairs grow, so the last of a unit stands last.
    last = {each: dict(pairs.tolist()) for each, pairs in waits.items()}
    for i, k in classes:
        for unit in range(len(items[i])):
            if k > 0:
                named.append(at[i, k - 1])
                counts.append(unit + 1)
            for (one, other), theirs in last.items() if k == 0 else ():
                if one == i and unit in theirs:
                    named.append(at[other, placement.segments(other) - 1])
                    counts.append(theirs[unit] + 1)
            ptr.append(len(named))
    return np.array(ptr, np.int64), np.array(named, np.int64), np.array(counts, np.int64)


def chunk_figures(
    module: Module, layers: tuple[int, int], items: int, knob: Knob, memory: Memory
) -> tuple[float, float, float, float, float]:
    """What one pass of ``items`` through a chunk takes.

    Parameters
    ----------
    layers : (int, int)
        First layer and number of layers.

    Returns
    -------
    forward_s, backward_s, kept_bytes, more_forward_bytes, more_backward_bytes : float

    Notes
    -----
    Recomputing repeats the forward pass before the backward pass and keeps the chunk's input alone between
    them. Offloading moves all activations to the host beside the forward pass and back beside the backward
    pass; a pass is as long as the longer of its arithmetic and its transfer.
    """
    first, count = layers
    weight = sum(module.layers[first : first + count])
    forward_s, backward_s = (weight * each for each in module.layer_s(items))
    full = count * module.activation_bytes * items
    if knob == "recompute" and count:
        boundary = min(module.boundary_bytes * items, full)
        return forward_s, backward_s + forward_s, boundary, 0.0, full - boundary
    if knob == "offload" and count:
        transfer_s = full / memory.host_bytes_per_s
        return max(forward_s, transfer_s), max(backward_s, transfer_s), 0.0, full, full
    return forward_s, backward_s, full, 0.0, 0.0


def _figures(
    modules: Sequence[Module],
    placement: Placement,
    items: Sequence[tuple[int, ...]],
    memory: Memory,
    knobs: Knobs,
    ids: Sequence[np.ndarray],
    half: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    duration_s = np.empty(2 * half)
    kept, forward, backward = np.empty(half), np.empty(half), np.empty(half)
    for i, (module, chunks, units) in enumerate(zip(modules, placement.chunks, items, strict=True)):
        for at, chunk in enumerate(chunks):
            for size in set(units):
                found = chunk_figures(module, (chunk.first, chunk.layers), size, knobs[i][at], memory)
                places = ids[i][np.flatnonzero(np.array(units) == size), at]
                duration_s[places], duration_s[half + places] = found[0], found[1]
                kept[places], forward[places], backward[places] = found[2:]
    return duration_s, kept, forward, backward


def bound_s(tasks: Tasks) -> float:
    """Jackson's preemptive bound of each rank, and the longest way through the tasks.

    Each task has a head (longest way to it) and a tail (longest way from it). On one rank, the schedule that
    always runs the task with the longest tail of those whose head has passed, interrupting others, is the
    best that may interrupt; so no schedule is shorter (Carlier 1982).
    """
    head_s, tail_s = tasks.ways_s
    bound = float((head_s + tasks.duration_s + tail_s).max())
    rank_of = np.concatenate([tasks.rank, tasks.rank])
    for r in range(tasks.ranks):
        mine = np.flatnonzero(rank_of == r)
        mine = mine[np.argsort(head_s[mine], kind="stable")]
        bound = max(bound, float(preemptive_s(head_s[mine], tasks.duration_s[mine], tail_s[mine])))
    return bound
