"""Fields of request bodies that several endpoints share: programs and devices.

These models check the form of a body only. Unknown operators, impossible sizes and missing device figures are
errors of an item, which ``cdmpp`` reports.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    create_model,
)
from pydantic_core import PydanticCustomError

from cdmpp.programs.elements import MAX_PROGRAM_TEXT
from cdmpp.programs.program import PROGRAM_FORMS
from cdmpp_server.schema_base import RequestModel

#: Bounds on texts and numbers of fields, far above what real requests need.
MAX_NAME, MAX_TEXT, MAX_FIELDS, MAX_LIST = 64, 200, 64, 32
#: Longer, because a device's `source` may name the origin of each figure.
MAX_DEVICE_TEXT = 2000
MAX_TVM_JSON, MAX_TVMSCRIPT = 8 * 2**20, 2**20

Name = Annotated[str, Field(max_length=MAX_NAME)]
_TEXT_SCHEMA = {"type": "string", "maxLength": MAX_TEXT}
_SCALAR_SCHEMAS = [{"type": "number"}, _TEXT_SCHEMA, {"type": "boolean"}, {"type": "null"}]
#: Keys that identify the form of a program, checked in this order.
_FORMS = ("operator", "tvm_json", "tvmscript", "hash")


def check_width(value: Any) -> Any:
    """Refuse an object with more than :data:`MAX_FIELDS` fields, before pydantic makes an error of each."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise PydanticCustomError(
            "too_long",
            "an object should have at most {most} fields, not {fields}",
            {"most": MAX_FIELDS, "fields": len(value)},
        )
    return value


def _is_scalar(value: Any, longest: int) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) <= longest)


# A plain function for each: a union would report an error for every one of its members.
def _operator_value(value: Any) -> Any:
    # JSON.stringify writes NaN as null: an error of one item, not of the whole body.
    if value is not None and not _is_scalar(value, MAX_TEXT):
        raise PydanticCustomError(
            "scalar", f"should be a number, a boolean, null or a text of at most {MAX_TEXT} characters"
        )
    return value


def _device_value(value: Any) -> Any:
    texts = (
        isinstance(value, list)
        and len(value) <= MAX_LIST
        and all(isinstance(text, str) and len(text) <= MAX_TEXT for text in value)
    )
    figures = (
        isinstance(value, dict)
        and len(value) <= MAX_LIST
        and all(len(name) <= MAX_NAME for name in value)
        and all(part is None or _is_scalar(part, MAX_DEVICE_TEXT) for part in value.values())
    )
    if value is not None and not texts and not figures and not _is_scalar(value, MAX_DEVICE_TEXT):
        raise PydanticCustomError("figure", "should be a number, a text, a list of texts, an object of numbers or null")
    return value


