"""Evaluation of a step's designs, and the search for good ones.

A design is the cuts of the layers and the numbers of sub-micro-batches. It is evaluated by quick
schedules and, within a memory limit, with the knobs that make them fit.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from cdmpp.plan.multimodal.dispatch import DispatchRule
from cdmpp.plan.multimodal.knobs import choose_knobs, least_bytes
from cdmpp.plan.multimodal.placement import (
    Cuts,
    Items,
    Placement,
    cuts_of,
    micro_batch_counts,
    move_layer,
    place,
    segment_placements,
    split_micro_batches,
    task_count,
    work_by_rank,
)
from cdmpp.plan.multimodal.search import ROUNDING, PlacementTimes, quick_bounds_s, shorten
from cdmpp.plan.multimodal.tasks import (
    ALTERNATE_RULE,
    FIRST_RULES,
    Schedule,
    StepSettings,
    Tasks,
    data_order_key,
    initial_keys,
    least_memory_orders,
    list_schedule,
    one_f_one_b_orders,
    schedule_orders,
    sequence_by,
)
from cdmpp.predict.requests.budget import SearchControl

_MEMORY_RULES = FIRST_RULES[:2]
#: A design whose first schedules are longer than the best by less than this share gets further ones.
_NEAR, _CLOSE = 0.1, 0.03
#: Nodes of branch and bound for a small design.
_NODES = 2000
#: Seconds to evaluate a task of a large design until one is measured: without and with a memory limit.
_GUESS_S = (4e-6, 2e-5)
#: Tasks of a design from which on its time is measured: one that would take longer than the budget is left out.
_LARGE = 2000
#: Seconds to describe a task in the answer, and what that may take: seconds, and share of the budget.
TASK_S, _ANSWER_S, _ANSWER_SHARE = 8e-6, 0.4, 0.1
#: Best designs that are kept; the search continues from these.
POOL = 12
#: Numbers of sub-micro-batches beside the present one that are tried first.
_COUNT_STEPS = (1, -1, 2, -2, 3, -3)
#: A random change continues from the n-th best design with this share of the probability of the one before it.
_RANK_SHARE = 0.7
#: Changes in a row that give nothing new, after which the search ends.
_MAX_STALE = 500
#: Counts up to this are all tried for each module in turn; of more, near ones and those at these ratios.
_MAX_SCAN, _RATIOS = 32, (0.5, 2.0, 0.25, 4.0, 0.67, 1.5, 0.8, 1.25, 0.125, 8.0)


@dataclass(frozen=True)
class Evaluated:
    """A design that was evaluated: its best schedule, and its tasks with each choice of knobs to search."""

    schedule: Schedule
    variants: tuple[Tasks, ...]


class StepDesigns:
    """Designs of one step, each evaluated once.

    ``bound_s``: least lower bound of the designs whose tasks were made, in seconds. ``least_bytes``: least memory that
    an evaluated order needs, by placement; computed until a design is found. ``steps``: orders that were evaluated.
    ``has_plan``: whether there is a plan: designs that would take longer than the rest of the budget are left out.
    ``left_out``: whether there were such designs. ``reserve_s``: seconds of the budget for the answer.
    """

    def __init__(self, step: StepSettings, control: SearchControl) -> None:
        self.step, self.control = step, control
        self.bound_s = math.inf
        self.least_bytes: dict[object, float] = {}
        self.steps = 0
        self.has_plan = self.left_out = False
        self._known: set[int] = set()
        self._seconds_per_task, self.reserve_s = _GUESS_S[math.isfinite(step.memory.limit_bytes)], 0.0

    def evaluate(self, placement: Placement, items: Items, cutoff_s: float = math.inf) -> Evaluated | None:
        """Quick schedules of a design; None if it is known, cannot be below ``cutoff_s``, or does not fit."""
        key = hash((placement.chunks, items))
        if key in self._known or not self.step.allows(placement, items):
            return None
        if self.has_plan and not self._affordable(placement, items):
            return None
        self._known.add(key)
        rows = zip(placement.chunks, self.step.modules, strict=True)
        weights = [PlacementTimes([row], module, self.step.ranks) for row, module in rows]
        if quick_bounds_s(self.step, weights, items)[0] >= cutoff_s * (1 - ROUNDING):
            return None
        with self._timed(task_count(placement, items)):
            tasks = self._tasks(placement, items)
            if tasks.bound_s >= cutoff_s * (1 - ROUNDING):
                return None
            return self._limited(tasks, cutoff_s) if tasks.limited else self._unlimited(tasks, cutoff_s)

    def one_f_one_b(self, placement: Placement) -> tuple[Schedule, int] | None:
        """1F1B of a contiguous placement with the best number of micro-batches; None where none fits."""
        best: tuple[Schedule, int] | None = None
        step = self.step
        counts = step.equal_counts() if step.executable else micro_batch_counts(step.batch[step.links.samples])
        choices = []
        for count in counts:
            items, micro_batches = split_micro_batches(step.batch, count, step.links)
            about_s = self._pipeline_s(placement, count, items)
            choices.append((not self._affordable(placement, items), about_s, count, items, micro_batches))
        # The shortest by a rule of thumb first: with little time the others are left out.
        for _, about_s, count, items, micro_batches in sorted(choices):
            if not step.allows(placement, items):
                return None
            longer = best is not None and about_s > best[0].makespan_s and task_count(placement, items) >= _LARGE
            if longer or (best is not None and not self._affordable(placement, items)):
                continue
            with self._timed(task_count(placement, items)):
                tasks = self._tasks(placement, items)
                schedule = self.fit(tasks, one_f_one_b_orders(tasks, micro_batches))
            if schedule is not None and (best is None or schedule.makespan_s < best[0].makespan_s):
                best = schedule, count
        return best

    def _pipeline_s(self, placement: Placement, count: int, items: Sequence[Sequence[int]]) -> float:
        """Seconds of an even pipeline: one micro-batch through all ranks, then the others through the slowest."""
        load = np.zeros(self.step.ranks)
        for module, chunks, units in zip(self.step.modules, placement.chunks, items, strict=True):
            work_s = module.units_s(units)
            for chunk in chunks:
                load[chunk.rank] += work_s * module.weight(chunk.first, chunk.layers)
        return float(load.sum() + (count - 1) * load.max()) / count

    def segments_1f1b(self, placement: Placement, items: Sequence[Sequence[int]]) -> Schedule | None:
        """1F1B of segments in data order; None where it does not fit, or takes too long to compute."""
        if not self.step.allows(placement, items) or (self.has_plan and not self._affordable(placement, items)):
            return None
        with self._timed(task_count(placement, items)):
            tasks = self._tasks(placement, items)
            sequence = sequence_by(tasks, data_order_key(tasks))
            return self.fit(tasks, list_schedule(tasks, sequence, ALTERNATE_RULE, limited=False).orders)

    def fit(self, tasks: Tasks, orders: list[list[int]]) -> Schedule | None:
        """Schedule of orders with the knobs that they need, or None where none fit."""
        if tasks.limited:
            knobs = choose_knobs(tasks, orders)
            if knobs is None:
                if not self.has_plan:
                    chunks = tasks.placement.chunks
                    self.least_bytes[chunks] = min(self.least_bytes.get(chunks, math.inf), least_bytes(tasks, orders))
                return None
            self.least_bytes[tasks.placement.chunks] = tasks.memory.limit_bytes
            tasks = tasks.with_knobs(knobs)
        return schedule_orders(tasks, orders)

    def _tasks(self, placement: Placement, items: Sequence[Sequence[int]]) -> Tasks:
        tasks = self.step.tasks(placement, items)
        self.bound_s = min(self.bound_s, tasks.bound_s)
        return tasks

    @contextmanager
    def _timed(self, tasks: int) -> Iterator[None]:
        """Measure how long large designs take."""
        began_s = self.control.spent_s
        yield
        if tasks >= _LARGE:
            self._seconds_per_task = max(self._seconds_per_task, (self.control.spent_s - began_s) / tasks)

    def _affordable(self, placement: Placement, items: Sequence[Sequence[int]]) -> bool:
        """Whether the rest of the budget is enough to evaluate a design, and the answer not too long to describe."""
        tasks, budget_s = task_count(placement, items), self.control.budget_s
        long = budget_s is not None and TASK_S * tasks > _ANSWER_S + _ANSWER_SHARE * budget_s
        affordable = not long and (self._seconds_per_task + TASK_S) * tasks <= self.control.left_s - self.reserve_s
        self.left_out = self.left_out or not affordable
        return affordable

    def _unlimited(self, tasks: Tasks, cutoff_s: float) -> Evaluated:
        by_share, *others = initial_keys(tasks)
        best = self._list(tasks, by_share, _MEMORY_RULES)
        if best.makespan_s < cutoff_s * (1 + _NEAR) and best.makespan_s > tasks.bound_s * (1 + ROUNDING):
            best = min(best, self._list(tasks, by_share, FIRST_RULES[2:]), key=lambda schedule: schedule.makespan_s)
        if best.makespan_s < cutoff_s * (1 + _CLOSE) and best.makespan_s > tasks.bound_s * (1 + ROUNDING):
            for key in others:
                best = min(best, self._list(tasks, key, FIRST_RULES), key=lambda schedule: schedule.makespan_s)
            best, _ = shorten(best, cutoff_s, _NODES)
        return Evaluated(best, (tasks,))

    def _list(self, tasks: Tasks, key: np.ndarray, rules: Sequence[DispatchRule]) -> Schedule:
        """The best schedule of an order of segments under these rules; under the first one, once the time is over."""
        sequence = sequence_by(tasks, key)
        schedules: list[Schedule] = []
        for rule in rules:
            if not (schedules and self.control.expired):
                schedules.append(list_schedule(tasks, sequence, rule))
        self.steps += len(schedules)
        return min(schedules, key=lambda schedule: schedule.makespan_s)

    def _limited(self, tasks: Tasks, cutoff_s: float) -> Evaluated | None:
        """Quick schedules with the knobs that they need; orders that are too long without knobs are left out."""
        sequence = sequence_by(tasks, data_order_key(tasks))
        orders = [list_schedule(tasks, sequence, rule, limited=False).orders for rule in _MEMORY_RULES]
        knobs = [tasks.uniform_knobs(knob) for knob in tasks.memory.knobs]
        schedules = []
        for candidate in [*orders, least_memory_orders(tasks)]:
            self.steps += 1
            if self.has_plan and schedule_orders(tasks, candidate).makespan_s >= cutoff_s:
                continue
            schedule = self.fit(tasks, candidate)
            if schedule is not None:
                schedules.append(schedule)
                if schedule.tasks.knobs not in knobs:
                    knobs.append(schedule.tasks.knobs)
        if not schedules:
            return None
        best = min(schedules, key=lambda schedule: schedule.makespan_s)
        return Evaluated(best, tuple(tasks.with_knobs(choice) for choice in knobs))


def variants_of(schedule: Schedule) -> tuple[Tasks, ...]:
    """Tasks of a schedule with each choice of knobs to search: the same for all chunks, and the schedule's."""
    tasks = schedule.tasks
    if not tasks.limited:
        return (tasks,)
    knobs = dict.fromkeys([*(tasks.uniform_knobs(knob) for knob in tasks.memory.knobs), tasks.knobs])
    return tuple(tasks.with_knobs(choice) for choice in knobs)


