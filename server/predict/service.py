"""Answering ``/predict`` and ``/adapt``: from the bytes of a body to those of an answer, apart from HTTP."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cdmpp.adaptation.records import measurement
from cdmpp.data.records import Measurement
from cdmpp.devices import DeviceSpec, from_mapping
from cdmpp.errors import CdmppError
from cdmpp.nn.artifact import Artifact
from cdmpp.predictor import ErrorInfo, LatencyPredictor, Prediction, Question
from server.adapt.wire import Record, adapt_request_model
from server.models import Models
from server.predict.cache import ProgramCache
from server.predict.strict import check_item, refusal
from server.predict.wire import Item, PredictRequest, request_model
from server.problems import ProblemError, SchemaViolation, internal_error
from server.settings import Settings

_log = logging.getLogger(__name__)
_MAX_VIOLATIONS = 8
_Model = TypeVar("_Model", bound=BaseModel)
#: Asked once at start; the service is ready when the answer is sound.
GOLDEN = {
    "items": [
        {
            "id": "golden",
            "program": {"operator": "linear", "m": 512, "n": 4096, "k": 1024, "dtype": "float16"},
            "device": "t4",
        }
    ]
}


class PredictionService:
    """One loaded model, and those adapted from it, behind the wire format. Safe to share between threads."""

    def __init__(self, predictor: LatencyPredictor, settings: Settings) -> None:
        self.predictor = predictor
        self.models = Models(predictor, settings.max_adapted, settings.adapted_dir)
        self._request_model = request_model(settings.max_items)
        self._adapt_model = adapt_request_model(settings.max_items)
        self._programs = ProgramCache(settings.cache_bytes)

    def predict(self, body: bytes | bytearray) -> bytes:
        """Answer a request body with a response body.

        Raises
        ------
        ProblemError
            400 or 422 for the body, 4xx for an item of a strict request, 500 for a bug.
        """
        request = _parse(self._request_model, body)
        with _bugs_hidden("/predict"):
            predictor = self.models.get(request.model)
            results = self._answer(predictor, request)
            return _json({"model_id": predictor.model_id, "results": results})

    def adapt(self, body: bytes | bytearray) -> bytes:
        """Adapt the model to a device, keep the adapted one, and answer with what was gained.

        Raises
        ------
        ProblemError
            400 or 422 for the body, 404 for a device that is not known, 409 for records that cannot be used,
            500 for a bug.
        """
        request = _parse(self._adapt_model, body)
        with _bugs_hidden("/adapt"):
            try:
                rows = [self._record(position, record) for position, record in enumerate(request.records)]
                name = request.device
                device = self.predictor.artifact.device(name) if isinstance(name, str) else from_mapping(name)
                adapted = self.predictor.adapt(
                    rows, device, k=request.k, sampler=request.sampler, seed=request.seed
                )
            except CdmppError as error:
                status = 404 if error.code == "unknown_device" else 409
                raise ProblemError(error.code, error.message, error.hint, status=status) from None
            self.models.add(adapted)
            report = dict(adapted.adaptation or {})
            return _json({"adapted_model": report.pop("model_id"), **report})

    def check_golden(self) -> str:
        """Make the golden prediction; empty when it is sound, else what is wrong."""
        try:
            result = json.loads(self.predict(json.dumps(GOLDEN).encode()))["results"][0]
        except ProblemError as error:
            return error.problem.detail
        if "error" in result:
            return str(result["error"]["message"])
        figures = [result[key] for key in ("lower_s", "latency_s", "upper_s")]
        if not all(map(math.isfinite, figures)) or figures != sorted(figures) or figures[0] <= 0:
            return f"the golden prediction is not a latency with its bounds: {figures}"
        return ""

    def _record(self, position: int, record: Record) -> Measurement:
        try:
            program = self._programs.get(record.program, record.backend)
        except CdmppError as error:
            raise ProblemError(
                error.code, f"records.{position}: {error.message}", error.hint, status=409, item=position
            ) from None
        return measurement(program, record.latency_s, record.protocol, record.framework)

    def _answer(self, predictor: LatencyPredictor, request: PredictRequest) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = [{} for _ in request.items]
        questions: list[Question] = []
        positions: list[int] = []
        # The answer of a device is the same for every item that names it.
        named = lru_cache(maxsize=None)(partial(_device_or_error, predictor.artifact))
        for position, item in enumerate(request.items):
            if request.strict:
                check_item(position, item)
            try:
                question = self._question(item, named)
            except CdmppError as error:
                if request.strict:
                    raise refusal(position, item, ErrorInfo.of(error)) from None
                results[position] = _error(item, error)
            else:
                questions.append(question)
                positions.append(position)
        predictions = predictor.predict_questions(questions, request.quantiles)
        for position, prediction in zip(positions, predictions, strict=True):
            item = request.items[position]
            if prediction.error is not None and request.strict:
                raise refusal(position, item, prediction.error)
            results[position] = _result(item, prediction)
        return results

    def _question(self, item: Item, named: Callable[[str], DeviceSpec | CdmppError]) -> Question:
        program = self._programs.get(item.program, item.backend)
        device = named(item.device) if isinstance(item.device, str) else from_mapping(item.device)
        if isinstance(device, CdmppError):
            raise device
        return Question(program, device, item.protocol, item.framework)


def _parse(model: type[_Model], body: bytes | bytearray) -> _Model:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refused(error) from None


def _json(answer: dict[str, Any]) -> bytes:
    # NaN and infinity are no JSON: better no answer than one that no client can read.
    return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()


@contextmanager
def _bugs_hidden(route: str) -> Iterator[None]:
    """What is no problem of the request is logged, and the client hears of a bug only."""
    try:
        yield
    except ProblemError:
        raise
    except Exception:
        _log.exception("unexpected error in %s", route)
        raise internal_error() from None


def _device_or_error(artifact: Artifact, name: str) -> DeviceSpec | CdmppError:
    # By name and never load_device: a client's text is not a path on this machine.
    try:
        return artifact.device(name)
    except CdmppError as error:
        return error


def _result(item: Item, prediction: Prediction) -> dict[str, Any]:
    fields = prediction.to_dict()
    if prediction.error is not None:
        return {"id": item.id, "error": fields["error"]}
    return {"id": item.id, **fields}


def _error(item: Item, error: CdmppError) -> dict[str, Any]:
    return {"id": item.id, "error": {"code": error.code, "message": error.message, "hint": error.hint}}


def _refused(error: ValidationError) -> ProblemError:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    if found[0]["type"] == "json_invalid":
        return ProblemError(
            "malformed_json", found[0]["msg"], "send one JSON object; GET /openapi.json has its schema"
        )
    violations = [
        SchemaViolation(path=".".join(str(part)[:80] for part in problem["loc"]), message=problem["msg"])
        for problem in found[:_MAX_VIOLATIONS]
    ]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return ProblemError(
        "invalid_request",
        f"{violations[0].path or 'body'}: {violations[0].message}{more}",
        "GET /openapi.json has the schema of a request",
        errors=violations,
    )
