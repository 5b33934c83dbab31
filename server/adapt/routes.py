"""``POST /adapt``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.body import read_json_body

router = APIRouter()


@router.post("/adapt", summary="Adapt the model to a device", response_class=Response)
async def adapt(request: Request) -> Response:
    """Measurements of one device in, an adapted model out, which /predict takes as `model`."""
    body = await read_json_body(request, request.app.state.settings)
    service = request.app.state.service
    answer = await request.app.state.gate.run(lambda: service.adapt(body))
    return Response(answer, media_type="application/json")
