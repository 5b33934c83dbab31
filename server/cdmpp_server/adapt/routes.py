"""``POST /adapt``: its response, its implementation, and the lifespan of the adapting processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import Field

from cdmpp.errors import CdmppError
from cdmpp.model.artifact.load import ADAPTER, on_base, without_adapter
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.adapt.work import AdaptRequest, header_for, unpack
from cdmpp_server.body import INLINE_BYTES, JSON, read_json_body
from cdmpp_server.concurrency import Deadline, cancel_on_disconnect
from cdmpp_server.fields import ProgramValue, with_max_items
from cdmpp_server.load import Place
from cdmpp_server.models import Models
from cdmpp_server.openapi import BODY_PROBLEMS, Schema, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.operate.access import sender_id
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.predict.service import bugs_hidden
from cdmpp_server.problems import ProblemError
from cdmpp_server.processes import ADAPTING, Processes, adapting
from cdmpp_server.sandbox.sandbox import Sandbox
from cdmpp_server.schema_base import AnswerModel
from cdmpp_server.settings import Settings


class CrossValidated(AnswerModel):
    """Leave-one-out mean relative error on the used measurements, as fractions."""

    before: float
    after: float


class Figures(AnswerModel):
    """Errors on the remaining records."""

    overall: dict[str, Any] = Field(description="As `cdmpp eval --json` prints them; fractions.")


class NamedWarning(AnswerModel):
    """A warning about the result."""

    code: str
    message: str


class AdaptResponse(AnswerModel):
    """Errors before and after the adaptation, and the name of the adapted model for /predict."""

    adapted_model: str = Field(description="Pass it as `model` to /predict.")
    base_model_id: str
    device: str
    k: int = Field(ge=1, description="Number of used records.")
    selected: list[int] | None = Field(description="With k: indices of the chosen records.")
    programs: int = Field(ge=1, description="Number of distinct queries among the used records.")
    families: dict[str, int]
    protocols: dict[str, int]
    cross_validated: CrossValidated
    before: Figures | None = Field(description="Errors of the base model on the remaining records.")
    after: Figures | None = Field(description="Errors of the adapted model on the same records.")
    weight: float = Field(
        ge=0,
        le=1,
        description="Share of the correction that reduced the error on left-out measurements. 0: none did, and "
        "the adapted model predicts as the base model.",
    )
    width: float = Field(gt=0, description="Factor on the width of the intervals.")
    sampler: str | None
    seed: int
    unsupported: dict[str, int] = Field(description="Number of records that could not be used, by reason.")
    warnings: list[NamedWarning]
    seconds: dict[str, float]


async def adapt_model(
    records: list[dict[str, Any]], fields: dict[str, Any], state: Any, deadline: Deadline, place: Place
) -> bytes:
    """Adapt the base model to a device, keep the adapted model, and return the response body.

    The sandbox reads TIR texts first and refuses those that exceed its limits, and converts TVMScript to TVM JSON.
    An adapting process reads TVM JSON again, in plain Python. It is killed at the deadline.

    Raises ProblemError: 404 for an unknown device, 409 for records that cannot be used, 503 and 504 under load.
    """
    service = state.service
    sent = [(record["program"], record["backend"]) for record in records]
    for position, program in enumerate(await service.read_programs(sent, deadline)):
        if isinstance(program, CdmppError):
            message = f"records.{position}: {program.message}"
            raise ProblemError(program.code, message, program.hint, status=409, item=position)
    forms = await _without_scripts([form for form, _ in sent], state.sandbox, deadline)
    base = service.models.base  # a reload may replace it during the adaptation
    body = await service.do(False, partial(_encode, fields, records, forms), deadline)
    reply, data = await state.adapting.run({"do": "adapt", **header_for(base.artifact)}, body, deadline, place)
    return await run_sync(_keep, unpack(reply, data), base, service.models)


async def _without_scripts(forms: Sequence[ProgramValue], sandbox: Sandbox, deadline: Deadline) -> list[ProgramValue]:
    scripts = {form["tvmscript"]: "" for form in forms if isinstance(form, dict) and "tvmscript" in form}
    try:
        async with deadline.limit():
            for script in scripts:
                scripts[script] = await sandbox.script_as_json(script)
    except CdmppError as error:  # the first reading succeeded; this one exceeded the time or memory limit
        raise ProblemError(error.code, error.message, error.hint, status=409) from None
    return [
        {"tvm_json": scripts[form["tvmscript"]]} if isinstance(form, dict) and "tvmscript" in form else form
        for form in forms
    ]


def _encode(fields: dict[str, Any], records: list[dict[str, Any]], forms: Sequence[ProgramValue]) -> bytes:
    read = [{**record, "program": form} for form, record in zip(forms, records, strict=True)]
    return json.dumps({**fields, "records": read}).encode()


def _keep(reply: tuple[dict[str, Any], dict[str, Any], bytes], base: LatencyPredictor, models: Models) -> bytes:
    report, manifest, payload = reply
    adapted = on_base(without_adapter(base.artifact), payload, manifest, Path(ADAPTER))
    models.add(LatencyPredictor(adapted, cache=base.cache), sender_id())
    return json.dumps({"adapted_model": report.pop("model_id"), **report}, separators=(",", ":")).encode()


router = APIRouter()


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Keep adapting processes; each starts when it is first needed."""
    make = adapting(settings.adapt_memory_bytes)
    async with Processes(ADAPTING, settings.adapt_workers, make, settings.max_queued) as processes:
        app.state.adapting = processes
        yield


@router.post("/adapt", summary="Adapt the model to a device", response_class=Response)
async def adapt(request: Request) -> Response:
    """Adapt the model to measurements of one device; pass the result to /predict as `model`."""
    body = bytes(await read_json_body(request, request.app.state.settings))
    deadline = Deadline.of(request, request.app.state.settings)
    with bugs_hidden("/adapt"):
        answer = await cancel_on_disconnect(request, _adapt(request, body, deadline))
    return Response(answer, media_type=JSON)


async def _adapt(request: Request, body: bytes, deadline: Deadline) -> bytes:
    state = request.app.state
    with state.adapting.admitted("adapt", deadline, 1 + len(body) / 2**14) as place:
        header = {"do": "read", "most": state.settings.max_items}
        _, text = await state.adapting.run(header, body, deadline, place)
        fields = await state.service.do(len(text) <= INLINE_BYTES, partial(json.loads, text), deadline)
        records = fields.pop("records")
        # Charged before the work, so that further requests of the sender are refused meanwhile.
        count_items(request, len(records))
        return await adapt_model(records, fields, state, deadline, place)


_MEANING = {
    404: "The device is unknown (unknown_device).",
    409: "A record cannot be read, or the records cannot be used.",
}
_EXAMPLE = {
    "device": "t4",
    "records": [
        {
            "program": {"operator": "linear", "m": 512, "n": 4096, "k": k, "dtype": "float16"},
            "latency_s": latency_s,
            "protocol": "eager",
        }
        for k, latency_s in ((256, 1.1e-4), (1024, 1.9e-4), (4096, 7.2e-4))
    ],
}


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add request, response and problems of ``POST /adapt``."""
    add_models(schemas, with_max_items(AdaptRequest, "records", settings.max_items), AdaptResponse)
    adapt = document["paths"]["/adapt"]["post"]
    add_body(adapt, ref("AdaptRequest"), _EXAMPLE)
    add_answer(
        adapt, ref("AdaptResponse"), "Errors before and after the adaptation, and the name of the adapted model."
    )
    add_problems(adapt, 404, 409, *BODY_PROBLEMS, meaning=_MEANING)
