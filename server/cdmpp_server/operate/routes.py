"""``GET /metrics``, and the OpenAPI description of keys and rate limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request, Response

from cdmpp_server.background import background
from cdmpp_server.feature import Schema
from cdmpp_server.openapi import add_answer, add_problems
from cdmpp_server.operate.connections import CONNECTIONS
from cdmpp_server.operate.metrics import MEDIA_TYPE, Metrics
from cdmpp_server.operate.middleware import OPEN, QUIET
from cdmpp_server.settings import Settings

router = APIRouter()
#: Interval at which each worker samples its queues; a scrape also samples its own worker.
_SAMPLE_S = 1.0


@router.get("/metrics", summary="Metrics for Prometheus", response_class=Response, operation_id="metrics_metrics_get")
async def get_metrics(request: Request) -> Response:
    """Requests, batches, caches, queues, domains, errors, plans, jobs and observations in Prometheus' text format."""
    _sample(request.app)
    # With several workers this reads files, which would block the event loop.
    text = await anyio.to_thread.run_sync(request.app.state.metrics.text)
    return Response(text, headers={"content-type": MEDIA_TYPE})


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Describe /metrics, and keys and rate limits if they are set."""
    operation = document["paths"]["/metrics"]["get"]
    operation["responses"]["200"] = {}
    add_answer(operation, {"type": "string"}, "All metrics.", media="text/plain")
    limited = settings.requests_per_s is not None or settings.items_per_s is not None
    if settings.api_key_hashes or settings.admin_key_hashes:
        schemes = document["components"].setdefault("securitySchemes", {})
        schemes["key"] = {"type": "http", "scheme": "bearer"}
    for path, methods in document["paths"].items():
        is_open = path in OPEN or (path == "/metrics" and settings.open_metrics)
        for operation in methods.values():
            if path not in QUIET:
                add_problems(operation, 421)
            if not is_open and settings.api_key_hashes:
                operation["security"] = [{"key": []}]
                add_problems(operation, 401)
            if not is_open and limited and "429" not in operation["responses"]:
                add_problems(operation, 429)


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Sample the queues regularly, for a scrape of another worker."""

    async def sample_regularly() -> None:
        while True:
            _sample(app)
            await asyncio.sleep(_SAMPLE_S)

    async with background(sample_regularly()):
        yield


def _sample(app: FastAPI) -> None:
    metrics: Metrics = app.state.metrics
    metrics.connections(len(CONNECTIONS.open), CONNECTIONS.refused)
    batcher = getattr(app.state, "batcher", None)
    sandbox = getattr(app.state, "sandbox", None)
    metrics.sample(
        batcher.queued_rows if batcher is not None else 0,
        sandbox.queued if sandbox is not None else 0,
        sandbox.restarts if sandbox is not None else 0,
    )
