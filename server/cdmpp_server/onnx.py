"""``POST /models/predict``: latency of an ONNX model on several devices, per program and in total.

The sandbox reads the model, and the queue of ``/predict`` computes its programs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError
from cdmpp.features.encode import EncodedProgram
from cdmpp.predict.prediction import DEFAULT_QUANTILES, ErrorInfo, Prediction, Query, Seconds
from cdmpp.predict.prediction_matrix import Failed, PredictionMatrix
from cdmpp.predict.prediction_total import PredictionTotal
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import (
    DEFAULT_PROTOCOL,
    FRAMEWORKS,
    IMPLEMENTATIONS,
    PROTOCOLS,
    Framework,
    Implementation,
    Protocol,
)
from cdmpp_server.body import read_body
from cdmpp_server.concurrency import Deadline
from cdmpp_server.fields import MAX_TEXT, OPERATOR_SCHEMA
from cdmpp_server.observe.ids import MAX_ID, Signer
from cdmpp_server.openapi import BODY_PROBLEMS, Schema, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.predict.render import reason_field
from cdmpp_server.predict.schema import ErrorInfo as ItemError
from cdmpp_server.predict.schema import Reason
from cdmpp_server.predict.service import bugs_hidden
from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.sandbox.replies import ModelSummary
from cdmpp_server.sandbox.sandbox import Sandbox
from cdmpp_server.schema_base import AnswerModel
from cdmpp_server.settings import Settings

#: Maximum number of devices, and of dynamic dimensions, in one request.
MAX_DEVICES, MAX_DIMS = 64, 64
_DIM = r"[^\x00-\x1f]{1,200}=[1-9][0-9]{0,8}"

_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}


def _parameter(name: str, description: str, schema: dict[str, Any], **further: Any) -> dict[str, Any]:
    required = {"required": True} if further.pop("required", False) else {}
    return {"name": name, "in": "query", **required, "description": description, "schema": schema, **further}


def _choice(values: Iterable[str], **further: Any) -> dict[str, Any]:
    return {"type": "string", "enum": list(values), **further}


PARAMETERS: list[dict[str, Any]] = [
    _parameter(
        "device",
        "Name or alias of a known device (GET /devices); repeat it for several. An unknown device gives an error and "
        "does not affect the others.",
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_DEVICES},
        required=True,
        example=["t4", "l4"],
    ),
    _parameter(
        "protocol", "Measurement protocol of the latency, as in /predict.", _choice(PROTOCOLS, default=DEFAULT_PROTOCOL)
    ),
    _parameter("framework", "Framework that launches the kernels, if known.", _choice(FRAMEWORKS)),
    _parameter("implementation", "How the operators are executed, as in /predict.", _choice(IMPLEMENTATIONS)),
    _parameter(
        "dim",
        "Size of a dynamic dimension of the model, such as `batch=1`; repeat it for several. Two sizes of one "
        "dimension give 409.",
        {"type": "array", "items": {"type": "string", "pattern": f"^{_DIM}$"}, "maxItems": MAX_DIMS},
        example=[],
    ),
    _parameter("model", "`model_id` of a loaded model (GET /models). Default: the base model.", _TEXT),
]
#: Options that define the latency, and their values.
_OPTIONS = {"protocol": PROTOCOLS, "framework": FRAMEWORKS, "implementation": IMPLEMENTATIONS}


@dataclass(frozen=True)
class ModelQuery:
    """The validated query parameters."""

    #: 1 to 64 names, in the order of the request.
    devices: tuple[str, ...]
    #: Options that define the latency.
    protocol: Protocol
    framework: Framework | None
    implementation: Implementation | None
    #: Sizes of dynamic dimensions.
    dims: dict[str, int]
    #: Id of the model.
    model: str | None

    @classmethod
    def read(cls, pairs: Iterable[tuple[str, str]]) -> ModelQuery:
        """Read the pairs of a query string.

        Raises ProblemError: 422 for an unknown parameter, a missing or an invalid value; 409 for a dimension with two
        sizes.
        """
        given: dict[str, list[str]] = {}
        for name, value in pairs:
            given.setdefault(name, []).append(value)
        known = [str(parameter["name"]) for parameter in PARAMETERS]
        if unknown := next((name for name in given if name not in known), None):
            raise _refused(unknown[:80], f"unknown parameter; allowed are {', '.join(known)}")
        devices = _texts("device", given, MAX_DEVICES, _is_name, f"a text of 1 to {MAX_TEXT} characters")
        if not devices:
            raise _refused("device", "missing: name at least one device, such as device=t4")
        options: dict[str, Any] = {
            name: _single(name, given, allowed.__contains__, "one of " + ", ".join(allowed))
            for name, allowed in _OPTIONS.items()
        }
        dims = _dims(
            _texts("dim", given, MAX_DIMS, lambda text: bool(re.fullmatch(_DIM, text)), "NAME=SIZE, such as batch=1")
        )
        model = _single("model", given, _is_name, f"a text of 1 to {MAX_TEXT} characters")
        options["protocol"] = options["protocol"] or DEFAULT_PROTOCOL
        return cls(tuple(devices), **options, dims=dims, model=model)


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= MAX_TEXT


def _texts(
    name: str, given: dict[str, list[str]], max_values: int, fits: Callable[[str], bool], form: str
) -> list[str]:
    values = given.get(name, [])
    if len(values) > max_values:
        raise _refused(name, f"given {len(values)} times; at most {max_values} are allowed")
    for value in values:
        if not fits(value):
            raise _refused(name, f"{value[:100]!r} should be {form}")
    return values


def _single(name: str, given: dict[str, list[str]], fits: Callable[[str], bool], form: str) -> str | None:
    values = _texts(name, given, 1, fits, form)
    return values[0] if values else None


def _dims(texts: list[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if sizes.setdefault(name, int(size)) != int(size):
            raise ProblemError(
                "invalid_program",
                f"dim: {name[:100]!r} has two sizes, {sizes[name]} and {size}",
                "send one size for each dimension",
                status=409,
            )
    return sizes


def _refused(name: str, message: str) -> ProblemError:
    return ProblemError(
        "invalid_request",
        f"query: {name}: {message}",
        "GET /openapi.json lists the parameters",
        errors=[SchemaViolation(path=f"query.{name}", message=message)],
    )


Domain = Literal["in", "near", "out"]
_Count = Annotated[int, Field(ge=1)]


_Share = Annotated[float, Field(ge=0, le=1)]


class DeviceTotal(AnswerModel):
    """Sum of the predicted kernel latencies on one device, without the gaps between kernels."""

    device: str
    latency_s: Seconds | None = Field(description="Sum over the predicted launches; null if there is none.")
    lower_s: Seconds | None = Field(description="Sum of the lower bounds, as if all errors had the same sign.")
    upper_s: Seconds | None
    domain: Domain | None = Field(
        description="in: at least 90 % of the time is in; near: at most 10 % is out; else out."
    )
    domain_shares: dict[Domain, _Share] | None = Field(
        description="Share of latency_s that the programs of each domain have."
    )
    domain_reason: str | None = Field(description="The largest part that is not `in`; null: none.")
    lower_bound: bool = Field(
        description="Whether nodes without a program or launches without a prediction are left out."
    )
    launches: int = Field(ge=0, description="Number of program launches in one pass of the model.")
    launches_predicted: int = Field(ge=0, description="Number of launches in the sum.")


class ProgramAnswer(AnswerModel):
    """One launch of a program on one device, in seconds."""

    device: str
    implementation: Implementation
    latency_s: Seconds
    lower_s: Seconds
    upper_s: Seconds
    domain: Domain
    domain_score: float
    roofline_s: float = Field(ge=0)
    prediction_id: Annotated[str, Field(max_length=MAX_ID)] | None = Field(
        description="Identifies this result in POST /observe; null as in a result of /predict."
    )
    domain_reason: Reason = ""


class ProgramFailure(AnswerModel):
    """Error of a program on a device."""

    device: str
    error: ItemError


class ModelProgram(AnswerModel):
    """A kernel that the model launches."""

    name: str = Field(description="The operator as text.")
    program_hash: str
    program: dict[str, Any] = Field(
        description="The operator with all fields, in the form of an item of /predict.",
        json_schema_extra={k: OPERATOR_SCHEMA[k] for k in ("required", "properties")},
    )
    count: _Count = Field(description="Number of launches in one pass of the model.")
    answers: list[ProgramAnswer | ProgramFailure] = Field(
        description="One entry per device, in the order of the query."
    )


class UnsupportedNodes(AnswerModel):
    """Nodes without a program; they are not part of any sum."""

    operator: str
    count: _Count
    reason: str


class ModelResponse(AnswerModel):
    """Latency of an ONNX model on each device, and of its programs."""

    model_id: str
    protocol: Protocol
    framework: Framework | None
    devices: list[DeviceTotal] = Field(description="In the order of the query.")
    programs: list[ModelProgram] = Field(
        description="Most expensive first: count times latency, summed over all devices."
    )
    unsupported: list[UnsupportedNodes]


MEDIA = "application/octet-stream"
_MEANING = {
    404: "The model that `model` names is not loaded (unknown_model).",
    409: "The file is not a readable ONNX model, has a dynamic dimension without a size, exceeds the time or "
    "memory limit, or launches too many programs (invalid_program).",
    415: f"The body is not {MEDIA} (unsupported_media_type).",
    422: "A parameter is missing, unknown or invalid (invalid_request).",
}


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add parameters, body, response and problems."""
    add_models(schemas, ModelResponse)
    operation = document["paths"]["/models/predict"]["post"]
    operation["parameters"] = PARAMETERS
    file = {
        "type": "string",
        "format": "binary",
        "description": "An ONNX file. Its weights are not read, so external data files are not needed.",
    }
    add_body(operation, file, media=MEDIA)
    add_answer(operation, ref("ModelResponse"), "Latency of each program, and the sum for each device.")
    statuses = [status for status in BODY_PROBLEMS if status != 400]
    add_problems(operation, 404, 409, *statuses, meaning=_MEANING)


