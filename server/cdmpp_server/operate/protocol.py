"""uvicorn's HTTP protocol with the limits of :mod:`cdmpp_server.operate.connections`."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cdmpp_server.operate.connections import CONNECTIONS, LAST, OVER_S, header_too_large, header_too_slow, too_many
from cdmpp_server.problems import MEDIA_TYPE, REFUSED, ProblemError

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
