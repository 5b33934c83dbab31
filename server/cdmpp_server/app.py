"""Application factory of the service, and all its features; the model is loaded at start, nothing at import."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from cdmpp import __version__
from cdmpp_server import curve, drift, llm, onnx, page, planned, problems, reload, routes, training
from cdmpp_server.adapt import routes as adapt
from cdmpp_server.jobs import routes as jobs
from cdmpp_server.observe import routes as observe
from cdmpp_server.openapi import Feature, build_openapi
from cdmpp_server.operate import middleware, protocol
from cdmpp_server.plan import routes as plan
from cdmpp_server.predict import routes as predict
from cdmpp_server.sandbox import sandbox
from cdmpp_server.settings import Settings

DESCRIPTION = """\
Predicts how long a tensor program runs on a device, in seconds.

A program is an operator with its sizes, TVM JSON or TVMScript. Three options define which latency is
predicted: `backend` (a library kernel, or the TVM program as scheduled), `protocol` (device time only,
inside a captured graph, or called from the host) and `framework`.
"""


#: All features, in the order in which their lifespans begin.
FEATURES: tuple[Feature, ...] = (
    Feature(lifespan=protocol.lifespan),
    Feature(lifespan=sandbox.lifespan),
    # Before predictions, which read registered programs from its database.
    Feature(observe.router, observe.describe, lifespan=observe.lifespan),
    Feature(predict.router, predict.describe, lifespan=predict.lifespan),
    Feature(None, reload.describe, reload.install, reload.lifespan),
    Feature(adapt.router, adapt.describe, lifespan=adapt.lifespan),
    Feature(curve.router),
    Feature(llm.router),
    Feature(training.router, planned.describe),
    Feature(onnx.router, onnx.describe),
    Feature(plan.router, plan.describe, lifespan=plan.lifespan),
    # Before the runners of jobs, which execute them.
    Feature(lifespan=drift.handlers),
    Feature(jobs.router, jobs.describe, lifespan=jobs.lifespan),
    Feature(lifespan=drift.lifespan),
    Feature(routes.router, routes.describe),
    Feature(page.router),
    # Last: its descriptions apply to all endpoints, and its middleware is outermost.
    Feature(middleware.router, middleware.describe, middleware.install, middleware.lifespan),
)


class _App(FastAPI):
    """FastAPI application that reports a failed start in one line."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            return await super().__call__(scope, receive, send)

        async def send_short(message: Message) -> None:
            # Starlette sends the traceback of a failed start; for an expected error the reason suffices.
            reason = getattr(self.state, "start_error", "")
            if message["type"] == "lifespan.startup.failed" and reason:
                message = {"type": "lifespan.startup.failed", "message": f"cannot start: {reason}"}
            await send(message)

        await super().__call__(scope, receive, send_short)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Create the application, by default with the settings of the environment (``CDMPP_...``).

    It loads the model when it starts; a missing or damaged model ends the start.
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
        # FastAPI's own pages load scripts from elsewhere into the origin that keeps the reader's key.
        docs_url=None,
        redoc_url=None,
        # A redirect would name the host that the client sent.
        redirect_slashes=False,
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
