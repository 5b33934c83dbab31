"""Solver of multimodal pipeline requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cdmpp.compose.budget import SearchControl
from cdmpp.planning.multimodal.plan_schema import MultimodalPlan
from cdmpp.planning.multimodal.report import make_plan, make_step_plan
from cdmpp.planning.multimodal.schema import MultimodalRequest
from cdmpp.planning.multimodal.steps import MAX_TASKS, StepSolution, plan_steps
from cdmpp.planning.multimodal.tree import CacheCounts


def solve(request: MultimodalRequest, control: SearchControl) -> MultimodalPlan:
    """Search for a short schedule of each step on a common placement.

    Parameters
    ----------
    request : MultimodalRequest
        Its costs are resolved.
    control : SearchControl
        Budget, progress and cancellation.

    Raises
    ------
    FieldError, InfeasibleError
    """
    batches = [batch for _, batch in request.named_batches()]
    costs, counts = request.costs(), CacheCounts()
    bounds = None
    if any(cost.parts for forward, backward in costs for cost in (*forward, *backward)):
        bounds = request.resolved_modules("lower_s"), request.resolved_modules("upper_s")

    def plan_of(solutions: Sequence[StepSolution]) -> MultimodalPlan:
        steps = [make_step_plan(solution, request.efficiency, bounds) for solution in solutions]
        return make_plan(solutions, steps, costs, counts, several=request.batches is not None)

    def on_progress(solutions: Sequence[StepSolution]) -> None:
        control.report(
            best=sum(solution.schedule.makespan_s for solution in solutions),
            bound=sum(solution.bound_s for solution in solutions),
            answer=partial(plan_of, solutions),
        )

    solutions = plan_steps(
        request.resolved_modules(),
        [[batch[module.name] for module in request.modules] for batch in batches],
        request.ranks,
        memory=request.memory,
        efficiency=request.efficiency,
        samples=request.samples_index,
        control=control,
        seed=request.seed,
        max_steps=request.max_steps,
        max_tasks=min(MAX_TASKS, 2 * MAX_TASKS // len(batches)),
        counts=counts,
        on_progress=on_progress,
    )
    return plan_of(solutions)
