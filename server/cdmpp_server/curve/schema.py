"""Request and response models of ``/curve``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from cdmpp.errors import DataError
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
from cdmpp.predict.prediction import DEFAULT_QUANTILES
from cdmpp.predict.requests.request import WholeNumber
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp_server.fields import Device, OperatorProgram, TextProgram
from cdmpp_server.predict.schema import MAX_QUANTILES, ErrorInfo, Level, Seconds

MAX_DEVICES = 100
_CLOSED = ConfigDict(extra="forbid", strict=True)
_ANSWER = ConfigDict(extra="forbid")
_NAME = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,31}$", "not": {"enum": list(RESERVED)}}


def _values(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": MAX_VALUES, "uniqueItems": True}


AXES_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "Values by name of the axis: numbers, texts or truth values. An axis replaces the field "
    "of its name; axes of numbers may stand in expressions. Every axis must be used. The last one is "
    "fastest.",
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


def _template(value: Any) -> Any:
    if not isinstance(value, str) and (not isinstance(value, Mapping) or "operator" not in value):
        raise PydanticCustomError("template", "should be an operator object, or its text")
    return value


TemplateProgram = Annotated[
    Annotated[OperatorProgram, Tag("operator")] | Annotated[TextProgram, Tag("text")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "operator"),
    BeforeValidator(_template),
    Field(description=_TEMPLATE),
]


class CountedProgram(BaseModel):
    """A template, and its number of runs at a point."""

    model_config = _CLOSED

    program: TemplateProgram
    count: Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber] = 1


class _Request(BaseModel):
    model_config = _CLOSED

    axes: Annotated[dict[str, list[Any]], PlainValidator(_axes), WithJsonSchema(AXES_SCHEMA)]
    devices: Annotated[list[Device], Field(min_length=1, max_length=MAX_DEVICES)]
    backend: Annotated[Backend | None, Field(description="Default: library.")] = None
    protocol: Annotated[Protocol, Field(description="As in an item of /predict.")] = DEFAULT_PROTOCOL
    framework: Framework | None = None
    quantiles: Annotated[
        list[Level], Field(min_length=1, max_length=MAX_QUANTILES, description="The outermost levels are the bounds.")
    ] = list(DEFAULT_QUANTILES)
    monotone: Annotated[
        Annotated[list[Annotated[str, Field(max_length=32)]], Field(max_length=MAX_AXES)] | None,
        Field(description="Numeric axes along which `fitted_s` does not decrease. null: all."),
    ] = None
    model: Annotated[
        Annotated[str, Field(max_length=200)] | None,
        Field(description="Model that predicts: a `model_id` of GET /models."),
    ] = None


class CurveRequest(_Request):
    """One template over axes, on devices."""

    program: TemplateProgram


class CurvesRequest(_Request):
    """Several templates, summed at each point."""

    programs: Annotated[list[CountedProgram], Field(min_length=1, max_length=MAX_PROGRAMS)]


At = Annotated[dict[str, float | str | bool], Field(description="Values of the axes at this point.")]


class CurveAnswer(BaseModel):
    """One point on one device, in seconds; programs are summed, each times its count."""

    model_config = _ANSWER

    device: str
    at: At
    latency_s: Seconds
    lower_s: Annotated[Seconds, Field(description="Sum of the programs' lower bounds.")]
    upper_s: Annotated[
        Seconds, Field(description="Sum of the upper bounds, which assumes that all errors have the same sign.")
    ]
    fitted_s: Annotated[
        Seconds,
        Field(
            description="Least-squares fit of the logarithms that does not decrease along the axes of "
            "`monotone`; latency_s itself where that needs no change."
        ),
    ]
    domain: Annotated[Literal["in", "near", "out"], Field(description="Worst domain of the programs.")]
    domain_score: Annotated[float, Field(description="Largest score of the programs.")]
    roofline_s: Annotated[float, Field(ge=0)]


class CurveFailure(BaseModel):
    """A point without a prediction: its sizes or its device are invalid."""

    model_config = _ANSWER

    device: str
    at: At
    error: ErrorInfo


class CurveResponse(BaseModel):
    """The points of a curve, device by device, the last axis fastest."""

    model_config = _ANSWER

    model_id: str
    axes: dict[str, list[float | str | bool]]
    monotone: Annotated[list[str], Field(description="Axes along which fitted_s does not decrease.")]
    points: list[CurveAnswer | CurveFailure]
