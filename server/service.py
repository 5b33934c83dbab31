"""Answering ``/predict``: from the bytes of a body to the bytes of an answer, apart from HTTP."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from pydantic import ValidationError

from cdmpp.devices import DeviceSpec, from_mapping
from cdmpp.errors import CdmppError
from cdmpp.nn.artifact import Artifact
from cdmpp.predictor import ErrorInfo, LatencyPredictor, Prediction, Question
from server.cache import ProgramCache
from server.problems import ProblemError, SchemaViolation, internal_error
from server.settings import Settings
from server.strict import check_item, refusal
from server.wire import Item, PredictRequest, request_model

_log = logging.getLogger(__name__)
_MAX_VIOLATIONS = 8
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
    """One loaded model behind the wire format. Safe to share between threads."""

    def __init__(self, predictor: LatencyPredictor, settings: Settings) -> None:
        self.predictor = predictor
        self._request_model = request_model(settings.max_items)
        self._programs = ProgramCache(settings.cache_bytes)

    def predict(self, body: bytes | bytearray) -> bytes:
        """Answer a request body with a response body.

        Raises
        ------
        ProblemError
            400 or 422 for the body, 4xx for an item of a strict request, 500 for a bug.
        """
        request = self._parse(body)
        try:
            results = self._answer(request)
            answer = {"model_id": self.predictor.model_id, "results": results}
            # NaN and infinity are no JSON: better no answer than one that no client can read.
            return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
        except ProblemError:
            raise
        except Exception:
            _log.exception("unexpected error in /predict")
            raise internal_error() from None

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

    def _parse(self, body: bytes | bytearray) -> PredictRequest:
        try:
            return self._request_model.model_validate_json(body)
        except ValidationError as error:
            raise _refused(error) from None

    def _answer(self, request: PredictRequest) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = [{} for _ in request.items]
        questions: list[Question] = []
        positions: list[int] = []
        # The answer of a device is the same for every item that names it.
        named = lru_cache(maxsize=None)(partial(_device_or_error, self.predictor.artifact))
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
        predictions = self.predictor.predict_questions(questions, request.quantiles)
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
