"""The parts of a precision request, as JSON gives them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cdmpp.compose.request import Closed, DeviceForm, Name, Seconds, WholeNumber, Work
from cdmpp.planning.precision.indicator import OperatorStatistics, TensorStatistics
from cdmpp.programs.operators import DType
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp.replay.forms import LinkForm

MAX_OPERATORS, MAX_DEVICES, MAX_DEPS, MAX_WORKS, MAX_BUCKETS = 1000, 8, 64, 16, 256
#: Of all operators together; networks have one or two for each.
MAX_EDGES = 3000
#: Operators times devices: what one request may take is bounded.
MAX_PAIRS = 2000
MAX_ELEMENTS, MAX_BYTES = 10**13, 1e18
Elements = Annotated[int, Field(ge=0, le=MAX_ELEMENTS), WholeNumber]
Error = Annotated[float, Field(ge=0, le=1e30)]


class CastForm(Closed):
    """Seconds of a cast: overhead_s + s_per_element x elements."""

    source: DType
    target: DType
    s_per_element: Annotated[float, Field(ge=0, le=1.0)]
    overhead_s: Seconds = 0.0


class DeviceLine(Closed):
    """Equal workers of one data-parallel job."""

    name: Name
    device: Annotated[
        DeviceForm | None, Field(description="Prices the operators' programs; scales the measured casts.")
    ] = None
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None
    workers: Annotated[int, Field(ge=1, le=100_000), WholeNumber] = 1
    dtypes: Annotated[list[DType], Field(min_length=1, max_length=4, description="What it computes in.")]
    memory_bytes: Annotated[float, Field(gt=0, le=MAX_BYTES)] | None = None
    base_bytes: Annotated[float, Field(ge=0, le=MAX_BYTES, description="Taken by context, workspace and the like.")] = (
        0.0
    )
    update_s: Annotated[Seconds, Field(description="Optimizer step, after all gradients.")] = 0.0
    casts: Annotated[
        list[CastForm] | None,
        Field(
            max_length=12,
            description="Each pair of types that meets; null: as measured on a CPU, carried to `device` by "
            "its memory bandwidth where there is one.",
        ),
    ] = None


class GivenCost(Closed):
    """Seconds of one operator in one type; on one device of the request, or on all (null)."""

    device: Name | None = None
    dtype: DType
    forward_s: Seconds
    backward_s: Seconds


class TensorForm(Closed):
    """A tensor's number of elements, squared Euclidean norm and largest magnitude."""

    elements: Elements
    norm2: Annotated[float, Field(ge=0, le=1e30)]
    max_abs: Annotated[float, Field(ge=0, le=1e15)]

    def read(self) -> TensorStatistics:
        """For the indicator."""
        return TensorStatistics(float(self.elements), self.norm2, self.max_abs)


class StatisticsForm(Closed):
    """Tensors of an operator in a training step; gradient: of its output. No weight: an activation."""

    input: TensorForm
    weight: TensorForm | None = None
    gradient: TensorForm | None = None

    def read(self) -> OperatorStatistics:
        """For the indicator."""
        return OperatorStatistics(
            self.input.read(),
            self.weight.read() if self.weight else None,
            self.gradient.read() if self.gradient else None,
        )


class SensitivityForm(Closed):
    """Error that each type adds, in any unit that can be summed; float32 adds none unless said."""

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
    deps: Annotated[
        list[Name], Field(default_factory=list, max_length=MAX_DEPS, description="Operators whose output it reads.")
    ]
    output_elements: Elements
    weight_elements: Elements = 0
    kept_elements: Annotated[
        Elements, Field(description="Kept for the backward pass besides the inputs from other operators.")
    ] = 0
    dtypes: Annotated[
        list[DType] | None, Field(min_length=1, max_length=4, description="null: what the device has.")
    ] = None
    costs: Annotated[list[GivenCost] | None, Field(min_length=1, max_length=32)] = None
    forward: Annotated[
        list[Work] | None,
        Field(max_length=MAX_WORKS, description="Operator objects; their dtype is replaced by each in turn."),
    ] = None
    backward: Annotated[list[Work] | None, Field(max_length=MAX_WORKS)] = None
    backward_factor: Annotated[
        float | None, Field(ge=0, le=100, description="Backward seconds over forward seconds, instead.")
    ] = None
    sensitivity: SensitivityForm | None = None
    statistics: StatisticsForm | None = None


class BucketForm(Closed):
    """Gradients that are exchanged together."""

    operators: Annotated[list[Name], Field(min_length=1, max_length=MAX_OPERATORS)]
    duration_s: Annotated[
        Seconds | None, Field(description="null: a ring all-reduce of their float32 gradients over the link.")
    ] = None


class ExchangeForm(Closed):
    """How gradients are exchanged. They stay float32, whatever the operators compute in."""

    link: LinkForm | None = None
    bucket_bytes: Annotated[
        float, Field(gt=0, le=MAX_BYTES, description="Where no buckets are given: filled in backward order.")
    ] = 26_214_400.0
    buckets: Annotated[list[BucketForm] | None, Field(min_length=1, max_length=MAX_BUCKETS)] = None
