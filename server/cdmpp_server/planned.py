"""Answers of a plan: its queries use the queue of ``/predict``, and it makes an answer of their predictions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from cdmpp.errors import CdmppError, FieldError, UnknownDeviceError
from cdmpp.model.artifact.model import Artifact
from cdmpp.predict.prediction import DEFAULT_QUANTILES, Prediction, Query
from cdmpp_server.body import check, parse_json, read_json_body
from cdmpp_server.concurrency import Deadline
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.predict.service import bugs_hidden
from cdmpp_server.problems import ProblemError, SchemaViolation


class QueryPlan(Protocol):
    """A plan with queries for a predictor."""

    queries: list[Query]


Form = TypeVar("Form", bound=BaseModel)
Plan = TypeVar("Plan", bound=QueryPlan)


async def answer_planned(
    request: Request,
    form: type[Form],
    plan_of: Callable[[Form, Artifact, int], Plan],
    answer_of: Callable[[Plan, str, Sequence[Prediction]], dict[str, Any]],
) -> Response:
    """Answer a request by a plan.

    Parameters
    ----------
    form : type
        Model of the body, with a field ``model``.
    plan_of : callable
        From the form, the model's artifact and the most predictions of a request. Its :class:`CdmppError` becomes a
        problem.
    answer_of : callable
        From the plan, the model's id and the predictions of its queries. Its :class:`CdmppError` becomes a problem.
    """
    state = request.app.state
    body = await read_json_body(request, state.settings)
    deadline = Deadline.of(request, state.settings)

    def as_problem(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except CdmppError as error:
            raise problem_of(error) from None

    with bugs_hidden(request.scope["route"].path):
        parsed = await state.limiter.run(lambda: check(form, parse_json(body)), deadline)
        predictor = await state.service.model(getattr(parsed, "model"))  # noqa: B009
        most = state.settings.max_items
        plan = await state.limiter.run(partial(as_problem, plan_of, parsed, predictor.artifact, most), deadline)
        count_items(request, len(plan.queries))
        predictions = await state.batcher.ask(predictor, plan.queries, DEFAULT_QUANTILES, deadline)
        render = partial(as_problem, answer_of, plan, predictor.model_id, predictions)
        text = await state.limiter.run(lambda: json_bytes(render()), deadline)
    return Response(text, media_type="application/json")


def problem_of(error: CdmppError) -> ProblemError:
    """The problem of an error behind the schema: 404 for an unknown device, else 409, because the body fits."""
    status = 404 if isinstance(error, UnknownDeviceError) else 409
    places = [SchemaViolation(path=error.path, message=error.message)] if isinstance(error, FieldError) else None
    return ProblemError(error.code, error.message, error.hint, status=status, errors=places)


def json_bytes(value: Any) -> bytes:
    """A body without spaces; NaN and infinities are a bug and raise."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