def _has_operator(fields: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(fields["operator"], str):
        raise PydanticCustomError("operator", "operator should be a string")
    return fields


OPERATOR_SCHEMA: dict[str, Any] = {
    "title": "OperatorProgram",
    "description": "One operator by its sizes, such as linear with m, n, k and dtype. GET /support lists the operators "
    "and their fields. An unknown operator, a missing field, null or an impossible size is an error of the item.",
    "type": "object",
    "required": ["operator"],
    "properties": {"operator": _TEXT_SCHEMA},
    "propertyNames": {"maxLength": MAX_NAME},
    "maxProperties": MAX_FIELDS,
    "additionalProperties": {"anyOf": _SCALAR_SCHEMAS},
    "examples": [{"operator": "linear", "m": 512, "n": 4096, "k": 1024, "dtype": "float16"}],
}

OperatorProgram = Annotated[
    dict[Name, Annotated[Any, PlainValidator(_operator_value)]],
    BeforeValidator(check_width),
    AfterValidator(_has_operator),
    WithJsonSchema(OPERATOR_SCHEMA),
]


TextProgram = Annotated[
    str,
    Field(
        max_length=MAX_PROGRAM_TEXT,
        title="TextProgram",
        description="One operator as text, as in Python and on the command line. A text that is no operator is an "
        "error of the item.",
        examples=["linear:m=512,n=4096,k=1024,dtype=float16"],
    ),
]


class TvmJsonProgram(RequestModel):
    """TIR as ``tvm.ir.save_json`` of apache-tvm 0.27 writes it: a PrimFunc, or a module with one."""

    tvm_json: str = Field(max_length=MAX_TVM_JSON)


class TvmScriptProgram(RequestModel):
    """TIR as TVMScript: one ``@T.prim_func``. It is parsed, never executed."""

    tvmscript: str = Field(max_length=MAX_TVMSCRIPT)


class HashProgram(RequestModel):
    """A program that was registered by ``POST /programs``, or sent before and still cached."""

    hash: str = Field(pattern="^[0-9a-f]{32}$", description="Its structural hash: `program_hash` of an answer.")


def _form(value: Any) -> str | None:
    if isinstance(value, dict):
        return next((form for form in _FORMS if form in value), None)
    return "text" if isinstance(value, str) else None


Program = Annotated[
    Annotated[OperatorProgram, Tag("operator")]
    | Annotated[TvmJsonProgram, Tag("tvm_json")]
    | Annotated[TvmScriptProgram, Tag("tvmscript")]
    | Annotated[HashProgram, Tag("hash")]
    | Annotated[TextProgram, Tag("text")],
    Discriminator(
        _form,
        custom_error_type="program_form",
        custom_error_message=f"a program is {PROGRAM_FORMS}, or {{'hash': text}}",
    ),
]

#: A program in full, not its hash.
RegisteredProgram = Annotated[
    Annotated[OperatorProgram, Tag("operator")]
    | Annotated[TvmJsonProgram, Tag("tvm_json")]
    | Annotated[TvmScriptProgram, Tag("tvmscript")]
    | Annotated[TextProgram, Tag("text")],
    Discriminator(
        lambda value: None if _form(value) == "hash" else _form(value),
        custom_error_type="program_form",
        custom_error_message=f"a program is {PROGRAM_FORMS}",
    ),
]


#: A program as JSON has it: an operator's text, or an object.
ProgramValue = str | dict[str, Any]


def program_value(program: Any) -> ProgramValue:
    """The JSON value of a validated program."""
    value: ProgramValue = program if isinstance(program, str | dict) else program.model_dump()
    return value


def _device_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "name"
    return "specification" if isinstance(value, dict) else None


DeviceName = Annotated[str, Field(max_length=MAX_TEXT, description="Name or alias of a known device (GET /devices).")]
_FIGURE_SCHEMAS: list[dict[str, Any]] = [
    {"type": "number"},
    {"type": "string", "maxLength": MAX_DEVICE_TEXT},
    {"type": "boolean"},
    {"type": "null"},
]
DEVICE_SCHEMA = {
    "description": "A custom device: the fields of DeviceSpecification in base units (Hz, bytes, "
    "flop/s). A missing or impossible figure is an error of the item.",
    "type": "object",
    "propertyNames": {"maxLength": MAX_NAME},
    "maxProperties": MAX_FIELDS,
    "additionalProperties": {
        "anyOf": [
            *_FIGURE_SCHEMAS,
            {"type": "array", "items": _TEXT_SCHEMA, "maxItems": MAX_LIST},
            {
                "type": "object",
                "propertyNames": {"maxLength": MAX_NAME},
                "maxProperties": MAX_LIST,
                "additionalProperties": {"anyOf": _FIGURE_SCHEMAS},
            },
        ]
    },
}
InlineDevice = Annotated[
    dict[Name, Annotated[Any, PlainValidator(_device_value)]],
    BeforeValidator(check_width),
    WithJsonSchema(DEVICE_SCHEMA),
]
Device = Annotated[
    Annotated[DeviceName, Tag("name")] | Annotated[InlineDevice, Tag("specification")],
    Discriminator(
        _device_form,
        custom_error_type="device_form",
        custom_error_message="a device is a name or an object with its figures",
    ),
]


Request = TypeVar("Request", bound=BaseModel)


def with_max_items(model: type[Request], field: str, max_items: int) -> type[Request]:
    """Return ``model`` with a list ``field`` of 1 to ``max_items`` elements."""
    return cast("type[Request]", _limited(model, field, max_items))


@lru_cache  # creating a model takes twenty milliseconds
def _limited(model: type[BaseModel], field: str, max_items: int) -> type[BaseModel]:
    elements = model.model_fields[field].annotation
    made: dict[str, Any] = {field: (Annotated[elements, Field(min_length=1, max_length=max_items)], ...)}
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **made)
