"""Request and plan of precision planning."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, computed_field

from cdmpp.predict.prediction import Prediction
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.fields import MAX_BYTES
from cdmpp.predict.requests.pricing import collect, fill
from cdmpp.predict.requests.request import (
    Budget,
    Closed,
    DeviceForm,
    MaxSteps,
    Name,
    Plan,
    PositiveSeconds,
    PriceRequest,
    Request,
    Row,
    Seconds,
    Seed,
    WholeNumber,
    Work,
)
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp.programs.spec import DType
from cdmpp.simulate.replay.forms import LinkForm
from cdmpp.utils.units import format_latency, format_si

MAX_ELEMENTS = 10**13
#: Mantissa bits of each floating type for the indicator (:mod:`cdmpp.plan.precision.network`).
MANTISSA = {"float16": 9, "bfloat16": 6}
#: Operators that the table in the terminal lists.
_MAX_ROWS = 40
#: A lower bound below this share of the objective counts as zero.
_SMALLEST_BOUND = 1e-12
Elements = Annotated[int, Field(ge=0, le=MAX_ELEMENTS), WholeNumber]
Error = Annotated[float, Field(ge=0, le=1e30)]
CastSource = Literal["given", "measured on a CPU", "measured on a CPU, scaled by memory bandwidth"]
BrokenLimit = Literal["memory", "time", "memory and time"]


class CastForm(Closed):
    """Seconds of a cast: overhead_s + s_per_element x elements."""

    source: DType
    target: DType
    s_per_element: float = Field(ge=0, le=1.0)
    overhead_s: Seconds = 0.0


class DeviceLine(Closed):
    """Equal workers of one data-parallel job."""

    name: Name
    device: DeviceForm | None = Field(None, description="Prices the operators' programs; scales the measured casts.")
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None
    workers: Annotated[int, Field(ge=1, le=100_000), WholeNumber] = 1
    dtypes: list[DType] = Field(min_length=1, max_length=4, description="Types that it computes in.")
    memory_bytes: Annotated[float, Field(gt=0, le=MAX_BYTES)] | None = Field(
        None, description="Memory limit; null: that of `device`, where it is published."
    )
    base_bytes: float = Field(0.0, ge=0, le=MAX_BYTES, description="Taken by the context, the workspace and the like.")
    update_s: Seconds = Field(0.0, description="Optimizer step, after all gradients.")
    casts: list[CastForm] | None = Field(
        None,
        max_length=12,
        description="Cost for each pair of types that meets; null: as measured on a CPU, scaled to the memory "
        "bandwidth of `device` where it is given.",
    )


class GivenCost(Closed):
    """Seconds of one operator in one type; on one device of the request, or on all (null)."""

    device: Name | None = None
    dtype: DType
    forward_s: Seconds
    backward_s: Seconds


class TensorForm(Closed):
    """A tensor's number of elements, squared Euclidean norm and largest magnitude."""

    elements: Elements
    norm2: float = Field(ge=0, le=1e30)
    max_abs: float = Field(ge=0, le=1e15)

    def step(self, dtype: str) -> float:
        """Distance of neighbouring values of a type near the tensor's typical magnitude."""
        if dtype == "float32" or not self.elements or self.norm2 == 0.0:
            return 0.0
        if dtype == "int8":
            return self.max_abs / 127.0
        _, exponent = math.frexp(math.sqrt(self.norm2 / self.elements))
        return math.ldexp(1.0, exponent - MANTISSA[dtype])


class StatisticsForm(Closed):
    """Tensors of an operator in a training step; gradient: of its output. No weight: an activation."""

    input: TensorForm
    weight: TensorForm | None = None
    gradient: TensorForm | None = None


class SensitivityForm(Closed):
    """Error that each type adds, in any unit that can be summed; float32 adds none by default."""

    int8: Error | None = None
    float16: Error | None = None
    bfloat16: Error | None = None
    float32: Error = 0.0


