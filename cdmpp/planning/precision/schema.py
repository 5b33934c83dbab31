"""The request and the answer of a precision plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.request import Budget, Explained, MaxSteps, PositiveSeconds, PriceRequest, Seed
from cdmpp.compose.request import OldRequest as Request
from cdmpp.planning.precision.build import CastSource, Job, Tables, asked, read_job, tables
from cdmpp.planning.precision.explain import Raise, explain, rejected_raises
from cdmpp.planning.precision.forms import MAX_DEVICES, MAX_OPERATORS, DeviceLine, ExchangeForm, OperatorForm
from cdmpp.planning.precision.plan import Plan, baselines, make_plan, total
from cdmpp.planning.precision.pricing import Pricing
from cdmpp.prediction import Prediction
from cdmpp.programs.operators import DType


class PrecisionRequest(Request):
    """Which operator computes in which type, on unlike devices that train together.

    The sum of the sensitivities is made small within each device's memory and the iteration's time.
    """

    devices: Annotated[list[DeviceLine], Field(min_length=1, max_length=MAX_DEVICES)]
    operators: Annotated[list[OperatorForm], Field(min_length=1, max_length=MAX_OPERATORS)]
    communication: Annotated[ExchangeForm | None, Field(description="Exchange of gradients; null: takes no time.")] = (
        None
    )
    iteration_limit_s: Annotated[
        PositiveSeconds | None, Field(description="null: what the lowest precision that fits in the memory takes.")
    ] = None
    optimizer_bytes_per_weight: Annotated[float, Field(ge=0, le=1000)] = 8.0
    gamma: Annotated[float, Field(ge=0, le=1e12, description="Weight of forward errors in the indicator.")] = 1.0
    seed: Seed = 0
    budget_s: Budget = 1.0
    max_steps: MaxSteps = None

    answer_model: ClassVar[type[BaseModel]]

    def job(self) -> Job:
        """The operators in order, checked."""
        return read_job(self.devices, self.operators, self.gamma, self.optimizer_bytes_per_weight)

    def price_requests(self) -> list[PriceRequest]:
        """Programs of the operators whose costs are not given."""
        return asked(self.job())

    def solve(self, prices: Sequence[Prediction], watch: SearchControl) -> dict[str, Any]:
        """See :class:`PrecisionAnswer`."""
        job = self.job()
        made = tables(job, self.communication, prices)

        def hear(plan: Plan) -> None:
            # The search goes on with these objects; the answer is made later.
            so_far = replace(plan, found=[replace(found) for found in plan.found])
            watch.report(
                best=total([one.costs for one in made], [found.objective for found in so_far.found]),
                bound=total([one.costs for one in made], [found.bound for found in so_far.found]),
                answer=lambda: _answer(job, made, so_far),
            )

        plan = make_plan(
            [one.costs for one in made],
            self.iteration_limit_s,
            watch,
            max_steps=self.max_steps,
            seed=self.seed,
            report=hear,
        )
        return _answer(job, made, plan)


class DevicePlan(BaseModel):
    """One device's part of the plan."""

    model_config = ConfigDict(extra="forbid")

    name: str
    dtypes: Annotated[dict[str, DType], Field(description="By operator, in the order of computation.")]
    iteration_s: Annotated[float, Field(description="As far as this device decides it.")]
    compute_s: float
    casts_s: Annotated[float, Field(description="Part of compute_s: casts between neighbours.")]
    memory_bytes: float
    memory_limit_bytes: float | None
    sensitivity: Annotated[float, Field(description="Of one worker.")]
    lower_bound: float
    proven: Annotated[bool, Field(description="Nothing better exists within the limits.")]
    cast_source: CastSource


class RejectedRaise(BaseModel):
    """The next level of an operator, which the plan does not take, and the limit that it breaks."""

    model_config = ConfigDict(extra="forbid")

    device: str
    operator: str
    source: DType
    target: DType
    reduction: Annotated[float, Field(description="Of the error of one worker.")]
    breaks: Literal["memory", "time", "memory and time"]
    iteration_s: float
    memory_bytes: float


class BaselinePlan(BaseModel):
    """A simpler plan on the same costs."""

    model_config = ConfigDict(extra="forbid")

    name: str
    sensitivity: float
    iteration_s: float
    memory_bytes: Annotated[dict[str, float], Field(description="By device.")]
    feasible: Annotated[bool, Field(description="Keeps all limits; only then it is among `baselines`.")]


