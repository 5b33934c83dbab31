"""The jobs of a planning process: validate a request, check it with prices from the service, and solve it.

Inputs and outputs are JSON. A request is validated once for all jobs where they follow each other.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from cdmpp.errors import CdmppError, FieldError
from cdmpp.plan.base.solve import signed, solve_priced
from cdmpp.plan.registry import PLANNERS
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.budget import Progress, SearchControl
from cdmpp.predict.requests.plot import write_figure
from cdmpp.predict.requests.request import Answer, Plan, Request
from cdmpp_server.plan_limits import LOCAL_HINT, too_large
from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.queries import decode_prices
from cdmpp_server.schema_base import violations

WorkerReply = tuple[dict[str, Any], bytes]
#: Receives progress, and from time to time the best plan so far as JSON.
Send = Callable[[dict[str, Any], bytes], None]
#: Seconds between two plans that are sent during a search: describing a plan may take longer than finding it.
PLAN_EACH_S = 2.0
#: Seconds after which :func:`check` accepts a request that is still being prepared.
CHECK_S = 1.0

#: Characters of a name that XML does not allow.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
#: Errors of checks by validators: fields that fit the schema, but contradict each other.
_CONTRADICTIONS = ("value_error", "assertion_error")


class PlanReader:
    """Validates requests; keeps the last one, which is usually solved next.

    ``limits``: largest sizes of requests by their names (:mod:`cdmpp_server.plan_limits`).
    """

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._limits = limits
        self._last: tuple[bytes, Request[Any]] | None = None

    def read(self, kind: str, body: bytes) -> Request[Any]:
        """The validated request of a body.

        Raises ProblemError: 400, 409 or 422; CdmppError: sizes cannot be determined because the request is wrong.
        """
        key = hashlib.sha256(kind.encode() + b"\0" + body).digest()
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self._last = None
        try:
            value = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            hint = "send one JSON object; GET /openapi.json has its schema"
            raise ProblemError("malformed_json", f"Invalid JSON: {error}", hint) from None
        model = PLANNERS[kind].model_of(value) if isinstance(value, dict) else PLANNERS[kind].models()[0]
        try:
            request = model.model_validate(value)
        except ValidationError as error:
            message, places = violations(error, value)
            # One is enough: the others may belong to other forms of a union.
            if any(problem["type"] in _CONTRADICTIONS for problem in error.errors(include_url=False)):
                raise _problem(409, FieldError.code, message, "", places) from None
            raise _problem(422, "invalid_request", message, hint_of(kind), places) from None
        breach = too_large(kind, request, self._limits)
        if breach is not None:
            name, message = breach
            raise _problem(409, "plan_too_large", message, LOCAL_HINT, [(name, message)])
        self._last = (key, request)
        return request


def read(reader: PlanReader, kind: str, body: bytes) -> WorkerReply:
    """List the programs to price, each once.

    Returns ``budget_s`` and ``programs`` (their number), and the payload ``{"programs": [...], "positions": [...]}``:
    for each program of the request its position in the list.
    """
    request = reader.read(kind, body)
    unique: dict[str, int] = {}
    programs: list[dict[str, Any]] = []
    positions = []
    for program in request.price_requests():
        key = repr((program.program, program.device, program.backend, program.protocol, program.framework))
        position = unique.setdefault(key, len(programs))
        if position == len(programs):
            programs.append(vars(program))
        positions.append(position)
    payload = json.dumps({"programs": programs, "positions": positions}).encode() if programs else b""
    return {"budget_s": request.budget, "programs": len(programs)}, payload


def solve(
    reader: PlanReader,
    kind: str,
    body: bytes,
    prices: bytes,
    on_start: Callable[[SearchControl], None],
    send: Send | None = None,
    with_figure: bool = False,
) -> WorkerReply:
    """Solve a request; the payload is the plan as JSON, on demand with its figure as SVG in the key ``figure``.

    ``prices``: JSON of :func:`cdmpp_server.queries.encode_prices`; empty where there are no programs to price.
    ``on_start``: receives the search control before the search starts. ``send``: receives progress.
    """
    request = reader.read(kind, body)
    predictions = decode_prices(prices) if prices else []
    control = SearchControl(request.budget, None if send is None else ProgressSender(send, request, predictions))
    on_start(control)
    answer = solve_priced(request, predictions, control)
    figure = {"figure": svg(request, answer)} if with_figure else {}
    return _objective(answer), encode(answer.to_json() | figure)


def svg(request: Request[Any], answer: Answer) -> str:
    """The figure of a plan."""
    text = io.StringIO()
    write_figure(lambda: request.sibling("solver").draw(request, answer), text, format="svg")
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text.getvalue())


def check(reader: PlanReader, kind: str, body: bytes, prices: bytes) -> WorkerReply:
    """Prepare the search of a request without searching, so that a faulty request does not become a job.

    A planner refuses a request before its search asks for the remaining time or reports progress. A planner without
    a search, or a preparation that takes longer than :data:`CHECK_S`, is interrupted; its job reports what is wrong.
    """
    request = reader.read(kind, body)
    before = signal.signal(signal.SIGALRM, _end_check)
    try:
        signal.setitimer(signal.ITIMER_REAL, CHECK_S)
        solve_priced(request, decode_prices(prices) if prices else [], _Checking(request.budget))
    except _PreparedError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    return {}, b""


class _PreparedError(BaseException):
    """The search of a request begins; no planner catches this."""


def _end_check(*_: Any) -> None:
    raise _PreparedError


class _Checking(SearchControl):
    """A control that ends the search where it begins."""

    @property
    def spent_s(self) -> float:
        raise _PreparedError

    @property
    def left_s(self) -> float:
        raise _PreparedError

    def report(self, **_: Any) -> None:
        raise _PreparedError


class ProgressSender:
    """Progress listener that also sends the best plan every few seconds."""

    def __init__(self, send: Send, request: Request[Any], prices: Sequence[Prediction]) -> None:
        self._send, self._request, self._prices = send, request, prices
        self._sent_at = -PLAN_EACH_S
        self._best: float | None = None

    def __call__(self, progress: Progress) -> None:
        """Send progress."""
        header = {"progress": progress.done, "best": progress.best, "bound": progress.bound}
        payload = b""
        better = progress.best is None or progress.best != self._best
        if progress.answer is not None and better and time.monotonic() - self._sent_at >= PLAN_EACH_S:
            payload = encode(signed(self._request, progress.answer(), self._prices).to_json())
            self._sent_at, self._best = time.monotonic(), progress.best
        self._send(header, payload)


def encode(answer: Mapping[str, Any]) -> bytes:
    """JSON; NaN and infinities are a bug and raise."""
    return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()


def _objective(answer: Answer) -> dict[str, float]:
    """Best and bound of a plan; those of the last progress hold for answers without an objective."""
    return {"best": answer.objective_value, "bound": answer.bound_value} if isinstance(answer, Plan) else {}


def hint_of(kind: str) -> str:
    """Where the service itself has the fields of a planner, and an example."""
    return f"GET /openapi.json has the fields and an example of {kind}, under POST {PLANNERS[kind].path}"


def problem(error: Exception) -> dict[str, Any] | None:
    """The problem that the service receives for an error of the request; None for a bug."""
    if isinstance(error, CdmppError):
        path = error.path if isinstance(error, FieldError) else ""
        error = _problem(409, error.code, error.message, error.hint, [(path, error.message)])
    return error.refusal() if isinstance(error, ProblemError) else None


def _problem(status: int, code: str, message: str, hint: str, places: Sequence[tuple[str, str]]) -> ProblemError:
    errors = [SchemaViolation(path=path, message=text) for path, text in places]
    return ProblemError(code, message, hint, status=status, errors=errors)
