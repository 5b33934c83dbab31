"""Starting the service: its listening sockets, its warnings, and uvicorn with one or several processes."""

from __future__ import annotations

import errno
import functools
import ipaddress
import logging
import math
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from cdmpp_server.operate.logs import log_config
from cdmpp_server.operate.protocol import connection_limit, descriptor_limit, raise_descriptor_limit
from cdmpp_server.settings import PREFIX, Settings, injected

if TYPE_CHECKING:
    from fastapi import FastAPI

_log = logging.getLogger(__name__)
#: uvicorn's variable with the addresses of proxies whose X-Forwarded-For is trusted.
FORWARDED_VARIABLE = "FORWARDED_ALLOW_IPS"
#: Addresses that a system lacks without IPv6: the others of a name suffice.
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class ListenError(Exception):
    """The address cannot be listened on; the message has the reason and a remedy."""


def application(settings: Settings) -> FastAPI:
    """Create the application in the process that serves it."""
    from cdmpp_server.app import create_app

    return create_app(settings)


def serve(settings: Settings) -> bool:
    """Serve until interrupted; return whether the service was ever ready.

    Raises ListenError: before the model is loaded.
    """
    sockets = listen(settings.host, settings.port)
    raise_descriptor_limit()
    try:
        options: dict[str, Any] = {
            "factory": True,
            "host": settings.host,
            "port": settings.port,
            "log_config": log_config(settings.log_format),
            # The service logs one line per request itself, with more fields.
            "access_log": False,
            # Every accepted request is answered or refused within this time.
            "timeout_graceful_shutdown": math.ceil(settings.deadline_s) + 5,
            # Otherwise every program on this machine could name the address that its requests are charged to.
            "proxy_headers": FORWARDED_VARIABLE in os.environ,
            "http": "cdmpp_server.operate.protocol:BoundedProtocol",
            "ws": "none",
            "workers": settings.workers,
            # A worker without a sign of life for this time is replaced; a failed start is noticed as late.
            "timeout_worker_healthcheck": 10,
        }
        config = uvicorn.Config(functools.partial(application, settings), **options)
        for line in warnings(settings):
            _log.warning(line)
        if settings.workers > 1:
            from cdmpp_server.workers import serve_workers

            _running_on(settings.host, sockets)
            return serve_workers(config, sockets)
        server = _Server(config)
        server.run(sockets)
        return server.started
    except OSError as error:
        # Two services that start at the same time conflict only in listen(), not in bind().
        if error.errno == errno.EADDRINUSE:
            raise ListenError(_reason(error, settings.host, settings.port)) from None
        raise
    finally:
        for listener in sockets:
            listener.close()


class _Server(uvicorn.Server):
    """uvicorn's server, which does not log the addresses of given sockets."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        if self.started:
            _running_on(self.config.host, sockets or [])


def _running_on(host: str, sockets: list[socket.socket]) -> None:
    shown = f"[{host}]" if ":" in host else host
    for port in sorted({listener.getsockname()[1] for listener in sockets}):
        _log.info("running on http://%s:%d (Ctrl-C ends the service)", shown, port)


def listen(host: str, port: int) -> list[socket.socket]:
    """Bind the address: one socket for each address of a name, all with the same port.

    Raises ListenError: the port is in use, or the address is not one of this machine.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ListenError(
            f"cannot listen on {host!r}: {error.strerror}; --host takes an address of this machine"
        ) from None
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        try:
            listener = socket.socket(family, kind, protocol)
            sockets.append(listener)
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = sockets[0].getsockname()[1] if len(sockets) > 1 else port
            listener.bind((address[0], chosen, *address[2:]))
            listener.set_inheritable(True)
        except OSError as error:
            failure = error
            if len(sockets) and error.errno in _ABSENT:
                sockets.pop().close()
                continue
            break
    else:
        if sockets:
            return sockets
    for listener in sockets:
        listener.close()
    assert failure is not None
    raise ListenError(_reason(failure, host, port))


def _reason(error: OSError, host: str, port: int) -> str:
    where = f"port {port} of {host}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{where} is in use by another program, perhaps a service that still runs: end it, or choose another port "
            f"with --port (0: any free one)"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{where} needs more rights: choose a port from 1024 on with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine: --host takes one of them, or 0.0.0.0 for all"
    return f"{where} cannot be used: {error.strerror}"


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def warnings(settings: Settings) -> Iterator[str]:
    """Warnings about these settings, for the log at start."""
    ignored = sorted(name for name, value in os.environ.items() if name.startswith(PREFIX) and injected(name, value))
    if ignored:
        yield f"ignored, because Kubernetes sets them for a Service of this name: {', '.join(ignored)}"
    if not settings.api_key_hashes and not is_loopback(settings.host):
        yield (
            f"everybody who reaches port {settings.port} of {settings.host} can use this service: "
            "it needs no key (CDMPP_API_KEY_HASHES)"
        )
    if (connections := connection_limit(settings)) < settings.max_connections:
        yield (
            f"at most {connections} connections instead of {settings.max_connections}: "
            f"this process may open {descriptor_limit()} files (ulimit -n)"
        )
