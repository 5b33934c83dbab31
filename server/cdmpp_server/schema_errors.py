"""The first few places where a value breaks a schema, in words. Plain: also for processes without HTTP."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from cdmpp.compose.validation_errors import places as places_of

_MAX_PLACES = 8
HINT = "GET /openapi.json has the schema of a request"


def violations(error: ValidationError, value: Any = None) -> tuple[str, list[tuple[str, str]]]:
    """One line about a breach, and (path, message) of the first few places.

    With the ``value`` that was checked, paths are without the branches of unions.
    """
    if value is not None:
        found = places_of(error, value)
    else:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        found = [(".".join(str(part)[:80] for part in one["loc"]), one["msg"]) for one in problems]
    places = [(path, said.removeprefix("Value error, ")) for path, said in found[:_MAX_PLACES]]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{places[0][0] or 'body'}: {places[0][1]}{more}", places
