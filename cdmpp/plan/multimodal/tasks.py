"""Tasks of one step with dependencies, durations and memory, and schedules from orders of segments or tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cdmpp.plan.base.task_graph import TaskGraph, jackson_bound_s, longest_paths_s, make_graph, run_in_order
from cdmpp.plan.multimodal.dispatch import (
    ALTERNATE,
    BACKWARD_FIRST,
    FORWARD_FIRST,
    FORWARD_ORDER,
    LONGEST_TAIL,
    LONGEST_WAIT,
    REVERSE_ORDER,
    DispatchRule,
    MemoryUse,
    RankQueues,
    dispatch,
)
from cdmpp.plan.multimodal.modules import (
    ItemLinks,
    Knob,
    Knobs,
    MemoryOptions,
    Module,
    chunk_cost,
    shared_units,
    split_evenly,
    topological_order,
)
from cdmpp.plan.multimodal.placement import Items, Placement, one_f_one_b_places
from cdmpp.utils.jit import jit


@dataclass(frozen=True)
class Tasks:
    """Tasks of one step: forward tasks 0 to ``half - 1``, and the backward pass of task t as ``half + t``.

    A *unit* is one sub-micro-batch of a module. A *segment* is a unit's pass over the chunks of one of the module's
    segments. A *class* is a module's segment; it contains one segment of each unit. Forward tasks are numbered by
    class, unit and chunk. Units of different modules depend on each other where their items are linked.
    """

    modules: tuple[Module, ...]
    placement: Placement
    items: tuple[tuple[int, ...], ...]  # items of each unit, by module; empty for a module without items
    ranks: int
    memory: MemoryOptions
    knobs: Knobs
    ids: tuple[np.ndarray, ...]  # (units, chunks): forward task of each unit and chunk, by module
    rank: np.ndarray  # shape (forward tasks,)
    graph: TaskGraph
    # forward tasks of each segment, segments of each class, and what a segment depends on; see
    # :func:`cdmpp.plan.multimodal.tasks.complete`
    first_task: np.ndarray
    first_segment: np.ndarray
    need_ptr: np.ndarray
    need_class: np.ndarray
    need_count: np.ndarray
    classes: tuple[tuple[int, int], ...]  # module and segment of each class, in topological order
    # (forward tasks,): bytes; see :class:`cdmpp.plan.multimodal.modules.ChunkCost`
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
        return jackson_bound_s(self.rank_of_all, self.ranks, self.duration_s, *self.paths_s)

    def with_costs(self, modules: Sequence[Module], knobs: Knobs) -> Tasks:
        """The same tasks with other costs of the layers, or other memory knobs."""
        duration_s, transfer_s = np.empty(self.size), np.empty(self.half)
        kept, extra_forward, extra_backward = np.empty((3, self.half))
        for i, (module, chunks, units) in enumerate(zip(modules, self.placement.chunks, self.items, strict=True)):
            for c, chunk in enumerate(chunks):
                for size in set(units):
                    cost = chunk_cost(module, (chunk.first, chunk.layers), size, knobs[i][c], self.memory)
                    tasks = self.ids[i][np.flatnonzero(np.array(units) == size), c]
                    duration_s[tasks], duration_s[self.half + tasks] = cost.forward_s, cost.backward_s
                    transfer_s[tasks], kept[tasks] = module.transfer_s(size), cost.kept_bytes
                    extra_forward[tasks], extra_backward[tasks] = cost.extra_forward_bytes, cost.extra_backward_bytes
        return replace(
            self,
            modules=tuple(modules),
            knobs=knobs,
            graph=self.graph._replace(duration_s=duration_s).with_transfers(self.rank_of_all, transfer_s),
            kept=kept,
            extra_forward=extra_forward,
            extra_backward=extra_backward,
        )

    def with_knobs(self, knobs: Knobs) -> Tasks:
        """The same tasks with other memory knobs: other durations and bytes."""
        return self if knobs == self.knobs else self.with_costs(self.modules, knobs)

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

    ``items``: items of each unit, by module.
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
    uncosted = Tasks(
        modules=tuple(modules),
        placement=placement,
        items=tuple(tuple(units) for units in items),
        ranks=ranks,
        memory=memory,
        knobs=knobs,
        ids=tuple(ids),
        rank=rank,
        graph=make_graph(source, target, 2 * half),
        first_task=np.array(first_task),
        first_segment=np.array(first_segment),
        need_ptr=need_ptr,
        need_class=need_class,
        need_count=need_count,
        classes=tuple(classes),
        kept=_EMPTY,
        extra_forward=_EMPTY,
        extra_backward=_EMPTY,
    )
    return uncosted.with_costs(modules, knobs)


@dataclass(frozen=True)
class StepSettings:
    """What all designs of a step share."""

    modules: Sequence[Module]
    batch: Sequence[int]  # items of each module
    ranks: int
    memory: MemoryOptions
    links: ItemLinks
    efficiency: float  # share of the peak items per second that the rule's sub-micro-batches reach
    # only plans that torch.distributed.pipelining runs: equal sub-micro-batches, as many of each module, and a part of
    # a module on every rank. Of a single module, stage i is on rank i modulo ranks, and every rank has as many
    # (Megatron-LM).
    executable: bool = False

    def equal_counts(self) -> list[int]:
        """Numbers of sub-micro-batches into which the items of each module are divided equally."""
        most = math.gcd(*self.batch)
        return [count for count in range(1, most + 1) if most % count == 0]

    def split(self, items: Items, module: int, count: int) -> Items:
        """The items in another number of sub-micro-batches of a module, or of all where they must be equal."""
        if self.executable:
            count = max(equal for equal in self.equal_counts() if equal <= count)
        changed = range(len(items)) if self.executable else (module,)
        return tuple(
            split_evenly(self.batch[i], count) if i in changed and self.batch[i] else units
            for i, units in enumerate(items)
        )

    def allows(self, placement: Placement, items: Sequence[Sequence[int]]) -> bool:
        """Whether a plan may have this placement and these sub-micro-batches."""
        if not self.executable:
            return True
        used = [(units, chunks) for units, chunks in zip(items, placement.chunks, strict=True) if units]
        ranks = [chunk.rank for _, chunks in used for chunk in chunks if chunk.layers]
        equal = len({len(units) for units, _ in used}) == 1 and all(len({*units}) == 1 for units, _ in used)
        cyclic = len(self.modules) > 1 or ranks == [*range(self.ranks)] * (len(ranks) // self.ranks)
        return equal and cyclic and {*ranks} == {*range(self.ranks)}

    def tasks(self, placement: Placement, items: Sequence[Sequence[int]]) -> Tasks:
        """Tasks of the step with this placement and these sub-micro-batches."""
        return make_tasks(self.modules, placement, items, self.ranks, self.memory, self.links)


def _dependent_units(items: Sequence[Sequence[int]], links: ItemLinks) -> dict[tuple[int, int], np.ndarray]:
    """For modules (i, j), pairs of units (of i, of j): the former's forward pass waits for the latter's."""
    dependent = {}
    for link in links.all:
        pairs = shared_units(tuple(items[link.single]), tuple(items[link.other]))
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


_EMPTY = np.empty(0, np.int64)
#: Forward and backward passes alternately: 1F1B where possible.
ALTERNATE_RULE = DispatchRule(LONGEST_WAIT, ALTERNATE)
RULES = tuple(
    DispatchRule(backward_rule, preference)
    for backward_rule in (LONGEST_WAIT, FORWARD_ORDER, REVERSE_ORDER, LONGEST_TAIL)
    for preference in (BACKWARD_FIRST, ALTERNATE, FORWARD_FIRST)
)
#: For memory limits: a task that overtakes may take the memory that another one needs.
STRICT_RULES = tuple(rule._replace(strict=True) for rule in RULES)
#: Rules that every variant of a step is tried with before others.
FIRST_RULES = (
    ALTERNATE_RULE,
    DispatchRule(LONGEST_WAIT, BACKWARD_FIRST, True),
    DispatchRule(FORWARD_ORDER, BACKWARD_FIRST),
    DispatchRule(LONGEST_TAIL, ALTERNATE),
)


@dataclass(frozen=True)
class Schedule:
    """Start times of all tasks."""

    tasks: Tasks
    makespan_s: float  # infinite on a deadlock
    start_s: np.ndarray  # shape (tasks,)
    # (tasks,): position of each task in a topological order; distinguishes tasks of no duration that start together
    place: np.ndarray

    @property
    def orders(self) -> list[list[int]]:
        """Tasks of each rank, in the order in which they run."""
        in_order = np.argsort(self.place)
        rank = self.tasks.rank_of_all[in_order]
        return [in_order[rank == r].tolist() for r in range(self.tasks.ranks)]


def list_schedule(tasks: Tasks, sequence: np.ndarray, rule: DispatchRule, *, limited: bool = True) -> Schedule:
    """List schedule of an order of segments; infinitely long where memory leads to a deadlock.

    ``sequence`` (shape (segments,)): segments, most urgent first. ``limited``: False: as if memory were unlimited.
    """
    start_s, place = np.empty(tasks.size), np.empty(tasks.size, np.int64)
    memory = tasks.memory_use(limited)
    makespan_s = dispatch(tasks.graph, tasks.queues, memory, sequence, tasks.paths_s[1], rule, start_s, place)
    return Schedule(tasks, float(makespan_s), start_s, place)


def schedule_orders(tasks: Tasks, orders: Sequence[Sequence[int]]) -> Schedule:
    """Schedule each rank's tasks in a given order, as early as possible; infinitely long on a deadlock."""
    start_s, place = np.empty(tasks.size), np.empty(tasks.size, np.int64)
    first_of = np.cumsum([0, *map(len, orders)])
    flat = np.concatenate([np.array(order, np.int64) for order in orders])
    makespan_s = run_in_order(tasks.graph, first_of, flat, start_s, place)
    return Schedule(tasks, float(makespan_s), start_s, place)


