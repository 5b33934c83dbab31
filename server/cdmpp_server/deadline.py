"""The one moment by which a request is answered or refused."""

from __future__ import annotations

import asyncio
import math

from fastapi import Request

from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.settings import Settings

#: A client may ask for less time than the service gives (seconds).
TIMEOUT_HEADER = "x-request-timeout-s"
DESCRIPTION = (
    f"The header `{TIMEOUT_HEADER}` asks for an answer within so many seconds (a positive number; the "
    "service's own limit holds where it is shorter); past it the answer is 504."
)


class Deadline:
    """A moment on the event loop's clock.

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
        """The deadline of a request whose body has arrived.

        Raises
        ------
        ProblemError
            422: the header is there and no positive number.
        """
        text = request.headers.get(TIMEOUT_HEADER)
        if text is None:
            return cls(settings.deadline_s)
        try:
            asked = float(text[:32])
        except ValueError:
            asked = math.nan
        if not asked > 0:
            raise ProblemError(
                "invalid_request",
                f"{TIMEOUT_HEADER}: {text[:100]!r} is no positive number of seconds",
                "leave the header out for the service's own limit",
                errors=[SchemaViolation(path=TIMEOUT_HEADER, message="should be a positive number")],
            )
        return cls(min(asked, settings.deadline_s))

    def left_s(self) -> float:
        """Seconds until then, from any thread; negative when it has passed."""
        return self.at - self._loop.time()

    def exceeded(self) -> ProblemError:
        """What a request past its deadline is told (504)."""
        return ProblemError(
            "deadline_exceeded",
            f"there was no answer within {self.after_s:g} s",
            "send fewer items, or come back when the service has less to do",
            headers={"retry-after": "1"},
        )
