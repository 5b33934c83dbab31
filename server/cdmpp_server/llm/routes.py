"""Route ``POST /llm``; its queries use the queue of ``/predict``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request, Response

from cdmpp.devices import DeviceSpec
from cdmpp.devices.loading import resolve_device
from cdmpp.errors import CdmppError, DataError, FieldError, UnknownDeviceError
from cdmpp.model.artifact.model import Artifact
from cdmpp.predict.llm import EstimatePlan, LLMEstimate, read_config
from cdmpp.predict.prediction import DEFAULT_QUANTILES, ErrorInfo, Prediction
from cdmpp.predict.prediction_matrix import Failed
from cdmpp_server.body import read_json_body
from cdmpp_server.deadline import Deadline
from cdmpp_server.llm.schema import LlmDevicesRequest, LlmRequest
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.parse import check, parse_json
from cdmpp_server.predict.service import bugs_hidden
from cdmpp_server.problems import ProblemError, SchemaViolation

router = APIRouter()
Body = LlmRequest | LlmDevicesRequest


@router.post("/llm", summary="Estimate a language model", response_class=Response)
async def llm(request: Request) -> Response:
    """Estimate latency, throughput and memory of a batch of requests to a language model.

    With `devices`, a device without an estimate is an `error` at its place.
    """
    state = request.app.state
    body = await read_json_body(request, state.settings)
    deadline = Deadline.of(request, state.settings)
    with bugs_hidden("/llm"):
        parsed = await state.limiter.run(partial(_parse, body), deadline)
        predictor = await state.service.model(parsed.model)
        most = state.settings.max_items
        plans = await state.limiter.run(partial(_plans, parsed, predictor.artifact, most), deadline)
        queries = [query for plan in plans if not isinstance(plan, Failed) for query in plan.queries]
        count_items(request, len(queries))
        predictions = await state.batcher.ask(predictor, queries, DEFAULT_QUANTILES, deadline)

        def render() -> bytes:
            state.metrics.items(
                [(one.device, one.domain) for one in predictions if one.domain is not None],
                [one.error.code for one in predictions if one.error is not None],
            )
            return _render(parsed, plans, predictor.model_id, predictions)

        text = await state.limiter.run(render, deadline)
    return Response(text, media_type="application/json")


def _parse(body: bytes | bytearray) -> Body:
    value = parse_json(body)
    several = isinstance(value, dict) and "devices" in value
    return check(LlmDevicesRequest, value) if several else check(LlmRequest, value)


def _plans(request: Body, artifact: Artifact, most: int) -> list[EstimatePlan | Failed]:
    """A plan for each device; raises :class:`ProblemError` where the request has none at all."""
    options = request.model_dump(exclude={"config", "device", "devices", "model"})
    sent = [request.device] if isinstance(request, LlmRequest) else request.devices
    plans: list[EstimatePlan | Failed] = []
    try:
        config = read_config(request.config)
        rows = 0
        for device in sent:
            try:
                plan = EstimatePlan(config, _device(device, artifact), **options)
            except CdmppError as error:
                if isinstance(request, LlmRequest):
                    raise
                plans.append(Failed(_name(device), error))
                continue
            rows += len(plan.queries)
            if rows > most:
                raise DataError(
                    f"the devices need more than {most:,} predictions", hint="send fewer devices in one request"
                )
            plans.append(plan)
    except CdmppError as error:
        raise _problem(error) from None
    return plans


def _device(device: str | dict[str, Any], artifact: Artifact) -> DeviceSpec:
    # By name and never load_device: a client's text must not be used as a path on this machine.
    return resolve_device(device, artifact.device)


def _name(device: str | dict[str, Any]) -> str:
    return str(device if isinstance(device, str) else device.get("name", ""))[:100]


def _problem(error: CdmppError) -> ProblemError:
    # Not 422: the body satisfies the schema.
    status = 404 if isinstance(error, UnknownDeviceError) else 409
    places = [SchemaViolation(path=error.path, message=error.message)] if isinstance(error, FieldError) else None
    return ProblemError(error.code, error.message, error.hint, status=status, errors=places)


def _render(
    request: Body, plans: Sequence[EstimatePlan | Failed], model_id: str, predictions: Sequence[Prediction]
) -> bytes:
    results = list(_estimates(plans, model_id, iter(predictions)))
    if isinstance(request, LlmDevicesRequest):
        return _json({"answers": [_answer(result) for result in results]})
    [result] = results
    if isinstance(result, Failed):
        raise _problem(result.error)
    return _json(result.to_dict())


def _estimates(
    plans: Sequence[EstimatePlan | Failed], model_id: str, predictions: Iterator[Prediction]
) -> Iterator[LLMEstimate | Failed]:
    for plan in plans:
        if isinstance(plan, Failed):
            yield plan
            continue
        own = list(islice(predictions, len(plan.queries)))
        try:
            yield plan.estimate(model_id, own)
        except CdmppError as error:
            yield Failed(plan.settings.device, error)


def _answer(result: LLMEstimate | Failed) -> dict[str, Any]:
    if isinstance(result, Failed):
        return {"device": result.name, "error": asdict(ErrorInfo.of(result.error))}
    return result.to_dict()


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
