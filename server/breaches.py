"""The first few places where a value breaks a schema, in words. Plain: also for processes without HTTP."""

from __future__ import annotations

from pydantic import ValidationError

_MAX_PLACES = 8
HINT = "GET /openapi.json has the schema of a request"


def breaches(error: ValidationError) -> tuple[str, list[tuple[str, str]]]:
    """One line about a breach, and (path, message) of the first few places."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    places = [
        (".".join(str(part)[:80] for part in problem["loc"]), problem["msg"].removeprefix("Value error, "))
        for problem in found[:_MAX_PLACES]
    ]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{places[0][0] or 'body'}: {places[0][1]}{more}", places
