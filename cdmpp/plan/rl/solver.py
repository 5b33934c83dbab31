"""Solver of RL requests: builds the problem, searches it, and reports the plan."""

from __future__ import annotations

from cdmpp.plan.rl.generation import compile_loops
from cdmpp.plan.rl.pipeline import compile_pipelines, schedules
from cdmpp.plan.rl.plan_schema import RlPlan
from cdmpp.plan.rl.problem import make_problem
from cdmpp.plan.rl.report import plan_of
from cdmpp.plan.rl.schema import RlRequest
from cdmpp.plan.rl.search import search
from cdmpp.plan.rl.search_result import SearchResult
from cdmpp.predict.requests.budget import SearchControl


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
    pipeline_schedules = schedules(costs, control, request.ignore_memory)
    problem = make_problem(request, schedules=pipeline_schedules)

    def answer(result: SearchResult) -> RlPlan:
        return plan_of(request, problem, result, pipeline_schedules)

    return answer(search(problem, control, request.max_steps, answer))
