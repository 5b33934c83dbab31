"""Route ``POST /curve``; its queries use the queue of ``/predict``."""

from __future__ import annotations

import json
from functools import partial

from fastapi import APIRouter, Request, Response

from cdmpp.errors import CdmppError
from cdmpp.model.artifact.model import Artifact
from cdmpp.predict.curves import CurvePlan, Template
from cdmpp_server.body import read_json_body
from cdmpp_server.curve.schema import CurveRequest, CurvesRequest
from cdmpp_server.deadline import Deadline
from cdmpp_server.fields import ProgramValue
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.parse import check, parse_json
from cdmpp_server.predict.service import bugs_hidden
from cdmpp_server.problems import ProblemError

router = APIRouter()


@router.post("/curve", summary="Predict a curve", response_class=Response)
async def curve(request: Request) -> Response:
    """Predict a template over axes on devices, with a monotone fit and domain labels."""
    state = request.app.state
    body = await read_json_body(request, state.settings)
    deadline = Deadline.of(request, state.settings)
    with bugs_hidden("/curve"):
        parsed = await state.limiter.run(partial(_parse, body), deadline)
        predictor = await state.service.model(parsed.model)
        most = state.settings.max_items
        plan = await state.limiter.run(partial(_plan, parsed, predictor.artifact, most), deadline)
        count_items(request, len(plan.queries))
        predictions = await state.batcher.ask(predictor, plan.queries, plan.levels, deadline)

        def render() -> bytes:
            curve = plan.curve(predictor.model_id, predictions)
            predicted = [(point.device, point.domain) for point in curve.points if point.domain is not None]
            errors = [point.error.code for point in curve.points if point.error is not None]
            state.metrics.items(predicted, errors)
            return json.dumps(curve.to_dict(), allow_nan=False, separators=(",", ":")).encode()

        text = await state.limiter.run(render, deadline)
    return Response(text, media_type="application/json")


def _parse(body: bytes | bytearray) -> CurveRequest | CurvesRequest:
    value = parse_json(body)
    several = isinstance(value, dict) and "programs" in value
    return check(CurvesRequest, value) if several else check(CurveRequest, value)


def _template(program: ProgramValue, count: int = 1) -> Template:
    return Template.parse(program, count) if isinstance(program, str) else Template(program, count)


def _plan(request: CurveRequest | CurvesRequest, artifact: Artifact, most: int) -> CurvePlan:
    try:
        if isinstance(request, CurvesRequest):
            templates = [_template(program.program, program.count) for program in request.programs]
        else:
            templates = [_template(request.program)]
        return CurvePlan(
            templates,
            request.axes,
            request.devices,
            backend=request.backend,
            protocol=request.protocol,
            framework=request.framework,
            quantiles=request.quantiles,
            monotone=request.monotone,
            # By name and never load_device: a client's text must not be used as a path on this machine.
            find=artifact.device,
            most=most,
        )
    except CdmppError as error:
        # Not 422: the body satisfies the schema.
        raise ProblemError(error.code, error.message, error.hint, status=409) from None
