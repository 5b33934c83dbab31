"""Base classes of the bodies of requests and answers, and messages for violations; without the HTTP libraries."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cdmpp.errors import violation_text
from cdmpp.plan.base.solve import places as places_of

_MAX_VIOLATIONS = 8
HINT = "GET /openapi.json has the schema of a request"


class RequestModel(BaseModel):
    """Base of what clients send: unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class AnswerModel(BaseModel):
    """Base of what the service sends: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


def violations(error: ValidationError, value: Any = None) -> tuple[str, list[tuple[str, str]]]:
    """Return a one-line summary, and (path, message) of the first few violations.

    Given the validated ``value``, paths omit the branches of unions.
    """
    if value is not None:
        located = places_of(error, value)
    else:
        details = error.errors(include_url=False, include_input=False, include_context=False)
        located = [
            (".".join(str(part)[:80] for part in detail["loc"]), violation_text(detail["type"], detail["msg"]))
            for detail in details
        ]
    first = located[:_MAX_VIOLATIONS]
    more = f" and {len(located) - 1} more" if len(located) > 1 else ""
    return f"{first[0][0] or 'body'}: {first[0][1]}{more}", first
