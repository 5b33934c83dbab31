"""How many requests compute at a time, and how many may wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from server.problems import ProblemError

T = TypeVar("T")


class Gate:
    """Runs work in threads, so that the event loop keeps answering; refuses what it cannot hold."""

    def __init__(self, max_concurrent: int, max_queued: int) -> None:
        self._limiter = anyio.CapacityLimiter(max_concurrent)
        self._places = max_concurrent + max_queued
        self._inside = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread when there is a place.

        Raises
        ------
        ProblemError
            503 when as many wait already as may.
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
            return await anyio.to_thread.run_sync(work, limiter=self._limiter)
        finally:
            self._inside -= 1
