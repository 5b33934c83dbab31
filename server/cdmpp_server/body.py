"""Reading a request body: media type, size and time are limited before anything is kept."""

from __future__ import annotations

from collections.abc import Set

import anyio
from fastapi import Request
from starlette.requests import ClientDisconnect

from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings

JSON = "application/json"


async def read_json_body(request: Request, settings: Settings) -> bytearray:
    """The raw body of a JSON request; raises as :func:`read_body`."""
    return (await read_body(request, settings, {JSON}))[1]


async def read_body(request: Request, settings: Settings, media: Set[str]) -> tuple[str, bytearray]:
    """Media type and raw body of a request.

    Parameters
    ----------
    request : Request
    settings : Settings
    media : set of str
        The media types that are read here, in lower case.

    Raises
    ------
    ProblemError
        415 for another media type, 413 as soon as the body is known to be too large (by its declared
        length, or by what has arrived: the declaration is not trusted), 408 when it does not arrive.
    """
    kind = _media_type(request.headers.get("content-type"), media)
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
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
        # Nobody is left to read an answer; this keeps the log free of a traceback.
        raise ProblemError("body_timeout", "the client went away") from None
    return kind, body


def _media_type(header: str | None, media: Set[str]) -> str:
    kind, _, rest = (header or "").partition(";")
    kind = kind.strip().lower()
    parameter = rest.replace(" ", "").replace('"', "").lower()
    charset = ("charset=utf-8", "charset=utf8") if kind == JSON else ()
    if kind not in media or parameter not in ("", *charset):
        wanted = " or ".join(sorted(media))
        raise ProblemError(
            "unsupported_media_type",
            f"a request body of type {(header or 'none')[:100]!r} is not read",
            "send UTF-8 JSON with Content-Type: application/json"
            if media == {JSON}
            else f"send one of Content-Type: {wanted}",
            headers={"accept": ", ".join(sorted(media))},
        )
    return kind


def _too_large(limit: int) -> ProblemError:
    return ProblemError(
        "body_too_large", f"the request body exceeds {limit} bytes", "split the items over several requests"
    )
