"""Solver of RL requests: builds the problem, searches it, and reports the plan."""

from __future__ import annotations

from cdmpp.compose.budget import SearchControl
from cdmpp.planning.rl.generation import compile_loops
from cdmpp.planning.rl.pipeline import compile_pipelines, schedules
from cdmpp.planning.rl.plan_schema import RlPlan
from cdmpp.planning.rl.problem import make_problem
from cdmpp.planning.rl.report import plan_of
from cdmpp.planning.rl.schema import RlRequest
from cdmpp.planning.rl.search import search
from cdmpp.planning.rl.search_result import SearchResult


def solve(request: RlRequest, control: SearchControl) -> RlPlan:
    """The best plan within the budget, which begins when the simulation is compiled.

    Raises
    ------
    FieldError
        Fixed sizes fit no pool, or the minimised price has no positive lower bound.
    InfeasibleError
        The longest sample fits into no memory, or every step is longer than the limit.
    """
    costs = [pool.training for pool in request.pools]
    compile_loops()
    compile_pipelines(costs)
    control.restart()
    pipeline_schedules = schedules(costs, control)
    problem = make_problem(request, schedules=pipeline_schedules)

    def answer(result: SearchResult) -> RlPlan:
        return plan_of(request, problem, result, pipeline_schedules)

    return answer(search(problem, control, request.max_steps, answer))
