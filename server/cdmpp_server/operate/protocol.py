"""uvicorn's HTTP protocol with limits: the number of connections, and the bytes and the time of a request's header.

uvicorn closes a connection that idles after a response, but neither one that never sends a request nor one whose header
has no end. One sweep a second over all connections of the process finds those that exceed a limit.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, Protocol

from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cdmpp_server.concurrency import background
from cdmpp_server.problems import MEDIA_TYPE, REFUSED, ProblemError
from cdmpp_server.settings import Settings


def descriptor_limit() -> int:
    """Number of files that this process may open."""
    if sys.platform == "win32":
        return 2**31
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files as the system allows."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The system may refuse even its own hard limit; the present limit then stays.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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

    ``clock``: returns monotonic seconds.
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


def header_too_large(max_bytes: int) -> ProblemError:
    """Problem of a request whose header is too large (431)."""
    return ProblemError(
        "headers_too_large", f"the header of the request exceeds {max_bytes} bytes", "send fewer or shorter headers"
    )


def header_too_slow(seconds: float) -> ProblemError:
    """Problem of a request whose header does not arrive (408)."""
    return ProblemError(
        "header_timeout", f"the header of the request did not arrive within {seconds:g} s", "send the request again"
    )


#: Maximum received bytes per byte of the body. A chunk of one byte takes six.
_OVERHEAD = 16


class BoundedProtocol(HttpToolsProtocol):
    """One connection. It tracks what the client sends; uvicorn sends the response."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sends: Literal["nothing", "header", "body"] = "nothing"
        self._since = CONNECTIONS.clock()
        self._begun = False
        self._header_bytes = self._raw_bytes = self._body_bytes = 0
        self._admitted = self._last = False
        self._stalled_at: float | None = None
        self._closing_at: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Count the connection; one that takes one of the very last descriptors is refused at once."""
        super().connection_made(transport)
        CONNECTIONS.open.add(self)
        listener = transport.get_extra_info("socket")
        left = CONNECTIONS.descriptors_left(listener.fileno()) if listener is not None else LAST
        self._last = left < LAST
        if left < LAST // 2:
            self._refuse("descriptors", too_many())
        elif not self._last:
            self._admitted = CONNECTIONS.admit()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the count."""
        CONNECTIONS.open.discard(self)
        if self._admitted:
            self._admitted = False
            CONNECTIONS.admitted -= 1
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        if self.transport.is_closing():
            return
        before, self._begun = self._sends, False
        super().data_received(data)
        if self.transport.is_closing() or self._begun:
            return
        if before == self._sends == "header":
            self._header_bytes += len(data)
            if self._header_bytes > CONNECTIONS.header_bytes:
                self._refuse("header_bytes", header_too_large(CONNECTIONS.header_bytes))
        elif before == self._sends == "body":
            # Trailers after a chunked body are headers too, of any length.
            self._raw_bytes += len(data)
            if self._raw_bytes - _OVERHEAD * self._body_bytes > CONNECTIONS.header_bytes:
                CONNECTIONS.refused["header_bytes"] += 1
                self.transport.close()

    def on_message_begin(self) -> None:
        """Begin a header."""
        super().on_message_begin()
        self._sends, self._begun, self._since = "header", True, CONNECTIONS.clock()
        self._header_bytes = self._raw_bytes = self._body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a field of the header; those after a body are not kept."""
        if self._sends == "header":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request on, marked if it must be refused."""
        self._sends = "body"
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._admitted = self._admitted or (not self._last and CONNECTIONS.admit())
        scope: Any = self.scope
        if size > CONNECTIONS.header_bytes:
            CONNECTIONS.refused["header_bytes"] += 1
            scope[REFUSED] = header_too_large(CONNECTIONS.header_bytes)
        elif not self._admitted:
            CONNECTIONS.refused["descriptors" if self._last else "limit"] += 1
            scope[REFUSED] = too_many()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._sends, self._since = "nothing", CONNECTIONS.clock()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the time limit for the rest of the request or for the next one."""
        self._since = CONNECTIONS.clock()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Note that the client reads too slowly."""
        self._stalled_at = CONNECTIONS.clock()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client has read."""
        self._stalled_at = None
        super().resume_writing()

    def _unsupported_upgrade_warning(self) -> None:
        """Serve a request that asks for another protocol as HTTP; uvicorn would log two lines for each."""

    def check(self, now: float) -> None:
        """End the connection if it exceeds a limit of time."""
        if self.transport.is_closing():
            # What was sent last is dropped if the client does not read it.
            self._closing_at = now if self._closing_at is None else self._closing_at
            if now - self._closing_at > CONNECTIONS.header_s:
                self.transport.abort()
        elif self._stalled_at is not None:
            if now - self._stalled_at > CONNECTIONS.body_s:
                self.transport.abort()
        elif self.cycle is not None and not self.cycle.response_complete:
            return  # the service works on the request, or reads its body, each within its own limit
        elif self._sends == "body":
            if now - self._since > CONNECTIONS.body_s:
                self.transport.close()
        elif now - self._since > (CONNECTIONS.header_s if self._admitted else OVER_S):
            if not self._admitted and self.cycle is None:
                self._refuse("descriptors" if self._last else "limit", too_many())
            elif self._sends == "header":
                self._refuse("header_time", header_too_slow(CONNECTIONS.header_s))
            else:
                self.transport.close()

    def _refuse(self, reason: str, error: ProblemError) -> None:
        """Answer without a request, and close the connection."""
        CONNECTIONS.refused[reason] += 1
        body = error.problem.model_dump_json(exclude_none=True).encode()
        headers = {**error.headers, "content-type": MEDIA_TYPE, "content-length": str(len(body)), "connection": "close"}
        lines = [b"%s: %s\r\n" % (name, value) for name, value in self.server_state.default_headers]
        lines += [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        self.transport.write(b"".join((STATUS_LINE[error.status], *lines, b"\r\n", body)))
        self.transport.close()
