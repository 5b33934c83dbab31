"""Verification of fused pipeline plans: order, figures and baselines are simulated again, without the search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from cdmpp.errors import FieldError
from cdmpp.plan.base.passes import TOLERANCE, time_faults
from cdmpp.plan.base.solve import first_faults, schema_faults
from cdmpp.plan.fused.list_scheduling import EQUAL, greedy, lower_bound_s, serial_1f1b
from cdmpp.plan.fused.problem import FusedProblem, run_orders
from cdmpp.plan.fused.schema import FusedPass, FusedPlan, FusedRequest
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.pricing import Figure
from cdmpp.predict.requests.request import Interval


# Plans of other programs may have more fields.
class _ClaimedPass(FusedPass, extra="ignore", strict=True, allow_inf_nan=False): ...


class _Interval(Interval, extra="ignore", strict=True, allow_inf_nan=False): ...


class _Claim(BaseModel, extra="ignore", strict=True, allow_inf_nan=False):
    makespan_s: float
    lower_bound_s: float
    gap: float
    peak_activations: float
    rank_peak_activations: list[float] | None = None
    interval: _Interval | None = None
    baselines: dict[str, float] = Field(min_length=1)
    order: list[list[_ClaimedPass]]


def check(request: FusedRequest, answer: Any, prices: Sequence[Prediction] = ()) -> list[str]:
    """Faults of a plan; empty for a correct one.

    Every pass of every micro-batch must be there once, on the rank of its stage, with the duration of its cost,
    after the pass it depends on, and without overlap. The order of the ranks, run again as early as possible, must
    end at the claimed makespan or before. Peak memory, bound, gap and the interval must be as claimed; so must the
    baselines of cdmpp, which are scheduled again. A baseline of another name must be possible: not below the bound.

    ``answer``: JSON of a plan of any program; unknown fields are ignored. ``prices``: of ``request.price_requests()``.
    Raises FieldError or InfeasibleError: the request itself is invalid.
    """
    request.check()
    request = request.with_prices(prices)
    problem = request.problem()
    try:
        claim = _Claim.model_validate(answer)
    except ValidationError as error:
        return schema_faults(error)
    orders = _Orders(request, problem, claim)
    faults = list(orders.task_faults())
    if not faults:
        held = [float(rank_held.max()) for rank_held in problem.tasks.held(orders.numbers)]
        faults = [*orders.time_faults(), *_figure_faults(problem, claim, held), *_baseline_faults(problem, claim)]
    if not faults:
        faults = list(_interval_faults(request, claim, orders.numbers))
    return first_faults(faults)


class _Orders:
    """The claimed orders as numbers of tasks (:class:`FusedProblem`); those of passes that the request has."""

    def __init__(self, request: FusedRequest, problem: FusedProblem, claim: _Claim) -> None:
        self.request, self.problem, self.claim, tasks = request, problem, claim, problem.tasks
        self.replicas = problem.replicas()
        groups = {}
        for g, (replica, rank) in enumerate(zip(tasks.replica.tolist(), tasks.rank.tolist(), strict=True)):
            groups[(*self.replicas[replica], rank, "F" if tasks.forward[g] else "B")] = tasks.offset[g], tasks.count[g]
        self.numbers: list[list[int]] = []
        self.times: dict[int, tuple[float, float]] = {}
        self.wrong: list[str] = []
        for rank, row in enumerate(claim.order):
            self.numbers.append([])
            for at, step in enumerate(row):
                offset, count = groups.get((step.model, step.copy_, rank, step.pass_), (0, 0))
                number, path = int(offset) + step.micro_batch, f"order.{rank}.{at}"
                if not 0 <= step.micro_batch < count:
                    name = f"{step.pass_} of micro-batch {step.micro_batch}, model {step.model} copy {step.copy_}"
                    self.wrong.append(f"{path}: {name} does not belong on rank {rank}")
                elif number in self.times:
                    self.wrong.append(f"{path}: {self.name(number)} runs twice")
                else:
                    self.times[number] = (step.start_s, step.end_s)
                    self.numbers[-1].append(number)

    def name(self, number: int) -> str:
        """Text of a task."""
        tasks, g = self.problem.tasks, self.problem.tasks.group[number]
        model, copy = self.replicas[tasks.replica[g]]
        way = "F" if tasks.forward[g] else "B"
        return f"{way} of micro-batch {tasks.index[number]}, model {model} copy {copy} stage {tasks.stage[g]}"

    def task_faults(self) -> Iterator[str]:
        """Passes that are missing, repeated, or on a wrong rank."""
        if len(self.numbers) != self.problem.ranks:
            yield f"order: {len(self.numbers)} ranks, the request has {self.problem.ranks}"
            return
        yield from self.wrong
        if self.request.executable and FusedPlan.sequence(self.claim) is None:  # type: ignore[arg-type]
            yield "order: the request is executable, and ranks mix the passes of models or run them in other orders"
        for rank, numbers in enumerate(self.problem.tasks.by_rank()):
            missing = {*numbers.tolist()} - {*self.numbers[rank]}
            if missing:
                yield f"order.{rank}: {len(missing)} passes are missing, the first is {self.name(min(missing))}"

    def time_faults(self) -> Iterator[str]:
        """Wrong times; a makespan that is shorter than that of the simulated order."""
        tasks, makespan_s = self.problem.tasks, self.claim.makespan_s
        duration_s, lag_s, earlier = tasks.duration[tasks.group], tasks.lag[tasks.group], tasks.earlier()

        def waits_for(number: int) -> list[tuple[int, float]]:
            return [(int(earlier[number]), float(lag_s[number]))] if earlier[number] >= 0 else []

        yield from time_faults(
            self.numbers, self.times, makespan_s, lambda n: float(duration_s[n]), waits_for, self.name
        )
        try:
            simulated_s = float(run_orders(self.problem, self.numbers)[1].max())
        except FieldError as error:
            yield error.message
            return
        if simulated_s > makespan_s + TOLERANCE * makespan_s:
            yield f"makespan_s: {makespan_s:.9g}, the simulated order takes {simulated_s:.9g} s"


def _figure_faults(problem: FusedProblem, claim: _Claim, held: Sequence[float]) -> Iterator[str]:
    """Wrong memory, bound and gap; ``held``: peak memory of each rank."""
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


def _interval_faults(request: FusedRequest, claim: _Claim, orders: Sequence[Sequence[int]]) -> Iterator[str]:
    """An interval that is not that of the order with all predictions at their bounds."""
    predicted = any(cost.parts for pair in request.costs() for cost in pair)
    if "interval" not in claim.model_fields_set:
        return
    if (claim.interval is not None) != predicted:
        yield "interval: missing, and costs are predicted" if predicted else "interval: given, but no cost is predicted"
        return
    if claim.interval is None:
        return
    ends: tuple[tuple[Figure, float], ...] = (("lower_s", claim.interval.lower_s), ("upper_s", claim.interval.upper_s))
    for name, seconds in ends:
        expected_s = float(run_orders(request.problem(name), orders)[1].max())
        if abs(seconds - expected_s) > TOLERANCE * expected_s:
            yield f"interval.{name}: {seconds:.9g}, the order takes {expected_s:.9g} with these costs"