def least_memory_orders(tasks: Tasks) -> list[list[int]]:
    """Orders that hold little memory: backward passes as soon as possible, one unit in flight at a time."""
    graph, half = tasks.graph, tasks.half
    waiting = [int(n) for n in graph.dependencies]
    orders: list[list[int]] = [[] for _ in range(tasks.ranks)]
    backward: list[int] = []

    def run(task: int) -> None:
        orders[int(tasks.rank_of_all[task])].append(task)
        for other in graph.after[graph.first_after[task] : graph.first_after[task + 1]]:
            waiting[other] -= 1
            if not waiting[other] and other >= half:
                backward.append(int(other))

    for segment in sequence_by(tasks, data_order_key(tasks)):
        for t in range(int(tasks.first_task[segment]), int(tasks.first_task[segment + 1])):
            run(t)
            while backward:
                run(backward.pop())
    return orders


def one_f_one_b_orders(tasks: Tasks, micro_batch: Sequence[Sequence[int]]) -> list[list[int]]:
    """1F1B order of each rank's tasks for a contiguous placement.

    ``micro_batch`` has the micro-batch of each unit, by module.
    """
    of_task, number = np.empty(tasks.half, np.int64), np.arange(tasks.half)
    for grid, numbers in zip(tasks.ids, micro_batch, strict=True):
        of_task[grid] = np.array(numbers, np.int64)[:, None]
    places = one_f_one_b_places(tasks.rank, of_task, tasks.ranks, 1 + int(of_task.max()))
    # Backward, the tasks of a micro-batch run in reverse.
    order = np.lexsort((np.concatenate([number, -number]), np.concatenate(places), tasks.rank_of_all))
    counts = np.bincount(tasks.rank_of_all, minlength=tasks.ranks)
    return [part.tolist() for part in np.split(order, np.cumsum(counts)[:-1])]


