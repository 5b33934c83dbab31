"""Solver of fused pipeline requests: the search, and the plan with its explanation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.plan.fused.list_scheduling import memory_bound_s
from cdmpp.plan.fused.problem import FusedProblem, run_numbers
from cdmpp.plan.fused.schema import MAX_RATIO, FusedPlan, FusedRequest, StageCost
from cdmpp.plan.fused.search import FusedSearchResult, search
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.pricing import Cost
from cdmpp.predict.requests.request import Interval


def solve(request: FusedRequest, control: SearchControl) -> FusedPlan:
    """Search for a schedule of least makespan."""
    problem = request.problem()
    seconds = [s for model in problem.models for s in (model.forward_s, model.backward_s)]
    if max(seconds) > MAX_RATIO * min(seconds):
        raise FieldError.at(
            "models",
            f"the longest pass takes more than {MAX_RATIO:g} times the shortest",
            hint="leave out models whose passes take negligible time",
        )

    def on_progress(result: FusedSearchResult) -> None:
        control.report(
            best=result.schedule.makespan_s, bound=result.lower_bound_s, answer=partial(_plan, request, problem, result)
        )

    result = search(problem, control, seed=request.seed, max_steps=request.max_steps, on_progress=on_progress)
    return _plan(request, problem, result)


def _plan(request: FusedRequest, problem: FusedProblem, result: FusedSearchResult) -> FusedPlan:
    tasks, start_s = problem.tasks, result.schedule.start_s
    orders = [numbers[np.argsort(start_s[numbers], kind="stable")] for numbers in tasks.by_rank()]
    begin_s, end_s = run_numbers(problem, orders)
    makespan = float(end_s.max())
    change = tasks.memory_change()[tasks.group]
    held = [float(np.cumsum(change[order]).max()) for order in orders]
    costs = request.costs()
    interval = None
    if any(cost.parts for pair in costs for cost in pair):
        lower_s, upper_s = (run_numbers(request.problem(name), orders)[1].max() for name in ("lower_s", "upper_s"))
        interval = Interval(lower_s=float(lower_s), upper_s=float(upper_s))
    copies = np.array([copy for _, copy in problem.replicas()])[tasks.replica]
    names = ("model", "copy", "pass", "micro_batch", "start_s", "end_s")
    ways, groups = np.where(tasks.forward, "F", "B"), [tasks.group[order] for order in orders]
    columns = [
        (tasks.model[group], copies[group], ways[group], tasks.index[order], begin_s[order], end_s[order])
        for order, group in zip(orders, groups, strict=True)
    ]
    # Rows as mappings: made and validated several times as fast as models one by one.
    rows: Any = [
        [dict(zip(names, row, strict=True)) for row in zip(*(column.tolist() for column in rank), strict=True)]
        for rank in columns
    ]
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
        order=rows,
        explanation=_explain(problem, result, makespan, costs),
    )


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
