"""From bytes to models: the refusals of a body that is no JSON or breaks the published schema."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.schema_errors import HINT, violations

_Model = TypeVar("_Model", bound=BaseModel)


def parse_json(body: bytes | bytearray) -> Any:
    """The value of a JSON text.

    Raises
    ------
    ProblemError
        400.
    """
    try:
        return from_json(body)
    except ValueError as error:
        raise ProblemError(
            "malformed_json", f"Invalid JSON: {error}", "send one JSON object; GET /openapi.json has its schema"
        ) from None


def parse(model: type[_Model], body: bytes | bytearray) -> _Model:
    """A model from the bytes of a body.

    Raises
    ------
    ProblemError
        400 or 422.
    """
    return check(model, parse_json(body))


def check(model: type[_Model], value: Any) -> _Model:
    """A model from a JSON value.

    Raises
    ------
    ProblemError
        422.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise refused(error) from None


def refused(error: ValidationError) -> ProblemError:
    """The problem that a breach of the schema becomes, with the first few places (422)."""
    line, places = violations(error)
    return ProblemError(
        "invalid_request", line, HINT, errors=[SchemaViolation(path=path, message=message) for path, message in places]
    )
