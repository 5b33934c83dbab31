"""Request and response models of ``/predict`` and ``/programs``; they forbid unknown fields.

The response to a body that fits :class:`Envelope` has status 200. Every fault of an item is the error of that item.
The models check form only, and ``cdmpp`` checks the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model, model_validator

from cdmpp.model.nn.config import LEVELS
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.predictor import DEFAULT_QUANTILES
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Implementation, Protocol
from cdmpp_server.fields import MAX_TEXT, Device, Program, RegisteredProgram, check_width
from cdmpp_server.observe.ids import MAX_ID as MAX_ID_TOKEN
from cdmpp_server.schema_base import AnswerModel, RequestModel

MAX_ID = 200
MAX_QUANTILES = 16


class Item(RequestModel):
    """One query: a program, a device, and the options that define the latency."""

    _check_width = model_validator(mode="before")(check_width)

    id: Annotated[str, Field(max_length=MAX_ID)] | None = Field(None, description="Returned with the result.")
    program: Program
    device: Device
    backend: Backend | None = Field(
        None,
        description="library: the kernel that a vendor library selects (default for operators). "
        "tvm: the program exactly as scheduled (default for TIR).",
    )
    protocol: Protocol = Field(
        DEFAULT_PROTOCOL,
        description="kernel: device time only. graph: inside a captured graph. eager: one call from the "
        "host, with launch cost.",
    )
    framework: Framework | None = Field(
        None, description="Framework that launches a library kernel; null where it is not known."
    )
    implementation: Implementation | None = Field(
        None,
        description="fused: one kernel. composed: several kernels of an eager framework, summed. compiled: a "
        "compiler's kernel. tuned: the fastest of many candidates. null: composed for what eager PyTorch composes "
        "and the framework pytorch, else fused.",
    )


Level = Annotated[float, Field(ge=LEVELS[0], le=LEVELS[-1])]


Quantiles = Annotated[
    list[Level],
    Field(min_length=1, max_length=MAX_QUANTILES, description="Levels to report; the outermost are the bounds."),
]
ModelName = Annotated[
    Annotated[str, Field(max_length=MAX_TEXT)] | None,
    Field(description="Model that predicts: a `model_id` of GET /models, for example from POST /adapt."),
]


class PredictRequest(RequestModel):
    """Items to predict; results are in the same order, each a prediction or an error.

    Without ``strict``, anything that is no valid item gets an error in its place.
    """

    items: list[Item] = Field(min_length=1, max_length=10_000)
    quantiles: Quantiles = Field(list(DEFAULT_QUANTILES))
    strict: bool = Field(False, description="Refuse the whole request (4xx) when one item cannot be predicted.")
    model: ModelName = None


class Envelope(PredictRequest):
    """A request whose items are not validated yet."""

    items: list[Any]


Reason = Annotated[str, Field(description=Prediction.declarations()["domain_reason"].description)]


class _Identified(AnswerModel):
    id: str | None
    prediction_id: Annotated[str, Field(max_length=MAX_ID_TOKEN)] | None = Field(
        description="Identifies this result in POST /observe, where it counts once; each result has another one. "
        "null while the database has been unavailable since the service started."
    )


def result_model(prediction: type[Prediction] = Prediction) -> type[BaseModel]:
    """The model of a result: the fields that a class of predictions declares."""
    declared: dict[str, Any] = {}
    for name, field in prediction.declarations().items():
        described = Annotated[field.type, Field(description=field.description)] if field.description else field.type
        declared[name] = (described, "") if field.optional else (described, ...)
    model = create_model("PredictionResult", __base__=_Identified, **declared)
    model.__doc__ = "A predicted latency, in seconds."
    return model


if TYPE_CHECKING:
    PredictionResult = BaseModel
else:
    PredictionResult = result_model()


class ErrorInfo(AnswerModel):
    """Reason why an item has no prediction."""

    code: Literal[
        "invalid_program",
        "unsupported_operator",
        "unknown_device",
        "invalid_device",
        "missing_dependency",
        "data_error",
        "unknown_program",
    ] = Field(description="Stable identifier for machines.")
    message: str
    hint: str


class ItemError(AnswerModel):
    """An item that could not be predicted; the others are unaffected."""

    id: str | None
    error: ErrorInfo


class RegisterRequest(RequestModel):
    """Programs to register."""

    programs: list[RegisteredProgram] = Field(min_length=1, max_length=10_000)


class Registered(AnswerModel):
    """A registered program; items can name it by its hash."""

    hash: str = Field(pattern="^[0-9a-f]{32}$", description='Use it as `{"hash": "..."}`.')
    name: str


class RegisterError(AnswerModel):
    """A program that was not registered."""

    error: ErrorInfo


class RegisterResponse(AnswerModel):
    """Hashes in the order of the programs."""

    programs: list[Registered | RegisterError]


class PredictResponse(AnswerModel):
    """Results in the order of the items."""

    model_id: str
    results: list[PredictionResult | ItemError]
