"""Evaluation of designs of a step: quick schedules, and knobs that make them fit the memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from cdmpp.plan.multimodal.branch_and_bound import ROUNDING, shorten
from cdmpp.plan.multimodal.candidates import micro_batch_counts, split_micro_batches, task_count
from cdmpp.plan.multimodal.dispatch import (
    ALTERNATE,
    BACKWARD_FIRST,
    FORWARD_ORDER,
    LONGEST_TAIL,
    LONGEST_WAIT,
    DispatchRule,
)
from cdmpp.plan.multimodal.knobs import choose_knobs, least_bytes
from cdmpp.plan.multimodal.links import ItemLinks
from cdmpp.plan.multimodal.memory import Memory
from cdmpp.plan.multimodal.modules import Module
from cdmpp.plan.multimodal.one_f_one_b import one_f_one_b_orders
from cdmpp.plan.multimodal.placement import Placement
from cdmpp.plan.multimodal.schedule import Schedule, least_memory_orders, list_schedule, schedule_orders
from cdmpp.plan.multimodal.sequence import data_order_key, initial_keys, sequence_by
from cdmpp.plan.multimodal.space import Items, layer_seconds
from cdmpp.plan.multimodal.tasks import Tasks, make_tasks
from cdmpp.predict.requests.budget import SearchControl

#: Forward and backward passes alternately: 1F1B where possible.
ALTERNATE_RULE = DispatchRule(LONGEST_WAIT, ALTERNATE)
_MEMORY_RULES = (ALTERNATE_RULE, DispatchRule(LONGEST_WAIT, BACKWARD_FIRST, True))
_RULES = (*_MEMORY_RULES, DispatchRule(FORWARD_ORDER, BACKWARD_FIRST), DispatchRule(LONGEST_TAIL, ALTERNATE))
#: A design whose first schedules are longer than the best by less than this share gets further ones.
_NEAR, _CLOSE = 0.1, 0.03
#: Nodes of branch and bound for a small design.
_NODES = 2000
#: Tasks of a design from which on its time is measured: one that would take longer than the budget is left out.
_LARGE = 2000
#: Seconds to describe a task in the answer, and what that may take: seconds, and share of the budget.
_TASK_S, _ANSWER_S, _ANSWER_SHARE = 1e-5, 0.5, 0.1


@dataclass(frozen=True)
class StepSettings:
    """What all designs of a step share.

    Attributes
    ----------
    modules : sequence of Module
    batch : sequence of int
        Items of each module.
    ranks : int
    memory : Memory
    links : ItemLinks
    efficiency : float
        Share of the peak items per second that the rule's sub-micro-batches reach.
    """

    modules: Sequence[Module]
    batch: Sequence[int]
    ranks: int
    memory: Memory
    links: ItemLinks
    efficiency: float

    def tasks(self, placement: Placement, items: Sequence[Sequence[int]]) -> Tasks:
        """Tasks of the step with this placement and these sub-micro-batches."""
        return make_tasks(self.modules, placement, items, self.ranks, self.memory, self.links)


@dataclass(frozen=True)
class Evaluated:
    """A design that was evaluated: its best schedule, and its tasks with each choice of knobs to search."""

    schedule: Schedule
    variants: tuple[Tasks, ...]


class StepDesigns:
    """Designs of one step, each evaluated once.

    Attributes
    ----------
    bound_s : float
        Least lower bound of the designs whose tasks were made, in seconds.
    least_bytes : dict
        Least memory that an evaluated order needs, by placement; computed until a design is found.
    steps : int
        Orders that were evaluated.
    found : bool
        Whether there is a plan: designs that would take longer than the rest of the budget are left out.
    """

    def __init__(self, step: StepSettings, control: SearchControl) -> None:
        self.step, self._control = step, control
        self.bound_s = math.inf
        self.least_bytes: dict[object, float] = {}
        self.steps = 0
        self.found = False
        self._known: set[int] = set()
        self._seconds_per_task = 0.0

    def evaluate(self, placement: Placement, items: Items, cutoff_s: float = math.inf) -> Evaluated | None:
        """Quick schedules of a design; None if it is known, cannot be below ``cutoff_s``, or does not fit."""
        key = hash((placement.chunks, items))
        if key in self._known or (self.found and not self._affordable(placement, items)):
            return None
        self._known.add(key)
        if quick_bound_s(self.step, placement, items) >= cutoff_s * (1 - ROUNDING):
            return None
        with self._timed(task_count(placement, items)):
            tasks = self._tasks(placement, items)
            if tasks.bound_s >= cutoff_s * (1 - ROUNDING):
                return None
            return self._limited(tasks, cutoff_s) if tasks.limited else self._unlimited(tasks, cutoff_s)

    def one_f_one_b(self, placement: Placement) -> tuple[Schedule, int] | None:
        """1F1B of a contiguous placement with the best number of micro-batches; None where none fits."""
        best: tuple[Schedule, int] | None = None
        for count in micro_batch_counts(self.step.batch[self.step.links.samples]):
            items, micro_batches = split_micro_batches(self.step.batch, count, self.step.links)
            if best is not None and not self._affordable(placement, items):
                break
            with self._timed(task_count(placement, items)):
                tasks = self._tasks(placement, items)
                schedule = self.fit(tasks, one_f_one_b_orders(tasks, micro_batches))
            if schedule is not None and (best is None or schedule.makespan_s < best[0].makespan_s):
                best = schedule, count
        return best

    def segments_1f1b(self, placement: Placement, items: Sequence[Sequence[int]]) -> Schedule | None:
        """1F1B of segments in data order; None where it does not fit, or takes too long to compute."""
        if self.found and not self._affordable(placement, items):
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
                if not self.found:
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
        began = time.monotonic()
        yield
        if tasks >= _LARGE:
            self._seconds_per_task = max(self._seconds_per_task, (time.monotonic() - began) / tasks)

    def _affordable(self, placement: Placement, items: Sequence[Sequence[int]]) -> bool:
        """Whether the rest of the budget is enough to evaluate a design, and the answer not too long to describe."""
        tasks, budget_s = task_count(placement, items), self._control.budget_s
        if budget_s is not None and _TASK_S * tasks > _ANSWER_S + _ANSWER_SHARE * budget_s:
            return False
        return self._seconds_per_task * tasks <= self._control.left_s

    def _unlimited(self, tasks: Tasks, cutoff_s: float) -> Evaluated:
        by_share, *others = initial_keys(tasks)
        best = self._list(tasks, by_share, _MEMORY_RULES)
        if best.makespan_s < cutoff_s * (1 + _NEAR) and best.makespan_s > tasks.bound_s * (1 + ROUNDING):
            best = min(best, self._list(tasks, by_share, _RULES[2:]), key=lambda schedule: schedule.makespan_s)
        if best.makespan_s < cutoff_s * (1 + _CLOSE) and best.makespan_s > tasks.bound_s * (1 + ROUNDING):
            for key in others:
                best = min(best, self._list(tasks, key, _RULES), key=lambda schedule: schedule.makespan_s)
            best, _ = shorten(best, cutoff_s, _NODES)
        return Evaluated(best, (tasks,))

    def _list(self, tasks: Tasks, key: np.ndarray, rules: Sequence[DispatchRule]) -> Schedule:
        """The best schedule of an order of segments under these rules; under the first one, once the time is over."""
        sequence = sequence_by(tasks, key)
        schedules: list[Schedule] = []
        for rule in rules:
            if not (schedules and self._control.expired):
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
            if self.found and schedule_orders(tasks, candidate).makespan_s >= cutoff_s:
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


def quick_bound_s(step: StepSettings, placement: Placement, items: Items) -> float:
    """Lower bound of a design without its tasks: for each rank its work, and the shortest way to it and back."""
    load, head, tail = [0.0] * step.ranks, [math.inf] * step.ranks, [math.inf] * step.ranks
    for module, chunks, units in zip(step.modules, placement.chunks, items, strict=True):
        if not units:
            continue
        sizes = set(units)
        work_s = layer_seconds(module, units)
        forward_s = min(module.layer_s(n)[0] for n in sizes)
        backward_s = min(module.layer_s(n)[1] for n in sizes)
        before = 0.0
        for chunk in chunks:
            rank = chunk.rank
            weight = sum(module.layers[chunk.first : chunk.first + chunk.layers])
            load[rank] += weight * work_s
            head[rank] = min(head[rank], before * forward_s)
            tail[rank] = min(tail[rank], before * backward_s)
            before += weight
    return max(h + w + t for h, w, t in zip(head, load, tail, strict=True) if w > 0)
