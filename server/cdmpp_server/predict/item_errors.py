"""Errors of items that violate the schema of an item."""

from __future__ import annotations

import reprlib
from typing import Any

from pydantic import ValidationError

from cdmpp.errors import DataError, InvalidDeviceError, InvalidProgramError
from cdmpp.predict.prediction import ErrorInfo
from cdmpp_server.predict.schema import MAX_ID
from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.schema_errors import violations

#: Codes by field; a fault of any other field has the code that it has in Python.
_CODES = {"program": InvalidProgramError.code, "device": InvalidDeviceError.code}
_HINT = "Item in GET /openapi.json has the schema of an item"


def sent_id(raw: Any) -> str | None:
    """The id of an item that may be invalid; None where it has no valid id."""
    id = raw.get("id") if isinstance(raw, dict) else None
    return id if isinstance(id, str) and len(id) <= MAX_ID else None


def item_error(error: ValidationError, raw: Any) -> ErrorInfo:
    """The error of an item that violates the schema.

    Parameters
    ----------
    error : ValidationError
        The violations.
    raw : JSON value
        The item.
    """
    line, places = violations(error, raw)
    field = places[0][0]
    if not isinstance(raw, dict):
        return ErrorInfo(DataError.code, f"an item should be an object; it is {_text(raw)}", _HINT)
    # A value inside a program or a device is identified by its path.
    value = f"; it is {_text(raw[field])}" if field in raw else ""
    return ErrorInfo(_CODES.get(field.partition(".")[0], DataError.code), line + value, _HINT)


def _text(value: Any) -> str:
    return "null" if value is None else reprlib.repr(value)


def item_refusal(position: int, error: ValidationError, raw: Any) -> ProblemError:
    """The problem of a strict request with an item that violates the schema (422)."""
    prefix = f"items.{position}"
    fault = item_error(error, raw)
    places = [(f"{prefix}.{path}".rstrip("."), message) for path, message in violations(error, raw)[1]]
    return ProblemError(
        "invalid_request",
        f"{prefix}: {fault.message}",
        fault.hint,
        errors=[SchemaViolation(path=path, message=message) for path, message in places],
        item=position,
        id=sent_id(raw),
    )
