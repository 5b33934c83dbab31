"""``POST /curve``: a template over axes on devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from cdmpp.errors import DataError
from cdmpp.predict.curves import CurvePlan, Template
from cdmpp.predict.curves.template import (
    MAX_AXES,
    MAX_COUNT,
    MAX_NUMBER,
    MAX_PROGRAMS,
    MAX_TEXT,
    MAX_VALUES,
    RESERVED,
    check_axes,
)
from cdmpp.predict.prediction import DEFAULT_QUANTILES, Seconds
from cdmpp.predict.requests.request import WholeNumber
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Implementation, Protocol
from cdmpp_server.fields import Device, OperatorProgram, ProgramValue, TextProgram
from cdmpp_server.planned import Endpoint, Find, planned
from cdmpp_server.predict.schema import MAX_QUANTILES, ErrorInfo, Level
from cdmpp_server.schema_base import AnswerModel, RequestModel

MAX_DEVICES = 100
_NAME = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,31}$", "not": {"enum": list(RESERVED)}}


def _values(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": MAX_VALUES, "uniqueItems": True}


AXES_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "Values by name of the axis: numbers, texts or truth values. An axis replaces the field of its "
    "name; axes of numbers may stand in expressions. Every axis must be used. The last one is fastest.",
    "maxProperties": MAX_AXES,
    "propertyNames": _NAME,
    "additionalProperties": {
        "anyOf": [
            _values({"type": "number", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}),
            _values({"type": "string", "maxLength": MAX_TEXT}),
            _values({"type": "boolean"}),
        ]
    },
    "examples": [{"batch": [1, 2, 4, 8], "dtype": ["float16"]}],
}
_TEMPLATE = (
    "An operator object, or its text (`linear:m=batch*128,n=64,k=64`). Integer fields may be expressions over axes, "
    "as text: `batch*tokens`, `ceil(tokens*density)`; + - * / //, ceil, floor, min, max, numbers and brackets."
)


def _axes(value: Any) -> Any:
    if not isinstance(value, Mapping) or not all(isinstance(values, list) for values in value.values()):
        raise PydanticCustomError("axes", "should be an object of lists")
    try:
        check_axes(value)
    except DataError as error:
        raise PydanticCustomError("axes", "{message}", {"message": error.message}) from None
    return value


def _checked_template(value: Any) -> Any:
    if not isinstance(value, str) and (not isinstance(value, Mapping) or "operator" not in value):
        raise PydanticCustomError("template", "should be an operator object, or its text")
    return value


TemplateProgram = Annotated[
    Annotated[OperatorProgram, Tag("operator")] | Annotated[TextProgram, Tag("text")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "operator"),
    BeforeValidator(_checked_template),
    Field(description=_TEMPLATE),
]


class CountedProgram(RequestModel):
    """A template, and its number of runs at a point."""

    program: TemplateProgram
    count: Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber] = 1


class _Request(RequestModel):
    axes: Annotated[dict[str, list[Any]], PlainValidator(_axes), WithJsonSchema(AXES_SCHEMA)]
    devices: list[Device] = Field(min_length=1, max_length=MAX_DEVICES)
    backend: Backend | None = Field(None, description="Default: library.")
    protocol: Protocol = Field(DEFAULT_PROTOCOL, description="As in an item of /predict.")
    framework: Framework | None = None
    implementation: Implementation | None = Field(None, description="As in an item of /predict.")
    quantiles: list[Level] = Field(
        list(DEFAULT_QUANTILES),
        min_length=1,
        max_length=MAX_QUANTILES,
        description="The outermost levels are the bounds.",
    )
    monotone: Annotated[list[Annotated[str, Field(max_length=32)]], Field(max_length=MAX_AXES)] | None = Field(
        None, description="Numeric axes along which `fitted_s` does not decrease. null: all."
    )
    model: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="Model that predicts: a `model_id` of GET /models."
    )


class CurveRequest(_Request):
    """One template over axes, on devices."""

    program: TemplateProgram


class CurvesRequest(_Request):
    """Several templates, summed at each point."""

    programs: list[CountedProgram] = Field(min_length=1, max_length=MAX_PROGRAMS)


At = Annotated[dict[str, float | str | bool], Field(description="Values of the axes at this point.")]


class CurveAnswer(AnswerModel):
    """One point on one device, in seconds; programs are summed, each times its count."""

    device: str
    at: At
    latency_s: Seconds
    lower_s: Seconds = Field(description="Sum of the programs' lower bounds.")
    upper_s: Seconds = Field(description="Sum of the upper bounds, which assumes that all errors have the same sign.")
    fitted_s: Seconds = Field(
        description="Least-squares fit of the logarithms that does not decrease along the axes of "
        "`monotone`; latency_s itself where that needs no change."
    )
    domain: Literal["in", "near", "out"] = Field(description="By the share of the time, as that of a model.")
    domain_score: float = Field(description="Largest score of the programs.")
    roofline_s: float = Field(ge=0)
    domain_reason: str | None = Field(description="The largest part that is not `in`.")


class CurveFailure(AnswerModel):
    """A point without a prediction: its sizes or its device are invalid."""

    device: str
    at: At
    error: ErrorInfo


class CurveResponse(AnswerModel):
    """The points of a curve, device by device, the last axis fastest."""

    model_id: str
    axes: dict[str, list[float | str | bool]]
    monotone: list[str] = Field(description="Axes along which fitted_s does not decrease.")
    points: list[CurveAnswer | CurveFailure]


_MEANING = {
    404: "The model is not loaded (unknown_model).",
    409: "The request fits the schema, but an axis is not used, `monotone` names a non-numeric axis, or there "
    "are more predictions than items of one request (data_error); or a template's operator or fields are not "
    "known, or an expression is invalid (unsupported_operator, invalid_program).",
}
_EXAMPLE: dict[str, Any] = {
    "program": {"operator": "linear", "m": "batch*128", "n": 4096, "k": 1024, "dtype": "float16"},
    "axes": {"batch": [1, 2, 4, 8]},
    "devices": ["t4", "l4"],
    "protocol": "eager",
    "framework": "pytorch",
}


def _template(program: ProgramValue, count: int = 1) -> Template:
    return Template.parse(program, count) if isinstance(program, str) else Template(program, count)


def _plan(request: CurveRequest | CurvesRequest, find: Find, max_predictions: int) -> CurvePlan:
    if isinstance(request, CurvesRequest):
        templates = [_template(program.program, program.count) for program in request.programs]
    else:
        templates = [_template(request.program)]
    settings = (request.backend, request.protocol, request.framework, request.quantiles, request.monotone)
    limits: dict[str, Any] = {"find": find, "max_predictions": max_predictions}
    # By name and never load_device: a client's text must not be used as a path on this machine.
    return CurvePlan(templates, request.axes, request.devices, *settings, request.implementation, **limits)


router = planned(
    Endpoint(
        "/curve",
        "Predict a curve",
        "Predict a template over axes on devices, with a monotone fit and domain labels.",
        _plan,
        lambda plan, *made: plan.curve(*made).to_dict(),
        (CurveRequest, CurvesRequest),
        (CurveResponse,),
        "The points of the curve.",
        _EXAMPLE,
        _MEANING,
        "At most {most} predictions: programs times points times devices. ",
        several="programs",
    )
)
