"""What travels to and from ``/adapt``: measurements of one device, and what a model gained by them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.adaptation.samplers import Sampler
from cdmpp.compose.request import WholeNumber
from cdmpp.evaluation.tables import BELIEVABLE_S
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp_server.predict.schema import Device, RegisteredProgram
from cdmpp_server.schema import with_max_items

_CLOSED = ConfigDict(extra="forbid", strict=True)


class Record(BaseModel):
    """A program and how long it took on the device."""

    model_config = _CLOSED

    program: RegisteredProgram
    latency_s: Annotated[
        float, Field(ge=BELIEVABLE_S[0], le=BELIEVABLE_S[1], allow_inf_nan=False, description="Seconds.")
    ]
    backend: Backend | None = None
    protocol: Annotated[Protocol, Field(description="As in an item of /predict.")] = DEFAULT_PROTOCOL
    framework: Framework | None = None


class AdaptRequest(BaseModel):
    """Measurements of one device."""

    model_config = _CLOSED

    device: Device
    records: Annotated[list[Record], Field(min_length=1, max_length=10_000)]
    k: Annotated[
        Annotated[int, Field(ge=1, le=100_000), WholeNumber] | None,
        Field(
            description="Use so many records, chosen without their latencies, and report the error on the "
            "others. Without it all are used."
        ),
    ] = None
    sampler: Annotated[Sampler, Field(description="How k records are chosen.")] = "kmeans"
    seed: Annotated[int, Field(ge=0, le=2**31 - 1), WholeNumber] = 0


def adapt_request_model(max_items: int) -> type[AdaptRequest]:
    """:class:`AdaptRequest` with another limit on the number of records."""
    return with_max_items(AdaptRequest, "records", max_items)


class CrossValidated(BaseModel):
    """Mean relative error on the used measurements, each of them left out once; fractions."""

    model_config = ConfigDict(extra="forbid")

    before: float
    after: float


class Figures(BaseModel):
    """Errors on the records that were not used."""

    model_config = ConfigDict(extra="forbid")

    overall: Annotated[dict[str, Any], Field(description="As `cdmpp eval --json` prints them; fractions.")]


class NamedWarning(BaseModel):
    """Something that the result should not be read without."""

    model_config = ConfigDict(extra="forbid")

    code: str
    message: str


class AdaptResponse(BaseModel):
    """What was gained, and the name under which /predict takes the adapted model."""

    model_config = ConfigDict(extra="forbid")

    adapted_model: Annotated[str, Field(description="Pass it as `model` to /predict.")]
    base_model_id: str
    device: str
    k: Annotated[int, Field(ge=1, description="Records used.")]
    selected: Annotated[list[int] | None, Field(description="With k: positions of the records that were chosen.")]
    programs: Annotated[int, Field(ge=1, description="Distinct queries among them.")]
    families: dict[str, int]
    protocols: dict[str, int]
    cross_validated: CrossValidated
    before: Annotated[Figures | None, Field(description="The base on the records that were not chosen.")]
    after: Annotated[Figures | None, Field(description="The adapted model on the same records.")]
    tuned: Annotated[dict[str, Any] | None, Field(description="Whether fine-tuning was tried, and what it gave.")]
    weight: Annotated[int, Field(ge=0, le=1, description="0: nothing was gained, the base's answers are kept.")]
    width: Annotated[float, Field(gt=0, description="Factor on the intervals.")]
    sampler: str | None
    seed: int
    unsupported: Annotated[dict[str, int], Field(description="Records that were not used, by reason.")]
    warnings: list[NamedWarning]
    seconds: dict[str, float]
