"""Deadlines of requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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

    Parameters
    ----------
    after_s : float
        Seconds from now.
    """

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self._loop = asyncio.get_running_loop()
        self.at = self._loop.time() + after_s

    @classmethod
    def of(cls, request: Request, settings: Settings) -> Deadline:
        """Return the deadline of a request whose body has arrived.

        Raises
        ------
        ProblemError
            422 if the header is not a positive number.
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

        Raises
        ------
        ProblemError
            504 at the deadline; 503 if the block raises OverloadedError.
        """
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError:
            raise self.exceeded() from None
        except OverloadedError as error:
            raise ProblemError(error.code, error.message, error.hint, headers={"retry-after": "1"}) from None

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
