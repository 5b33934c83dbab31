"""The application factory: model loaded and tried at start, nothing at import."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from cdmpp import __version__
from cdmpp_server import problems
from cdmpp_server.features import FEATURES
from cdmpp_server.openapi import build_openapi
from cdmpp_server.settings import Settings

DESCRIPTION = """\
Predicts how long a tensor program runs on a device, in seconds.

A program is an operator with its sizes, TVM JSON or TVMScript. Which latency is meant is part of the
query: `backend` (a library's kernel, or the TVM program as scheduled), `protocol` (device time alone,
inside a captured graph, called from the host) and `framework`.
"""


class _App(FastAPI):
    """FastAPI that says in one line why it could not start."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            return await super().__call__(scope, receive, send)

        async def send_short(message: Message) -> None:
            # Starlette reports a failed start as a traceback; for an expected error its reason is enough.
            reason = getattr(self.state, "start_error", "")
            if message["type"] == "lifespan.startup.failed" and reason:
                message = {"type": "lifespan.startup.failed", "message": f"cannot start: {reason}"}
            await send(message)

        await super().__call__(scope, receive, send_short)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Make the application.

    Parameters
    ----------
    settings : Settings, optional
        Read from the environment (``CDMPP_...``) where none are given.

    Returns
    -------
    FastAPI
        The model is loaded when the application starts; a missing or damaged one ends the start.
    """
    chosen = settings if settings is not None else Settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for feature in FEATURES:
                if feature.lifespan is not None:
                    await stack.enter_async_context(feature.lifespan(app, chosen))
            yield

    app = _App(
        title="cdmpp",
        summary="Latency of tensor programs on devices you do not have.",
        description=DESCRIPTION,
        version=__version__,
        lifespan=lifespan,
    )
    app.state.settings = chosen
    app.state.not_ready = "the model is being loaded"
    problems.install(app)
    for feature in FEATURES:
        if feature.router is not None:
            app.include_router(feature.router)
        if feature.install is not None:
            feature.install(app, chosen)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build_openapi(app, FEATURES, chosen)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    return app
