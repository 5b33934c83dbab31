"""Plans of one or several steps of a multimodal model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cdmpp.plan.multimodal.evaluate import StepSettings
from cdmpp.plan.multimodal.links import link_items
from cdmpp.plan.multimodal.memory import Memory
from cdmpp.plan.multimodal.modules import EFFICIENCY, Module
from cdmpp.plan.multimodal.planner import Planner
from cdmpp.plan.multimodal.schedule import Schedule
from cdmpp.plan.multimodal.solution import StepSolution
from cdmpp.plan.multimodal.tree import CacheCounts
from cdmpp.predict.requests.budget import SearchControl


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
) -> list[StepSolution]:
    """Place the modules once, and schedule each step on that placement.

    PipeWeaver searches the order for one placement and one size of sub-micro-batches of each module. Here cuts,
    segments and numbers of sub-micro-batches are searched too, beginning from its rule for every efficiency and from
    1F1B on a contiguous placement. So a plan is never longer than these on the same costs.

    Parameters
    ----------
    modules : sequence of Module
    batches : sequence of sequence of int
        Items of each module in each step.
    ranks : int
    memory : Memory, optional
    efficiency : float
        Share of the peak items per second that the rule's sub-micro-batches reach, for the baseline.
    samples : int, optional
        Module whose items are the samples; default: see :func:`cdmpp.plan.multimodal.links.link_items`.
    control : SearchControl, optional
        Default: a budget of one second.
    seed : int
    max_steps : int, optional
        Orders to evaluate in all steps together.
    counts : CacheCounts, optional
        Updated.
    on_progress : callable, optional
        Called with a copy of the solutions so far, every few orders.

    Returns
    -------
    list of StepSolution
        One for each batch.

    Raises
    ------
    FieldError
        The modules form a cycle.
    InfeasibleError
        No plan fits the memory limit; the message names one that does.
    """
    memory = memory if memory is not None else Memory()
    control = control if control is not None else SearchControl(1.0)
    counts = counts if counts is not None else CacheCounts()
    used = most_used_ranks(modules, ranks)
    settings = [
        StepSettings(modules, batch, used, memory, link_items(modules, batch, samples), efficiency) for batch in batches
    ]

    def report(solutions: list[StepSolution]) -> None:
        if on_progress is not None:
            on_progress([_on_ranks(solution, ranks) for solution in solutions])

    planner = Planner(settings, samples, control, np.random.default_rng(seed), max_steps, counts, report)
    return [_on_ranks(solution, ranks) for solution in planner.plan()]


def most_used_ranks(modules: Sequence[Module], ranks: int) -> int:
    """Most ranks that can have a layer.

    With more ranks than layers each module has one segment. So a plan that leaves ranks idle is also a plan on the
    other ranks alone: the search of these misses no plan, and its lower bound holds for all ranks.
    """
    return min(ranks, sum(len(module.layers) for module in modules))


def _on_ranks(solution: StepSolution, ranks: int) -> StepSolution:
    """The solution with idle ranks behind those that it uses."""

    def extend(schedule: Schedule) -> Schedule:
        same = schedule.tasks.ranks == ranks
        return schedule if same else replace(schedule, tasks=replace(schedule.tasks, ranks=ranks))

    baseline = solution.one_f_one_b
    return replace(
        solution, schedule=extend(solution.schedule), one_f_one_b=None if baseline is None else extend(baseline)
    )
