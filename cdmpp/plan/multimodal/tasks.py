"""Tasks of one step: dependencies, durations and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cdmpp.plan.base.one_machine import lower_bound_s
from cdmpp.plan.multimodal.modules import ItemLinks, Knob, Knobs, MemoryOptions, Module, chunk_cost, topological_order
from cdmpp.plan.multimodal.placement import Placement
from cdmpp.plan.multimodal.task_graph import MemoryUse, RankQueues, TaskGraph, longest_paths_s, make_graph


@dataclass(frozen=True)
class Tasks:
    """Tasks of one step: forward tasks 0 to ``half - 1``, and the backward pass of task t as ``half + t``.

    A *unit* is one sub-micro-batch of a module. A *segment* is a unit's pass over the chunks of one of the module's
    segments. A *class* is a module's segment; it contains one segment of each unit. Forward tasks are numbered by
    class, unit and chunk. Units of different modules depend on each other where their items are linked.

    Attributes
    ----------
    items : tuple of tuple of int
        Items of each unit, by module; empty for a module without items.
    ids : tuple of ndarray of int64, shape (units, chunks)
        Forward task of each unit and chunk, by module.
    rank : ndarray of int64, shape (forward tasks,)
    first_task, first_segment, need_ptr, need_class, need_count : ndarray of int64
        Forward tasks of each segment, segments of each class, and what a segment depends on; see
        :func:`cdmpp.plan.multimodal.schedule.complete`.
    classes : tuple of (int, int)
        Module and segment of each class, in topological order.
    kept, extra_forward, extra_backward : ndarray of float64, shape (forward tasks,)
        Bytes; see :class:`cdmpp.plan.multimodal.modules.ChunkCost`.
    """

    modules: tuple[Module, ...]
    placement: Placement
    items: tuple[tuple[int, ...], ...]
    ranks: int
    memory: MemoryOptions
    knobs: Knobs
    ids: tuple[np.ndarray, ...]
    rank: np.ndarray
    graph: TaskGraph
    first_task: np.ndarray
    first_segment: np.ndarray
    need_ptr: np.ndarray
    need_class: np.ndarray
    need_count: np.ndarray
    classes: tuple[tuple[int, int], ...]
    kept: np.ndarray
    extra_forward: np.ndarray
    extra_backward: np.ndarray

    @property
    def half(self) -> int:
        """Number of forward tasks."""
        return len(self.rank)

    @property
    def size(self) -> int:
        """Number of tasks."""
        return 2 * self.half

    @property
    def segments(self) -> int:
        """Number of segments of all units."""
        return len(self.first_task) - 1

    @property
    def duration_s(self) -> np.ndarray:
        """Durations in seconds, shape (tasks,)."""
        return self.graph.duration_s

    @cached_property
    def rank_of_all(self) -> np.ndarray:
        """Rank of each task, shape (tasks,)."""
        return np.concatenate([self.rank, self.rank])

    @cached_property
    def queues(self) -> RankQueues:
        """Forward tasks by segment and by rank, for the dispatcher."""
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(self.ranks)]
        for i, grid in enumerate(self.ids):
            for c, chunk in enumerate(self.placement.chunks[i]):
                if len(grid):
                    distance = int(grid[1, c] - grid[0, c]) if len(grid) > 1 else 0
                    rows[chunk.rank].append((int(grid[0, c]), distance, len(grid)))
        first_lane = np.cumsum([0, *map(len, rows)])
        lanes = np.array([lane for row in rows for lane in row], np.int64)
        return RankQueues(self.rank, self.first_task, first_lane, lanes)

    @cached_property
    def paths_s(self) -> tuple[np.ndarray, np.ndarray]:
        """Longest path to each task's start and from its end, in seconds; both of shape (tasks,)."""
        head_s, tail_s = longest_paths_s(self.graph)
        return head_s, tail_s

    @cached_property
    def static_bytes(self) -> np.ndarray:
        """Bytes of each rank's weights, gradients and optimizer states, shape (ranks,)."""
        static = np.zeros(self.ranks)
        for module, chunks in zip(self.modules, self.placement.chunks, strict=True):
            for chunk in chunks:
                static[chunk.rank] += chunk.layers * module.weight_bytes
        return static

    @cached_property
    def available_bytes(self) -> np.ndarray:
        """Bytes of each rank for activations, shape (ranks,); infinite without a limit."""
        return self.memory.limit_bytes - self.static_bytes

    @property
    def limited(self) -> bool:
        """Whether there is a memory limit."""
        return bool(np.isfinite(self.memory.limit_bytes))

    def memory_use(self, limited: bool = True) -> MemoryUse:
        """Bytes of tasks and ranks, for the dispatcher; ``limited`` False: as if memory were unlimited."""
        available = self.available_bytes if limited else np.full(self.ranks, np.inf)
        return MemoryUse(self.kept, self.extra_forward, self.extra_backward, available)

    @cached_property
    def bound_s(self) -> float:
        """Lower bound of the makespan of these tasks, in seconds."""
        return lower_bound_s(self.rank_of_all, self.ranks, self.duration_s, *self.paths_s)

    def with_costs(self, modules: Sequence[Module]) -> Tasks:
        """The same tasks with other costs of the layers."""
        duration_s, *_ = _costs(modules, self.placement, self.items, self.memory, self.knobs, self.ids, self.half)
        return replace(self, modules=tuple(modules), graph=self.graph._replace(duration_s=duration_s))

    def with_knobs(self, knobs: Knobs) -> Tasks:
        """The same tasks with other memory knobs: other durations and bytes."""
        if knobs == self.knobs:
            return self
        duration_s, kept, extra_forward, extra_backward = _costs(
            self.modules, self.placement, self.items, self.memory, knobs, self.ids, self.half
        )
        return replace(
            self,
            knobs=knobs,
            graph=self.graph._replace(duration_s=duration_s),
            kept=kept,
            extra_forward=extra_forward,
            extra_backward=extra_backward,
        )

    def uniform_knobs(self, knob: Knob) -> Knobs:
        """The same knob for all chunks."""
        return tuple(tuple(knob for _ in row) for row in self.placement.chunks)