Device = DeviceSpec | Failed
Program = TensorProgram | EncodedProgram


def model_queries(summary: ModelSummary, devices: Sequence[Device], query: ModelQuery) -> list[Query]:
    """Every program on every valid device, program by program."""
    pairs = _matrix(summary, devices).pairs()
    return [Query(program, device, query.protocol, query.framework, query.implementation) for program, device in pairs]


def model_answer(
    model_id: str,
    query: ModelQuery,
    summary: ModelSummary,
    devices: Sequence[Device],
    predictions: Sequence[Prediction],
    signer: Signer | None,
) -> dict[str, Any]:
    """The response as plain values.

    ``predictions``: one for each of :func:`model_queries`. ``signer``: makes prediction ids; without it they are null.
    """
    receipts = iter([] if signer is None else signer.receipts(len(summary.programs) * len(devices)))

    def failed(_: Program | Failed, device: Device) -> Prediction | ErrorInfo:
        assert isinstance(device, Failed)
        return ErrorInfo.of(device.error)

    results: list[Prediction | ErrorInfo] = [*predictions]
    rows = _matrix(summary, devices).results(results, failed)
    programs = sorted(zip(summary.programs, summary.counts, rows, strict=True), key=lambda p: -_cost(*p[1:]))
    return {
        "model_id": model_id,
        "protocol": query.protocol,
        "framework": query.framework,
        "devices": [
            _total(device.name, summary.counts, [row[i] for row in rows], bool(summary.unsupported))
            for i, device in enumerate(devices)
        ],
        "programs": [
            {
                "name": program.name,
                "program_hash": program.hash,
                "program": {} if program.operator is None else program.operator.canonical(),
                "count": count,
                "answers": [
                    _answer(device, result, signer, receipts) for device, result in zip(devices, row, strict=True)
                ],
            }
            for program, count, row in programs
        ],
        "unsupported": [{"operator": u.operator, "count": u.count, "reason": u.reason} for u in summary.unsupported],
    }


