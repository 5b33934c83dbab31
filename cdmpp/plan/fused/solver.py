"""Solver of fused pipeline requests: the search, and the plan with its explanation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.plan.fused.list_scheduling import memory_bound_s
from cdmpp.plan.fused.problem import FusedProblem, FusedTask, Pass, makespan_s, peaks, run_order
from cdmpp.plan.fused.schema import MAX_RATIO, FusedPass, FusedPlan, FusedRequest, StageCost
from cdmpp.plan.fused.search import FusedSearchResult, search
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.pricing import Cost
from cdmpp.predict.requests.request import Interval


def solve(request: FusedRequest, control: SearchControl) -> FusedPlan:
    """Search for a schedule of least makespan."""
    problem = request.problem()
    seconds = [s for model in problem.models for s in (model.forward_s, model.backward_s)]
    if max(seconds) > MAX_RATIO * min(seconds):
        raise FieldError(
            f"models: the longest pass takes more than {MAX_RATIO:g} times the shortest",
            path="models",
            hint="leave out models whose passes take negligible time",
        )

    def on_progress(result: FusedSearchResult) -> None:
        control.report(
            best=result.schedule.makespan_s, bound=result.lower_bound_s, answer=partial(_plan, request, problem, result)
        )

    result = search(problem, control, seed=request.seed, max_steps=request.max_steps, on_progress=on_progress)
    return _plan(request, problem, result)


def _plan(request: FusedRequest, problem: FusedProblem, result: FusedSearchResult) -> FusedPlan:
    order = order_of(problem, result.schedule.start_s)
    times = run_order(problem, order)
    makespan = makespan_s(times)
    held = peaks(problem, order)
    costs = request.costs()
    interval = None
    if any(cost.parts for pair in costs for cost in pair):
        interval = Interval(
            lower_s=makespan_s(run_order(request.problem("lower_s"), order)),
            upper_s=makespan_s(run_order(request.problem("upper_s"), order)),
        )
    return FusedPlan(
        makespan_s=makespan,
        # Sums of the same terms in another order may differ in their last digits.
        lower_bound_s=_capped(result.lower_bound_s, makespan),
        baselines={name: -_capped(-seconds, -makespan) for name, seconds in result.baselines.items()},
        peak_activations=max(held),
        rank_peak_activations=held,
        interval=interval,
        costs=[StageCost(forward_s=f.latency_s, backward_s=b.latency_s) for f, b in costs],
        steps=result.steps,
        order=[
            [
                FusedPass(
                    model=task.model,
                    copy_=task.copy,
                    pass_=task.way,
                    micro_batch=task.micro_batch,
                    start_s=times[task][0],
                    end_s=times[task][1],
                )
                for task in row
            ]
            for row in order
        ],
        explanation=_explain(problem, result, makespan, costs),
    )


def order_of(problem: FusedProblem, start_s: np.ndarray) -> list[list[FusedTask]]:
    """Tasks of each rank by start time.

    Parameters
    ----------
    start_s : ndarray, shape (tasks,)
        Start of each task, in seconds.
    """
    tasks = problem.tasks
    replicas = problem.replicas()
    orders: list[list[FusedTask]] = []
    for numbers in tasks.by_rank():
        order = []
        for number in numbers[np.argsort(start_s[numbers], kind="stable")]:
            g = tasks.group[number]
            model, copy = replicas[tasks.replica[g]]
            way: Pass = "F" if tasks.forward[g] else "B"
            order.append(FusedTask(model, copy, int(tasks.stage[g]), way, int(tasks.index[number])))
        orders.append(order)
    return orders


def _explain(
    problem: FusedProblem, result: FusedSearchResult, makespan: float, costs: Sequence[tuple[Cost, Cost]]
) -> list[str]:
    """Shares of the models, what determines the lower bound, and the programs of each model."""
    work = [m.micro_batches * (m.forward_s + m.backward_s) for m in problem.models]
    chains = [(m.micro_batches + m.stages - 1) * (m.forward_s + m.backward_s) for m in problem.models]
    busy = sum(work)
    lines = [
        f"every rank works {busy:.6g} s of {makespan:.6g} s ({100 * busy / makespan:.1f} %): "
        + ", ".join(f"model {m} {100 * s / makespan:.1f} %" for m, s in enumerate(work))
    ]
    longest = max(range(len(chains)), key=chains.__getitem__)
    if chains[longest] >= result.lower_bound_s * (1 - 1e-9):
        lines.append(
            f"model {longest} alone takes as long as the lower bound, (micro-batches + stages - 1) x "
            f"(forward + backward) = {chains[longest]:.6g} s; the other models run in its bubbles"
        )
    elif memory_bound_s(problem) >= result.lower_bound_s * (1 - 1e-9):
        lines.append(
            "the memory limit sets the lower bound: micro-batches are held until they have been to the last "
            f"stage and back, at most {problem.max_activations:g} on a rank"
        )
    else:
        lines.append(
            f"one rank sets the lower bound: its work of {busy:.6g} s, and {result.lower_bound_s - busy:.6g} s "
            "until its first micro-batches can arrive and after its last ones have left"
        )
    for m, pair in enumerate(costs):
        for name, cost in zip(("forward", "backward"), pair, strict=True):
            if cost.parts:
                lines.append(f"model {m} {name}, {cost.latency_s:.4g} s per stage: {cost.largest()}")
    return lines


def _capped(value: float, limit: float) -> float:
    """``limit`` for a value that exceeds it by rounding alone, else the value."""
    return limit if limit < value <= limit + 1e-9 * abs(limit) else value
