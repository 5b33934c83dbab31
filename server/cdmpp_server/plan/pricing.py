"""The programs of a request, priced by the model of ``/predict`` through its queue and caches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cdmpp.compose.predict import check_price
from cdmpp.compose.request import PriceRequest
from cdmpp.errors import CdmppError, FieldError
from cdmpp.prediction import DEFAULT_QUANTILES, Query
from cdmpp.predictor import LatencyPredictor
from cdmpp_server.deadline import Deadline
from cdmpp_server.fields import Device, Program
from cdmpp_server.plan.work import asked_of, priced
from cdmpp_server.predict.batcher import Batcher
from cdmpp_server.predict.programs import Known
from cdmpp_server.predict.service import PredictionService
from cdmpp_server.schema_errors import violations

_PROGRAM: TypeAdapter[Any] = TypeAdapter(Program)
_DEVICE: TypeAdapter[Any] = TypeAdapter(Device)


async def price(
    text: bytes, service: PredictionService, batcher: Batcher, predictor: LatencyPredictor, deadline: Deadline
) -> bytes:
    """Prices as JSON, from what :func:`cdmpp_server.plan.work.read` asks.

    Raises
    ------
    FieldError
        A program or device cannot be read, or has no prediction.
    ProblemError
        503, 504.
    """
    found = await service.do(len(text) <= 2**16, lambda: json.loads(text), deadline)
    asks = [asked_of(fields) for fields in found["asks"]]
    forms = [(_program(one), one.backend) for one in asks]
    known = await service.read_programs(forms, deadline)

    def queries() -> list[Query]:
        return [_query(one, program, service, predictor) for one, program in zip(asks, known, strict=True)]

    asked = await service.do(len(asks) <= 256, queries, deadline)
    answers = await batcher.ask(predictor, asked, DEFAULT_QUANTILES, deadline)
    for one, answer in zip(asks, answers, strict=True):
        check_price(one, answer)
    return priced(answers, found["places"])


def _program(asked: PriceRequest) -> Mapping[str, Any]:
    try:
        _PROGRAM.validate_python(asked.program)
    except ValidationError as error:
        raise _no(asked, violations(error)[0]) from None
    return asked.program


def _query(
    asked: PriceRequest, known: Known | CdmppError, service: PredictionService, predictor: LatencyPredictor
) -> Query:
    if not isinstance(known, Known):
        raise _no(asked, known.message, known.hint)
    try:
        _DEVICE.validate_python(asked.device)
        # By name and never by path: a client's text is not a file on this machine.
        device = service.devices.find(asked.device, predictor.artifact)
    except ValidationError as error:
        raise _no(asked, violations(error)[0]) from None
    except CdmppError as error:
        raise _no(asked, error.message, error.hint) from None
    return Query(known.program, device.spec, asked.protocol, asked.framework)


def _no(asked: PriceRequest, message: str, hint: str = "") -> FieldError:
    return FieldError(f"{asked.path}: {message}", path=asked.path, hint=hint)
