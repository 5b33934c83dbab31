"""Responses of a service: predictions, and the errors of refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cdmpp.errors import FieldError, ServiceError
from cdmpp.predict.client.transport import Answer, by_code
from cdmpp.predict.prediction import ErrorInfo, Prediction


@dataclass(frozen=True)
class ServedPrediction(Prediction):
    """A prediction by a service.

    Attributes
    ----------
    prediction_id : str or None
        For ``observe``: names this answer when its program has been measured.
    """

    prediction_id: str | None = None


def content(answer: Answer) -> Any:
    """The JSON of a response; raises the error of a refusal.

    Raises
    ------
    CdmppError
        The class whose code the service gives; ServiceError for anything else.
    """
    check(answer)
    try:
        return json.loads(answer.body)
    except ValueError:
        raise ServiceError("the answer is no JSON", hint="see whether a cdmpp service runs at this URL") from None


def check(answer: Answer) -> None:
    """Raise the error of a response that is a refusal."""
    if 200 <= answer.status < 300:
        return
    problem = problem_of(answer)
    code = str(problem.get("code", ""))
    message = str(problem.get("detail") or f"the service answered with status {answer.status}")
    hint = str(problem.get("hint") or "")
    kind = by_code().get(code)
    if kind is not None and issubclass(kind, FieldError):
        raise kind(message, hint=hint, path=place_of(problem))
    if kind is not None and kind is not ServiceError:
        raise kind(message, hint=hint)
    raise ServiceError(message, hint=hint, status=answer.status, problem=code)


def place_of(problem: Mapping[str, Any]) -> str:
    """The first field in the errors of a refusal; may be empty."""
    errors = problem.get("errors")
    first = errors[0] if isinstance(errors, list) and errors else None
    return str(first.get("path", "")) if isinstance(first, dict) else ""


@contextmanager
def understood() -> Iterator[None]:
    """Raise :class:`ServiceError` where a response lacks fields: it is not from a cdmpp service."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise ServiceError(
            f"the answer is not that of a cdmpp service ({type(error).__name__}: {str(error)[:100]})",
            hint="see whether the URL is right and the service of this version",
        ) from None


def problem_of(answer: Answer) -> dict[str, Any]:
    """The problem+json of a refusal; empty where the body is not problem+json."""
    try:
        problem = json.loads(answer.body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def listed(value: Any, name: str, length: int | None = None) -> Sequence[Any]:
    """A list in a response.

    Raises
    ------
    ServiceError
        It is not there, or of another length than was asked.
    """
    items = value.get(name) if isinstance(value, dict) else None
    if not isinstance(items, list) or (length is not None and len(items) != length):
        raise ServiceError(
            f"the answer has no {name} as they were asked", hint="is this a cdmpp service of this version?"
        )
    return items


@dataclass(frozen=True)
class Registered:
    """A registered program, or the error that prevented it.

    Attributes
    ----------
    hash, name : str or None
        Ask with ``{"hash": hash}``.
    error : ErrorInfo or None
    """

    hash: str | None = None
    name: str | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class Observed:
    """A stored measurement, or the error that prevented it."""

    observation_id: str | None = None
    error: ErrorInfo | None = None


def error_info(fields: Mapping[str, Any]) -> ErrorInfo:
    """The error of a result."""
    return ErrorInfo(fields["code"], fields["message"], fields["hint"])


def registered(fields: Mapping[str, Any]) -> Registered:
    """Read a result of ``POST /programs``."""
    if "error" in fields:
        return Registered(error=error_info(fields["error"]))
    return Registered(fields["hash"], fields["name"])


def observed(fields: Mapping[str, Any]) -> Observed:
    """Read a result of ``POST /observe``."""
    if "error" in fields:
        return Observed(error=error_info(fields["error"]))
    return Observed(fields["observation_id"])
