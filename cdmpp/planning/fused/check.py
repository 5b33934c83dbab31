"""Verification of fused pipeline plans: the order is simulated again, without the search's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cdmpp.errors import FieldError
from cdmpp.planning.fused.bound import lower_bound_s
from cdmpp.planning.fused.problem import Problem
from cdmpp.planning.fused.schema import FusedRequest
from cdmpp.planning.fused.timing import Task, all_tasks, duration_s, peaks, predecessor, run_order
from cdmpp.prediction import Prediction

#: Largest difference between a claimed time and the simulated one, as a share of the makespan.
TOLERANCE = 1e-9
_MAX_FAULTS = 20


class _Lenient(BaseModel):
    # Plans of other programs may have more fields.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _Step(_Lenient):
    model: int
    copy_: Annotated[int, Field(alias="copy")]
    way: Annotated[Literal["F", "B"], Field(alias="pass")]
    micro_batch: int
    start_s: float
    end_s: float


class _Claim(_Lenient):
    makespan_s: float
    lower_bound_s: float
    gap: float
    peak_activations: float
    baselines: Annotated[dict[str, float], Field(min_length=1)]
    order: list[list[_Step]]


def check(request: FusedRequest, answer: Any, prices: Sequence[Prediction] = ()) -> list[str]:
    """Faults of a plan; empty for a correct one.

    Every pass of every micro-batch must be there once, on the rank of its stage, with the duration of its cost,
    after the pass it depends on, and without overlap. The order of the ranks, run again as early as possible, must
    end at the claimed makespan or before. Peak memory, bound, gap and baselines must be as claimed.

    Parameters
    ----------
    request : FusedRequest
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
    problem = request.with_prices(prices).problem()
    try:
        claim = _Claim.model_validate(answer)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        return [f"{'.'.join(map(str, p['loc'])) or 'answer'}: {p['msg']}" for p in problems[:_MAX_FAULTS]]
    faults = list(_task_faults(problem, claim))
    if not faults:
        faults = [*_time_faults(problem, claim), *_figure_faults(problem, claim)]
    more = len(faults) - _MAX_FAULTS
    return [*faults[:_MAX_FAULTS], f"and {more} more"] if more > 0 else faults


def _tasks(problem: Problem, claim: _Claim) -> list[list[Task]]:
    """The claimed order as tasks; stage -1 where a replica has no stage on the rank."""
    stages = {
        (m, copy, problem.rank_of(model, copy, stage)): stage
        for m, copy in problem.replicas()
        for model in (problem.models[m],)
        for stage in range(model.stages)
    }
    return [
        [Task(s.model, s.copy_, stages.get((s.model, s.copy_, rank), -1), s.way, s.micro_batch) for s in row]
        for rank, row in enumerate(claim.order)
    ]


def _task_faults(problem: Problem, claim: _Claim) -> Iterator[str]:
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


def _time_faults(problem: Problem, claim: _Claim) -> Iterator[str]:
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


def _figure_faults(problem: Problem, claim: _Claim) -> Iterator[str]:
    """Wrong memory, bound, gap and baselines."""
    peak = max(peaks(problem, _tasks(problem, claim)))
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
    for name, seconds in claim.baselines.items():
        if seconds < bound_s * (1 - TOLERANCE):
            yield f"baselines.{name}: {seconds:.9g}, below the lower bound {bound_s:.9g}"
        if seconds < claim.makespan_s * (1 - TOLERANCE):
            yield f"baselines.{name}: {seconds:.9g}, shorter than the plan"


def _name(task: Task) -> str:
    return f"{task.way} of micro-batch {task.micro_batch}, model {task.model} copy {task.copy}" + (
        f" stage {task.stage}" if task.stage >= 0 else ""
    )
