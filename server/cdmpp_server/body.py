"""Reading of request bodies, with limits on media type, size and time."""

from __future__ import annotations

from collections.abc import Set

import anyio
from fastapi import Request
from starlette.requests import ClientDisconnect

from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings

JSON = "application/json"
#: Bodies up to this size are parsed in the event loop: a thread would cost more than it frees.
INLINE_BYTES = 64 * 1024


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
        Accepted media types, in lower case.

    Raises
    ------
    ProblemError
        415 for another media type; 413 as soon as the declared length or the received bytes exceed the
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
