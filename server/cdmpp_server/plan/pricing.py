"""Prices of the programs of a request, by the queue and the caches of ``/predict``."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cdmpp.errors import CdmppError, FieldError
from cdmpp.plan.base.solve import check_price
from cdmpp.predict.prediction import DEFAULT_QUANTILES, Query
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.requests.request import PriceRequest
from cdmpp_server.deadline import Deadline
from cdmpp_server.fields import Device, Program
from cdmpp_server.plan.work import encode_prices
from cdmpp_server.predict.batcher import Batcher
from cdmpp_server.predict.programs import Known
from cdmpp_server.predict.service import PredictionService
from cdmpp_server.schema_errors import violations

_PROGRAM: TypeAdapter[Any] = TypeAdapter(Program)
_DEVICE: TypeAdapter[Any] = TypeAdapter(Device)


async def price(
    text: bytes, service: PredictionService, batcher: Batcher, predictor: LatencyPredictor, deadline: Deadline
) -> bytes:
    """Prices as JSON, for the programs that :func:`cdmpp_server.plan.work.read` lists.

    Raises
    ------
    FieldError
        A program or device cannot be read, or has no prediction.
    ProblemError
        503, 504.
    """
    listed = await service.do(len(text) <= 2**16, lambda: json.loads(text), deadline)
    requests = [PriceRequest(**fields) for fields in listed["programs"]]
    forms = [(_program(request), request.backend) for request in requests]
    programs = await service.read_programs(forms, deadline)

    def make_queries() -> list[Query]:
        pairs = zip(requests, programs, strict=True)
        return [_query(request, program, service, predictor) for request, program in pairs]

    queries = await service.do(len(requests) <= 256, make_queries, deadline)
    predictions = await batcher.ask(predictor, queries, DEFAULT_QUANTILES, deadline)
    for request, prediction in zip(requests, predictions, strict=True):
        check_price(request, prediction)
    return encode_prices(predictions, listed["positions"])


def _program(request: PriceRequest) -> dict[str, Any]:
    try:
        _PROGRAM.validate_python(request.program)
    except ValidationError as error:
        raise _field_error(request, violations(error)[0]) from None
    return request.program


def _query(
    request: PriceRequest, program: Known | CdmppError, service: PredictionService, predictor: LatencyPredictor
) -> Query:
    if not isinstance(program, Known):
        raise _field_error(request, program.message, program.hint)
    try:
        _DEVICE.validate_python(request.device)
        # By name, never by path: text of a client is not a file of this machine.
        device = service.devices.find(request.device, predictor.artifact)
    except ValidationError as error:
        raise _field_error(request, violations(error)[0]) from None
    except CdmppError as error:
        raise _field_error(request, error.message, error.hint) from None
    return Query(program.program, device.spec, request.protocol, request.framework)


def _field_error(request: PriceRequest, message: str, hint: str = "") -> FieldError:
    return FieldError(f"{request.path}: {message}", path=request.path, hint=hint)
