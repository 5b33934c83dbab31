"""Routes ``POST /predict`` and ``POST /programs``, and their model, queue and caches."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Request, Response

from cdmpp.errors import CdmppError
from cdmpp.predict.bulk import MEDIA_TYPE
from cdmpp.utils.lru import Lru
from cdmpp_server.body import JSON, declared_bytes, read_body, read_json_body
from cdmpp_server.concurrency import Deadline, cancel_on_disconnect, infrequent_gc
from cdmpp_server.models import Models, fingerprint, load_model
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.predict.batcher import Batcher
from cdmpp_server.predict.observed_programs import ObservedPrograms
from cdmpp_server.predict.render import ROWS_SHARE
from cdmpp_server.predict.service import PredictionService, check_golden
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
