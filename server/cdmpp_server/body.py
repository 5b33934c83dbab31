"""Reading of request bodies with limits on media type, size and time, and validation of their JSON."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, TypeVar

import anyio
import numpy as np
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError, from_json
from starlette.requests import ClientDisconnect

from cdmpp_server.fields import check_width
from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.schema_base import HINT, violations
from cdmpp_server.settings import Settings

JSON = "application/json"
#: Bodies up to this size are parsed in the event loop: a thread would cost more than it frees.
INLINE_BYTES = 64 * 1024


async def read_json_body(request: Request, settings: Settings) -> bytearray:
    """The raw body of a JSON request; raises as :func:`read_body`."""
    return (await read_body(request, settings, {JSON}))[1]


async def read_body(request: Request, settings: Settings, media: Set[str]) -> tuple[str, bytearray]:
    """Media type and raw body of a request.

    ``media``: accepted media types, in lower case.
    Raises ProblemError: 415 for another media type; 413 as soon as the declared length or the received bytes exceed the
    limit; 408 if the body does not arrive in time.
    """
    media_type = _media_type(request.headers.get("content-type"), media)
    limit = settings.max_body_bytes
    if declared_bytes(request) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        with anyio.fail_after(settings.body_timeout_s):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise _too_large(limit)
                body += chunk
    except TimeoutError:
        raise ProblemError(
            "body_timeout",
            f"the request body did not arrive within {settings.body_timeout_s:g} s",
            headers={"connection": "close"},
        ) from None
    except ClientDisconnect:
        # Nobody reads this response; it keeps a traceback out of the log.
        raise ProblemError("body_timeout", "the client closed the connection") from None
    return media_type, body


def declared_bytes(request: Request) -> int:
    """Length of the body by its header; 0 if the header is missing or invalid."""
    declared = request.headers.get("content-length", "")
    return int(declared[:20]) if declared.isdecimal() else 0


def _media_type(header: str | None, media: Set[str]) -> str:
    media_type, _, rest = (header or "").partition(";")
    media_type = media_type.strip().lower()
    parameter = rest.replace(" ", "").replace('"', "").lower()
    charset = ("charset=utf-8", "charset=utf8") if media_type == JSON else ()
    if media_type not in media or parameter not in ("", *charset):
        accepted = " or ".join(sorted(media))
        raise ProblemError(
            "unsupported_media_type",
            f"request bodies of type {(header or 'none')[:100]!r} are not accepted",
            "send UTF-8 JSON with Content-Type: application/json"
            if media == {JSON}
            else f"send one of Content-Type: {accepted}",
            headers={"accept": ", ".join(sorted(media))},
        )
    return media_type


def _too_large(limit: int) -> ProblemError:
    return ProblemError(
        "body_too_large", f"the request body exceeds {limit} bytes", "split the items over several requests"
    )


#: Most values of a body. The parser holds the interpreter's lock, so no other request is answered meanwhile: 0.14 s for
#: the slowest body of so many values, 0.8 s for one of 16 MiB. Ten thousand items with devices in full have 350,000.
MAX_VALUES = 500_000
_Model = TypeVar("_Model", bound=BaseModel)


def parse_json(body: bytes | bytearray) -> Any:
    """Parse a JSON text.

    Raises ProblemError: 400 if it is not JSON, 413 if it has more than :data:`MAX_VALUES` values.
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

    Raises ProblemError: 400 if it is not JSON, 422 if it violates the model's schema.
    """
    return check(model, parse_json(body))


def check(model: type[_Model], value: Any) -> _Model:
    """Validate a JSON value.

    Raises ProblemError: 422 if it violates the model's schema.
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
