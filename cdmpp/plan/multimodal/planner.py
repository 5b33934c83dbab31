"""Plans of one or several steps: baselines, designs on one placement, then the order of each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cdmpp.errors import InfeasibleError
from cdmpp.plan.multimodal.designs import (
    TASK_S,
    Design,
    DesignSearch,
    Evaluated,
    EvaluatedDesign,
    StepDesigns,
    variants_of,
)
from cdmpp.plan.multimodal.knobs import choose_knobs
from cdmpp.plan.multimodal.modules import EFFICIENCY, MemoryOptions, Module, chained, link_items
from cdmpp.plan.multimodal.placement import (
    MAX_CUT_PASSES,
    Items,
    Placement,
    contiguous_at,
    contiguous_cuts,
    contiguous_placements,
    cuts_of,
    move_layer,
    rank_pairs,
    rule_placement,
    rule_sizes,
    segment_placements,
    split_batch,
)
from cdmpp.plan.multimodal.request_bound import request_bound_s
from cdmpp.plan.multimodal.search import MAX_TASKS, CacheCounts, search, solve_exactly, try_all
from cdmpp.plan.multimodal.tasks import Schedule, StepSettings, schedule_orders
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.memory import IGNORE_HINT

#: Shares of the budget, and of the steps, after which the parts of the search end: the scan of counts and segments,
#: the trial of every design of a small step, and random changes. The rest is for orders of the best designs. Designs
#: of a small step have their best order already.
SCAN_SHARE, TRY_ALL_SHARE, DESIGN_SHARE, SMALL_DESIGN_SHARE = 0.35, 0.7, 0.75, 0.9
#: Share of the budget after which the lower bound of a large request is not refined any further.
BOUND_SHARE = 0.2
#: Share of the budget after which the cuts of 1F1B are not fitted to a memory limit any further.
CUT_SHARE = 0.1
#: Share of the remaining budget for the search for an order; the rest is for the exact solution of small designs.
_ORDER_SHARE = 0.9
#: Relative difference of a makespan and a bound that are equal.
_EQUAL = 1e-9


@dataclass(frozen=True)
class StepSolution:
    """Best schedule of one step."""

    batch: tuple[int, ...]  # items of each module
    schedule: Schedule
    bound_s: float  # lower bound of every plan that the request allows, in seconds
    searched_bound_s: float  # lower bound of the designs that were searched, in seconds
    # "1f1b": contiguous modules, the best number of micro-batches; "1f1b_segments": the rule's segments in data order.
    # Absent where they do not fit the memory.
    baselines_s: dict[str, float]
    one_f_one_b: Schedule | None  # schedule of "1f1b"
    micro_batches: int | None  # micro-batches of "1f1b"
    complete: bool = False  # no plan that the request allows is shorter
    steps: int = 0  # orders that were evaluated
    left_out: bool = False  # designs were left out because they, or their answer, would take longer than the budget


def plan_steps(
    modules: Sequence[Module],
    batches: Sequence[Sequence[int]],
    ranks: int,
    *,
    memory: MemoryOptions | None = None,
    efficiency: float = EFFICIENCY,
    samples: int | None = None,
    control: SearchControl | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    counts: CacheCounts | None = None,
    executable: bool = False,
    on_progress: Callable[[list[StepSolution]], None] | None = None,
) -> list[StepSolution]:
    """Place the modules once, and schedule each step on that placement.

    PipeWeaver searches the order for one placement and one size of sub-micro-batches of each module. Here cuts,
    segments and numbers of sub-micro-batches are searched too, beginning from its rule for every efficiency and from
    1F1B on a contiguous placement. So a plan is never longer than these on the same costs.

    ``batches``: items of each module in each step. ``efficiency``: share of the peak items per second that the rule's
    sub-micro-batches reach, for the baseline. ``samples``: module whose items are the samples; default: see
    :func:`cdmpp.plan.multimodal.modules.link_items`. ``control``: default: a budget of one second. ``max_steps``:
    orders to evaluate in all steps together. ``counts``: updated. ``executable``: only plans that
    torch.distributed.pipelining runs (:class:`StepSettings`), with the modules as a chain. ``on_progress``: called with
    a copy of the solutions so far, every few orders.
    Raises FieldError: the modules form a cycle.
    Raises InfeasibleError: no plan fits the memory limit; the message names one that does.
    """
    memory = memory if memory is not None else MemoryOptions()
    control = control if control is not None else SearchControl(1.0)
    counts = counts if counts is not None else CacheCounts()
    # With more ranks than layers each module has one segment: plans that leave other ranks idle are no shorter.
    used = min(ranks, sum(len(module.layers) for module in modules))
    if executable:
        modules = chained(modules)
        if used < ranks:
            raise InfeasibleError.at(
                "executable", f"{used} layers are fewer than {ranks} ranks, and each needs a stage"
            )
    settings = [
        StepSettings(modules, batch, used, memory, link_items(modules, batch, samples), efficiency, executable)
        for batch in batches
    ]

    def report(solutions: list[StepSolution]) -> None:
        if on_progress is not None:
            on_progress([_on_ranks(solution, ranks) for solution in solutions])

    planner = Planner(settings, samples, control, np.random.default_rng(seed), max_steps, counts, report)
    return [_on_ranks(solution, ranks) for solution in planner.plan()]


def _on_ranks(solution: StepSolution, ranks: int) -> StepSolution:
    """The solution with idle ranks behind those that it uses."""

    def extend(schedule: Schedule) -> Schedule:
        same = schedule.tasks.ranks == ranks
        return schedule if same else replace(schedule, tasks=replace(schedule.tasks, ranks=ranks))

    baseline = solution.one_f_one_b
    return replace(
        solution, schedule=extend(solution.schedule), one_f_one_b=None if baseline is None else extend(baseline)
    )


class Planner:
    """Search for the plans of several steps on one placement."""

    def __init__(
        self,
        settings: Sequence[StepSettings],
        samples: int | None,
        control: SearchControl,
        rng: np.random.Generator,
        max_steps: int | None,
        counts: CacheCounts,
        on_progress: Callable[[list[StepSolution]], None] | None,
    ) -> None:
        self.settings, self.samples, self.control, self.rng = settings, samples, control, rng
        self.max_steps, self.counts, self.on_progress = max_steps, counts, on_progress
        self.modules, self.ranks = settings[0].modules, settings[0].ranks
        self.share, self.reserve_s = SCAN_SHARE, 0.0
        self.total = [sum(column) for column in zip(*(step.batch for step in settings), strict=True)]
        self.bounds_s = [
            request_bound_s(self.modules, step.batch, self.ranks, step.links, partial(self._late, BOUND_SHARE))
            for step in settings
        ]
        self.designs = [StepDesigns(step, control) for step in settings]
        self.search = DesignSearch(self.designs, rng, self._over, self._take)
        self.conventional: list[tuple[Schedule, int]] | None = None
        self.segments: list[Schedule | None] = [None] * len(settings)
        self.best: list[Schedule] = []
        self.complete = False

    def plan(self) -> list[StepSolution]:
        """The plans of all steps."""
        self._add_baselines()
        if self.best:  # what it takes to describe such a plan
            tasks = sum(schedule.tasks.size for schedule in self.best)
            self.reserve_s = min(TASK_S * tasks, self.control.left_s / 2)
            for designs in self.designs:
                designs.reserve_s = self.reserve_s
        self._search_designs()
        # With little time the search may not have come to the rule's own sub-micro-batches.
        self._insert([schedule for schedule in self.segments if schedule is not None])
        if not self.search.pool:
            raise _infeasible(self.designs, self.settings[0].memory)
        evaluations = sum(designs.steps for designs in self.designs)
        self.counts.misses += evaluations
        for at in range(len(self.settings)):
            self._search_orders(at, evaluations)
        return self._solutions()

    def _solutions(self) -> list[StepSolution]:
        """The best schedules so far, with their bounds and baselines."""
        solutions = []
        for at, (step, schedule) in enumerate(zip(self.settings, self.best, strict=True)):
            one_f_one_b, micro_batches = (None, None) if self.conventional is None else self.conventional[at]
            baselines = {"1f1b": one_f_one_b, "1f1b_segments": self.segments[at]}
            # Equal sums of seconds in another order differ in their last digits.
            met = self.bounds_s[at] >= schedule.makespan_s * (1 - _EQUAL)
            bound_s = schedule.makespan_s if met or self.complete else self.bounds_s[at]
            solutions.append(
                StepSolution(
                    batch=tuple(step.batch),
                    schedule=schedule,
                    bound_s=bound_s,
                    searched_bound_s=max(bound_s, min(self.designs[at].bound_s, schedule.makespan_s)),
                    baselines_s={
                        name: baseline.makespan_s for name, baseline in baselines.items() if baseline is not None
                    },
                    one_f_one_b=one_f_one_b,
                    micro_batches=micro_batches,
                    complete=met or self.complete,
                    steps=self.designs[at].steps,
                    left_out=self.designs[at].left_out,
                )
            )
        return solutions

    def _over(self, more: int = 0) -> bool:
        """Whether the present share of the budget is spent, or of the orders evaluated; ``more``: not counted yet."""
        steps = more + sum(designs.steps for designs in self.designs)
        return self._late() or (self.max_steps is not None and steps >= self.share * self.max_steps)

    def _late(self, share: float | None = None) -> bool:
        """Whether a share of the budget is spent; default: the present one."""
        budget_s, share = self.control.budget_s or 0.0, self.share if share is None else share
        return self.control.left_s <= (1 - share) * budget_s + self.reserve_s

    def _done(self) -> bool:
        """Whether no plan can be shorter."""
        bounded = zip(self.best, self.bounds_s, strict=True)
        return self.complete or all(schedule.makespan_s * (1 - _EQUAL) <= bound_s for schedule, bound_s in bounded)

    def _take(self, entry: EvaluatedDesign) -> None:
        """Report a better design."""
        self.best = [evaluated.schedule for evaluated in entry.evaluated]
        for designs in self.designs:
            designs.has_plan = True
        self._report()

    def _report(self) -> None:
        if self.on_progress is not None:
            self.on_progress(self._solutions())

    def _add_baselines(self) -> None:
        """1F1B on contiguous placements and on the rule's segments; the former are the first designs."""
        links = link_items(self.modules, self.total, self.samples)
        placements = contiguous_placements(self.modules, self.total, self.ranks, links, self._late)
        if self.settings[0].executable:  # balanced cuts may leave a rank without layers
            layers = sum(len(module.layers) for module in self.modules)
            placements.append(contiguous_at(self.modules, np.arange(self.ranks + 1) * layers // self.ranks))
        for placement in placements:
            if self.search.pool and self._late():
                break
            self._try_1f1b(placement)
        self._fit_cuts()
        sizes = [module.efficient_size(self.settings[0].efficiency) for module in self.modules]
        placement = rule_placement(self.modules, self.total, sizes, self.ranks)
        for at, designs in enumerate(self.designs):
            self.segments[at] = designs.segments_1f1b(placement, split_batch(designs.step.batch, sizes))

    def _try_1f1b(self, placement: Placement) -> bool:
        """Simulate 1F1B on a contiguous placement; return whether it is the shortest so far."""
        row = [designs.one_f_one_b(placement) for designs in self.designs]
        results = [result for result in row if result is not None]
        if len(results) < len(row):
            return False
        schedules = [schedule for schedule, _ in results]
        shorter = self.conventional is None or _total_s(schedules) < _total_s([s for s, _ in self.conventional])
        if shorter:
            self.conventional = results
        self._insert(schedules)
        return shorter

    def _fit_cuts(self) -> None:
        """Move layers between ranks while that shortens 1F1B within a memory limit: the other cuts ignore the limit."""
        if self.conventional is None or not self.conventional[0][0].tasks.limited:
            return
        pairs, passes = rank_pairs(self.ranks), MAX_CUT_PASSES
        while passes > 0 and not self._late(CUT_SHARE) and (pair := next(pairs, None)) is not None:
            source, target = pair
            tasks = self.conventional[0][0].tasks
            cuts = contiguous_cuts(tasks.placement, self.ranks)
            if cuts[source + 1] == cuts[source]:
                continue
            passes -= tasks.size * len(self.designs)
            if self._try_1f1b(contiguous_at(self.modules, move_layer(cuts, source, target))):
                pairs = rank_pairs(self.ranks)

    def _insert(self, schedules: Sequence[Schedule]) -> None:
        """Insert schedules of all steps on one placement among the designs, if they are the best."""
        if len(schedules) == len(self.settings) and _total_s(schedules) < self.search.best_s:
            cuts = cuts_of(schedules[0].tasks.placement, self.ranks)
            items = tuple(schedule.tasks.items for schedule in schedules)
            self.search.insert(
                Design(cuts, items),
                [Evaluated(step_schedule, variants_of(step_schedule)) for step_schedule in schedules],
            )

    def _search_designs(self) -> None:
        """Evaluate designs: those of the rule, other counts and segments, all of a small step, random changes."""
        if not (self.search.pool and self._late()):
            for design in self._initial_designs():
                self.search.add(design)
                if self.search.pool and self._late():
                    break
        if not self.search.pool or self._done():
            return
        self.search.scan()
        small = all(schedule.tasks.size <= MAX_TASKS for schedule in self.best)
        if small and len(self.designs) == 1 and not self._done():
            self.share = TRY_ALL_SHARE
            best, self.complete, steps = try_all(self.settings[0], self.best[0], self._over)
            self.designs[0].steps += steps
            if best is not self.best[0]:
                self._insert([best])
        self.share = SMALL_DESIGN_SHARE if small else DESIGN_SHARE
        if not self._done():
            self.search.wander()

    def _initial_designs(self) -> Iterator[Design]:
        """One sub-micro-batch of each module, the rule at every efficiency, and the best counts in other segments."""
        ones: list[Items] = [tuple((n,) if n else () for n in step.batch) for step in self.settings]
        one_segment = [1] * len(self.modules)
        yield from self._balanced(ones, one_segment)
        if self.settings[0].executable:
            counts = max(len(step.equal_counts()) for step in self.settings)
            for at in range(1, counts):
                rows = [(c := step.equal_counts())[min(at, len(c) - 1)] for step in self.settings]
                items = [step.split(o, 0, count) for step, o, count in zip(self.settings, ones, rows, strict=True)]
                yield from self._balanced(items, one_segment)
        for sizes in rule_sizes(self.modules):
            items = [tuple(split_batch(step.batch, sizes)) for step in self.settings]
            placement = rule_placement(self.modules, self.total, sizes, self.ranks)
            yield Design(cuts_of(placement, self.ranks), tuple(items))
        for entry in self.search.pool[:3]:
            rule = [(len(cuts) - 1) // self.ranks for cuts in entry.design.cuts]
            max_segments = [module.most_segments(self.ranks) for module in self.modules]
            doubled = [min(2 * k, top) for k, top in zip(rule, max_segments, strict=True)]
            two = [max(k, min(2, top)) for k, top in zip(rule, max_segments, strict=True)]
            for segments in (rule, one_segment, doubled, two):
                yield from self._balanced(entry.design.items, segments)

    def _balanced(self, items: Sequence[Items], segments: Sequence[int]) -> Iterator[Design]:
        """Designs with these sub-micro-batches of each step in so many segments."""
        together = [tuple(n for step in items for n in step[i]) for i in range(len(self.modules))]
        for placement in segment_placements(self.modules, together, segments, self.ranks):
            yield Design(cuts_of(placement, self.ranks), tuple(items))

    def _search_orders(self, at: int, evaluations: int) -> None:
        """Search for the order of one step: of the best designs, of several steps those on the best placement."""
        if self._done():
            return
        cuts = self.search.pool[0].design.cuts
        entries = [entry for entry in self.search.pool if len(self.settings) == 1 or entry.design.cuts == cuts]
        variants = [tasks for entry in entries for tasks in entry.evaluated[at].variants]
        left_s, remaining = self.control.left_s - self.reserve_s, len(self.settings) - at

        def take(schedule: Schedule) -> None:
            self.best[at] = schedule
            self._report()

        best, steps = search(
            variants,
            self.best[at],
            self.control,
            self.rng,
            until_left_s=left_s * (1 - _ORDER_SHARE / remaining) + self.reserve_s if math.isfinite(left_s) else 0.0,
            max_steps=None if self.max_steps is None else max(1, (self.max_steps - evaluations) // len(self.settings)),
            counts=self.counts,
            on_progress=take,
        )
        self.designs[at].steps += steps
        self.best[at] = solve_exactly(variants, _with_better_knobs(best), self.control)


def _with_better_knobs(schedule: Schedule) -> Schedule:
    """The same order with the knobs of least added time under which it fits, where that is shorter."""
    if not schedule.tasks.limited:
        return schedule
    orders = schedule.orders
    knobs = choose_knobs(schedule.tasks, orders)
    if knobs is None:
        return schedule
    other = schedule_orders(schedule.tasks.with_knobs(knobs), orders)
    return other if other.makespan_s < schedule.makespan_s else schedule


def _total_s(schedules: Sequence[Schedule]) -> float:
    return sum(schedule.makespan_s for schedule in schedules)


def _infeasible(designs: Sequence[StepDesigns], memory: MemoryOptions) -> InfeasibleError:
    # A placement needs what its largest step needs; the leanest placement decides.
    placements = set.intersection(*(set(designs_of_step.least_bytes) for designs_of_step in designs))
    if not placements:
        raise InfeasibleError.at(
            "executable",
            "no placement was found that gives each rank a stage in each step",
            hint="use fewer ranks, give all modules items in each step, or leave executable out",
        )
    least = min(max(designs_of_step.least_bytes[placement] for designs_of_step in designs) for placement in placements)
    return InfeasibleError.at(
        "memory_bytes",
        f"no plan fits {memory.limit_bytes:.0f} bytes per rank; the leanest plan that was found needs "
        f"{np.ceil(least):.0f}",
        hint=f"raise memory_bytes, allow more knobs, or use more ranks; {IGNORE_HINT}",
    )
