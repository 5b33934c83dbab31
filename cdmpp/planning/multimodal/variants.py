"""Variants of a step under one placement, with the baselines and the best initial schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cdmpp.planning.multimodal.candidates import (
    micro_batch_counts,
    split_batch,
    split_micro_batches,
    task_count,
    unit_sizes,
)
from cdmpp.planning.multimodal.dispatch import ALTERNATE, BACKWARD_FIRST, LONGEST_WAIT, DispatchRule
from cdmpp.planning.multimodal.knobs import choose_knobs, least_bytes
from cdmpp.planning.multimodal.links import ItemLinks
from cdmpp.planning.multimodal.memory import Memory
from cdmpp.planning.multimodal.modules import Module
from cdmpp.planning.multimodal.one_f_one_b import one_f_one_b_orders
from cdmpp.planning.multimodal.placement import Placement
from cdmpp.planning.multimodal.schedule import Schedule, least_memory_orders, list_schedule, schedule_orders
from cdmpp.planning.multimodal.sequence import data_order_key, sequence_by
from cdmpp.planning.multimodal.tasks import Tasks, make_tasks

#: Divisors of the rule's sub-micro-batch size: smaller ones are less efficient, but fill the pipeline better.
SIZE_DIVISORS = (1, 2, 4)
#: Forward and backward passes alternately: 1F1B where possible.
_ALTERNATE_RULE = DispatchRule(LONGEST_WAIT, ALTERNATE)


@dataclass(frozen=True)
class StepSettings:
    """What all variants of a step share.

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
    max_tasks : int
        Variants with more tasks are left out.
    """

    modules: Sequence[Module]
    batch: Sequence[int]
    ranks: int
    memory: Memory
    links: ItemLinks
    efficiency: float
    max_tasks: int

    def tasks(self, placement: Placement, items: Sequence[Sequence[int]]) -> Tasks:
        """Tasks of the step with this placement and these sub-micro-batches."""
        return make_tasks(self.modules, placement, items, self.ranks, self.memory, self.links)


class PlacementVariants:
    """Variants of a step under one placement.

    Parameters
    ----------
    step : StepSettings
    placement : Placement
    is_rule : bool
        The placement is that of PipeWeaver's rule, whose 1F1B is a baseline.
    best_s : float
        Best makespan of other placements, in seconds; variants with a larger bound are not searched.
    search : bool
        False: compute bounds only.

    Attributes
    ----------
    variants : list of Tasks
        What to search.
    bounds_s : list of float
        Lower bounds of all variants, searched or not.
    best : Schedule or None
        Best initial schedule; None where none fits the memory.
    least_bytes : float
        Least memory that one of the initial orders needs; infinite where all fit.
    segments_1f1b, one_f_one_b : Schedule or None
        Baselines: 1F1B on the rule's segments, and on a contiguous placement.
    micro_batches : int or None
        Micro-batches of ``one_f_one_b``.
    """

    def __init__(
        self,
        step: StepSettings,
        placement: Placement,
        *,
        is_rule: bool = False,
        best_s: float = float("inf"),
        search: bool = True,
    ) -> None:
        self.variants: list[Tasks] = []
        self.bounds_s: list[float] = []
        self.best: Schedule | None = None
        self.least_bytes = float("inf")
        self.segments_1f1b: Schedule | None = None
        self.one_f_one_b: Schedule | None = None
        self.micro_batches: int | None = None
        self._best_other_s, self._search = best_s, search
        if placement.name == "contiguous":
            self._add_contiguous(step, placement)
        else:
            self._add_segments(step, placement, is_rule)

    def _add_contiguous(self, step: StepSettings, placement: Placement) -> None:
        """One variant for each number of micro-batches; where 1F1B fits, only the best number is searched."""
        self._search = True
        candidates: list[Tasks] = []
        for count in micro_batch_counts(step.batch[step.links.samples]):
            items, micro_batches = split_micro_batches(step.batch, count, step.links)
            if task_count(placement, items) > step.max_tasks:
                continue
            tasks = step.tasks(placement, items)
            schedule = self._fit(tasks, one_f_one_b_orders(tasks, micro_batches))
            candidates.append(tasks)
            if schedule is not None and (self.one_f_one_b is None or schedule.makespan_s < self.one_f_one_b.makespan_s):
                self.one_f_one_b, self.micro_batches = schedule, count
        for tasks in candidates:
            if self.one_f_one_b is None or tasks.items == self.one_f_one_b.tasks.items:
                self._add(tasks)

    def _add_segments(self, step: StepSettings, placement: Placement, is_rule: bool) -> None:
        """One variant for each sub-micro-batch size."""
        seen: list[list[tuple[int, ...]]] = []
        for divisor in SIZE_DIVISORS:
            items = split_batch(step.batch, unit_sizes(step.modules, step.efficiency, divisor))
            if items in seen or task_count(placement, items) > step.max_tasks:
                continue
            seen.append(items)
            tasks = step.tasks(placement, items)
            self._add(tasks)
            if divisor == 1 and is_rule:
                sequence = sequence_by(tasks, data_order_key(tasks))
                orders = list_schedule(tasks, sequence, _ALTERNATE_RULE, limited=False).orders
                self.segments_1f1b = self._fit(tasks, orders)

    def _add(self, tasks: Tasks) -> None:
        """Add a variant that can win, with each choice of knobs under which it may fit."""
        self.bounds_s.append(tasks.bound_s)
        if tasks.bound_s >= self._best_other_s or not self._search:
            return
        sequence = sequence_by(tasks, data_order_key(tasks))
        initial_orders = [
            list_schedule(tasks, sequence, rule, limited=False).orders
            for rule in (_ALTERNATE_RULE, DispatchRule(LONGEST_WAIT, BACKWARD_FIRST, True))
        ]
        if not tasks.limited:
            for orders in initial_orders:
                self._fit(tasks, orders)
            self.variants.append(tasks)
            return
        knobs = [tasks.uniform_knobs(knob) for knob in tasks.memory.knobs]
        for orders in [*initial_orders, least_memory_orders(tasks)]:
            schedule = self._fit(tasks, orders)
            if schedule is not None and schedule.tasks.knobs not in knobs:
                knobs.append(schedule.tasks.knobs)
        self.variants += [tasks.with_knobs(choice) for choice in knobs]

    def _fit(self, tasks: Tasks, orders: list[list[int]]) -> Schedule | None:
        """Schedule of orders with the knobs that they need, or None where none fit; updates the best schedule."""
        if tasks.limited:
            knobs = choose_knobs(tasks, orders)
            if knobs is None:
                self.least_bytes = min(self.least_bytes, least_bytes(tasks, orders))
                return None
            tasks = tasks.with_knobs(knobs)
        schedule = schedule_orders(tasks, orders)
        if self.best is None or schedule.makespan_s < self.best.makespan_s:
            self.best = schedule
        return schedule


def total_s(steps: Iterable[Schedule | None]) -> float:
    """Sum of makespans in seconds; infinite where a schedule is missing."""
    return sum(float("inf") if schedule is None else schedule.makespan_s for schedule in steps)
