"""Request and plan of gradient compression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.pricing import CostField
from cdmpp.predict.requests.request import (
    Budget,
    Closed,
    MaxSteps,
    Name,
    Plan,
    PositiveBytes,
    Request,
    Row,
    Seconds,
    Seed,
    WholeNumber,
)
from cdmpp.simulate.replay.data_parallel import Place
from cdmpp.simulate.replay.forms import LinkForm
from cdmpp.utils.units import format_latency

Stream = Literal["gpu", "cpu", "network"]
Stage = Literal["backward", "compress", "exchange", "decompress"]
#: Shortest bound, as a share of the iteration, that the gap is computed with.
_LEAST_BOUND = 1e-12


def _given(name: str) -> dict[str, Any]:
    """JSON schema of an object with this field."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class WorkForm(Closed):
    """Seconds of compressing and decompressing one tensor, by its uncompressed bytes."""

    compress_s_per_byte: float = Field(ge=0, le=1.0)
    decompress_s_per_byte: float = Field(ge=0, le=1.0)
    overhead_s: Seconds = Field(0.0, description="Added to each of the two.")


class CompressorForm(Closed):
    """A compressor: its ratio, how compressed gradients are exchanged, and its cost on one processor or both."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_given("gpu"), _given("cpu")]})

    name: Name
    ratio: float = Field(gt=0, le=1, description="Compressed bytes over bytes.")
    collective: Literal["all_reduce", "all_gather"] = Field(
        "all_gather",
        description="all_gather: for gradients that cannot be summed in compressed form; every worker then "
        "decompresses all of them.",
    )
    gpu: WorkForm | None = None
    cpu: WorkForm | None = None

    @model_validator(mode="after")
    def _has_processor(self) -> Self:
        if self.gpu is None and self.cpu is None:
            # Not a value_error, which stands for faults that no schema describes.
            raise PydanticCustomError("processor", "neither gpu nor cpu: give its cost on one of them")
        return self


class GradientForm(Closed):
    """A gradient, and the backward pass between the one before and this one."""

    name: Name
    bytes: PositiveBytes
    backward: CostField


class TensorPlan(Row):
    """Decision for one gradient."""

    name: str
    compressor: str | None
    place: Place
    network_s: float
    hidden: bool = Field(description="Its exchange does not lengthen the iteration.")


class Span(Row):
    """One bar of the timeline."""

    tensor: str
    stage: Stage
    stream: Stream
    start_s: float
    end_s: float


class CompressPlan(Plan):
    """Baselines, bound and gap refer to ``iteration_s``: from the first backward pass to the last gradient."""

    objective_field = "iteration_s"

    iteration_s: float
    lower_bound_s: float
    proven: bool = Field(description="No strategy is shorter.")
    exposed_comm_s: float = Field(description="Exchanges while nothing computes.")
    tensors: list[TensorPlan]
    busy_s: dict[Stream, float] = Field(description="By processor.")
    timeline: list[Span]

    @property
    def gap(self) -> float:
        """Iteration over its lower bound, less one; large where the bound is almost 0."""
        if self.iteration_s <= self.lower_bound_s:
            return 0.0
        if self.lower_bound_s <= _LEAST_BOUND * self.iteration_s:
            return 1.0 / _LEAST_BOUND
        return self.iteration_s / self.lower_bound_s - 1

    def tables(self) -> list[Table]:
        """Each tensor, the baselines."""
        columns: dict[str, Callable[[TensorPlan], str]] = {
            "tensor": lambda row: row.name,
            "exchange": lambda row: format_latency(row.network_s),
            "compression": lambda row: f"{row.compressor} on the {row.place}" if row.compressor else "not compressed",
            "": lambda row: "hidden" if row.hidden else "",
        }
        return [Table.of(self.tensors, columns, right=(1,)), self.baseline_table(), Table.lines(*self.explanation[1:])]


class CompressRequest(Request[CompressPlan]):
    """Which gradients to compress, with which compressor and on which processor, for the shortest iteration."""

    tensors: list[GradientForm] = Field(min_length=1, description="In the order of the backward pass.")
    compressors: list[CompressorForm] = Field(min_length=1)
    workers: Annotated[int, Field(ge=2, le=100_000), WholeNumber]
    link: LinkForm
    seed: Seed = 0
    budget_s: Budget = 1.0
    max_steps: MaxSteps = None

    def unchecked_memory(self) -> list[str]:
        """Tensors have the bytes of their gradients only."""
        return ["the request has gradients, but no weights, optimizer states and activations"]

    def sizes(self) -> dict[str, int]:
        """Gradients and compressors."""
        return {"tensors": len(self.tensors), "compressors": len(self.compressors)}