class OperatorForm(Closed):
    """An operator of the forward graph.

    Its cost is given (``costs``), or predicted from ``forward`` with ``backward`` or ``backward_factor``; its
    sensitivity is given, or computed from ``statistics``.
    """

    id: Name
    deps: list[Name] = Field(default_factory=list, description="Operators whose output it reads.")
    output_elements: Elements
    weight_elements: Elements = 0
    kept_elements: Elements = Field(
        0, description="Kept for the backward pass besides the inputs from other operators."
    )
    dtypes: list[DType] | None = Field(None, min_length=1, max_length=4, description="null: all types of the device.")
    costs: list[GivenCost] | None = Field(None, min_length=1, max_length=32)
    forward: list[Work] | None = Field(
        None, description="Operator objects; their dtype is replaced by each type in turn."
    )
    backward: list[Work] | None = None
    backward_factor: float | None = Field(
        None, ge=0, le=100, description="Backward seconds over forward seconds, instead."
    )
    sensitivity: SensitivityForm | None = None
    statistics: StatisticsForm | None = None


class BucketForm(Closed):
    """Gradients that are exchanged together."""

    operators: list[Name] = Field(min_length=1)
    duration_s: Seconds | None = Field(
        None, description="null: a ring all-reduce of their float32 gradients over the link."
    )


class ExchangeForm(Closed):
    """Exchange of gradients. They stay float32, whatever the operators compute in."""

    link: LinkForm | None = None
    bucket_bytes: float = Field(
        26_214_400.0, gt=0, le=MAX_BYTES, description="Where no buckets are given: filled in backward order."
    )
    buckets: list[BucketForm] | None = Field(None, min_length=1)


class DevicePlan(Row):
    """One device's part of the plan."""

    name: str
    dtypes: dict[str, DType] = Field(description="By operator, in the order of computation.")
    iteration_s: float = Field(description="As far as this device decides it.")
    compute_s: float
    casts_s: float = Field(description="Part of compute_s: casts between neighbours.")
    memory_bytes: float
    memory_limit_bytes: float | None
    sensitivity: float = Field(description="Of one worker.")
    lower_bound: float
    proven: bool = Field(description="No plan within the limits has a smaller sensitivity.")
    cast_source: CastSource


class RejectedRaise(Row):
    """The next level of an operator, which the plan does not use, and the limit that it breaks."""

    device: str
    operator: str
    source: DType
    target: DType
    reduction: float = Field(description="Of the error of one worker.")
    breaks: BrokenLimit
    iteration_s: float
    memory_bytes: float


class BaselinePlan(Row):
    """A simpler plan on the same costs."""

    name: str
    sensitivity: float
    iteration_s: float
    memory_bytes: dict[str, float] = Field(description="By device.")
    feasible: bool = Field(description="Within all limits; only then it is among `baselines`.")


