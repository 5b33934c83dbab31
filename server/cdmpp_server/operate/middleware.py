"""Middleware around every request (id, host, key, rate limit, log line and metrics), and ``GET /metrics``.

It is the outermost layer, outside Starlette's handling of bugs. It is plain ASGI, costs a few
microseconds, and neither reads nor buffers a body.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cdmpp_server.concurrency import background
from cdmpp_server.openapi import Schema, add_answer, add_problems
from cdmpp_server.operate.access import Hosts, Keys, Rates, current_sender, forbidden, sender_of, unauthorized
from cdmpp_server.operate.logs import log_request, request_id
from cdmpp_server.operate.metrics import MEDIA_TYPE, Metrics
from cdmpp_server.operate.protocol import CONNECTIONS
from cdmpp_server.problems import CODE_OF_PROBLEM, REFUSED, ProblemError
from cdmpp_server.settings import Settings

#: Header with the request id: the client's or a new one; every response has it.
ID_HEADER = b"x-request-id"
_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
#: Polled every few seconds by monitoring, under any name: logged at level DEBUG.
QUIET = frozenset(("/healthz", "/readyz", "/metrics"))
#: Paths that need no key.
OPEN = frozenset(("/", "/status", "/support.html", "/healthz", "/readyz", "/openapi.json", "/docs"))
OPEN_FOLDERS = ("/page/",)
_ITEMS = "cdmpp.items"
_CHARGE = "cdmpp.charge"
_ACCESS = "cdmpp.access"


def count_items(request: Request, items: int) -> None:
    """Set the number of items of a request, for the log, and charge them; call it before the work."""
    scope = request.scope
    charge = scope.get(_CHARGE)
    if charge is not None:
        charge(items - scope.get(_ITEMS, 0))
    scope[_ITEMS] = items


def is_administrator(request: Request) -> bool:
    """Whether the request has an administrator's key."""
    return bool(request.scope[_ACCESS][1])


def require_administrator(request: Request) -> None:
    """Raise :class:`ProblemError` (401, 403) unless the request has an administrator's key."""
    name, administrator = request.scope[_ACCESS]
    if name is None:
        raise unauthorized()
    if not administrator:
        raise forbidden()


class RequestMiddleware:
    """Adds id, key check, rate limit, log line and metrics to every request."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._keys = Keys(settings.api_key_hashes, settings.admin_key_hashes)
        self._rates = Rates(settings.requests_per_s, settings.items_per_s)
        self._hosts = Hosts(settings.allowed_hosts, settings.host)
        self._open = OPEN | ({"/metrics"} if settings.open_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it to the application."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = time.perf_counter()
        self._metrics.started()
        headers = dict(scope["headers"])
        id_text = headers.get(ID_HEADER, b"")
        if not _ID.fullmatch(id_text):
            id_text = b"%032x" % random.getrandbits(128)  # it need not be secret, only unlikely to repeat
        token = request_id.set(id_text.decode())
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (ID_HEADER, id_text)]
            await send(message)

        key: str | None = None
        try:
            try:
                if scope["path"] not in QUIET:
                    if REFUSED in scope:
                        raise scope[REFUSED]
                    self._hosts.check(scope)
                key, administrator = self._keys.find(headers.get(b"authorization", b"").decode("latin-1"))
                scope[_ACCESS] = (key, administrator)
                if scope["path"] not in self._open and not scope["path"].startswith(OPEN_FOLDERS):
                    if key is None and self._keys.required:
                        raise unauthorized()
                    client = scope.get("client")
                    sender = sender_of(key, client[0] if client else None)
                    # Each request has its own context.
                    current_sender.set(sender)
                    if self._rates:
                        self._rates.take(sender)
                        scope[_CHARGE] = partial(self._rates.charge, sender)
            except ProblemError as error:
                scope[CODE_OF_PROBLEM] = error.problem.code
                await error.response()(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        finally:
            self._ended(scope, status, time.perf_counter() - started, id_text.decode(), key)
            request_id.reset(token)

    def _ended(self, scope: Scope, status: int, seconds: float, id_text: str, key: str | None) -> None:
        # The path of the route, not of the request: the number of labels must be bounded.
        path = scope["path"]
        route = getattr(scope.get("route"), "path", None) or (path if path in OPEN else "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        code: str | None = scope.get(CODE_OF_PROBLEM)
        # 499: the client disconnected before the response (a convention of proxies).
        status = status or 499
        items: int | None = scope.get(_ITEMS)
        self._metrics.ended(method, route, status, seconds, code)
        fields: dict[str, Any] = {
            "request_id": id_text,
            "method": method,
            "route": route,
            "status": status,
            "duration_s": round(seconds, 6),
        }
        for name, value in (("items", items), ("key", key), ("code", code)):
            if value is not None:
                fields[name] = value
        log_request(fields, logging.DEBUG if route in QUIET and status < 400 else logging.INFO)


def install(app: FastAPI, settings: Settings) -> None:
    """Wrap the application in the middleware, and put its metrics into ``app.state.metrics``."""
    metrics = app.state.metrics = Metrics()
    inner = app.build_middleware_stack

    def build() -> ASGIApp:
        # Not `add_middleware`, which adds inside Starlette's handling of bugs: responses to bugs would then
        # have no id and no log line.
        return RequestMiddleware(inner(), settings, metrics)

    app.build_middleware_stack = build  # type: ignore[method-assign]


router = APIRouter()
#: Interval at which each worker samples its queues; a scrape also samples its own worker.
_SAMPLE_S = 1.0


@router.get("/metrics", summary="Metrics for Prometheus", response_class=Response, operation_id="metrics_metrics_get")
async def get_metrics(request: Request) -> Response:
    """Requests, batches, caches, queues, domains, errors, plans, jobs and observations in Prometheus' text format."""
    _sample(request.app)
    # With several workers this reads files, which would block the event loop.
    text = await anyio.to_thread.run_sync(request.app.state.metrics.text)
    return Response(text, headers={"content-type": MEDIA_TYPE})


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Describe /metrics, and keys and rate limits if they are set."""
    operation = document["paths"]["/metrics"]["get"]
    operation["responses"]["200"] = {}
    add_answer(operation, {"type": "string"}, "All metrics.", media="text/plain")
    limited = settings.requests_per_s is not None or settings.items_per_s is not None
    if settings.api_key_hashes or settings.admin_key_hashes:
        schemes = document["components"].setdefault("securitySchemes", {})
        schemes["key"] = {"type": "http", "scheme": "bearer"}
    for path, methods in document["paths"].items():
        is_open = path in OPEN or (path == "/metrics" and settings.open_metrics)
        for operation in methods.values():
            if path not in QUIET:
                add_problems(operation, 421)
            if not is_open and settings.api_key_hashes:
                operation["security"] = [{"key": []}]
                add_problems(operation, 401)
            if not is_open and limited and "429" not in operation["responses"]:
                add_problems(operation, 429)


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Sample the queues regularly, for a scrape of another worker."""

    async def sample_regularly() -> None:
        while True:
            _sample(app)
            await asyncio.sleep(_SAMPLE_S)

    async with background(sample_regularly()):
        yield


def _sample(app: FastAPI) -> None:
    metrics: Metrics = app.state.metrics
    metrics.connections(len(CONNECTIONS.open), CONNECTIONS.refused)
    batcher = getattr(app.state, "batcher", None)
    sandbox = getattr(app.state, "sandbox", None)
    metrics.sample(
        batcher.queued_rows if batcher is not None else 0,
        sandbox.queued if sandbox is not None else 0,
        sandbox.restarts if sandbox is not None else 0,
    )
