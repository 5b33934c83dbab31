"""Parsing and validation of JSON bodies; invalid ones raise problems."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError, from_json

from cdmpp_server.fields import check_width
from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.schema_errors import HINT, violations

#: Most values of a body. The parser holds the interpreter's lock, so no other request is answered meanwhile: 0.14 s for
#: the slowest body of so many values, 0.8 s for one of 16 MiB. Ten thousand items with devices in full have 350,000.
MAX_VALUES = 500_000
_Model = TypeVar("_Model", bound=BaseModel)


def parse_json(body: bytes | bytearray) -> Any:
    """Parse a JSON text.

    Raises
    ------
    ProblemError
        400 if it is not JSON, 413 if it has more than :data:`MAX_VALUES` values.
    """
    if len(body) > MAX_VALUES and _count(body) > MAX_VALUES:
        raise ProblemError(
            "body_too_large",
            f"the request body has more than {MAX_VALUES} JSON values",
            "split the items over several requests",
        )
    try:
        return from_json(body)
    except ValueError as error:
        raise ProblemError(
            "malformed_json", f"Invalid JSON: {error}", "send one JSON object; GET /openapi.json has its schema"
        ) from None


def _count(body: bytes | bytearray) -> int:
    """Number of commas and opening brackets outside strings: at least the number of values less one."""
    # In two steps: an escaped backslash does not escape the quote after it.
    text = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    inside = np.logical_xor.accumulate(text == ord('"'))
    marks = (text == ord(",")) | (text == ord("[")) | (text == ord("{"))
    return int(np.count_nonzero(marks & ~inside))


def parse(model: type[_Model], body: bytes | bytearray) -> _Model:
    """Parse and validate the bytes of a body.

    Raises
    ------
    ProblemError
        400 if it is not JSON, 422 if it violates the model's schema.
    """
    return check(model, parse_json(body))


def check(model: type[_Model], value: Any) -> _Model:
    """Validate a JSON value.

    Raises
    ------
    ProblemError
        422 if it violates the model's schema.
    """
    try:
        check_width(value)
    except PydanticCustomError as error:
        line = error.message()
        raise ProblemError(
            "invalid_request", f"body: {line}", HINT, errors=[SchemaViolation(path="", message=line)]
        ) from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise refused(error) from None


def refused(error: ValidationError) -> ProblemError:
    """Problem of a schema violation, with the first few paths (422)."""
    line, places = violations(error)
    return ProblemError(
        "invalid_request", line, HINT, errors=[SchemaViolation(path=path, message=message) for path, message in places]
    )
