"""Request and response models of ``/observe``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp.train.evaluation.tables import BELIEVABLE_S
from cdmpp_server.fields import Device, Program
from cdmpp_server.observe.ids import MAX_ID
from cdmpp_server.schema import with_max_items

_CLOSED = ConfigDict(extra="forbid", strict=True)
_MEASURED = Field(ge=BELIEVABLE_S[0], le=BELIEVABLE_S[1], allow_inf_nan=False, description="Measured seconds.")


class ObservedPrediction(BaseModel):
    """A measurement of a previous prediction; each result of a response counts once."""

    model_config = _CLOSED

    prediction_id: Annotated[str, Field(max_length=MAX_ID, description="`prediction_id` of a result of /predict.")]
    latency_s: Annotated[float, _MEASURED]


class ObservedProgram(BaseModel):
    """A measurement without a previous prediction; the base model predicts it first."""

    model_config = _CLOSED

    program: Program
    device: Device
    latency_s: Annotated[float, _MEASURED]
    backend: Backend | None = None
    protocol: Annotated[Protocol, Field(description="As in an item of /predict.")] = DEFAULT_PROTOCOL
    framework: Framework | None = None


def _form(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    return "predicted" if "prediction_id" in value else "program"


Observed = Annotated[
    Annotated[ObservedPrediction, Tag("predicted")] | Annotated[ObservedProgram, Tag("program")],
    Discriminator(
        _form,
        custom_error_type="observation_form",
        custom_error_message="an observation needs latency_s, and either prediction_id or program and device",
    ),
]


class ObserveRequest(BaseModel):
    """Measurements; each is stored or gets an error."""

    model_config = _CLOSED

    observations: Annotated[list[Observed], Field(min_length=1, max_length=10_000)]


def observe_request_model(max_items: int) -> type[ObserveRequest]:
    """:class:`ObserveRequest` with another limit on the number of observations."""
    return with_max_items(ObserveRequest, "observations", max_items)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Kept(_Answer):
    """An observation that is stored on disk; the same one sent again has the same id."""

    observation_id: str


class ObservationError(_Answer):
    """Reason for which an observation was not stored."""

    code: Annotated[
        Literal[
            "invalid_prediction_id",
            "already_observed",
            "unknown_program",
            "invalid_program",
            "unsupported_operator",
            "unknown_device",
            "invalid_device",
            "missing_dependency",
            "data_error",
        ],
        Field(description="Stable identifier for programs."),
    ]
    message: str
    hint: str


class NotKept(_Answer):
    """An observation that was not stored; the others are not affected."""

    error: ObservationError


class ObserveResponse(_Answer):
    """Result of each observation, in the order of the request."""

    accepted: Annotated[
        int, Field(ge=0, description="Number of stored observations, including those that were sent before.")
    ]
    results: list[Kept | NotKept]


class DeviceError(_Answer):
    """Running error of one model on one device; all figures except count and drift are fractions.

    A ratio measured / predicted above 10 or below 0.1 counts as 10 or 0.1.
    """

    device: str
    device_digest: Annotated[
        str, Field(description="Hash of the device's figures; it differs between devices of one name.")
    ]
    model_id: str
    count: Annotated[int, Field(ge=1, description="Number of observations.")]
    mape: Annotated[float, Field(ge=0, description="Mean of |predicted / measured - 1|.")]
    bias: Annotated[
        float, Field(description="exp(mean log(measured / predicted)) - 1; 0.1: measured latencies are 10 % longer.")
    ]
    coverage: Annotated[float, Field(ge=0, le=1, description="Share of measurements inside their interval.")]
    recent_bias: Annotated[float, Field(description="Bias of the last 200 observations.")]
    drift: Annotated[
        float | None,
        Field(
            description="Change of the mean log ratio from the first to the last 200 observations, in standard "
            "errors; null while there are too few observations."
        ),
    ]
    drifting: Annotated[bool, Field(description="Whether the change is at least 5 standard errors and 5 %.")]
    proposal: Annotated[
        str | None,
        Field(description="Job that proposes an adapted model, for GET /jobs/{job_id} and POST /models/reload."),
    ] = None
    last_at: Annotated[float, Field(description="Unix time of the last observation, in seconds.")]


class ObservedErrors(_Answer):
    """Running error by device and model, most recent first; at most 1,000 entries."""

    devices: list[DeviceError]