def sequence_by(tasks: Tasks, key: np.ndarray) -> np.ndarray:
    """Segments by growing ``key``, each after those that it depends on; both of shape (segments,)."""
    sequence = np.empty(tasks.segments, np.int64)
    complete(tasks.first_segment, tasks.need_ptr, tasks.need_class, tasks.need_count, key, sequence)
    return sequence


@jit
def complete(
    first_segment: np.ndarray,
    need_ptr: np.ndarray,
    need_class: np.ndarray,
    need_count: np.ndarray,
    key: np.ndarray,
    sequence: np.ndarray,
) -> None:
    """Order of segments: always the allowed class whose next segment has the least key.

    ``first_segment`` (shape (classes + 1,)): segments of a class, one for each sub-micro-batch, in order. ``need_ptr``,
    ``need_class``, ``need_count``: segment s is allowed once class ``need_class[i]`` has occurred ``need_count[i]``
    times, for i from ``need_ptr[s]`` to ``need_ptr[s + 1]``. ``key``: shape (segments,). ``sequence`` (shape
    (segments,)): filled with the segments in order.
    """
    classes, done = len(first_segment) - 1, np.zeros(len(first_segment) - 1, np.int64)
    for place in range(len(sequence)):
        chosen = -1
        least = np.inf
        for c in range(classes):
            segment = first_segment[c] + done[c]
            if segment >= first_segment[c + 1] or key[segment] >= least:
                continue
            allowed = True
            for i in range(need_ptr[segment], need_ptr[segment + 1]):
                if done[need_class[i]] < need_count[i]:
                    allowed = False
                    break
            if allowed:
                least = key[segment]
                chosen = c
        sequence[place] = first_segment[chosen] + done[chosen]
        done[chosen] += 1


def data_order_key(tasks: Tasks) -> np.ndarray:
    """Key that orders segments by their share of the step's items: related segments of all modules come together."""
    key = np.empty(tasks.segments)
    for c, (i, _) in enumerate(tasks.classes):
        before = np.concatenate([[0], np.cumsum(tasks.items[i])[:-1]])
        key[tasks.first_segment[c] : tasks.first_segment[c + 1]] = before / sum(tasks.items[i])
    # Classes are in topological order: ties go to the earlier module.
    return key + 1e-9 * np.repeat(np.arange(len(tasks.classes)), np.diff(tasks.first_segment))


def initial_keys(tasks: Tasks) -> list[np.ndarray]:
    """Keys that a search starts from: by share of the step, by module, by class; each of shape (segments,)."""
    by_share = data_order_key(tasks)
    modules = np.repeat([i for i, _ in tasks.classes], np.diff(tasks.first_segment))
    place = {i: at for at, i in enumerate(dict.fromkeys(i for i, _ in tasks.classes))}
    by_module = np.array([place[int(i)] for i in modules], dtype=np.float64)
    by_class = np.repeat(np.arange(len(tasks.classes)), np.diff(tasks.first_segment)).astype(np.float64)
    return [by_share, by_share + by_module, by_share + by_class]
