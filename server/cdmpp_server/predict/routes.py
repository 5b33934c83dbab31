"""Routes ``POST /predict`` and ``POST /programs``, their model, queue and caches, and their OpenAPI schema."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from typing import Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Request, Response

from cdmpp.errors import CdmppError
from cdmpp.predict.bulk import MEDIA_TYPE
from cdmpp.utils.lru import Lru
from cdmpp_server.body import JSON, declared_bytes, read_body, read_json_body
from cdmpp_server.concurrency import DESCRIPTION, Deadline, cancel_on_disconnect, infrequent_gc
from cdmpp_server.fields import with_max_items
from cdmpp_server.models import Models, fingerprint, load_model
from cdmpp_server.openapi import BODY_PROBLEMS, Schema, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.predict.batcher import Batcher
from cdmpp_server.predict.observed_programs import ObservedPrograms
from cdmpp_server.predict.render import ROWS_SHARE
from cdmpp_server.predict.schema import PredictRequest, PredictResponse, RegisterRequest, RegisterResponse
from cdmpp_server.predict.service import PredictionService, check_golden
from cdmpp_server.predict.strict import strict_device, strict_program, strict_schemas
from cdmpp_server.proposals import ProposalStore, with_taken
from cdmpp_server.settings import Settings

router = APIRouter()
_log = logging.getLogger(__name__)
_SWITCH_S = 0.001


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Load the model and make the golden prediction; a missing or damaged model stops the start."""
    state = app.state
    state.model_fingerprint = await run_sync(fingerprint, settings.model)
    try:
        predictor = await run_sync(load_model, settings.model, Lru(int(ROWS_SHARE * settings.answer_cache_bytes)))
    except CdmppError as error:
        state.start_error = f"{error.message} ({error.hint})" if error.hint else error.message
        raise
    state.proposals = ProposalStore(state.store)
    predictor, state.model_taken = await run_sync(with_taken, predictor, state.proposals)
    state.models = Models(predictor, settings.max_adapted, settings.adapted_dir)
    state.batcher = Batcher(
        max_batch_rows=settings.max_batch_rows,
        max_queued_rows=settings.max_queued_rows,
        max_wait_s=settings.max_wait_s,
        threads=settings.max_concurrent,
        on_batch=state.metrics.batch,
    )
    state.metrics.model(predictor.model_id)
    state.service = PredictionService(state.models, settings, state.batcher, state.sandbox, state.metrics, state.store)
    state.observed_programs = ObservedPrograms(state.store, state.service.programs)
    state.not_ready = await run_sync(check_golden, predictor)
    if state.not_ready:
        _log.error("not ready: %s", state.not_ready)
    # With the default of 5 ms, the computing thread would delay the event loop by 5 ms per switch.
    sys.setswitchinterval(_SWITCH_S)
    async with state.batcher.running():
        with infrequent_gc():
            yield


@router.post("/predict", summary="Predict latencies", response_class=Response)
async def predict(request: Request) -> Response:
    """Predict the latency of each item, in order. A faulty item gets an error; the others are unaffected."""
    state = request.app.state
    if hasattr(state, "batcher"):  # the service has started
        state.batcher.check_unread(declared_bytes(request), Deadline.of(request, state.settings))
    media, body = await read_body(request, state.settings, {JSON, MEDIA_TYPE})
    deadline, on_items = Deadline.of(request, state.settings), partial(count_items, request)
    answer = state.service.predict_features if media == MEDIA_TYPE else state.service.predict
    work = answer(body, deadline, on_items)
    return Response(await cancel_on_disconnect(request, work), media_type=media)


@router.post("/programs", summary="Register programs", response_class=Response)
async def programs(request: Request) -> Response:
    """Register programs, so that items can name them by hash; order is kept."""
    state = request.app.state
    body = await read_json_body(request, state.settings)
    deadline = Deadline.of(request, state.settings)
    work = state.service.register(body, deadline, partial(count_items, request))
    return Response(await cancel_on_disconnect(request, work), media_type=JSON)


_MEANING = {
    404: "The model is not loaded (unknown_model); with strict: a device "
    "(unknown_device) or the hash of a program (unknown_program) is not known.",
    409: "With strict: an item fits the schema but contradicts itself, or its TIR cannot be read. The "
    "code is the one that the item would have without strict.",
    422: "The body violates this schema (invalid_request); with strict also an item (invalid_request), or its "
    "operator or device (unsupported_operator, invalid_program, invalid_device).",
}
_BYTES = {
    "type": "string",
    "format": "binary",
    "description": "cdmpp.predict.bulk.FeatureQueries and FeatureAnswers as safetensors; docs/server.md.",
}
_OTHER_ITEM = {"title": "InvalidItem", "description": "Anything else gets an error; other items are unaffected."}
_EXAMPLE: dict[str, Any] = {
    "items": [
        {
            "id": "a",
            "program": {"operator": "linear", "m": 512, "n": 4096, "k": 1024, "dtype": "float16"},
            "device": "t4",
        },
        {
            "program": {"operator": "softmax", "rows": 4096, "cols": 1024},
            "device": "a100-pcie-40gb",
            "protocol": "eager",
            "framework": "pytorch",
        },
    ],
    "quantiles": [0.1, 0.9],
}


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add requests, responses and problems of ``/predict`` and ``/programs``."""
    request = with_max_items(PredictRequest, "items", settings.max_items)
    registration = with_max_items(RegisterRequest, "programs", settings.max_items)
    add_models(schemas, request, PredictResponse, registration, RegisterResponse)
    schemas.update(strict_schemas())
    _add_strict_request(schemas)
    predict = document["paths"]["/predict"]["post"]
    add_body(predict, {"oneOf": [ref("PredictRequest"), ref("StrictPredictRequest")]}, _EXAMPLE)
    add_body(predict, _BYTES, media=MEDIA_TYPE)
    description = "One prediction or error per item, in order."
    add_answer(predict, ref("PredictResponse"), description)
    add_answer(predict, _BYTES, description, media=MEDIA_TYPE)
    add_problems(predict, 404, 409, *BODY_PROBLEMS, meaning=_MEANING)
    predict["description"] += "\n\n" + DESCRIPTION
    programs = document["paths"]["/programs"]["post"]
    add_body(programs, ref("RegisterRequest"), {"programs": [i["program"] for i in _EXAMPLE["items"]]})
    add_answer(programs, ref("RegisterResponse"), "A hash or an error per program, in order.")
    add_problems(programs, *BODY_PROBLEMS)


def _add_strict_request(schemas: Schema) -> None:
    """Split the request model by ``strict``; the strict one has a model of every operator."""
    item = deepcopy(schemas["Item"])
    item["title"] = "StrictItem"
    item["properties"]["program"] = strict_program()
    names = [s for s in item["properties"]["device"]["oneOf"] if s.get("type") == "string"]
    item["properties"]["device"] = strict_device(names[0])
    schemas["StrictItem"] = item
    strict = deepcopy(schemas["PredictRequest"])
    strict["title"] = "StrictPredictRequest"
    strict["description"] = "A request that is refused as a whole when one item cannot be predicted."
    strict["properties"]["items"]["items"] = ref("StrictItem")
    strict["properties"]["strict"] = {"const": True, "type": "boolean"}
    strict["required"] = [*strict["required"], "strict"]
    schemas["StrictPredictRequest"] = strict
    lenient = schemas["PredictRequest"]["properties"]
    lenient["strict"]["const"] = False
    lenient["items"]["items"] = {"anyOf": [ref("Item"), _OTHER_ITEM]}
