"""Search for the order of segments, and exact solution of small steps.

Variants of a step and dispatch rules share the steps of the search: random changes of the best order (PipeWeaver's
Monte Carlo tree search was not better at equal numbers of orders). Small steps are solved by branch and bound over
orders, for every design that the request allows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cdmpp.plan.base.task_graph import TaskGraph
from cdmpp.plan.multimodal.dispatch import DispatchRule
from cdmpp.plan.multimodal.modules import Module, split_evenly
from cdmpp.plan.multimodal.placement import Chunk, Items, Placement, every_row, split_micro_batches, task_count
from cdmpp.plan.multimodal.tasks import (
    FIRST_RULES,
    RULES,
    STRICT_RULES,
    Schedule,
    StepSettings,
    Tasks,
    data_order_key,
    initial_keys,
    list_schedule,
    schedule_orders,
    sequence_by,
)
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.utils.jit import COMPILED, jit

#: Largest step that is solved exactly, and nodes of the trees of all its variants.
MAX_TASKS, MAX_NODES = 64, 500_000
#: Nodes per second, at the slowest: what is started ends within the budget.
_NODES_PER_S = 2e6 if COMPILED else 5e3
#: Relative difference of a makespan and a bound that are equal: sums of the same seconds in another order.
ROUNDING = 1e-12


@jit
def branch_and_bound(
    ranks: int, rank: np.ndarray, graph: TaskGraph, tail_s: np.ndarray, limit_s: float, nodes: int, order: np.ndarray
) -> tuple[float, bool, int]:
    """Shortest active schedule (Giffler and Thompson 1960) among those shorter than ``limit_s``.

    ``rank``: shape (tasks,). ``tail_s`` (shape (tasks,)): longest path from each task's end to the end of the step.
    ``nodes``: most nodes to visit. ``order`` (shape (tasks,)): filled with the tasks in the order of their choice, if a
    shorter schedule was found.
    Returns ``best_s``: makespan in seconds; ``limit_s`` if no shorter schedule was found; ``complete``: whether the
    tree was searched completely; ``nodes``: nodes that are left.
    """
    duration_s, dependencies, first_after, after, lag_s = graph
    tasks = len(duration_s)
    waiting = np.empty((tasks + 1, tasks), np.int64)
    ready_s = np.zeros((tasks + 1, tasks), np.float64)
    free_s = np.zeros((tasks + 1, ranks), np.float64)
    end_s = np.zeros(tasks + 1, np.float64)
    branches = np.empty((tasks + 1, tasks), np.int64)
    branch_count = np.full(tasks + 1, -1, np.int64)
    chosen = np.empty(tasks, np.int64)
    placed = np.zeros(tasks, np.bool_)
    waiting[0] = dependencies
    best_s = limit_s
    depth = 0
    while depth >= 0:
        if branch_count[depth] < 0:  # a new node: its bound, then its branches
            branch_count[depth] = 0
            if depth == tasks:
                if end_s[depth] < best_s * (1 - ROUNDING):
                    best_s = end_s[depth]
                    order[:] = chosen
            else:
                bound_s = 0.0
                soonest_s = np.inf
                branch_rank = -1
                for r in range(ranks):
                    work_s = 0.0
                    least_start_s = np.inf
                    least_tail_s = np.inf
                    for t in range(tasks):
                        if rank[t] == r and not placed[t]:
                            start_s = max(free_s[depth, r], ready_s[depth, t])
                            bound_s = max(bound_s, start_s + duration_s[t] + tail_s[t])
                            work_s += duration_s[t]
                            least_start_s = min(least_start_s, start_s)
                            least_tail_s = min(least_tail_s, tail_s[t])
                            if waiting[depth, t] == 0 and start_s + duration_s[t] < soonest_s:
                                soonest_s = start_s + duration_s[t]
                                branch_rank = r
                    if work_s > 0.0:
                        bound_s = max(bound_s, least_start_s + work_s + least_tail_s)
                if bound_s < best_s * (1 - ROUNDING):
                    for t in range(tasks):
                        if rank[t] == branch_rank and not placed[t] and waiting[depth, t] == 0:
                            start_s = max(free_s[depth, branch_rank], ready_s[depth, t])
                            if start_s < soonest_s or start_s + duration_s[t] <= soonest_s:
                                # Sorted by tail; the longest one, at the end, is visited first.
                                place = branch_count[depth]
                                while place > 0 and (
                                    duration_s[branches[depth, place - 1]] + tail_s[branches[depth, place - 1]]
                                    > duration_s[t] + tail_s[t]
                                ):
                                    branches[depth, place] = branches[depth, place - 1]
                                    place -= 1
                                branches[depth, place] = t
                                branch_count[depth] += 1
        if branch_count[depth] == 0:
            branch_count[depth] = -1
            depth -= 1
            if depth >= 0:
                placed[chosen[depth]] = False
            continue
        nodes -= 1
        if nodes < 0:
            return best_s, False, 0
        branch_count[depth] -= 1
        task = branches[depth, branch_count[depth]]
        chosen[depth] = task
        placed[task] = True
        depth += 1
        waiting[depth] = waiting[depth - 1]
        ready_s[depth] = ready_s[depth - 1]
        free_s[depth] = free_s[depth - 1]
        r = rank[task]
        done_s = max(free_s[depth, r], ready_s[depth, task]) + duration_s[task]
        free_s[depth, r] = done_s
        end_s[depth] = max(end_s[depth - 1], done_s)
        for i in range(first_after[task], first_after[task + 1]):
            waiting[depth, after[i]] -= 1
            ready_s[depth, after[i]] = max(ready_s[depth, after[i]], done_s + lag_s[i])
    return best_s, True, nodes


def _shorter(tasks: Tasks, limit_s: float, nodes: int) -> tuple[Schedule | None, bool, int]:
    """A schedule shorter than ``limit_s``, whether the tree was searched completely, and the nodes that are left."""
    order = np.full(tasks.size, -1, np.int64)
    rank = tasks.rank_of_all
    _, complete, left = branch_and_bound(tasks.ranks, rank, tasks.graph, tasks.paths_s[1], limit_s, nodes, order)
    if order[0] < 0:
        return None, bool(complete), int(left)
    orders = [order[rank[order] == r].tolist() for r in range(tasks.ranks)]
    return schedule_orders(tasks, orders), bool(complete), int(left)


def shorten(best: Schedule, limit_s: float, nodes: int) -> tuple[Schedule, bool]:
    """A shorter schedule of the same tasks, or ``best``, by branch and bound of at most so many nodes.

    Returns the schedule, and whether no order of these tasks is shorter than it and ``limit_s``.
    """
    tasks = best.tasks
    if tasks.bound_s >= min(best.makespan_s, limit_s) * (1 - ROUNDING):
        return best, True
    if tasks.size > MAX_TASKS or tasks.limited:
        return best, False
    schedule, complete, _ = _shorter(tasks, min(limit_s, best.makespan_s), nodes)
    return schedule or best, complete


def solve_exactly(variants: Sequence[Tasks], best: Schedule, control: SearchControl) -> Schedule:
    """``best``, or a shorter schedule of a small variant without a memory limit."""
    nodes = MAX_NODES
    for tasks in sorted(variants, key=lambda variant: variant.bound_s):
        if tasks.bound_s >= best.makespan_s * (1 - ROUNDING) or control.expired:
            break
        if tasks.size <= MAX_TASKS and not tasks.limited:
            nodes = int(min(nodes, control.left_s * _NODES_PER_S))
            schedule, _, nodes = _shorter(tasks, best.makespan_s, nodes)
            best = schedule or best
    return best


#: Most designs that are listed, and most that are kept because their quick bound is below the best makespan.
MAX_DESIGNS, MAX_KEPT = 400_000, 60_000
#: Nodes of branch and bound for each of these designs.
_DESIGN_NODES = 50_000
_Row = tuple[Chunk, ...]


def try_all(step: StepSettings, best: Schedule, over: Callable[[int], bool]) -> tuple[Schedule, bool, int]:
    """Solve every design of a step, the one of least quick bound first; not with a memory limit.

    ``over``: whether to end, by the number of designs that were solved.
    Returns ``best`` or a shorter one; whether no plan that the request allows is shorter; number of designs that were
    solved.
    """
    if np.isfinite(step.memory.limit_bytes):
        return best, False, 0
    rows = _rows(step)
    items = _items(step)
    if rows is None or not items or math.prod(map(len, rows)) * len(items) > MAX_DESIGNS:
        return best, False, 0
    weights = [PlacementTimes(row, module, step.ranks) for row, module in zip(rows, step.modules, strict=True)]
    limit_s = best.makespan_s * (1 - ROUNDING)
    kept: list[tuple[float, int, int]] = []
    for number, units in enumerate(items):
        bounds_s = quick_bounds_s(step, weights, units)
        below = np.flatnonzero(bounds_s < limit_s)
        kept += zip(bounds_s[below].tolist(), itertools.repeat(number), below.tolist())
        if over(0) or len(kept) > MAX_KEPT:
            return best, False, 0
    proven, solved = True, 0
    for bound_s, number, at in sorted(kept):
        if bound_s >= best.makespan_s * (1 - ROUNDING):
            break
        if over(solved):
            return best, False, solved
        chosen = np.unravel_index(at, [len(row) for row in rows])
        placement = Placement(tuple(row[int(k)] for row, k in zip(rows, chosen, strict=True)))
        if not step.allows(placement, items[number]):
            continue
        solved += 1
        best, exact = _solve(step, placement, items[number], best)
        proven = proven and exact
    return best, proven, solved


def _solve(step: StepSettings, placement: Placement, items: Items, best: Schedule) -> tuple[Schedule, bool]:
    """The best order of a design if it is shorter, and whether the design is solved."""
    if task_count(placement, items) > MAX_TASKS:
        return best, False
    tasks = step.tasks(placement, items)
    if tasks.bound_s >= best.makespan_s * (1 - ROUNDING):
        return best, True
    sequence = sequence_by(tasks, data_order_key(tasks))
    quick = min((list_schedule(tasks, sequence, rule) for rule in sorted(FIRST_RULES)), key=lambda s: s.makespan_s)
    shorter, solved = shorten(quick, best.makespan_s, _DESIGN_NODES)
    return min(best, shorter, key=lambda schedule: schedule.makespan_s), solved


def _rows(step: StepSettings) -> list[list[_Row]] | None:
    """Different placements of each module, the first one from rank 0 on; None where there are too many."""
    rows, total, starts = [list[_Row]() for _ in step.modules], 1, 1
    for i, (module, items) in enumerate(zip(step.modules, step.batch, strict=True)):
        layers, segments = len(module.layers), module.most_segments(step.ranks)
        if not items:
            rows[i] = [(Chunk(0, 0, 0, layers),)]
            continue
        total *= starts * math.comb(layers + segments * step.ranks - 2, layers - 1)
        if total > MAX_DESIGNS:
            return None
        rows[i] = every_row(layers, step.ranks, segments, range(starts))
        starts = step.ranks
    return rows


def _items(step: StepSettings) -> list[Items]:
    """Different sub-micro-batches: every number for each module, and every number of micro-batches of samples."""
    if step.executable:
        return [step.split(((),) * len(step.batch), 0, count) for count in step.equal_counts()]
    if math.prod(max(n, 1) for n in step.batch) > MAX_DESIGNS:
        return []
    even = itertools.product(
        *([split_evenly(n, count) for count in range(1, n + 1)] if n else [()] for n in step.batch)
    )
    samples = step.batch[step.links.samples]
    by_sample = (tuple(split_micro_batches(step.batch, count, step.links)[0]) for count in range(1, samples + 1))
    return list(dict.fromkeys(itertools.chain(even, by_sample)))


class PlacementTimes:
    """Layers' relative times of each placement of a module by rank; all arrays of shape (placements, ranks).

    ``before``: in the layers before the rank's first one; infinite where the rank has none.
    """

    def __init__(self, rows: Sequence[_Row], module: Module, ranks: int) -> None:
        self.load, self.before = np.zeros((len(rows), ranks)), np.full((len(rows), ranks), np.inf)
        for number, row in enumerate(rows):
            for chunk in row:
                self.load[number, chunk.rank] += module.weight(chunk.first, chunk.layers)
                self.before[number, chunk.rank] = min(self.before[number, chunk.rank], module.weight(0, chunk.first))


def quick_bounds_s(step: StepSettings, weights: Sequence[PlacementTimes], items: Items) -> np.ndarray:
    """Lower bound of each combination of placements, flat, without its tasks.

    For each rank its work, and the shortest way to it and back.
    """
    load, head, tail = np.zeros((1, step.ranks)), np.full((1, step.ranks), np.inf), np.full((1, step.ranks), np.inf)
    for module, weight, units in zip(step.modules, weights, items, strict=True):
        if not units:
            continue
        forward_s, backward_s = (min(module.layer_s(n)[way] for n in set(units)) for way in (0, 1))
        work_s = module.units_s(units)
        load = (load[:, None] + weight.load[None] * work_s).reshape(-1, step.ranks)
        head = np.minimum(head[:, None], weight.before[None] * forward_s).reshape(-1, step.ranks)
        tail = np.minimum(tail[:, None], weight.before[None] * backward_s).reshape(-1, step.ranks)
    bounds: np.ndarray = np.where(load > 0, load + head + tail, 0.0).max(axis=1)
    return bounds


#: The best order is changed: a share of the segments moves by a normal number of places of this scale.
MOVE_SCALES, MOVED_SHARES = (1.0, 4.0, 16.0), (0.0, 0.03, 0.2, 1.0)
#: Share of orders by share of the step instead, with a random lag of each class up to these.
LAGGED_SHARE, LAGS = 0.3, (0.05, 0.2, 0.6)
#: Steps with a rule at a time, and orders in a row that were known before, after which the rule is done.
STEPS_AT_A_TIME, MAX_REPEATS = 16, 200
#: Variants, and rules of a variant, share the steps by rank: the second gets this share of what the first gets.
#: Upper confidence bounds stayed with the first variant that was good.
RANK_SHARE = 0.6


def search(
    variants: Sequence[Tasks],
    best: Schedule,
    control: SearchControl,
    rng: np.random.Generator,
    *,
    until_left_s: float = 0.0,
    max_steps: int | None = None,
    counts: CacheCounts | None = None,
    on_progress: Callable[[Schedule], None] | None = None,
) -> tuple[Schedule, int]:
    """Search for an order of segments whose list schedule is shorter than ``best``.

    Each variant is searched with each dispatch rule, from its initial orders by random changes. Variants whose bound
    equals the best makespan are skipped.

    ``variants``: the same step with other placements, sub-micro-batch sizes or memory knobs. ``best``: best schedule
    known before. ``until_left_s``: the search ends once ``control`` has so many seconds left. ``max_steps``: orders to
    evaluate; without it, until the time is over or changes give known orders alone. ``counts``: updated.
    ``on_progress``: called with the best schedule so far, every few steps.
    Returns the best schedule, and the number of orders that were evaluated, repeated ones included.
    """
    evaluator = Evaluator(best, counts if counts is not None else CacheCounts())

    def over() -> bool:
        return control.left_s <= until_left_s or (max_steps is not None and evaluator.steps >= max_steps)

    # Most promising variants first: with little time, the last ones are not evaluated.
    begun: list[_Variant] = []
    for tasks in sorted(variants, key=lambda variant: variant.bound_s):
        if over():
            break
        begun.append(_Variant(tasks, evaluator, over))
    while not over():
        open_variants = [variant for variant in begun if not variant.done(evaluator.best.makespan_s)]
        if not open_variants:
            break
        _next_arm(open_variants).search(evaluator, rng, over)
        if on_progress is not None:
            on_progress(evaluator.best)
    return evaluator.best, evaluator.steps


def _next_arm(arms: Sequence[_Arm]) -> _Arm:
    """The arm to continue with: the n-th best so far gets :data:`RANK_SHARE` to the power n of the steps."""
    ranked = sorted(arms, key=lambda arm: arm.promise_s)
    return min(enumerate(ranked), key=lambda item: item[1].visits / RANK_SHARE ** item[0])[1]


class _Variant:
    """A variant with its orders under each rule."""

    def __init__(self, tasks: Tasks, evaluator: Evaluator, over: Callable[[], bool]) -> None:
        self.tasks, self.visits = tasks, 1
        keys = initial_keys(tasks)
        self.rules = [Orders(tasks, rule, keys) for rule in ((*STRICT_RULES, *RULES) if tasks.limited else RULES)]
        for orders in self.rules:
            while orders.rule in FIRST_RULES and orders.keys and not over():
                orders.step(evaluator)
        # Rules that were not tried are expected to be as good as the best of the others.
        self.promise_s = min(orders.best_s for orders in self.rules)
        for orders in self.rules:
            orders.promise_s = self.promise_s if orders.keys else orders.best_s
        self.rules.sort(key=lambda orders: orders.promise_s)

    def done(self, best_s: float) -> bool:
        """Whether changes give known orders alone, or no order can be shorter than ``best_s``."""
        return self.tasks.bound_s >= best_s * (1 - ROUNDING) or all(orders.done for orders in self.rules)

    def search(self, evaluator: Evaluator, rng: np.random.Generator, over: Callable[[], bool]) -> None:
        """Make some steps with the most promising rule."""
        orders = _next_arm([orders for orders in self.rules if not orders.done])
        for _ in range(STEPS_AT_A_TIME):
            if over() or orders.done:
                return
            makespan_s = orders.step(evaluator, rng)
            for arm in (self, orders):
                arm.visits += 1
                arm.promise_s = min(arm.promise_s, makespan_s)


@dataclass
class CacheCounts:
    """Schedules that were computed (misses), and those that were known already (hits)."""

    hits: int = 0
    misses: int = 0


class Evaluator:
    """The best schedule so far, how many orders were evaluated, and how many of these were known."""

    def __init__(self, best: Schedule, counts: CacheCounts) -> None:
        self.best, self.counts, self.steps = best, counts, 0


class Orders:
    """Orders of one variant's segments under one dispatch rule, each evaluated once.

    ``keys`` (shape (segments,)): keys of initial orders, evaluated before others.
    """

    def __init__(self, tasks: Tasks, rule: DispatchRule, keys: list[np.ndarray]) -> None:
        self.tasks, self.rule, self.keys = tasks, rule, keys
        self.share_key = keys[0]
        self.visits, self.repeats = 1, 0
        self.best_s = self.promise_s = math.inf
        self.best_key = np.zeros(tasks.segments)
        self._known: dict[bytes, float] = {}

    @property
    def done(self) -> bool:
        """Whether the last changes gave known orders alone."""
        return self.repeats >= MAX_REPEATS

    def step(self, evaluator: Evaluator, rng: np.random.Generator | None = None) -> float:
        """Evaluate an initial order while there are any, then a change of the best one; its makespan in seconds."""
        if self.keys:
            key, *self.keys = self.keys
        else:
            assert rng is not None
            key = self._changed_key(rng)
        sequence = sequence_by(self.tasks, key)
        evaluator.steps += 1
        makespan_s = self._known.get(sequence.tobytes())
        if makespan_s is not None:
            evaluator.counts.hits += 1
            self.repeats += 1
            return makespan_s
        evaluator.counts.misses += 1
        self.repeats = 0
        schedule = list_schedule(self.tasks, sequence, self.rule)
        self._known[sequence.tobytes()] = schedule.makespan_s
        # Ties: the newest, whose neighbours are other orders.
        if schedule.makespan_s <= self.best_s:
            self.best_s = schedule.makespan_s
            self.best_key[sequence] = np.arange(len(sequence))
        if schedule.makespan_s < evaluator.best.makespan_s:
            evaluator.best = schedule
        return schedule.makespan_s

    def _changed_key(self, rng: np.random.Generator) -> np.ndarray:
        """Key of another order: the best one changed, or by share of the step with lags."""
        segments = self.tasks.segments
        if rng.random() < LAGGED_SHARE:
            return self._lagged_key(rng)
        shift = MOVE_SCALES[int(rng.integers(len(MOVE_SCALES)))] * rng.standard_normal(segments)
        draws = rng.random(segments)
        moved = draws < max(MOVED_SHARES[int(rng.integers(len(MOVED_SHARES)))], 2 / segments)
        return self.best_key + np.where(moved, shift, 0.0)

    def _lagged_key(self, rng: np.random.Generator) -> np.ndarray:
        """Segments by their share of the step, with a random lag and pace of each class."""
        classes, sizes = len(self.tasks.classes), np.diff(self.tasks.first_segment)
        lag = LAGS[int(rng.integers(len(LAGS)))] * rng.random(classes)
        if rng.random() < 0.5:  # lags add up along the data path
            lag = np.cumsum(lag)
        pace = 1 + 0.3 * rng.standard_normal(classes) * (rng.random() < 0.3)
        key: np.ndarray = np.repeat(pace, sizes) * self.share_key + np.repeat(lag, sizes)
        return key


_Arm = TypeVar("_Arm", "_Variant", Orders)
