"""Verification of fused pipeline plans: order, figures and baselines are simulated again, without the search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cdmpp.errors import FieldError
from cdmpp.plan.base.solve import first_faults, schema_faults
from cdmpp.plan.fused.list_scheduling import EQUAL, greedy, lower_bound_s, serial_1f1b
from cdmpp.plan.fused.problem import FusedProblem, FusedTask, all_tasks, duration_s, peaks, predecessor, run_order
from cdmpp.plan.fused.schema import FusedPass, FusedRequest
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.pricing import Figure
from cdmpp.predict.requests.request import Interval

#: Largest difference between a claimed time and the simulated one, as a share of the makespan.
TOLERANCE = 1e-9


# Plans of other programs may have more fields.
_LENIENT = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _Step(FusedPass):
    model_config = _LENIENT


class _Interval(Interval):
    model_config = _LENIENT


class _Claim(BaseModel):
    model_config = _LENIENT

    makespan_s: float
    lower_bound_s: float
    gap: float
    peak_activations: float
    rank_peak_activations: list[float] | None = None
    interval: _Interval | None = None
    baselines: Annotated[dict[str, float], Field(min_length=1)]
    order: list[list[_Step]]


def check(request: FusedRequest, answer: Any, prices: Sequence[Prediction] = ()) -> list[str]:
    """Faults of a plan; empty for a correct one.

    Every pass of every micro-batch must be there once, on the rank of its stage, with the duration of its cost,
    after the pass it depends on, and without overlap. The order of the ranks, run again as early as possible, must
    end at the claimed makespan or before. Peak memory, bound, gap and the interval must be as claimed; so must the
    baselines of cdmpp, which are scheduled again. A baseline of another name must be possible: not below the bound.

    Parameters
    ----------
    answer : JSON value
        Plan of any program; unknown fields are ignored.
    prices : sequence of Prediction
        Predictions of ``request.price_requests()``.

    Raises
    ------
    FieldError, InfeasibleError
        The request itself is invalid.
    """
    request.check()
    request = request.with_prices(prices)
    problem = request.problem()
    try:
        claim = _Claim.model_validate(answer)
    except ValidationError as error:
        return schema_faults(error)
    faults = list(_task_faults(problem, claim))
    if not faults:
        faults = [*_time_faults(problem, claim), *_figure_faults(problem, claim), *_baseline_faults(problem, claim)]
    if not faults:
        faults = list(_interval_faults(request, problem, claim))
    return first_faults(faults)


def _tasks(problem: FusedProblem, claim: _Claim) -> list[list[FusedTask]]:
    """The claimed order as tasks; stage -1 where a replica has no stage on the rank."""
    stages = {
        (m, copy, problem.rank_of(model, copy, stage)): stage
        for m, copy in problem.replicas()
        for model in (problem.models[m],)
        for stage in range(model.stages)
    }
    return [
        [FusedTask(s.model, s.copy_, stages.get((s.model, s.copy_, rank), -1), s.pass_, s.micro_batch) for s in row]
        for rank, row in enumerate(claim.order)
    ]


def _task_faults(problem: FusedProblem, claim: _Claim) -> Iterator[str]:
    """Passes that are missing, repeated, or on a wrong rank."""
    if len(claim.order) != problem.ranks:
        yield f"order: {len(claim.order)} ranks, the request has {problem.ranks}"
        return
    for rank, (row, expected) in enumerate(zip(_tasks(problem, claim), all_tasks(problem), strict=True)):
        missing = set(expected)
        for at, task in enumerate(row):
            if task in missing:
                missing.discard(task)
            elif task in expected:
                yield f"order.{rank}.{at}: {_name(task)} runs twice"
            else:
                yield f"order.{rank}.{at}: {_name(task)} does not belong on rank {rank}"
        if missing:
            yield f"order.{rank}: {len(missing)} passes are missing, the first is {_name(min(missing))}"


def _time_faults(problem: FusedProblem, claim: _Claim) -> Iterator[str]:
    """Wrong durations, overlaps, passes that start too early, and a wrong makespan."""
    slack_s = TOLERANCE * max(claim.makespan_s, 0.0)
    order = _tasks(problem, claim)
    claimed = {
        task: (step.start_s, step.end_s)
        for row, steps in zip(order, claim.order, strict=True)
        for task, step in zip(row, steps, strict=True)
    }
    for rank, row in enumerate(order):
        free_s = 0.0
        for at, task in enumerate(row):
            start_s, end_s = claimed[task]
            cost_s = duration_s(problem, task)
            where = f"order.{rank}.{at}: {_name(task)}"
            if abs(end_s - start_s - cost_s) > slack_s:
                yield f"{where} takes {end_s - start_s:.9g} s, its cost is {cost_s:.9g} s"
            if start_s < free_s - slack_s:
                yield f"{where} starts at {start_s:.9g} s, the previous pass ends at {free_s:.9g} s"
            earlier = predecessor(problem, task)
            if earlier is not None and start_s < claimed[earlier][1] - slack_s:
                yield f"{where} starts at {start_s:.9g} s, {_name(earlier)} ends at {claimed[earlier][1]:.9g} s"
            free_s = max(free_s, end_s)
    last_s = max(end for _, end in claimed.values())
    if abs(last_s - claim.makespan_s) > slack_s:
        yield f"makespan_s: {claim.makespan_s:.9g}, the last pass ends at {last_s:.9g} s"
    try:
        simulated_s = max(end for _, end in run_order(problem, order).values())
    except FieldError as error:
        yield error.message
        return
    if simulated_s > claim.makespan_s + slack_s:
        yield f"makespan_s: {claim.makespan_s:.9g}, the simulated order takes {simulated_s:.9g} s"


def _figure_faults(problem: FusedProblem, claim: _Claim) -> Iterator[str]:
    """Wrong memory, bound and gap."""
    held = peaks(problem, _tasks(problem, claim))
    peak = max(held)
    claimed = claim.rank_peak_activations
    if claimed is not None and len(claimed) != len(held):
        yield f"rank_peak_activations: {len(claimed)} ranks, the request has {len(held)}"
    for rank, (claimed_peak, actual_peak) in enumerate(zip(claimed or [], held, strict=False)):
        if abs(claimed_peak - actual_peak) > TOLERANCE * peak:
            yield f"rank_peak_activations.{rank}: {claimed_peak:.9g}, the order holds {actual_peak:.9g}"
    if abs(peak - claim.peak_activations) > TOLERANCE * peak:
        yield f"peak_activations: {claim.peak_activations:.9g}, the order holds {peak:.9g}"
    limit = problem.max_activations
    if limit is not None and peak > limit * (1 + TOLERANCE):
        yield f"order: a rank holds {peak:.9g}, max_activations is {limit:.9g}"
    bound_s = lower_bound_s(problem)
    if claim.lower_bound_s > claim.makespan_s * (1 + TOLERANCE):
        yield f"lower_bound_s: {claim.lower_bound_s:.9g}, above makespan_s"
    elif claim.lower_bound_s > bound_s * (1 + TOLERANCE):
        yield f"lower_bound_s: {claim.lower_bound_s:.9g}, the provable bound is {bound_s:.9g}"
    if claim.lower_bound_s <= 0 or abs(claim.makespan_s / claim.lower_bound_s - 1 - claim.gap) > TOLERANCE:
        yield f"gap: {claim.gap:.9g}, not makespan_s / lower_bound_s - 1"


def _baseline_faults(problem: FusedProblem, claim: _Claim) -> Iterator[str]:
    """Baselines that are not what they are called, impossible, or shorter than the plan."""
    bound_s = lower_bound_s(problem)
    scheduled_s: dict[str, float | None] = {}
    if "serial_1f1b" in claim.baselines:
        scheduled_s["serial_1f1b"] = serial_1f1b(problem)[1]
    if "greedy" in claim.baselines:
        limit = math.inf if problem.max_activations is None else problem.max_activations * (1 + EQUAL)
        schedule = greedy(problem, limit)
        scheduled_s["greedy"] = None if schedule is None else schedule.makespan_s
    for name, seconds in claim.baselines.items():
        expected_s = scheduled_s.get(name, seconds)
        if expected_s is None:
            yield f"baselines.{name}: {seconds:.9g}, but within max_activations it ends in a deadlock"
        elif abs(seconds - expected_s) > 2 * TOLERANCE * expected_s:
            yield f"baselines.{name}: {seconds:.9g}, this schedule takes {expected_s:.9g}"
        if seconds < bound_s * (1 - TOLERANCE):
            yield f"baselines.{name}: {seconds:.9g}, below the lower bound {bound_s:.9g}"
        if seconds < claim.makespan_s * (1 - TOLERANCE):
            yield f"baselines.{name}: {seconds:.9g}, shorter than the plan"


def _interval_faults(request: FusedRequest, problem: FusedProblem, claim: _Claim) -> Iterator[str]:
    """An interval that is not that of the order with all predictions at their bounds."""
    predicted = any(cost.parts for pair in request.costs() for cost in pair)
    if "interval" not in claim.model_fields_set:
        return
    if (claim.interval is not None) != predicted:
        yield "interval: missing, and costs are predicted" if predicted else "interval: given, but no cost is predicted"
        return
    if claim.interval is None:
        return
    order = _tasks(problem, claim)
    ends: tuple[tuple[Figure, float], ...] = (("lower_s", claim.interval.lower_s), ("upper_s", claim.interval.upper_s))
    for name, seconds in ends:
        expected_s = max(end for _, end in run_order(request.problem(name), order).values())
        if abs(seconds - expected_s) > TOLERANCE * expected_s:
            yield f"interval.{name}: {seconds:.9g}, the order takes {expected_s:.9g} with these costs"


def _name(task: FusedTask) -> str:
    return f"{task.way} of micro-batch {task.micro_batch}, model {task.model} copy {task.copy}" + (
        f" stage {task.stage}" if task.stage >= 0 else ""
    )
