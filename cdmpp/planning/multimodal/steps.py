"""Plans of one or several steps: candidate placements, the search, and memory knobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.planning.multimodal.branch_and_bound import solve_exactly
from cdmpp.planning.multimodal.candidates import contiguous_placements, segment_placements, split_batch, unit_sizes
from cdmpp.planning.multimodal.knobs import choose_knobs
from cdmpp.planning.multimodal.links import link_items
from cdmpp.planning.multimodal.memory import Memory
from cdmpp.planning.multimodal.modules import EFFICIENCY, Module
from cdmpp.planning.multimodal.placement import segment_counts
from cdmpp.planning.multimodal.schedule import Schedule, schedule_orders
from cdmpp.planning.multimodal.search import search
from cdmpp.planning.multimodal.tree import CacheCounts
from cdmpp.planning.multimodal.variants import PlacementVariants, StepSettings, total_s

#: Most tasks of a step: with more, even one schedule takes long.
MAX_TASKS = 20_000
#: With a memory limit, share of the budget after which further placements are not searched.
PREPARATION_SHARE = 0.3


@dataclass(frozen=True)
class StepSolution:
    """Best schedule of one step.

    Attributes
    ----------
    batch : tuple of int
        Items of each module.
    schedule : Schedule
    bound_s : float
        Lower bound of every schedule of the variants that were considered, in seconds.
    baselines_s : dict of str to float
        "1f1b": contiguous modules, the best number of micro-batches; "1f1b_segments": the rule's segments in data
        order. Absent where they do not fit the memory.
    one_f_one_b : Schedule or None
        Schedule of "1f1b".
    micro_batches : int or None
        Micro-batches of "1f1b".
    complete : bool
        Every order of segments was evaluated, or cannot be shorter.
    steps : int
        Orders that were evaluated.
    """

    batch: tuple[int, ...]
    schedule: Schedule
    bound_s: float
    baselines_s: dict[str, float]
    one_f_one_b: Schedule | None
    micro_batches: int | None
    complete: bool = False
    steps: int = 0


def plan_step(
    modules: Sequence[Module],
    batch: Sequence[int],
    ranks: int,
    *,
    memory: Memory | None = None,
    efficiency: float = EFFICIENCY,
    samples: int | None = None,
    control: SearchControl | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    counts: CacheCounts | None = None,
) -> StepSolution:
    """Plan one step: :func:`plan_steps` of a single batch."""
    (solution,) = plan_steps(
        modules,
        [batch],
        ranks,
        memory=memory,
        efficiency=efficiency,
        samples=samples,
        control=control,
        seed=seed,
        max_steps=max_steps,
        counts=counts,
    )
    return solution


def plan_steps(
    modules: Sequence[Module],
    batches: Sequence[Sequence[int]],
    ranks: int,
    *,
    memory: Memory | None = None,
    efficiency: float = EFFICIENCY,
    samples: int | None = None,
    control: SearchControl | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    counts: CacheCounts | None = None,
    on_progress: Callable[[list[StepSolution]], None] | None = None,
    max_tasks: int = MAX_TASKS,
) -> list[StepSolution]:
    """Place the modules once, and schedule each step on that placement.

    PipeWeaver with two additions: smaller sub-micro-batches than the rule's and the contiguous placement of 1F1B are
    variants too, so that a plan is never longer than 1F1B on the same costs.

    Parameters
    ----------
    modules : sequence of Module
    batches : sequence of sequence of int
        Items of each module in each step.
    ranks : int
    memory : Memory, optional
    efficiency : float
        Share of the peak items per second that the rule's sub-micro-batches reach.
    samples : int, optional
        Module whose items are the samples; default: see :func:`cdmpp.planning.multimodal.links.link_items`.
    control : SearchControl, optional
        Default: a budget of one second.
    seed : int
    max_steps : int, optional
        Orders to evaluate in all steps together.
    counts : CacheCounts, optional
        Updated.
    on_progress : callable, optional
        Called with a copy of the solutions so far, every few orders.
    max_tasks : int
        A step with more tasks under the rule is refused.

    Returns
    -------
    list of StepSolution
        One for each batch.

    Raises
    ------
    FieldError
        The modules form a cycle, or a step has too many tasks.
    InfeasibleError
        No plan fits the memory limit; the message names one that does.
    """
    memory = memory if memory is not None else Memory()
    control = control if control is not None else SearchControl(1.0)
    counts = counts if counts is not None else CacheCounts()
    rng = np.random.default_rng(seed)
    steps = [
        StepSettings(modules, batch, ranks, memory, link_items(modules, batch, samples), efficiency, max_tasks)
        for batch in batches
    ]
    for step in steps:
        _check_size(step)
    candidates, conventional = _evaluate_placements(steps, samples, control, max_steps)
    feasible = [row for row in candidates if all(variants.best is not None for variants in row)]
    if not feasible:
        raise _infeasible(candidates, memory)
    feasible.sort(key=lambda row: total_s(variants.best for variants in row))
    # Weights stay where they are: several steps share the best placement; a single step searches all of them.
    searched = [[variants] for variants in feasible[0]] if len(steps) > 1 else [[row[0] for row in feasible]]
    solutions = _initial_solutions(steps, candidates, conventional, searched)
    began_s = control.spent_s
    left_s = (control.budget_s if control.budget_s is not None else float("inf")) - began_s
    for at, row in enumerate(searched):

        def take(schedule: Schedule, at: int = at) -> None:
            solutions[at] = replace(solutions[at], schedule=schedule)
            if on_progress is not None:
                on_progress(solutions.copy())

        tasks = [tasks for variants in row for tasks in variants.variants]
        result = search(
            tasks,
            solutions[at].schedule,
            control,
            rng,
            until_s=began_s + left_s * (at + 1) / len(searched),
            max_steps=None if max_steps is None else max(1, max_steps // len(searched)),
            counts=counts,
            on_progress=take,
        )
        schedule, proven = solve_exactly(tasks, _with_better_knobs(result.best), control)
        # Equal sums of seconds in another order differ in their last digits.
        bound_s = min(solutions[at].bound_s, schedule.makespan_s)
        solutions[at] = replace(
            solutions[at],
            schedule=schedule,
            bound_s=schedule.makespan_s if proven and len(steps) == 1 else bound_s,
            complete=result.complete or proven,
            steps=result.steps,
        )
    return solutions


def _check_size(step: StepSettings) -> None:
    sizes = unit_sizes(step.modules, step.efficiency)
    segments = segment_counts(step.modules, sizes, step.ranks)
    units = split_batch(step.batch, sizes)
    tasks = 2 * step.ranks * sum(k * len(items) for k, items in zip(segments, units, strict=True))
    if tasks > step.max_tasks:
        raise FieldError(
            f"batch: a step of {list(step.batch)} items has more than {step.max_tasks:,} tasks",
            path="batch",
            hint="give curves for larger sub-micro-batches, fewer ranks, fewer items, or fewer steps",
        )


def _evaluate_placements(
    steps: Sequence[StepSettings], samples: int | None, control: SearchControl, max_steps: int | None
) -> tuple[list[list[PlacementVariants]], int]:
    """Variants of each step under each candidate placement.

    Returns
    -------
    candidates : list of list of PlacementVariants
        By placement and step: the rule's segments, contiguous placements, other segments.
    conventional : int
        Number of contiguous placements.
    """
    modules, ranks, efficiency, memory = steps[0].modules, steps[0].ranks, steps[0].efficiency, steps[0].memory
    total = [sum(column) for column in zip(*(step.batch for step in steps), strict=True)]
    rule, *others = segment_placements(modules, total, ranks, efficiency)
    conventional = contiguous_placements(modules, total, ranks, link_items(modules, total, samples))
    limited = max_steps is None and control.budget_s is not None and bool(np.isfinite(memory.limit_bytes))
    candidates: list[list[PlacementVariants]] = []
    for placement in [rule, *conventional, *others]:
        # The rule's and the contiguous placements always; others while there is time left to search them.
        late = limited and control.spent_s > PREPARATION_SHARE * (control.budget_s or 0.0)
        known_s = [v.best.makespan_s for row in candidates for v in row if v.best is not None]
        best_s = min(known_s, default=float("inf")) if len(steps) == 1 else float("inf")
        is_rule, needed = placement == rule, len(candidates) <= len(conventional)
        candidates.append(
            [
                PlacementVariants(step, placement, is_rule=is_rule, best_s=best_s, search=needed or not late)
                for step in steps
            ]
        )
    return candidates, len(conventional)


def _initial_solutions(
    steps: Sequence[StepSettings],
    candidates: Sequence[Sequence[PlacementVariants]],
    conventional: int,
    searched: Sequence[Sequence[PlacementVariants]],
) -> list[StepSolution]:
    """Best initial schedule of each step, with bound and baselines."""
    contiguous = min(candidates[1 : 1 + conventional], key=lambda row: total_s(v.one_f_one_b for v in row))
    comparable = all(variants.one_f_one_b is not None for variants in contiguous)
    solutions = []
    for at, (step, row) in enumerate(zip(steps, searched, strict=True)):
        one_f_one_b = contiguous[at].one_f_one_b if comparable else None
        baselines = {"1f1b": one_f_one_b, "1f1b_segments": candidates[0][at].segments_1f1b}
        initial = [variants.best for variants in row if variants.best is not None]
        solutions.append(
            StepSolution(
                batch=tuple(step.batch),
                schedule=min(initial, key=lambda schedule: schedule.makespan_s),
                bound_s=min(bound_s for row in candidates for bound_s in row[at].bounds_s),
                baselines_s={name: s.makespan_s for name, s in baselines.items() if s is not None},
                one_f_one_b=one_f_one_b,
                micro_batches=contiguous[at].micro_batches if comparable else None,
            )
        )
    return solutions


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


def _infeasible(candidates: Sequence[Sequence[PlacementVariants]], memory: Memory) -> InfeasibleError:
    # A placement needs what its largest step needs; the leanest placement decides.
    least = min(max(variants.least_bytes for variants in row if variants.best is None) for row in candidates)
    return InfeasibleError(
        f"memory_bytes: no plan fits {memory.limit_bytes:.0f} bytes per rank; "
        f"the leanest plan that was found needs {np.ceil(least):.0f}",
        path="memory_bytes",
        hint="raise memory_bytes, allow more knobs, or use more ranks",
    )
