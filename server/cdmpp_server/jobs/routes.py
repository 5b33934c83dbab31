"""``GET`` and ``DELETE /jobs/{job_id}``, and the runners that are open while the application runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Request, Response

from cdmpp_server.body import JSON
from cdmpp_server.feature import Schema
from cdmpp_server.jobs.runner import Runner
from cdmpp_server.jobs.schema import ID_PATTERN, Job, Submitted
from cdmpp_server.jobs.store import FullError, JobStore, Shown, to_json
from cdmpp_server.observe.store import StoreUnavailableError
from cdmpp_server.openapi import add_answer, add_models, add_problems, ref
from cdmpp_server.plan.pool import planning
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings

router = APIRouter()
_MEANING = {
    404: "No such job: it never was, or was finished so long ago that it has been dropped (unknown_job).",
    503: "The database cannot be used (store_unavailable).",
}


@asynccontextmanager
async def opened(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Take up jobs, those of other workers and of before a restart among them."""
    state = app.state
    state.jobs = JobStore(state.store, settings.max_jobs, settings.max_kept_jobs, settings.job_keep_s)
    state.runners = [
        Runner(state.jobs, planning("jobs", settings.plan_memory_bytes), state.metrics)
        for _ in range(settings.job_workers)
    ]
    tasks = [asyncio.create_task(runner.serve()) for runner in state.runners]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def submit(app: FastAPI, kind: str, body: bytes, prices: bytes, budget_s: float | None) -> Response:
    """Keep a request as a job; 202 once it is on the disk.

    Raises
    ------
    ProblemError
        503: too many jobs, or no database.
    """
    try:
        id = await run_sync(app.state.jobs.add, kind, body, prices, budget_s)
    except StoreUnavailableError as error:
        raise _unavailable(error) from None
    except FullError as error:
        raise ProblemError(
            "overloaded", str(error), "come back when some have ended", headers={"retry-after": "10"}
        ) from None
    for runner in app.state.runners:
        runner.look()
    app.state.metrics.job("submitted")
    answer = Submitted(job_id=id).model_dump_json()
    return Response(answer, 202, headers={"location": f"/jobs/{id}"}, media_type=JSON)


@router.get("/jobs/{job_id}", summary="How far a job is", response_class=Response)
async def job(job_id: str, request: Request) -> Response:
    """State, progress, best and bound, and the best answer so far or the final one."""
    return _answer(job_id, await _ask(request.app.state.jobs.get, job_id))


@router.delete("/jobs/{job_id}", summary="Cancel a job", response_class=Response)
async def cancel(job_id: str, request: Request) -> Response:
    """End a job that waits or runs; it keeps its best answer. One that has ended stays as it is."""
    found = await _ask(request.app.state.jobs.cancel, job_id)
    for runner in request.app.state.runners:
        runner.cancelled(job_id)
    return _answer(job_id, found)


async def _ask(call: object, job_id: str) -> Shown | None:
    if not re.fullmatch(ID_PATTERN, job_id):
        return None
    try:
        found: Shown | None = await run_sync(call, job_id)  # type: ignore[arg-type]  # get or cancel
    except StoreUnavailableError as error:
        raise _unavailable(error) from None
    return found


def _answer(job_id: str, found: Shown | None) -> Response:
    if found is None:
        raise ProblemError("unknown_job", f"no job {job_id[:64]!r} is known", "finished jobs are dropped after a while")
    return Response(to_json(found), media_type=JSON)


def _unavailable(error: StoreUnavailableError) -> ProblemError:
    return ProblemError("store_unavailable", str(error), "retry after some seconds", headers={"retry-after": "5"})


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Answers and problems."""
    add_models(schemas, Job)
    for method, said in (("get", "The job."), ("delete", "The job, cancelled unless it had ended.")):
        operation = document["paths"]["/jobs/{job_id}"][method]
        for parameter in operation["parameters"]:
            parameter["schema"] = {"type": "string", "pattern": ID_PATTERN}
        add_answer(operation, ref("Job"), said)
        add_problems(operation, 404, 503, meaning=_MEANING)