def make_tasks(
    modules: Sequence[Module],
    placement: Placement,
    items: Sequence[Sequence[int]],
    ranks: int,
    memory: MemoryOptions,
    links: ItemLinks,
) -> Tasks:
    """Tasks of a step; all activations are kept.

    Parameters
    ----------
    items : sequence of sequence of int
        Items of each unit, by module.
    """
    dependent = _dependent_units(items, links)
    # Classes in topological order, so that a class never depends on a later one.
    classes = [(i, k) for i in topological_order(modules) if len(items[i]) for k in range(placement.segments(i))]
    ids = [np.empty((len(units), len(placement.chunks[i])), np.int64) for i, units in enumerate(items)]
    first_task, first_segment, half = [0], [0], 0
    for i, k in classes:
        chunks = [c for c, chunk in enumerate(placement.chunks[i]) if chunk.segment == k]
        for unit in range(len(items[i])):
            ids[i][unit, chunks] = np.arange(half, half + len(chunks))
            half += len(chunks)
            first_task.append(half)
        first_segment.append(first_segment[-1] + len(items[i]))
    rank = np.empty(half, np.int64)
    source: list[np.ndarray] = []
    target: list[np.ndarray] = []
    for i, grid in enumerate(ids):
        if not grid.size:
            continue
        rank[grid] = np.array([chunk.rank for chunk in placement.chunks[i]])
        source += [grid[:, :-1].ravel(), half + grid[:, 1:].ravel(), grid[:, -1]]
        target += [grid[:, 1:].ravel(), half + grid[:, :-1].ravel(), half + grid[:, -1]]
    for (i, j), pairs in dependent.items():
        units, earlier_units = pairs[:, 0], pairs[:, 1]
        source += [ids[j][earlier_units, -1], half + ids[i][units, 0]]
        target += [ids[i][units, 0], half + ids[j][earlier_units, -1]]
    need_ptr, need_class, need_count = _needs(classes, items, dependent, placement)
    knobs: Knobs = tuple(tuple("keep" for _ in chunks) for chunks in placement.chunks)
    unit_items = tuple(tuple(units) for units in items)
    duration_s, kept, extra_forward, extra_backward = _costs(modules, placement, unit_items, memory, knobs, ids, half)
    return Tasks(
        modules=tuple(modules),
        placement=placement,
        items=unit_items,
        ranks=ranks,
        memory=memory,
        knobs=knobs,
        ids=tuple(ids),
        rank=rank,
        graph=make_graph(duration_s, source, target),
        first_task=np.array(first_task),
        first_segment=np.array(first_segment),
        need_ptr=need_ptr,
        need_class=need_class,
        need_count=need_count,
        classes=tuple(classes),
        kept=kept,
        extra_forward=extra_forward,
        extra_backward=extra_backward,
    )


