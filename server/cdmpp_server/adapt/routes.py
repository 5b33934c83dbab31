"""``POST /adapt``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from cdmpp_server.adapt.schema import adapt_request_model
from cdmpp_server.adapt.service import adapt as adapt_model
from cdmpp_server.body import read_json_body
from cdmpp_server.deadline import Deadline
from cdmpp_server.parse import parse
from cdmpp_server.predict.service import bugs_hidden

router = APIRouter()


@router.post("/adapt", summary="Adapt the model to a device", response_class=Response)
async def adapt(request: Request) -> Response:
    """Adapt the model to measurements of one device; pass the result to /predict as `model`."""
    state = request.app.state
    body = await read_json_body(request, state.settings)
    deadline = Deadline.of(request, state.settings)
    adapt_request = await state.limiter.run(
        lambda: parse(adapt_request_model(state.settings.max_items), body), deadline
    )
    with bugs_hidden("/adapt"):
        answer = await adapt_model(adapt_request, state.service, state.sandbox, state.slow_limiter, deadline)
    return Response(answer, media_type="application/json")