class PrecisionAnswer(Explained):
    """Baselines, bound and gap are of ``sensitivity``, the sum over operators and workers.

    Where the bound is 0 (less than 1e-12 of the sum), gap is the sum over that of the lowest precision.
    """

    sensitivity: float
    lower_bound: float
    iteration_s: float
    iteration_lower_s: Annotated[float, Field(description="With all costs at their lower bounds.")]
    iteration_upper_s: float
    iteration_limit_s: float
    limit_of: Annotated[
        Literal["request", "start"], Field(description="start: time of the lowest precision that fits.")
    ]
    devices: list[DevicePlan]
    rejected: Annotated[list[RejectedRaise], Field(description="Largest reduction first.")]
    baseline_plans: list[BaselinePlan]


PrecisionRequest.answer_model = PrecisionAnswer
_LEAST_BOUND = 1e-12


def _answer(job: Job, made: Sequence[Tables], plan: Plan) -> dict[str, Any]:
    devices = [one.costs for one in made]
    levels = [list(found.levels) for found in plan.found]
    bounds = [found.bound for found in plan.found]
    proven = [found.proven for found in plan.found]
    priced = [Pricing(costs, at) for costs, at in zip(devices, levels, strict=True)]
    sensitivity = total(devices, [one.sensitivity for one in priced])
    bound = min(total(devices, bounds), sensitivity)
    lower = [Pricing(one.lower, at).iteration_s for one, at in zip(made, levels, strict=True)]
    upper = [Pricing(one.upper, at).iteration_s for one, at in zip(made, levels, strict=True)]
    simpler = baselines(devices, plan)
    rejected: list[Raise] = [
        one
        for d, (costs, pricing) in enumerate(zip(devices, priced, strict=True))
        for one in rejected_raises(d, costs, pricing, plan.limit_s)
    ]
    rejected.sort(key=lambda one: (-one.reduction, one.device, one.operator))
    names = [one.id for one in job.operators]
    return {
        "sensitivity": sensitivity,
        "lower_bound": bound,
        "gap": _gap(sensitivity, bound, simpler[0].sensitivity),
        "iteration_s": max(one.iteration_s for one in priced),
        "iteration_lower_s": max(lower),
        "iteration_upper_s": max(upper),
        "iteration_limit_s": plan.limit_s,
        "limit_of": plan.limit_of,
        "devices": [
            {
                "name": costs.name,
                "dtypes": {name: costs.dtypes[i][at[i]] for i, name in enumerate(names)},
                "iteration_s": pricing.iteration_s,
                "compute_s": float(pricing.slots_s.sum()),
                "casts_s": pricing.casts_s,
                "memory_bytes": pricing.memory_bytes,
                "memory_limit_bytes": job.devices[d].memory_bytes,
                "sensitivity": pricing.sensitivity,
                "lower_bound": bounds[d],
                "proven": proven[d],
                "cast_source": made[d].cast_source,
            }
            for d, (costs, pricing, at) in enumerate(zip(devices, priced, levels, strict=True))
        ],
        "rejected": [
            {
                "device": devices[one.device].name,
                "operator": names[one.operator],
                "source": one.source,
                "target": one.target,
                "reduction": one.reduction,
                "breaks": one.breaks,
                "iteration_s": one.iteration_s,
                "memory_bytes": one.memory_bytes,
            }
            for one in rejected
        ],
        "baselines": {one.name: one.sensitivity for one in simpler if one.feasible},
        "baseline_plans": [
            {
                "name": one.name,
                "sensitivity": one.sensitivity,
                "iteration_s": one.iteration_s,
                "memory_bytes": {costs.name: size for costs, size in zip(devices, one.memory_bytes, strict=True)},
                "feasible": one.feasible,
            }
            for one in simpler
        ],
        "explanation": explain(job, made, priced, plan.limit_s, plan.limit_of, rejected),
    }


def _gap(objective: float, bound: float, worst: float) -> float:
    if objective <= bound:
        return 0.0
    # A bound of next to nothing makes no quotient.
    if bound > _LEAST_BOUND * objective:
        return objective / bound - 1.0
    return objective / max(worst, objective)