@dataclass(frozen=True)
class StepSettings:
    """What all designs of a step share.

    Attributes
    ----------
    batch : sequence of int
        Items of each module.
    efficiency : float
        Share of the peak items per second that the rule's sub-micro-batches reach.
    """

    modules: Sequence[Module]
    batch: Sequence[int]
    ranks: int
    memory: MemoryOptions
    links: ItemLinks
    efficiency: float

    def tasks(self, placement: Placement, items: Sequence[Sequence[int]]) -> Tasks:
        """Tasks of the step with this placement and these sub-micro-batches."""
        return make_tasks(self.modules, placement, items, self.ranks, self.memory, self.links)


def _dependent_units(items: Sequence[Sequence[int]], links: ItemLinks) -> dict[tuple[int, int], np.ndarray]:
    """For modules (i, j), pairs of units (of i, of j): the former's forward pass waits for the latter's."""
    dependent = {}
    for link in links.all:
        pairs = link.pairs(items[link.single], items[link.other])
        if link.forward:
            dependent[link.other, link.single] = pairs[:, ::-1]
        else:
            dependent[link.single, link.other] = pairs
    return dependent


def _needs(
    classes: Sequence[tuple[int, int]],
    items: Sequence[Sequence[int]],
    dependent: dict[tuple[int, int], np.ndarray],
    placement: Placement,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``need_ptr``, ``need_class`` and ``need_count`` of :class:`Tasks`."""
    number = {segment: c for c, segment in enumerate(classes)}
    ptr, needed, counts = [0], list[int](), list[int]()
    # The last unit that each depends on: pairs grow, so the last pair of a unit wins.
    last = {modules: dict(pairs.tolist()) for modules, pairs in dependent.items()}
    for i, k in classes:
        for unit in range(len(items[i])):
            if k > 0:
                needed.append(number[i, k - 1])
                counts.append(unit + 1)
            for (later, earlier), last_unit in last.items() if k == 0 else ():
                if later == i and unit in last_unit:
                    needed.append(number[earlier, placement.segments(earlier) - 1])
                    counts.append(last_unit[unit] + 1)
            ptr.append(len(needed))
    return np.array(ptr, np.int64), np.array(needed, np.int64), np.array(counts, np.int64)


def _costs(
    modules: Sequence[Module],
    placement: Placement,
    items: Sequence[tuple[int, ...]],
    memory: MemoryOptions,
    knobs: Knobs,
    ids: Sequence[np.ndarray],
    half: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Durations (shape (tasks,)); kept and extra bytes forward and backward (shape (forward tasks,))."""
    duration_s = np.empty(2 * half)
    kept, extra_forward, extra_backward = np.empty(half), np.empty(half), np.empty(half)
    for i, (module, chunks, units) in enumerate(zip(modules, placement.chunks, items, strict=True)):
        for c, chunk in enumerate(chunks):
            for size in set(units):
                cost = chunk_cost(module, (chunk.first, chunk.layers), size, knobs[i][c], memory)
                tasks = ids[i][np.flatnonzero(np.array(units) == size), c]
                duration_s[tasks], duration_s[half + tasks] = cost.forward_s, cost.backward_s
                kept[tasks] = cost.kept_bytes
                extra_forward[tasks], extra_backward[tasks] = cost.extra_forward_bytes, cost.extra_backward_bytes
    return duration_s, kept, extra_forward, extra_backward
