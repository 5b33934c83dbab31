"""What travels: requests and answers of ``/predict`` as models, closed at every level but a program's.

A body that fits :class:`PredictRequest` is answered 200, whatever its programs and devices say: those
faults are reported item by item. So the models check form here, and meaning is left to ``cdmpp``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from cdmpp.nn.config import LEVELS
from cdmpp.predictor import DEFAULT_QUANTILES
from cdmpp.programs.program import PROGRAM_FORMS
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp_server.observe.ids import MAX_ID as MAX_ID_TOKEN
from cdmpp_server.schema import with_max_items

#: Bounds on text and on the number of fields: what no honest request comes near.
MAX_ID, MAX_NAME, MAX_TEXT, MAX_FIELDS, MAX_LIST = 200, 64, 200, 64, 32
#: A device's `source` may say where each of its figures comes from.
MAX_DEVICE_TEXT = 2000
MAX_TVM_JSON, MAX_TVMSCRIPT = 8 * 2**20, 2**20
MAX_QUANTILES = 16

Name = Annotated[str, Field(max_length=MAX_NAME)]
_TEXT_SCHEMA = {"type": "string", "maxLength": MAX_TEXT}
_SCALAR_SCHEMAS = [{"type": "number"}, _TEXT_SCHEMA, {"type": "boolean"}, {"type": "null"}]
#: The key that tells which form a program has; checked in this order.
_FORMS = ("operator", "tvm_json", "tvmscript", "hash")

_CLOSED = ConfigDict(extra="forbid", strict=True)


def _is_scalar(value: Any, longest: int) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) <= longest)


# One plain check for each: a union would report every one of its members.
def _operator_value(value: Any) -> Any:
    # JSON.stringify writes NaN as null: a size gone wrong in one item, not a body of another form.
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


OPERATOR_SCHEMA = {
    "title": "OperatorProgram",
    "description": "One operator by its sizes, such as linear with m, n, k and dtype. GET /support lists the "
    "operators and their fields. An unknown operator, a missing field, null or an impossible size is an "
    "error of the item.",
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
    Field(max_length=MAX_FIELDS),
    AfterValidator(_has_operator),
    WithJsonSchema(OPERATOR_SCHEMA),
]


class TvmJsonProgram(BaseModel):
    """TIR as ``tvm.ir.save_json`` of apache-tvm 0.27 writes it: a PrimFunc, or a module with one."""

    model_config = _CLOSED

    tvm_json: Annotated[str, Field(max_length=MAX_TVM_JSON)]


class TvmScriptProgram(BaseModel):
    """TIR as TVMScript: one ``@T.prim_func``. It is parsed, never executed."""

    model_config = _CLOSED

    tvmscript: Annotated[str, Field(max_length=MAX_TVMSCRIPT)]


class HashProgram(BaseModel):
    """A program that ``POST /programs`` registered, or that was sent before and is not forgotten."""

    model_config = _CLOSED

    hash: Annotated[
        str, Field(pattern="^[0-9a-f]{32}$", description="Its structural hash: `program_hash` of an answer.")
    ]


def _form(value: Any) -> str | None:
    if isinstance(value, dict):
        return next((form for form in _FORMS if form in value), None)
    return None


Program = Annotated[
    Annotated[OperatorProgram, Tag("operator")]
    | Annotated[TvmJsonProgram, Tag("tvm_json")]
    | Annotated[TvmScriptProgram, Tag("tvmscript")]
    | Annotated[HashProgram, Tag("hash")],
    Discriminator(
        _form,
        custom_error_type="program_form",
        custom_error_message=f"a program is {PROGRAM_FORMS}, or {{'hash': text}}",
    ),
]

#: A program itself, not its hash.
RegisteredProgram = Annotated[
    Annotated[OperatorProgram, Tag("operator")]
    | Annotated[TvmJsonProgram, Tag("tvm_json")]
    | Annotated[TvmScriptProgram, Tag("tvmscript")],
    Discriminator(
        lambda value: None if _form(value) == "hash" else _form(value),
        custom_error_type="program_form",
        custom_error_message=f"a program is {PROGRAM_FORMS}",
    ),
]


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
    "description": "A device of one's own: the fields of DeviceSpecification in base units (Hz, bytes, "
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
    Field(max_length=MAX_FIELDS),
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


class Item(BaseModel):
    """One query: a program, a device, and which latency is meant."""

    model_config = _CLOSED

    id: Annotated[Annotated[str, Field(max_length=MAX_ID)] | None, Field(description="Comes back with the answer.")] = (
        None
    )
    program: Program
    device: Device
    backend: Annotated[
        Backend | None,
        Field(
            description="library: the kernel a vendor library picks (default for operators). "
            "tvm: the program exactly as scheduled (default for TIR)."
        ),
    ] = None
    protocol: Annotated[
        Protocol,
        Field(
            description="kernel: device time alone. graph: inside a captured graph. eager: one call from the "
            "host, launch cost inside."
        ),
    ] = DEFAULT_PROTOCOL
    framework: Annotated[
        Framework | None, Field(description="Who launches a library kernel; null where it is not known.")
    ] = None


Level = Annotated[float, Field(ge=LEVELS[0], le=LEVELS[-1])]


Quantiles = Annotated[
    list[Level],
    Field(min_length=1, max_length=MAX_QUANTILES, description="Levels to report; the outermost are the bounds."),
]
ModelName = Annotated[
    Annotated[str, Field(max_length=MAX_TEXT)] | None,
    Field(description="Which model answers: a `model_id` of GET /models, such as POST /adapt gives."),
]


class PredictRequest(BaseModel):
    """Items to predict; answered in order, each with a prediction or an error of its own."""

    model_config = _CLOSED

    items: Annotated[list[Item], Field(min_length=1, max_length=10_000)]
    quantiles: Quantiles = list(DEFAULT_QUANTILES)
    strict: Annotated[bool, Field(description="Refuse the whole request (4xx) when one item cannot be predicted.")] = (
        False
    )
    model: ModelName = None


class Envelope(PredictRequest):
    """A request whose items nobody has looked at."""

    items: list[Any]


def request_model(max_items: int) -> type[PredictRequest]:
    """:class:`PredictRequest` with another limit on the number of items."""
    return with_max_items(PredictRequest, "items", max_items)


Seconds = Annotated[float, Field(gt=0)]
_BOUND = "of the requested quantiles, or latency_s where that lies outside."


class PredictionResult(BaseModel):
    """A predicted latency, in seconds."""

    model_config = ConfigDict(extra="forbid")

    id: str | None
    prediction_id: Annotated[
        str,
        Field(
            max_length=MAX_ID_TOKEN,
            description="Names this answer to POST /observe; equal queries to one model share it.",
        ),
    ]
    name: Annotated[str, Field(description="The operator's text, or the function's name.")]
    program_hash: Annotated[str, Field(description="Structural hash: equal programs share it.")]
    device: str
    backend: Backend
    protocol: Protocol
    framework: Framework | None
    model_id: str
    latency_s: Annotated[Seconds, Field(description="Predicted run time.")]
    lower_s: Annotated[Seconds, Field(description=f"The lowest {_BOUND}")]
    upper_s: Annotated[Seconds, Field(description=f"The highest {_BOUND}")]
    quantiles: Annotated[dict[str, Seconds], Field(description="Requested level (as text) to seconds.")]
    domain: Annotated[Literal["in", "near", "out"], Field(description="Whether training covered the query.")]
    domain_score: Annotated[float, Field(description="Ranks answers by the error to expect; 0 is best.")]
    roofline_s: Annotated[
        Annotated[float, Field(ge=0)], Field(description="Arithmetic and traffic bound, not a prediction.")
    ]


class ErrorInfo(BaseModel):
    """Why an item has no answer."""

    model_config = ConfigDict(extra="forbid")

    code: Annotated[
        Literal[
            "invalid_program",
            "unsupported_operator",
            "unknown_device",
            "invalid_device",
            "missing_dependency",
            "data_error",
            "unknown_program",
        ],
        Field(description="Stable identifier for machines."),
    ]
    message: str
    hint: str


class ItemError(BaseModel):
    """An item that could not be predicted; the others are unaffected."""

    model_config = ConfigDict(extra="forbid")

    id: str | None
    error: ErrorInfo


class RegisterRequest(BaseModel):
    """Programs to be asked about by their hash."""

    model_config = _CLOSED

    programs: Annotated[list[RegisteredProgram], Field(min_length=1, max_length=10_000)]


def register_request_model(max_items: int) -> type[RegisterRequest]:
    """:class:`RegisterRequest` with another limit on the number of programs."""
    return with_max_items(RegisterRequest, "programs", max_items)


class Registered(BaseModel):
    """A program that can be asked about by its hash from now on."""

    model_config = ConfigDict(extra="forbid")

    hash: Annotated[str, Field(pattern="^[0-9a-f]{32}$", description='Ask with `{"hash": "..."}`.')]
    name: str


class RegisterError(BaseModel):
    """A program that was not registered."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorInfo


class RegisterResponse(BaseModel):
    """Hashes in the order of the programs."""

    model_config = ConfigDict(extra="forbid")

    programs: list[Registered | RegisterError]


class PredictResponse(BaseModel):
    """Answers in the order of the items."""

    model_config = ConfigDict(extra="forbid")

    model_id: str
    results: list[PredictionResult | ItemError]
