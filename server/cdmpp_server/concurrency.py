"""Bounded execution of blocking work other than batched predictions."""

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
    """Runs blocking work in a bounded number of threads; refuses work beyond a bounded queue.

    Parameters
    ----------
    max_concurrent : int
        Maximum number of threads.
    max_queued : int
        Maximum number of calls that wait for a thread.
    """

    def __init__(self, max_concurrent: int, max_queued: int) -> None:
        self._limiter = CapacityLimiter(max_concurrent)
        self._free = asyncio.Semaphore(max_concurrent)
        self._capacity = max_concurrent + max_queued
        self._calls = 0

    async def run(self, work: Callable[[], T], deadline: Deadline | None = None) -> T:
        """Run ``work`` in a thread once one is free; work that has begun is not interrupted.

        Raises
        ------
        ProblemError
            503 if the queue is full, 504 if the deadline passes before a thread is free.
        """
        if self._calls >= self._capacity:
            raise ProblemError(
                "overloaded",
                f"{self._calls} requests are being worked on or wait",
                "retry after a second, or send fewer requests with more items",
                headers={"retry-after": "1"},
            )
        self._calls += 1
        try:
            async with nullcontext() if deadline is None else asyncio.timeout_at(deadline.at):
                await self._free.acquire()
        except BaseException as error:
            self._calls -= 1
            if isinstance(error, TimeoutError) and deadline is not None:
                raise deadline.exceeded() from None
            raise
        # A thread cannot be stopped: it keeps its place if the caller is cancelled.
        task = asyncio.ensure_future(run_sync(work, limiter=self._limiter))
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def run_unless(self, inline: bool, work: Callable[[], T], deadline: Deadline) -> T:
        """Run ``work`` in the event loop if ``inline``, otherwise as :meth:`run` does."""
        return work() if inline else await self.run(work, deadline)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._free.release()
        self._calls -= 1
        if not task.cancelled():
            task.exception()  # marks it as retrieved if no caller waits any more
