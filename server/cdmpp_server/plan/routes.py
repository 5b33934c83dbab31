"""An endpoint for every planner, and the planning processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from cdmpp.errors import CdmppError
from cdmpp.plan.registry import PLANNERS, PlannerSpec
from cdmpp_server.body import JSON, read_json_body
from cdmpp_server.deadline import Deadline
from cdmpp_server.disconnect import cancel_on_disconnect
from cdmpp_server.jobs.routes import submit
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.plan.pricing import price
from cdmpp_server.planners import Planners, planning
from cdmpp_server.predict.service import bugs_hidden
from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.settings import Settings

router = APIRouter()
#: Seconds between the start of the service and that of its planning process.
_WARM_AFTER_S = 0.5


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Keep planning processes. The first one starts early, so that no request waits for it."""
    make = planning("inline", settings.plan_memory_bytes, settings.plan_limits)
    async with Planners(settings.plan_workers, make, settings.max_queued, settings.deadline_s) as planners:
        app.state.planners = planners
        warm = asyncio.create_task(_warm(planners)) if settings.warm_plans else None
        try:
            yield
        finally:
            if warm is not None:
                warm.cancel()
                with suppress(asyncio.CancelledError):
                    await warm


async def _warm(planners: Planners) -> None:
    await asyncio.sleep(_WARM_AFTER_S)
    planners.start()


async def answer(spec: PlannerSpec, request: Request) -> Response:
    """Validate, price and solve a request, or make it a job."""
    state = request.app.state
    body = bytes(await read_json_body(request, state.settings))
    deadline = Deadline.of(request, state.settings)
    try:
        with bugs_hidden(spec.path):
            response = await cancel_on_disconnect(request, _plan(spec, request, body, deadline))
    except ProblemError as error:
        state.metrics.plan(spec.name, error.problem.code)
        raise
    state.metrics.plan(spec.name, "job" if response.status_code == 202 else "done")
    return response


async def _plan(spec: PlannerSpec, request: Request, body: bytes, deadline: Deadline) -> Response:
    state = request.app.state
    header = {"do": "read", "kind": spec.name, "body": len(body)}
    reply, programs = await state.planners.run(header, body, deadline)
    count_items(request, max(reply["programs"], 1))
    predictor = state.service.predictor
    prices = b""
    if programs:
        try:
            prices = await price(programs, state.service, state.batcher, predictor, deadline)
        except CdmppError as error:
            # The schema is kept, but a program or device does not exist.
            path = getattr(error, "path", "")
            places = [SchemaViolation(path=path, message=error.message)]
            raise ProblemError(error.code, error.message, error.hint, status=409, errors=places) from None
    budget_s = reply["budget_s"]
    if (budget_s is not None and budget_s > state.settings.max_inline_s) or _wants_job(request):
        # Errors are reported now, because a client may never read the job.
        await state.planners.run({"do": "check", "kind": spec.name, "body": len(body)}, body + prices, deadline)
        return await submit(request.app, spec.name, body, prices, budget_s)
    header = {"do": "solve", "kind": spec.name, "body": len(body), "progress": False}
    _, text = await state.planners.run(header, body + prices, deadline)
    return Response(text, media_type=JSON)


def _wants_job(request: Request) -> bool:
    """RFC 7240: ``Prefer: respond-async``."""
    wishes = ",".join(request.headers.getlist("prefer")).lower().split(",")
    return any(wish.partition(";")[0].strip() == "respond-async" for wish in wishes)


class PlanKind(BaseModel):
    """A query above single programs, and where it is asked."""

    model_config = ConfigDict(extra="forbid")

    kind: Annotated[str, Field(description="As `cdmpp plan` and `cdmpp.make_plan` call it.")]
    path: str
    summary: str


class PlanKinds(BaseModel):
    """Every query above single programs."""

    model_config = ConfigDict(extra="forbid")

    kinds: list[PlanKind]


@router.get("/plans", summary="Kinds of plans")
async def plans() -> PlanKinds:
    """What can be asked above single programs, and at which endpoint."""
    return PlanKinds(kinds=[PlanKind(kind=k.name, path=k.path, summary=k.summary) for k in PLANNERS.values()])


def _endpoint(spec: PlannerSpec) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await answer(spec, request)

    endpoint.__doc__ = f"{spec.summary}\n\nThe same as `cdmpp plan {spec.name}` and `cdmpp.make_plan`."
    endpoint.__name__ = spec.name.replace("-", "_")
    return endpoint


for _spec in PLANNERS.values():
    router.add_api_route(_spec.path, _endpoint(_spec), methods=["POST"], summary=_spec.summary, response_class=Response)
