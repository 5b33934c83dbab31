"""``GET /jobs``, ``GET`` and ``DELETE /jobs/{job_id}``, ``POST /jobs/{job_id}/cancel``, and the runners of jobs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Query, Request, Response
from pydantic import Field

from cdmpp_server.body import JSON
from cdmpp_server.jobs.runner import Runner
from cdmpp_server.jobs.store import JobState, JobStore, summary_fields, to_json
from cdmpp_server.openapi import Schema, add_answer, add_models, add_problems, ref
from cdmpp_server.operate.access import sender_id
from cdmpp_server.problems import ProblemError
from cdmpp_server.processes import planning
from cdmpp_server.schema_base import AnswerModel
from cdmpp_server.settings import Settings

ID_PATTERN = "^[0-9a-f]{32}$"


class Submitted(AnswerModel):
    """A request that has become a job."""

    job_id: str = Field(pattern=ID_PATTERN, description="For /jobs/{job_id} and /jobs/{job_id}/cancel.")
    state: Literal["queued"] = "queued"


class JobError(AnswerModel):
    """Reason why a job has no answer."""

    code: str = Field(pattern="^[a-z_]+$", description="Stable identifier for machines.")
    message: str
    hint: str
    path: str = Field(description="The invalid field of the request; may be empty.")


class JobSummary(AnswerModel):
    """A queued, running or finished search without its answer."""

    job_id: str = Field(pattern=ID_PATTERN)
    kind: str = Field(description="Name of the planner, as in `cdmpp plan`.")
    state: Literal["queued", "running", "done", "cancelled", "failed"] = Field(description="The last three are final.")
    progress: float = Field(ge=0, le=1, description="Share of the work or of the budget.")
    best: float | None = Field(description="Objective of the best answer so far.")
    bound: float | None = Field(description="Its lower bound.")
    created_at: float = Field(description="Seconds since 1970.")
    updated_at: float = Field(description="Seconds since 1970.")


class Job(JobSummary):
    """A queued, running or finished search."""

    answer: dict[str, Any] | None = Field(
        description="The plan, as the planner's endpoint returns it; the best so far unless `done`."
    )
    error: JobError | None = Field(description="Set if the state is `failed`.")


class Jobs(AnswerModel):
    """The newest jobs of one sender."""

    jobs: list[JobSummary] = Field(description="Newest first; GET /jobs/{job_id} has the answer of each.")


router = APIRouter()
T = TypeVar("T")
#: Maximum number of jobs in one list, and the number without ``limit``.
MAX_LISTED, LISTED = 1000, 100
_MEANING = {
    404: "No such job: the id is wrong, or the job was removed (unknown_job).",
    503: "The database cannot be used (store_unavailable).",
}


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Execute jobs, including those that other workers or an earlier process left behind."""
    state = app.state
    of_sender = max(1, int(settings.max_jobs * settings.max_job_share))
    state.jobs = JobStore(state.store, settings.max_jobs, of_sender, settings.max_kept_jobs, settings.job_keep_s)
    state.runners = [
        Runner(
            state.jobs,
            planning("jobs", settings.plan_memory_bytes, settings.plan_limits),
            state.metrics,
            state.job_handlers,
        )
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
    """Store a request as a job; the response is 202 once the job is on disk.

    Raises ProblemError: 429 if too many jobs of the sender are open; 503 if too many jobs are open, or the database is
    unavailable.
    """
    id = await run_sync(app.state.jobs.add, kind, body, prices, budget_s, sender_id())
    for runner in app.state.runners:
        runner.wake()
    app.state.metrics.job("submitted")
    body_json = Submitted(job_id=id).model_dump_json()
    return Response(body_json, 202, headers={"location": f"/jobs/{id}"}, media_type=JSON)


@router.get("/jobs", summary="Own jobs")
async def own_jobs(request: Request, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = LISTED) -> Jobs:
    """List the jobs of the sender's key, or of its address without a key, newest first and without their answers."""
    listed = await run_sync(request.app.state.jobs.list_of, sender_id(), limit)
    return Jobs(jobs=[JobSummary(**summary_fields(job)) for job in listed])


@router.get("/jobs/{job_id}", summary="State of a job", response_class=Response)
async def job(job_id: str, request: Request) -> Response:
    """Return state, progress, best objective, bound, and the best answer so far or the final one."""
    return _response(job_id, await _call(request.app.state.jobs.get, job_id))


@router.post("/jobs/{job_id}/cancel", summary="Cancel a job", response_class=Response)
async def cancel(job_id: str, request: Request) -> Response:
    """Cancel a queued or running job; it keeps its best answer. A finished job stays unchanged."""
    state = await _call(request.app.state.jobs.cancel, job_id)
    _interrupt(request, job_id)
    return _response(job_id, state)


@router.delete("/jobs/{job_id}", summary="Remove a job", status_code=204, response_class=Response)
async def remove(job_id: str, request: Request) -> Response:
    """Remove a job with its answer; a queued or running one is cancelled first. Afterwards its id is unknown."""
    if not await _call(request.app.state.jobs.remove, job_id):
        raise _unknown(job_id)
    _interrupt(request, job_id)
    return Response(status_code=204)


def _interrupt(request: Request, job_id: str) -> None:
    for runner in request.app.state.runners:
        runner.interrupt(job_id)


async def _call(method: Callable[[str], T], job_id: str) -> T | None:
    return await run_sync(method, job_id) if re.fullmatch(ID_PATTERN, job_id) else None


def _response(job_id: str, state: JobState | None) -> Response:
    if state is None:
        raise _unknown(job_id)
    return Response(to_json(state), media_type=JSON)


def _unknown(job_id: str) -> ProblemError:
    return ProblemError("unknown_job", f"no job has the id {job_id[:64]!r}", "finished jobs are deleted later")


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add the responses and problems of the job endpoints to the OpenAPI document."""
    add_models(schemas, Job)
    add_problems(document["paths"]["/jobs"]["get"], 503, meaning=_MEANING)
    job_path, cancelled = document["paths"]["/jobs/{job_id}"], document["paths"]["/jobs/{job_id}/cancel"]["post"]
    for operation in (job_path["get"], job_path["delete"], cancelled):
        for parameter in operation["parameters"]:
            parameter["schema"] = {"type": "string", "pattern": ID_PATTERN}
        add_problems(operation, 404, 503, meaning=_MEANING)
    add_answer(job_path["get"], ref("Job"), "The job.")
    add_answer(cancelled, ref("Job"), "The job, cancelled unless it had finished.")
    job_path["delete"]["responses"]["204"] = {"description": "The job was removed."}
