"""Cancellation of work whose client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from cdmpp_server.problems import ProblemError

T = TypeVar("T")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, or cancel it when the client disconnects.

    Parameters
    ----------
    request : Request
        Its body has been read.
    work : coroutine

    Raises
    ------
    ProblemError
        499 if the client disconnects; only the log and the metrics show it.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ProblemError("client_gone", "the client disconnected before the response", status=499)
    finally:
        task.cancel()
        disconnected.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