@dataclass(frozen=True)
class Design:
    """Cuts of the layers, and the sub-micro-batches of each step."""

    cuts: Cuts
    items: tuple[Items, ...]


@dataclass(frozen=True)
class EvaluatedDesign:
    """A design with its schedules, one for each step."""

    total_s: float
    number: int
    design: Design
    evaluated: tuple[Evaluated, ...]


class DesignSearch:
    """The best designs so far, and the search for better ones.

    ``steps``: they share modules and ranks. ``over``: whether to end. ``on_best``: called with each new best entry.
    """

    def __init__(
        self,
        steps: Sequence[StepDesigns],
        rng: np.random.Generator,
        over: Callable[[], bool],
        on_best: Callable[[EvaluatedDesign], None],
    ) -> None:
        self.steps, self._rng, self._over, self._on_best = steps, rng, over, on_best
        self.modules, self.ranks = steps[0].step.modules, steps[0].step.ranks
        self.pool: list[EvaluatedDesign] = []
        self._tried: set[int] = set()  # hashes: a long search tries millions
        self._number = 0

    @property
    def best_s(self) -> float:
        """Sum of the makespans of the best design; infinite without one."""
        return self.pool[0].total_s if self.pool else float("inf")

    def add(self, design: Design, parent: EvaluatedDesign | None = None) -> bool:
        """Evaluate a design; True if it is the best so far. Unchanged steps of ``parent`` are not evaluated again."""
        if hash(design) in self._tried:
            return False
        self._tried.add(hash(design))
        placement = place(design.cuts, self.ranks)
        same = parent is not None and parent.design.cuts == design.cuts
        evaluated = []
        for at, (step, items) in enumerate(zip(self.steps, design.items, strict=True)):
            if parent is not None and same and parent.design.items[at] == items:
                evaluated.append(parent.evaluated[at])
                continue
            step_result = step.evaluate(placement, items, self.best_s if len(self.steps) == 1 else float("inf"))
            if step_result is None:
                return False
            evaluated.append(step_result)
        return self.insert(design, evaluated)

    def insert(self, design: Design, evaluated: Sequence[Evaluated]) -> bool:
        """Insert a design whose schedules are known; True if it is the best so far."""
        self._number += 1
        total_s = sum(step_result.schedule.makespan_s for step_result in evaluated)
        entry = EvaluatedDesign(total_s, self._number, design, tuple(evaluated))
        improved = total_s < self.best_s * (1 - 1e-12)
        bisect.insort(self.pool, entry, key=lambda e: (e.total_s, e.number))
        del self.pool[POOL:]
        if self.pool[0] is entry:  # also one that is better by a rounding error: the plan is on its placement
            self._on_best(entry)
        return improved

    def scan(self) -> None:
        """Try other numbers of sub-micro-batches and of segments from the best design until none is better."""
        improved = True
        while improved and not self._over():
            improved = False
            for at, step in enumerate(self.steps):
                for i in range(len(self.modules)):
                    if step.step.batch[i]:
                        improved |= self._scan_counts(at, i)
            for i in range(len(self.modules)):
                improved |= self._scan_segments(i)

    def wander(self) -> None:
        """Change good designs at random until the time is over, or many in a row were tried before."""
        stale = 0
        while not self._over() and stale <= _MAX_STALE:
            rank = min(int(self._rng.geometric(1 - _RANK_SHARE)) - 1, len(self.pool) - 1)
            parent, tried = self.pool[rank], len(self._tried)
            design = parent.design
            for _ in range(int(self._rng.integers(1, 4))):
                design = self._changed(design)
            self.add(design, parent)
            stale = stale + 1 if len(self._tried) == tried else 0

    def _scan_counts(self, at: int, i: int) -> bool:
        """Try other numbers of sub-micro-batches of one module in one step."""
        improved = False
        best = self.pool[0]
        items = self.steps[at].step.batch[i]
        for count in _counts(items, len(best.design.items[at][i])):
            if self._over():
                break
            changed = self._with_count(best.design, at, i, count)
            if self.add(changed, best) | self.add(self._rebalanced(changed), best):
                improved, best = True, self.pool[0]
        return improved

    def _scan_segments(self, i: int) -> bool:
        """Try other numbers of segments of one module, then other first ranks; those of the first module are alike."""
        improved = False
        counts = [(count, None) for count in range(1, self.modules[i].most_segments(self.ranks) + 1)]
        for count, start in [*counts, *((None, rank) for rank in range(self.ranks if i else 0))]:
            if self._over():
                break
            segments, starts = self._segments(self.pool[0].design)
            segments[i] = segments[i] if count is None else count
            starts[i] = starts[i] if start is None else start
            for cuts in self._balanced(self.pool[0].design, segments, starts):
                improved |= self.add(replace(self.pool[0].design, cuts=cuts), self.pool[0])
        return improved

    def _segments(self, design: Design) -> tuple[list[int], list[int]]:
        """Segments, and rank of the first part, of each module."""
        parts = [len(cuts) - 1 for cuts in design.cuts]
        return [count // self.ranks for count in parts], [count % self.ranks for count in parts]

    def _all_units(self, design: Design) -> list[tuple[int, ...]]:
        """Sub-micro-batches of all steps together, by module."""
        return [tuple(n for items in design.items for n in items[i]) for i in range(len(self.modules))]

    def _balanced(self, design: Design, segments: Sequence[int], starts: Sequence[int]) -> list[Cuts]:
        placements = segment_placements(self.modules, self._all_units(design), segments, self.ranks, starts)
        return [cuts_of(placement, self.ranks) for placement in placements]

    def _rebalanced(self, design: Design) -> Design:
        """The same numbers of segments, balanced for the design's sub-micro-batches."""
        return replace(design, cuts=self._balanced(design, *self._segments(design))[0])

    # Random changes

    def _changed(self, design: Design) -> Design:
        move = self._rng.random()
        if move < 0.35:
            return self._change_counts(design)
        if move < 0.75:
            return self._move_layers(design)
        if move < 0.85:
            return self._rebalanced(design)
        segments, starts = self._segments(design)
        i = int(self._rng.integers(len(segments)))
        if i and self._rng.random() < 0.5:
            starts[i] = int(self._rng.integers(self.ranks))
        max_segments = self.modules[i].most_segments(self.ranks)
        segments[i] = int(np.clip(segments[i] + self._rng.choice((-1, 0, 1)), 1, max_segments))
        choices = self._balanced(design, segments, starts)
        return replace(design, cuts=choices[int(self._rng.integers(len(choices)))])

    def _change_counts(self, design: Design) -> Design:
        """Other numbers of sub-micro-batches of one or several modules in one step."""
        at = int(self._rng.integers(len(self.steps)))
        batch = self.steps[at].step.batch
        active = [i for i in range(len(self.modules)) if batch[i]]
        share = 1.0 if self._rng.random() < 0.3 else 1 / len(active)
        chosen = [i for i in active if self._rng.random() < share] or [int(self._rng.choice(active))]
        aligned = len(design.items[at][int(self._rng.choice(active))]) if self._rng.random() < 0.2 else 0
        factor = float(np.exp(0.5 * self._rng.standard_normal()))
        for i in chosen:
            count = len(design.items[at][i])
            step = int(self._rng.choice(_COUNT_STEPS)) if self._rng.random() < 0.6 else round(count * factor) - count
            count = min(max(aligned or count + step, 1), batch[i])
            design = self._with_count(design, at, i, count)
        return design

    def _with_count(self, design: Design, at: int, i: int, count: int) -> Design:
        """The design with another number of sub-micro-batches of module ``i`` in step ``at``."""
        items = self.steps[at].step.split(design.items[at], i, count)
        return replace(design, items=(*design.items[:at], items, *design.items[at + 1 :]))

    def _move_layers(self, design: Design) -> Design:
        """Move a layer of a module to another part; often another module's layer goes the other way."""
        load = self._load_s(design)
        source, target = int(load.argmax()), int(load.argmin())
        if self._rng.random() < 0.6:
            source, target = (int(rank) for rank in self._rng.integers(self.ranks, size=2))
        moves = [(source, target)]
        if self._rng.random() < 0.4:
            moves.append((target, source))
        for a, b in moves:
            i = int(self._rng.integers(len(self.modules)))
            cuts = np.array(design.cuts[i])
            parts = np.arange(len(cuts) - 1)
            sources = parts[(parts % self.ranks == a) & (np.diff(cuts) > 0)]
            targets = parts[(parts % self.ranks == b) & (parts >= len(parts) % self.ranks)]
            if not len(sources) or a == b:
                continue
            moved = move_layer(cuts, int(self._rng.choice(sources)), int(self._rng.choice(targets)))
            if (np.diff(moved) >= 0).all():
                row = tuple(moved.tolist())
                design = replace(design, cuts=(*design.cuts[:i], row, *design.cuts[i + 1 :]))
        return design

    def _load_s(self, design: Design) -> np.ndarray:
        """Seconds of work of each rank in all steps."""
        load = np.zeros(self.ranks)
        for module, cuts, units in zip(self.modules, design.cuts, self._all_units(design), strict=True):
            totals = np.concatenate([[0.0], np.cumsum(module.layers)])
            load += module.units_s(units) * work_by_rank(cuts, totals, self.ranks)
        return load


def _counts(items: int, now: int) -> Iterator[int]:
    """Numbers of sub-micro-batches to try beside ``now``, near ones first."""
    near = [now + step for step in _COUNT_STEPS]
    if items <= _MAX_SCAN:
        tried = [*near, *range(1, items + 1)]
    else:
        tried = [*near, *(round(now * ratio) for ratio in _RATIOS), 1, items]
    for count in dict.fromkeys(tried):
        if 1 <= count <= items and count != now:
            yield count
