"""Work for a client that has gone is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from cdmpp_server.problems import ProblemError

T = TypeVar("T")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns or raises, unless the client goes away before.

    Parameters
    ----------
    request : Request
        One whose body has been read.
    work : coroutine
        Cancelled when nobody waits for it any more.

    Raises
    ------
    ProblemError
        499: the client has gone. Nobody reads it but the log and the metrics.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ProblemError("client_gone", "the client went away before there was an answer", status=499)
    finally:
        for each in (task, watch):
            if not each.done():
                each.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
