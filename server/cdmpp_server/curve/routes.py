"""``POST /curve``: the points go through the queue of ``/predict``."""

from __future__ import annotations

import json
from functools import partial

from fastapi import APIRouter, Request, Response

from cdmpp.artifact.model import Artifact
from cdmpp.curves import CurvePlan, Template
from cdmpp.errors import CdmppError
from cdmpp_server.body import read_json_body
from cdmpp_server.curve.schema import CurveRequest, CurvesRequest
from cdmpp_server.deadline import Deadline
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.parse import check, parse_json
from cdmpp_server.predict.service import bugs_hidden
from cdmpp_server.problems import ProblemError

router = APIRouter()


@router.post("/curve", summary="Predict a curve", response_class=Response)
async def curve(request: Request) -> Response:
    """Predict a template over axes on devices, with a fit that does not fall and domain flags."""
    state = request.app.state
    body = await read_json_body(request, state.settings)
    deadline = Deadline.of(request, state.settings)
    with bugs_hidden("/curve"):
        asked = await state.limiter.run(partial(_parse, body), deadline)
        predictor = await state.service.model(asked.model)
        most = state.settings.max_items
        plan = await state.limiter.run(partial(_plan, asked, predictor.artifact, most), deadline)
        count_items(request, len(plan.queries))
        answers = await state.batcher.ask(predictor, plan.queries, plan.levels, deadline)

        def render() -> bytes:
            found = plan.curve(predictor.model_id, answers)
            answered = [(point.device, point.domain) for point in found.points if point.domain is not None]
            errors = [point.error.code for point in found.points if point.error is not None]
            state.metrics.items(answered, errors)
            return json.dumps(found.to_dict(), allow_nan=False, separators=(",", ":")).encode()

        text = await state.limiter.run(render, deadline)
    return Response(text, media_type="application/json")


def _parse(body: bytes | bytearray) -> CurveRequest | CurvesRequest:
    value = parse_json(body)
    several = isinstance(value, dict) and "programs" in value
    return check(CurvesRequest, value) if several else check(CurveRequest, value)


def _plan(asked: CurveRequest | CurvesRequest, artifact: Artifact, most: int) -> CurvePlan:
    if isinstance(asked, CurvesRequest):
        templates = [Template(each.program, each.count) for each in asked.programs]
    else:
        templates = [Template(asked.program)]
    try:
        return CurvePlan(
            templates,
            asked.axes,
            asked.devices,
            backend=asked.backend,
            protocol=asked.protocol,
            framework=asked.framework,
            quantiles=asked.quantiles,
            monotone=asked.monotone,
            # By name and never load_device: a client's text is not a path on this machine.
            find=artifact.device,
            most=most,
        )
    except CdmppError as error:
        # The form is right; that its parts do not fit together, no schema can say.
        raise ProblemError(error.code, error.message, error.hint, status=409) from None