def device_of(artifact: Any, name: str) -> Device:
    """The device of this name, or the error."""
    # By name and never load_device: a client's text must not be used as a path on this machine.
    try:
        spec: DeviceSpec = artifact.device(name)
        return spec
    except CdmppError as error:
        return Failed(name, error)


def _matrix(summary: ModelSummary, devices: Sequence[Device]) -> PredictionMatrix[Program, DeviceSpec]:
    return PredictionMatrix(summary.programs, devices)


def _cost(count: int, row: Sequence[Prediction | ErrorInfo]) -> float:
    return sum(count * p.latency_s for p in row if isinstance(p, Prediction) and p.latency_s is not None)


def _total(
    device: str, counts: Sequence[int], column: Sequence[Prediction | ErrorInfo], left_out: bool
) -> dict[str, Any]:
    counted = [(None if isinstance(r, ErrorInfo) else r, count) for count, r in zip(counts, column, strict=True)]
    total = PredictionTotal.of(counted, left_out=left_out)
    names = ("latency_s", "lower_s", "upper_s", "domain", "domain_shares", "domain_reason", "lower_bound")
    figures = {name: getattr(total, name) for name in names}
    return {"device": device, **figures, "launches": sum(counts), "launches_predicted": total.launches}


def _answer(
    device: Device, result: Prediction | ErrorInfo, signer: Signer | None, receipts: Iterator[str]
) -> dict[str, Any]:
    error = result if isinstance(result, ErrorInfo) else result.error
    if error is not None or isinstance(result, ErrorInfo) or isinstance(device, Failed):
        assert error is not None
        return {"device": device.name, "error": asdict(error)}
    names = ("implementation", "latency_s", "lower_s", "upper_s", "domain", "domain_score", "roofline_s")
    return {
        "device": device.name,
        **{name: getattr(result, name) for name in names},
        "prediction_id": None if signer is None else next(receipts) + signer.content(result, device.digest()),
        **reason_field(result),
    }


