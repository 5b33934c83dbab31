"""What a planning process does: read a request, and solve it with prices that the service found.

Both speak JSON with the service. A request is read once for both steps where they follow each other.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from cdmpp.compose.budget import Progress, SearchControl
from cdmpp.compose.request import PriceRequest
from cdmpp.compose.solve import AnyRequest, finish, signed, to_json
from cdmpp.errors import CdmppError, FieldError
from cdmpp.planning.registry import PLANNERS
from cdmpp.prediction import Prediction
from cdmpp_server.schema_errors import HINT, violations

WorkerReply = tuple[dict[str, Any], bytes]
#: Told progress, and the best answer so far as JSON where that is due.
Tell = Callable[[dict[str, Any], bytes], None]
#: Seconds between two answers on the way: making one may take longer than finding it.
ANSWER_EACH_S = 2.0

#: Raised by the models' own checks: parts that each fit the schema and not one another.
_CONTRADICTIONS = ("value_error", "assertion_error")


class RefusedError(Exception):
    """A body that is no JSON or breaks the schema.

    Attributes
    ----------
    problem : dict
        What the service is told.
    """

    def __init__(self, status: int, code: str, message: str, hint: str, places: Sequence[tuple[str, str]]):
        super().__init__(message)
        self.problem = _problem(status, code, message, hint, places)


class Reader:
    """Reads requests; remembers the last one, which is mostly solved next."""

    def __init__(self) -> None:
        self._last: tuple[bytes, AnyRequest] | None = None

    def read(self, kind: str, body: bytes) -> AnyRequest:
        """The request of a body.

        Raises
        ------
        RefusedError
            400 or 422.
        """
        key = hashlib.sha256(kind.encode() + b"\0" + body).digest()
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self._last = None
        try:
            value = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            hint = "send one JSON object; GET /openapi.json has its schema"
            raise RefusedError(400, "malformed_json", f"Invalid JSON: {error}", hint, ()) from None
        model = PLANNERS[kind].model_of(value) if isinstance(value, dict) else PLANNERS[kind].models()[0]
        try:
            request = model.model_validate(value)
        except ValidationError as error:
            line, places = violations(error, value)
            # One is enough: the other places may be those of a union's other forms.
            if any(each["type"] in _CONTRADICTIONS for each in error.errors(include_url=False)):
                raise RefusedError(409, FieldError.code, line, "", places) from None
            raise RefusedError(422, "invalid_request", line, HINT, places) from None
        self._last = (key, request)
        return request


def read(reader: Reader, kind: str, body: bytes) -> WorkerReply:
    """The programs to price, each once.

    Returns
    -------
    header, payload
        ``budget_s`` and ``asks`` (how many); the payload is ``{"asks": [...], "places": [...]}``: for each
        program that the request names the position of its query.
    """
    request = reader.read(kind, body)
    unique: dict[str, int] = {}
    asks: list[dict[str, Any]] = []
    places = []
    for asked in request.price_requests():
        key = repr((asked.program, asked.device, asked.backend, asked.protocol, asked.framework))
        place = unique.setdefault(key, len(asks))
        if place == len(asks):
            asks.append(vars(asked))
        places.append(place)
    text = json.dumps({"asks": asks, "places": places}).encode() if asks else b""
    return {"budget_s": request.budget, "asks": len(asks)}, text


def solve(
    reader: Reader,
    kind: str,
    body: bytes,
    prices: bytes,
    on_watch: Callable[[SearchControl], None],
    tell: Tell | None = None,
) -> WorkerReply:
    """The answer as JSON.

    Parameters
    ----------
    prices : bytes
        JSON of :func:`priced`; empty where the request asks for none.
    on_watch : callable
        Given the watch before the search begins, so that somebody can end it.
    tell : callable, optional
        Hears of progress.
    """
    request = reader.read(kind, body)
    predictions = _predictions(prices) if prices else []
    watch = SearchControl(request.budget, None if tell is None else Teller(tell, predictions))
    on_watch(watch)
    answer = finish(request, predictions, watch)
    return _objective(answer), encode(answer)


class Teller:
    """Passes a search's progress on, with its best answer every few seconds."""

    def __init__(self, tell: Tell, prices: Sequence[Prediction]) -> None:
        self._tell, self._prices = tell, prices
        self._answered_at = -ANSWER_EACH_S
        self._best: float | None = None

    def __call__(self, progress: Progress) -> None:
        """Hear of progress."""
        said = {"progress": progress.done, "best": progress.best, "bound": progress.bound}
        text = b""
        now = time.monotonic()
        better = progress.best is None or progress.best != self._best
        if progress.answer is not None and better and now - self._answered_at >= ANSWER_EACH_S:
            text = encode(to_json(signed(progress.answer(), self._prices)))
            self._answered_at, self._best = time.monotonic(), progress.best
        self._tell(said, text)


def priced(asks: Sequence[Prediction], places: Sequence[int]) -> bytes:
    """Predictions as JSON: what :func:`solve` takes as ``prices``, and what is stored with a job."""
    return json.dumps({"answers": [one.to_dict() for one in asks], "places": list(places)}).encode()


def _predictions(text: bytes) -> list[Prediction]:
    found = json.loads(text)
    answers = [Prediction(**_known(one)) for one in found["answers"]]
    return [answers[place] for place in found["places"]]


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in Prediction.__dataclass_fields__}


def encode(answer: Mapping[str, Any]) -> bytes:
    """JSON; NaN and infinities are a bug and raise."""
    return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()


def _objective(answer: Mapping[str, Any]) -> dict[str, float]:
    """Best and bound of an answer that calls them as most do; else those last told of hold."""
    best, bound = answer.get("makespan_s"), answer.get("lower_bound_s")
    if not isinstance(best, int | float) or not isinstance(bound, int | float):
        return {}
    return {"best": best, "bound": bound}


def problem(error: Exception) -> dict[str, Any] | None:
    """What the service is told of a refusal; None for a bug."""
    if isinstance(error, RefusedError):
        return error.problem
    if isinstance(error, CdmppError):
        path = error.path if isinstance(error, FieldError) else ""
        return _problem(409, error.code, error.message, error.hint, [(path, error.message)])
    return None


def _problem(status: int, code: str, message: str, hint: str, places: Sequence[tuple[str, str]]) -> dict[str, Any]:
    errors = [{"path": path, "message": said} for path, said in places]
    return {"status": status, "code": code, "message": message, "hint": hint, "errors": errors}


def asked_of(fields: Mapping[str, Any]) -> PriceRequest:
    """One query of :func:`read`'s payload."""
    return PriceRequest(**fields)
