"""``POST /adapt``, and its processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request, Response

from cdmpp_server.adapt.processes import AdaptProcesses, adapting
from cdmpp_server.adapt.schema import AdaptRequest, adapt_request_model
from cdmpp_server.adapt.service import adapt as adapt_model
from cdmpp_server.body import JSON, read_json_body
from cdmpp_server.deadline import Deadline
from cdmpp_server.disconnect import cancel_on_disconnect
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.parse import parse
from cdmpp_server.predict.service import bugs_hidden
from cdmpp_server.settings import Settings

router = APIRouter()


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Keep adapting processes; each starts when it is first needed."""
    make = adapting(settings.adapt_memory_bytes)
    async with AdaptProcesses(settings.adapt_workers, make, settings.max_queued) as processes:
        app.state.adapting = processes
        yield


@router.post("/adapt", summary="Adapt the model to a device", response_class=Response)
async def adapt(request: Request) -> Response:
    """Adapt the model to measurements of one device; pass the result to /predict as `model`."""
    state = request.app.state
    body = await read_json_body(request, state.settings)
    deadline = Deadline.of(request, state.settings)
    adapt_request: AdaptRequest = await state.limiter.run(
        lambda: parse(adapt_request_model(state.settings.max_items), body), deadline
    )
    # Charged before the work, so that further requests of the sender are refused meanwhile.
    count_items(request, len(adapt_request.records))
    with bugs_hidden("/adapt"):
        work = adapt_model(adapt_request, state.service, state.sandbox, state.adapting, deadline)
        answer = await cancel_on_disconnect(request, work)
    return Response(answer, media_type=JSON)
