"""``GET /metrics``, and the part of the schema that keys and rates are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request, Response

from cdmpp_server.feature import Schema
from cdmpp_server.openapi import add_answer, add_problems
from cdmpp_server.operate.metrics import MEDIA_TYPE, Metrics
from cdmpp_server.operate.middleware import OPEN
from cdmpp_server.settings import Settings

router = APIRouter()
#: How often state is looked at; a scrape looks at its own worker's as well.
_SAMPLE_S = 1.0


@router.get("/metrics", summary="Figures for Prometheus", response_class=Response)
async def metrics(request: Request) -> Response:
    """Requests, batches, caches, queue, domains, errors and observations, in Prometheus' text format."""
    _sample(request.app)
    # With several workers their files are read, which is no work for the event loop.
    text = await anyio.to_thread.run_sync(request.app.state.metrics.text)
    return Response(text, headers={"content-type": MEDIA_TYPE})


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add the text of /metrics, and keys and rates where they are set."""
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
            if not is_open and settings.api_key_hashes:
                operation["security"] = [{"key": []}]
                add_problems(operation, 401)
            if not is_open and limited:
                add_problems(operation, 429)


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Look at the queues from time to time, for a scrape of another worker."""

    async def look() -> None:
        while True:
            _sample(app)
            await asyncio.sleep(_SAMPLE_S)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _sample(app: FastAPI) -> None:
    seen: Metrics = app.state.metrics
    batcher = getattr(app.state, "batcher", None)
    sandbox = getattr(app.state, "sandbox", None)
    seen.sample(
        batcher.queued_rows if batcher is not None else 0,
        sandbox.queued if sandbox is not None else 0,
        sandbox.restarts if sandbox is not None else 0,
    )