class PrecisionPlan(Plan):
    """Baselines, bound and gap are of ``sensitivity``, the sum over operators and workers."""

    objective_field = "sensitivity"
    bound_field = "lower_bound"

    sensitivity: float
    lower_bound: float
    iteration_s: float
    iteration_lower_s: float = Field(description="With all costs at their lower bounds.")
    iteration_upper_s: float
    iteration_limit_s: float
    limit_of: Literal["request", "start"] = Field(description="start: time of the fastest plan of one type that fits.")
    devices: list[DevicePlan]
    rejected: list[RejectedRaise] = Field(description="Largest reduction first.")
    baseline_plans: list[BaselinePlan]

    @computed_field(  # type: ignore[prop-decorator]
        description="sensitivity over lower_bound, less one. Where the bound is 0 (less than 1e-12 of the "
        "sensitivity): sensitivity over that of the lowest precision."
    )
    @property
    def gap(self) -> float:
        """Distance of the sensitivity from its lower bound."""
        if self.sensitivity <= self.lower_bound:
            return 0.0
        if self.lower_bound > _SMALLEST_BOUND * self.sensitivity:
            return self.sensitivity / self.lower_bound - 1.0
        lowest = next(plan.sensitivity for plan in self.baseline_plans if plan.name == "all_lowest")
        return self.sensitivity / max(lowest, self.sensitivity)

    @property
    def interval_figure(self) -> str:
        """The iteration: the sensitivity does not depend on costs."""
        return "iteration_s"

    @property
    def ends(self) -> tuple[float, float]:
        """The iteration at the bounds of the costs."""
        return self.iteration_lower_s, self.iteration_upper_s

    def headline(self) -> str:
        """Sensitivity and iteration."""
        return (
            f"sensitivity {self.sensitivity:.6g} with an iteration of {format_latency(self.iteration_s)} "
            f"(limit {format_latency(self.iteration_limit_s)})"
        )

    def tables(self) -> list[Table]:
        """Types by operator and device, figures of the devices, and the baselines."""
        names = list(self.devices[0].dtypes)
        types = [(name, *(device.dtypes[name] for device in self.devices)) for name in names[:_MAX_ROWS]]
        out = [Table(("operator", *(device.name for device in self.devices)), types)]
        if len(names) > _MAX_ROWS:
            out.append(Table.lines(f"... and {len(names) - _MAX_ROWS} more (--json lists all)"))
        out.append(Table.lines(*map(_device_line, self.devices)))
        columns: dict[str, Callable[[BaselinePlan], str]] = {
            "baseline": lambda plan: plan.name,
            "sensitivity": lambda plan: f"{plan.sensitivity:.6g}",
            "iteration": lambda plan: format_latency(plan.iteration_s),
            "": lambda plan: "" if plan.feasible else "breaks a limit",
        }
        return [*out, Table.of(self.baseline_plans, columns, (1, 2)), Table.lines(*self.explanation[1:])]


def _device_line(device: DevicePlan) -> str:
    limit = device.memory_limit_bytes
    of = "" if limit is None else f" of {format_si(limit, 'B')}"
    return (
        f"{device.name}: {format_latency(device.iteration_s)} per iteration, "
        f"{format_si(device.memory_bytes, 'B')}{of}, casts {device.cast_source}"
    )


class PrecisionRequest(Request[PrecisionPlan]):
    """The type of each operator, on unlike devices that train together.

    The sum of the sensitivities is minimised within each device's memory and the iteration's time.
    """

    devices: list[DeviceLine] = Field(min_length=1)
    operators: list[OperatorForm] = Field(min_length=1)
    communication: ExchangeForm | None = Field(None, description="Exchange of gradients; null: takes no time.")
    iteration_limit_s: PositiveSeconds | None = Field(
        None, description="null: time of the fastest plan of one type that fits into memory."
    )
    optimizer_bytes_per_weight: float = Field(8.0, ge=0, le=1000)
    gamma: float = Field(1.0, ge=0, le=1e12, description="Weight of forward errors in the indicator.")
    seed: Seed = 0
    budget_s: Budget = 1.0
    max_steps: MaxSteps = None

    _prices: tuple[Prediction, ...] = PrivateAttr(())

    @property
    def prices(self) -> tuple[Prediction, ...]:
        """Prices of :meth:`price_requests`, in its order; empty before :meth:`with_prices`."""
        return self._prices

    def sizes(self) -> dict[str, int]:
        """Operators, devices, operators times devices, dependencies, and programs to price at most."""
        dtypes = sum(len(device.dtypes) for device in self.devices)
        works = sum(len(operator.forward or ()) + len(operator.backward or ()) for operator in self.operators)
        return {
            "operators": len(self.operators),
            "devices": len(self.devices),
            "pairs": len(self.operators) * len(self.devices),
            "deps": sum(len(operator.deps) for operator in self.operators),
            "programs": works * dtypes + len(collect(self)),
        }

    def price_requests(self) -> list[PriceRequest]:
        """Programs of the operators whose costs are not given, in each type of each device."""
        requests: list[PriceRequest] = self.sibling("tables").price_requests(self)
        return requests + collect(self)

    def with_prices(self, prices: Sequence[Prediction]) -> Self:
        """A copy that holds the prices."""
        links = len(collect(self))
        filled = fill(self, prices[len(prices) - links :])
        if filled is self:
            filled = self.model_copy()
        filled._prices = tuple(prices[: len(prices) - links])
        return filled