router = APIRouter()
#: Larger responses are rendered outside the event loop.
_INLINE_ROWS = 256


@router.post("/models/predict", summary="Predict an ONNX model", response_class=Response)
async def predict_model(request: Request) -> Response:
    """Predict an ONNX file on several devices: each program that it launches, and their sums."""
    state = request.app.state
    query = ModelQuery.read(request.query_params.multi_items())
    _, body = await read_body(request, state.settings, {MEDIA})
    deadline = Deadline.of(request, state.settings)
    with bugs_hidden("/models/predict"):
        predictor = await state.service.model(query.model)
        devices = [device_of(predictor.artifact, name) for name in query.devices]
        # The rows of one request are bounded as in /predict.
        items_per_device = max(1, state.settings.max_items // len(devices))
        summary = await _read(state.sandbox, bytes(body), query, items_per_device, deadline)
        queries = model_queries(summary, devices, query)
        count_items(request, len(queries))
        predictions = await state.batcher.ask(predictor, queries, DEFAULT_QUANTILES, deadline)

        def render() -> bytes:
            signer = state.service.signer
            response = model_answer(predictor.model_id, query, summary, devices, predictions, signer)
            return json.dumps(response, allow_nan=False, separators=(",", ":")).encode()

        text = render() if len(queries) <= _INLINE_ROWS else await asyncio.to_thread(render)
        state.metrics.predictions(predictions)
    return Response(text, media_type="application/json")


async def _read(
    sandbox: Sandbox, data: bytes, query: ModelQuery, max_programs: int, deadline: Deadline
) -> ModelSummary:
    try:
        async with deadline.limit():
            return await sandbox.read_onnx(data, query.dims, max_programs=max_programs)
    except CdmppError as error:
        # Not 422: any bytes satisfy the schema.
        raise ProblemError(error.code, error.message, error.hint, status=409) from None
