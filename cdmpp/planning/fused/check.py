"""Whether an answer holds what it says: simulated anew, sharing nothing with the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cdmpp.errors import FieldError
from cdmpp.planning.fused.bound import lower_bound_s
from cdmpp.planning.fused.problem import Problem
from cdmpp.planning.fused.schema import FusedRequest
from cdmpp.planning.fused.timing import Task, all_tasks, duration_s, needed, peaks, run_order
from cdmpp.prediction import Prediction

#: Of the makespan: how far a claimed time may be from the simulated one.
TOLERANCE = 1e-9
_MOST_FAULTS = 20


class _Lenient(BaseModel):
    # An answer that another program wrote may hold more.
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
    """What is wrong with an answer; empty where nothing is.

    Every pass of every micro-batch is there once, on the rank of its stage, as long as its cost says, after
    what it needs, and beside no other; the ranks' orders, run anew with each pass as early as it can, end at
    the claimed makespan or before; peak memory, bound, gap and baselines are as claimed.

    Parameters
    ----------
    request : FusedRequest
    answer : JSON value
        Of any planner; fields beyond the contract are not looked at.
    prices : sequence of Prediction
        Of ``request.price_requests()``.

    Raises
    ------
    FieldError, InfeasibleError
        The request itself is wrong.
    """
    request.price_requests()
    problem = request.problem(request.costs(prices))
    try:
        claim = _Claim.model_validate(answer)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        return [f"{'.'.join(map(str, one['loc'])) or 'answer'}: {one['msg']}" for one in found[:_MOST_FAULTS]]
    faults = list(_places(problem, claim))
    if not faults:
        faults = [*_times(problem, claim), *_figures(problem, claim)]
    more = len(faults) - _MOST_FAULTS
    return [*faults[:_MOST_FAULTS], f"and {more} more"] if more > 0 else faults


def _tasks(problem: Problem, claim: _Claim) -> list[list[Task]]:
    """The claimed order as tasks; the stage follows from rank, model and copy."""
    stages = {
        (m, copy, problem.rank_of(model, copy, stage)): stage
        for m, copy in problem.lanes()
        for model in (problem.models[m],)
        for stage in range(model.stages)
    }
    out = []
    for rank, row in enumerate(claim.order):
        at = [stages.get((step.model, step.copy_, rank), -1) for step in row]
        rows = zip(row, at, strict=True)
        out.append([Task(s.model, s.copy_, stage, s.way, s.micro_batch) for s, stage in rows])
    return out


def _places(problem: Problem, claim: _Claim) -> Iterator[str]:
    """Faults of which passes are where."""
    if len(claim.order) != problem.ranks:
        yield f"order: {len(claim.order)} ranks, the request has {problem.ranks}"
        return
    for rank, (row, wanted) in enumerate(zip(_tasks(problem, claim), all_tasks(problem), strict=True)):
        missing = set(wanted)
        for at, task in enumerate(row):
            if task in missing:
                missing.discard(task)
            elif task in wanted:
                yield f"order.{rank}.{at}: {_name(task)} runs twice"
            else:
                yield f"order.{rank}.{at}: {_name(task)} has no place on rank {rank}"
        if missing:
            yield f"order.{rank}: {len(missing)} passes are missing, {_name(min(missing))} first"


def _times(problem: Problem, claim: _Claim) -> Iterator[str]:
    """Faults of when passes run."""
    slack = TOLERANCE * max(claim.makespan_s, 0.0)
    order = _tasks(problem, claim)
    claimed = {
        task: (step.start_s, step.end_s)
        for row, steps in zip(order, claim.order, strict=True)
        for task, step in zip(row, steps, strict=True)
    }
    for rank, row in enumerate(order):
        free = 0.0
        for at, task in enumerate(row):
            start, end = claimed[task]
            where = f"order.{rank}.{at}: {_name(task)}"
            if abs(end - start - duration_s(problem, task)) > slack:
                yield f"{where} takes {end - start:.9g} s, its cost is {duration_s(problem, task):.9g} s"
            if start < free - slack:
                yield f"{where} starts at {start:.9g} s, the pass before it ends at {free:.9g} s"
            earlier = needed(problem, task)
            if earlier is not None and start < claimed[earlier][1] - slack:
                ready = claimed[earlier][1]
                yield f"{where} starts at {start:.9g} s, {_name(earlier)} ends at {ready:.9g} s"
            free = max(free, end)
    last = max(end for _, end in claimed.values())
    if abs(last - claim.makespan_s) > slack:
        yield f"makespan_s: {claim.makespan_s:.9g}, the last pass ends at {last:.9g} s"
    try:
        anew = max(end for _, end in run_order(problem, order).values())
    except FieldError as error:
        yield error.message
        return
    if anew > claim.makespan_s + slack:
        yield f"makespan_s: {claim.makespan_s:.9g}, the order run anew takes {anew:.9g} s"


def _figures(problem: Problem, claim: _Claim) -> Iterator[str]:
    """Faults of the figures beside the order."""
    peak = max(peaks(problem, _tasks(problem, claim)))
    if abs(peak - claim.peak_activations) > TOLERANCE * peak:
        yield f"peak_activations: {claim.peak_activations:.9g}, the order holds {peak:.9g}"
    limit = problem.max_activations
    if limit is not None and peak > limit * (1 + TOLERANCE):
        yield f"order: a rank holds {peak:.9g}, max_activations is {limit:.9g}"
    bound = lower_bound_s(problem)
    if claim.lower_bound_s > claim.makespan_s * (1 + TOLERANCE):
        yield f"lower_bound_s: {claim.lower_bound_s:.9g}, above makespan_s"
    elif claim.lower_bound_s > bound * (1 + TOLERANCE):
        yield f"lower_bound_s: {claim.lower_bound_s:.9g}, what can be proven is {bound:.9g}"
    if claim.lower_bound_s <= 0 or abs(claim.makespan_s / claim.lower_bound_s - 1 - claim.gap) > TOLERANCE:
        yield f"gap: {claim.gap:.9g}, makespan_s / lower_bound_s - 1 is another"
    for name, seconds in claim.baselines.items():
        if seconds < bound * (1 - TOLERANCE):
            yield f"baselines.{name}: {seconds:.9g}, below the lower bound {bound:.9g}"
        if seconds < claim.makespan_s * (1 - TOLERANCE):
            yield f"baselines.{name}: {seconds:.9g}, better than the plan"


def _name(task: Task) -> str:
    return f"{task.way} of micro-batch {task.micro_batch}, model {task.model} copy {task.copy}" + (
        f" stage {task.stage}" if task.stage >= 0 else ""
    )
