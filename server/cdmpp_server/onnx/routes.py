"""``POST /models/predict``: the sandbox reads the model, the queue of ``/predict`` computes it."""

from __future__ import annotations

import asyncio
import json

from fastapi import APIRouter, Request, Response

from cdmpp.errors import CdmppError
from cdmpp.predict.prediction import DEFAULT_QUANTILES
from cdmpp_server.body import read_body
from cdmpp_server.deadline import Deadline
from cdmpp_server.onnx import answer, openapi
from cdmpp_server.onnx.query import ModelQuery
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.predict.service import bugs_hidden
from cdmpp_server.problems import ProblemError
from cdmpp_server.sandbox.replies import ModelSummary
from cdmpp_server.sandbox.sandbox import Sandbox

router = APIRouter()
#: Larger responses are rendered outside the event loop.
_INLINE_ROWS = 256


@router.post("/models/predict", summary="Predict an ONNX model", response_class=Response)
async def predict_model(request: Request) -> Response:
    """Predict an ONNX file on several devices: each program that it launches, and their sums."""
    state = request.app.state
    query = ModelQuery.read(request.query_params.multi_items())
    _, body = await read_body(request, state.settings, {openapi.MEDIA})
    deadline = Deadline.of(request, state.settings)
    with bugs_hidden("/models/predict"):
        predictor = await state.service.model(query.model)
        devices = [answer.device_of(predictor.artifact, name) for name in query.devices]
        # The rows of one request are bounded as in /predict.
        most = max(1, state.settings.max_items // len(devices))
        summary = await _read(state.sandbox, bytes(body), query, most, deadline)
        queries = answer.queries(summary, devices, query)
        count_items(request, len(queries))
        predictions = await state.batcher.ask(predictor, queries, DEFAULT_QUANTILES, deadline)

        def render() -> bytes:
            signer = state.service.signer
            response = answer.model_answer(predictor.model_id, query, summary, devices, predictions, signer)
            return json.dumps(response, allow_nan=False, separators=(",", ":")).encode()

        text = render() if len(queries) <= _INLINE_ROWS else await asyncio.to_thread(render)
        state.metrics.items(*answer.counted(predictions))
    return Response(text, media_type="application/json")


async def _read(sandbox: Sandbox, data: bytes, query: ModelQuery, most: int, deadline: Deadline) -> ModelSummary:
    try:
        async with deadline.limit():
            return await sandbox.read_onnx(data, query.dims, max_programs=most)
    except CdmppError as error:
        # Not 422: any bytes satisfy the schema.
        raise ProblemError(error.code, error.message, error.hint, status=409) from None
