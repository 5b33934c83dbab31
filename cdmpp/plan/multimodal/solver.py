"""Solver of multimodal pipeline requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import numpy as np

from cdmpp.plan.multimodal.modules import Module
from cdmpp.plan.multimodal.plan_schema import MultimodalPlan
from cdmpp.plan.multimodal.report import make_plan, make_step_plan
from cdmpp.plan.multimodal.schema import MultimodalRequest
from cdmpp.plan.multimodal.solution import StepSolution
from cdmpp.plan.multimodal.steps import plan_step, plan_steps
from cdmpp.plan.multimodal.tree import CacheCounts
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.utils.jit import COMPILED


@cache
def compile_loops() -> None:
    """Compile the search, or load it from the cache, before the budget of a search begins: seconds the first time."""
    if COMPILED:
        sizes, seconds = np.array([1.0, 2.0]), np.array([1.0, 1.5])
        modules = [
            Module(name, (1.0,) * 2, sizes, seconds, 2 * seconds, after) for name, after in (("a", ()), ("b", (0,)))
        ]
        plan_step(modules, [2, 3], 2, control=SearchControl(60.0), max_steps=20)


def solve(request: MultimodalRequest, control: SearchControl) -> MultimodalPlan:
    """Search for a short schedule of each step on a common placement; the budget begins when its code is compiled.

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
    compile_loops()
    control.restart()
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
        counts=counts,
        on_progress=on_progress,
    )
    return plan_of(solutions)
