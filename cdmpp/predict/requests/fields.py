"""Types of request fields, and the programs that a request lists for pricing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from cdmpp.errors import InvalidProgramError
from cdmpp.predict.curves.template import template_fields
from cdmpp.programs.elements import MAX_PROGRAM_TEXT
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol

M = TypeVar("M", bound=BaseModel)

#: Limits of single values: far above honest ones. The size of a request has no limit here (``Request.sizes``).
MAX_NAME, MAX_TEXT, MAX_COUNT = 200, 2000, 1_000_000
MAX_SECONDS, MAX_BYTES = 1e9, 1e18
MAX_BUDGET_S = 1e6


def _whole_number(value: Any) -> Any:
    """5.0 is an integer to JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: Put into ``Annotated[int, Field(...), WholeNumber]``: models are strict, and JSON has one kind of number.
WholeNumber = BeforeValidator(_whole_number)

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
PositiveSeconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Bytes = Annotated[float, Field(ge=0, le=MAX_BYTES)]
PositiveBytes = Annotated[float, Field(gt=0, le=MAX_BYTES)]
#: A number of things: stages, ranks, micro-batches.
Count = Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber]
Seed = Annotated[int, Field(ge=0, lt=2**32), WholeNumber]
Budget = Annotated[
    float,
    Field(gt=0, le=MAX_BUDGET_S, description="Seconds that the search may take; it ends earlier when proven best."),
]
MaxSteps = Annotated[
    Annotated[int, Field(ge=1, le=10**9), WholeNumber] | None,
    Field(
        description="The search ends after so many steps. Where the budget is not reached before, equal requests "
        "give equal answers on any machine."
    ),
]


def _from_text(value: Any) -> Any:
    """The operator object of an operator's text; its values may be expressions."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_PROGRAM_TEXT:
        raise PydanticCustomError("string_too_long", f"a program's text has at most {MAX_PROGRAM_TEXT} characters")
    try:
        return template_fields(value)
    except InvalidProgramError as error:
        raise PydanticCustomError("value_error", "{message}", {"message": error.message}) from None


ProgramForm = Annotated[
    dict[str, Any],
    Field(min_length=1, max_length=64),
    BeforeValidator(_from_text),
    WithJsonSchema(
        {
            "description": "A program as in POST /predict: an operator object, its text (`linear:m=1,n=2,k=3`), "
            '{"tvm_json": text}, {"tvmscript": text}, or over HTTP {"hash": text}.',
            "anyOf": [
                {"type": "object", "minProperties": 1, "maxProperties": 64},
                {"type": "string", "maxLength": MAX_PROGRAM_TEXT},
            ],
        }
    ),
]
DeviceForm = Annotated[
    Name | dict[str, Any], Field(description="Name of a known device, or the specification of another one.")
]


class Closed(BaseModel):
    """Base of everything that travels: unknown fields, coercion, NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Row(BaseModel):
    """Base of answers and of the rows of their lists: numbers are finite, keys are those of the JSON.

    A field whose JSON name is a Python keyword has an alias; code uses the field's own name.
    """

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, serialize_by_alias=True, validate_by_name=True, validate_by_alias=True
    )


def exactly_one(model: M, *names: str) -> M:
    """Validate that exactly one of some optional fields is given: ``x`` or ``x_s``.

    Raises ValueError: none or several are given.
    """
    if sum(getattr(model, name) is not None for name in names) != 1:
        raise PydanticCustomError("value_error", "give either {names}", {"names": " or ".join(names)})
    return model


def at_most_one(model: M, *names: str) -> M:
    """Validate that not more than one of some optional fields is given; as :func:`exactly_one`."""
    return exactly_one(model, *names) if any(getattr(model, name) is not None for name in names) else model


def instead_of(model: M, predicted: str, *given: str) -> M:
    """Validate that fields in seconds keep their default of 0 where a field that replaces them is given.

    Raises ValueError: both are given.
    """
    if getattr(model, predicted) is not None and any(getattr(model, name) for name in given):
        names = {"names": f"{predicted} or {' and '.join(given)}"}
        raise PydanticCustomError("value_error", "give either {names}", names)
    return model


class Work(Closed):
    """Programs that run one after the other, where a cost is to be predicted."""

    program: ProgramForm
    count: Annotated[int, Field(ge=1, le=MAX_COUNT, description="How often it runs."), WholeNumber] = 1


@dataclass(frozen=True)
class PriceRequest:
    """One program to price."""

    #: The field of the request that names it (``nodes.3.program``), for messages.
    path: str
    #: Its form.
    program: dict[str, Any]
    device: str | dict[str, Any]
    #: As in an item of ``/predict``.
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None
