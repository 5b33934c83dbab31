"""Predictions for the programs that a request names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from cdmpp.devices.loading import resolve_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, FieldError
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.predict.requests.fields import PriceRequest
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend

V = TypeVar("V")


def predict_prices(requests: Sequence[PriceRequest], predictor: Predictor) -> list[Prediction]:
    """Predict each program; equal ones are predicted once.

    Raises
    ------
    FieldError
        A program or device cannot be read, or has no prediction.
    """
    # Each program is read once: whole models repeat their layers.
    programs: dict[str, TensorProgram] = {}
    devices: dict[str, DeviceSpec | str] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    queries: list[Query] = []
    positions: list[int] = []
    for request in requests:
        program = _read_once(programs, (request.program, request.backend), request.path, partial(_program, request))
        device = _read_once(devices, request.device, request.path, partial(resolve_device, request.device, str))
        key = (id(program), id(device), request.protocol, request.framework)
        if key not in numbers:
            numbers[key] = len(queries)
            queries.append(Query(program, device, request.protocol, request.framework))
        positions.append(numbers[key])
    predictions = _predict_queries(predictor, queries)
    return [check_price(request, predictions[i]) for request, i in zip(requests, positions, strict=True)]


def _predict_queries(predictor: Predictor, queries: Sequence[Query]) -> list[Prediction]:
    """Call ``predict_queries``, or its former name on predictors written for the version before 0.1."""
    if hasattr(predictor, "predict_queries"):
        return predictor.predict_queries(queries)
    warnings.warn("predict_questions is now called predict_queries", DeprecationWarning, stacklevel=2)
    former: Callable[[Sequence[Query]], list[Prediction]] = predictor.predict_questions  # type: ignore[attr-defined]
    return former(queries)


def check_price(request: PriceRequest, prediction: Prediction) -> Prediction:
    """Return a prediction that has a latency.

    Raises
    ------
    FieldError
        The prediction is an error; this one names the field of the request.
    """
    if prediction.error is not None:
        error = prediction.error
        raise FieldError(f"{request.path}: {error.message}", path=request.path, hint=error.hint)
    return prediction


def _program(request: PriceRequest) -> TensorProgram:
    if set(request.program) == {"hash"}:
        raise FieldError(
            f"{request.path}: a hash names a program that a service has stored",
            path=request.path,
            hint="give the program itself",
        )
    backend: Backend | None = request.backend
    return program_from_request(request.program, backend)


def _read_once(read: dict[str, V], form: Any, path: str, make: Callable[[], V]) -> V:
    key = repr(form)
    if key not in read:
        try:
            read[key] = make()
        except FieldError:
            raise
        except CdmppError as error:
            raise FieldError(f"{path}: {error.message}", path=path, hint=error.hint) from None
    return read[key]
