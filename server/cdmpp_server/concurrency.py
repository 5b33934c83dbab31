"""Time and shares of requests: deadlines, bounded threads, background tasks, disconnects, garbage collection."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request

from cdmpp.errors import OverloadedError
from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.settings import Settings

#: Header with a shorter time limit than the service's own, in seconds.
TIMEOUT_HEADER = "x-request-timeout-s"
DESCRIPTION = (
    f"The header `{TIMEOUT_HEADER}` sets the time limit of the request: a positive number of seconds. The "
    "service's own limit applies if it is shorter. After the deadline the response is 504."
)


class Deadline:
    """A point in time on the event loop's clock.

    ``after_s``: seconds from now.
    """

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self._loop = asyncio.get_running_loop()
        self.at = self._loop.time() + after_s

    @classmethod
    def of(cls, request: Request, settings: Settings) -> Deadline:
        """Return the deadline of a request whose body has arrived.

        Raises ProblemError: 422 if the header is not a positive number.
        """
        text = request.headers.get(TIMEOUT_HEADER)
        if text is None:
            return cls(settings.deadline_s)
        try:
            limit_s = float(text[:32])
        except ValueError:
            limit_s = math.nan
        if not limit_s > 0:
            raise ProblemError(
                "invalid_request",
                f"{TIMEOUT_HEADER}: {text[:100]!r} is not a positive number of seconds",
                "send a positive number, or omit the header for the service's own limit",
                errors=[SchemaViolation(path=TIMEOUT_HEADER, message="should be a positive number")],
            )
        return cls(min(limit_s, settings.deadline_s))

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancel the block at the deadline.

        Raises ProblemError: 504 at the deadline; 503 if the block raises OverloadedError.
        """
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError:
            raise self.exceeded() from None
        except OverloadedError as error:
            raise ProblemError(error.code, error.message, error.hint) from None

    def left_s(self) -> float:
        """Seconds left, from any thread; negative after the deadline."""
        return self.at - self._loop.time()

    def exceeded(self) -> ProblemError:
        """Problem of a request whose deadline has passed (504)."""
        return ProblemError(
            "deadline_exceeded",
            f"there was no answer within {self.after_s:g} s",
            "send fewer items, or retry when the service is less busy",
            headers={"retry-after": "1"},
        )


T = TypeVar("T")


class ConcurrencyLimiter:
    """Runs blocking work in a bounded number of threads; refuses work beyond a bounded queue.

    ``max_concurrent``: maximum number of threads. ``max_queued``: maximum number of calls that wait for a thread.
    """

    def __init__(self, max_concurrent: int, max_queued: int) -> None:
        self._limiter = CapacityLimiter(max_concurrent)
        self._free = asyncio.Semaphore(max_concurrent)
        self._capacity = max_concurrent + max_queued
        self._calls = 0

    async def run(self, work: Callable[[], T], deadline: Deadline | None = None) -> T:
        """Run ``work`` in a thread once one is free; work that has begun is not interrupted.

        Raises ProblemError: 503 if the queue is full, 504 if the deadline passes before a thread is free.
        """
        if self._calls >= self._capacity:
            raise ProblemError(
                "overloaded",
                f"{self._calls} requests are being worked on or wait",
                "retry after a second, or send fewer requests with more items",
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


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``work`` as a task during the block; at its end the task is cancelled and awaited."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, or cancel it when the client disconnects.

    The body of ``request`` has been read.
    Raises ProblemError: 499 if the client disconnects; only the log and the metrics show it.
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


def excess(held: Mapping[str, int], places: int) -> dict[str, int]:
    """Number of places that each holder gives up, so that at most ``places`` are held.

    Shares are max-min fair: a holder with no more than an equal share keeps everything, and those with more give up the
    rest. A holder of many places therefore cannot take those of a holder of few. Among holders of equally many, the
    first gives up first.

    >>> excess({"a": 2, "b": 9}, 8)
    {'b': 3}
    """
    given_up: dict[str, int] = {}
    left, holders = places, len(held)
    for holder, count in sorted(held.items(), key=lambda item: item[1]):
        share = min(count, left // holders)
        if share < count:
            given_up[holder] = count - share
        left, holders = left - share, holders - 1
    return given_up


#: Collection thresholds of the three generations, as in ``gc.set_threshold``.
THRESHOLDS = (50_000, 10, 10)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Exclude the objects that exist now from collection, and collect the others less often."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
