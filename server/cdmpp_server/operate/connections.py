"""Limits of connections: their number, and the bytes and the time of a request's header.

uvicorn closes a connection that idles after a response, but neither one that never sends a request nor one whose header
has no end. One sweep a second over all connections of the process finds those that exceed a limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from fastapi import FastAPI

from cdmpp_server.background import background
from cdmpp_server.operate.descriptors import descriptor_limit
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings

_log = logging.getLogger(__name__)
#: Seconds that a connection beyond the limit has for its request, which is answered with 503.
OVER_S = 2.0
#: Descriptors that stay free for the database, files and processes.
RESERVED = 256
#: A connection is refused if it gets one of the last descriptors.
LAST = 64
#: Minimum time between two lines about a lack of descriptors, in seconds.
SAY_AGAIN_S = 60.0
_SWEEP_S = 1.0


class OpenConnection(Protocol):
    """A connection that the sweep checks."""

    def check(self, now: float) -> None:
        """End the connection if it exceeds a limit of time; ``now``: seconds of the clock."""


class Connections:
    """The connections of this process and their limits.

    Parameters
    ----------
    clock : callable
        Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.open: set[OpenConnection] = set()
        self.admitted = 0
        #: Number of refused connections by reason: limit, descriptors, header_bytes, header_time.
        self.refused: Counter[str] = Counter()
        self._said_at: float | None = None
        self.most, self.header_bytes, self.header_s, self.body_s = 2000, 2**16, 10.0, 60.0

    def configure(self, settings: Settings) -> None:
        """Take the limits from the settings."""
        self.most = connection_limit(settings)
        self.header_bytes, self.header_s = settings.max_header_bytes, settings.header_timeout_s
        self.body_s = settings.body_timeout_s

    def admit(self) -> bool:
        """Count one more connection; False if the limit is reached."""
        if self.admitted >= self.most:
            return False
        self.admitted += 1
        return True

    def descriptors_left(self, descriptor: int) -> int:
        """Number of free descriptors, estimated from a new connection's; logs a line if few are left."""
        # A system gives out the lowest free number.
        limit = descriptor_limit()
        left = limit - 1 - descriptor
        if left >= LAST:
            return left
        now = self.clock()
        if self._said_at is None or now - self._said_at >= SAY_AGAIN_S:
            self._said_at = now
            _log.error(
                "running out of file descriptors: %d of %d are used by %d connections and the service; "
                "new connections get 503. Raise the limit (ulimit -n) or lower max_connections",
                descriptor + 1,
                limit,
                len(self.open),
            )
        return left

    def sweep(self) -> None:
        """End the connections that exceed a limit of time."""
        now = self.clock()
        for connection in list(self.open):
            connection.check(now)


#: The connections of this process; a process serves one application.
CONNECTIONS = Connections()


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Apply the limits while the application runs."""
    CONNECTIONS.configure(settings)

    async def sweep_regularly() -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            CONNECTIONS.sweep()

    async with background(sweep_regularly()):
        yield


def connection_limit(settings: Settings) -> int:
    """The setting, or what the limit of open files allows if that is less."""
    return min(settings.max_connections, max(descriptor_limit() - RESERVED, 16))


def too_many() -> ProblemError:
    """Problem of a request on a connection beyond the limit (503)."""
    return ProblemError("overloaded", "the service has as many connections as it accepts", "retry after a second")


def header_too_large(most: int) -> ProblemError:
    """Problem of a request whose header is too large (431)."""
    return ProblemError(
        "headers_too_large", f"the header of the request exceeds {most} bytes", "send fewer or shorter headers"
    )


def header_too_slow(seconds: float) -> ProblemError:
    """Problem of a request whose header does not arrive (408)."""
    return ProblemError(
        "header_timeout", f"the header of the request did not arrive within {seconds:g} s", "send the request again"
    )
