"""``POST /predict``, and what stays open for it: the model, the queue, the caches."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request, Response

from cdmpp.errors import CdmppError
from cdmpp.predictor import LatencyPredictor
from server.body import read_json_body
from server.gate import Gate
from server.predict.service import PredictionService
from server.settings import Settings

router = APIRouter()
_log = logging.getLogger(__name__)


@asynccontextmanager
async def opened(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Load the model and try it with a golden prediction; a missing or damaged one ends the start."""
    try:
        predictor = await anyio.to_thread.run_sync(LatencyPredictor.load, settings.model)
    except CdmppError as error:
        app.state.start_error = f"{error.message} ({error.hint})" if error.hint else error.message
        raise
    service = PredictionService(predictor, settings)
    app.state.service = service
    app.state.gate = Gate(settings.max_concurrent, settings.max_queued)
    app.state.not_ready = await anyio.to_thread.run_sync(service.check_golden)
    if app.state.not_ready:
        _log.error("not ready: %s", app.state.not_ready)
    yield


@router.post("/predict", summary="Predict latencies", response_class=Response)
async def predict(request: Request) -> Response:
    """Predict the latency of each item, in order. A bad item gets an error of its own."""
    body = await read_json_body(request, request.app.state.settings)
    service = request.app.state.service
    answer = await request.app.state.gate.run(lambda: service.predict(body))
    return Response(answer, media_type="application/json")
