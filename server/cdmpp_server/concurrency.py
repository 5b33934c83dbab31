"""How many pieces of other work than predictions run at a time, and how many may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from cdmpp_server.deadline import Deadline
from cdmpp_server.problems import ProblemError

T = TypeVar("T")


class ConcurrencyLimiter:
    """Runs work in threads, so that the event loop keeps answering; refuses what it cannot hold.

    Parameters
    ----------
    max_concurrent : int
        Threads.
    max_queued : int
        Pieces of work that may wait for one.
    """

    def __init__(self, max_concurrent: int, max_queued: int) -> None:
        self._limiter = CapacityLimiter(max_concurrent)
        self._free = asyncio.Semaphore(max_concurrent)
        self._places = max_concurrent + max_queued
        self._inside = 0

    async def run(self, work: Callable[[], T], deadline: Deadline | None = None) -> T:
        """Run ``work`` in a thread when there is a place; what has begun is not interrupted.

        Raises
        ------
        ProblemError
            503 when as many wait already as may, 504 where the deadline comes before the place.
        """
        if self._inside >= self._places:
            raise ProblemError(
                "overloaded",
                f"{self._inside} requests are being answered or wait",
                "retry after a second, or send fewer requests with more items",
                headers={"retry-after": "1"},
            )
        self._inside += 1
        try:
            async with nullcontext() if deadline is None else asyncio.timeout_at(deadline.at):
                await self._free.acquire()
        except BaseException as error:
            self._inside -= 1
            if isinstance(error, TimeoutError) and deadline is not None:
                raise deadline.exceeded() from None
            raise
        # The place is the thread's: a caller that is cancelled leaves it behind, and it cannot be stopped.
        task = asyncio.ensure_future(run_sync(work, limiter=self._limiter))
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._free.release()
        self._inside -= 1
        if not task.cancelled():
            task.exception()  # seen, also where nobody waits for it any more
