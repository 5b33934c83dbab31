"""Request and response models of ``POST /adapt``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.predict.requests.request import WholeNumber
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp.train.adaptation.samplers import Sampler
from cdmpp.train.evaluation.tables import BELIEVABLE_S
from cdmpp_server.fields import Device, RegisteredProgram
from cdmpp_server.schema import with_max_items

_CLOSED = ConfigDict(extra="forbid", strict=True)


class Record(BaseModel):
    """A program and its measured latency on the device."""

    model_config = _CLOSED

    program: RegisteredProgram
    latency_s: Annotated[
        float,
        Field(ge=BELIEVABLE_S[0], le=BELIEVABLE_S[1], allow_inf_nan=False, description="Measured latency in seconds."),
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
            description="Number of records to use. They are chosen without their latencies, and the errors are "
            "reported for the remaining records. Default: use all records."
        ),
    ] = None
    sampler: Annotated[Sampler, Field(description="Method that chooses the k records.")] = "kmeans"
    seed: Annotated[int, Field(ge=0, le=2**31 - 1), WholeNumber] = 0


def adapt_request_model(max_items: int) -> type[AdaptRequest]:
    """:class:`AdaptRequest` with another limit on the number of records."""
    return with_max_items(AdaptRequest, "records", max_items)


class CrossValidated(BaseModel):
    """Leave-one-out mean relative error on the used measurements, as fractions."""

    model_config = ConfigDict(extra="forbid")

    before: float
    after: float


class Figures(BaseModel):
    """Errors on the remaining records."""

    model_config = ConfigDict(extra="forbid")

    overall: Annotated[dict[str, Any], Field(description="As `cdmpp eval --json` prints them; fractions.")]


class NamedWarning(BaseModel):
    """A warning about the result."""

    model_config = ConfigDict(extra="forbid")

    code: str
    message: str


class AdaptResponse(BaseModel):
    """Errors before and after the adaptation, and the name of the adapted model for /predict."""

    model_config = ConfigDict(extra="forbid")

    adapted_model: Annotated[str, Field(description="Pass it as `model` to /predict.")]
    base_model_id: str
    device: str
    k: Annotated[int, Field(ge=1, description="Number of used records.")]
    selected: Annotated[list[int] | None, Field(description="With k: indices of the chosen records.")]
    programs: Annotated[int, Field(ge=1, description="Number of distinct queries among the used records.")]
    families: dict[str, int]
    protocols: dict[str, int]
    cross_validated: CrossValidated
    before: Annotated[Figures | None, Field(description="Errors of the base model on the remaining records.")]
    after: Annotated[Figures | None, Field(description="Errors of the adapted model on the same records.")]
    tuned: Annotated[dict[str, Any] | None, Field(description="Always null: no weight of the network changes.")]
    weight: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of the correction that reduced the error on left-out measurements. 0: none did, and "
            "the adapted model predicts as the base model.",
        ),
    ]
    width: Annotated[float, Field(gt=0, description="Factor on the width of the intervals.")]
    sampler: str | None
    seed: int
    unsupported: Annotated[dict[str, int], Field(description="Number of records that could not be used, by reason.")]
    warnings: list[NamedWarning]
    seconds: dict[str, float]
