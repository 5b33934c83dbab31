"""Replacement of the model without a failed request: load, test, swap.

``SIGHUP`` to the service, or ``POST /models/reload`` by an administrator, loads the configured folder again, with the
proposal that was taken. A model that cannot be loaded or fails the golden prediction is refused, and the old model
stays.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Request
from pydantic import Field
from starlette.datastructures import State

from cdmpp.errors import CdmppError
from cdmpp.model.artifact.load import without_adapter
from cdmpp.predict.predictor import CachedRow, LatencyPredictor
from cdmpp.utils.lru import Lru
from cdmpp_server.body import parse, read_json_body
from cdmpp_server.jobs.routes import ID_PATTERN
from cdmpp_server.models import Fingerprint, Models, fingerprint, load_model
from cdmpp_server.observe.tables import StoreUnavailableError
from cdmpp_server.openapi import Schema, add_body, add_models, add_problems, ref
from cdmpp_server.operate.middleware import require_administrator
from cdmpp_server.predict.service import check_golden
from cdmpp_server.problems import ProblemError
from cdmpp_server.proposals import Proposal, with_proposal
from cdmpp_server.sandbox.confine import die_with_parent
from cdmpp_server.schema_base import AnswerModel, RequestModel
from cdmpp_server.settings import Settings
from cdmpp_server.workers import WorkerStatus, WorkerStatuses

_log = logging.getLogger(__name__)


class ReloadRefusedError(Exception):
    """The folder has no working model; the message is the reason. The old model stays."""


class Reloader:
    """Replaces the base model by the current content of the model folder, with the proposal that was taken.

    ``state``: of the application, with ``models``, ``proposals``, ``metrics`` and ``not_ready``. ``folder`` None: the
    model in the package. ``loaded``: fingerprint of the folder, taken before the present model was loaded. ``taken``:
    job of the proposal that was loaded.
    """

    def __init__(self, state: State, folder: Path | None, loaded: Fingerprint, taken: str | None) -> None:
        self._state, self._folder, self._loaded = state, folder, (loaded, taken)
        self._lock = asyncio.Lock()

    async def reload(self) -> str:
        """Load, test and swap the model; requests that have begun keep the old model.

        Returns the ``model_id`` of the base model from now on. An unchanged folder is not loaded again.
        Raises ReloadRefusedError: the new model cannot be loaded or fails its test; the old one stays.
        """
        async with self._lock:
            models: Models = self._state.models
            before = models.base.model_id
            try:
                taken = await run_sync(self._state.proposals.taken)
            except StoreUnavailableError as error:
                raise ReloadRefusedError(f"{error}: it holds the proposal that was taken") from None
            seen = await run_sync(fingerprint, self._folder), None if taken is None else taken.job_id
            if seen == self._loaded and not self._state.not_ready:
                _log.info("the model folder and the proposal are unchanged: %s stays", before)
                return before
            try:
                predictor = await run_sync(_load, self._folder, models.base.cache, taken)
            except ReloadRefusedError as error:
                _log.error("the model was not reloaded: %s; %s stays", error, self._state.models.base.model_id)
                raise
            models.replace(predictor)
            self._state.metrics.model(predictor.model_id)
            self._state.not_ready = ""
            self._loaded = seen
            _log.info("the model was reloaded: %s replaces %s", predictor.model_id, before)
            return predictor.model_id


def _load(folder: Path | None, cache: Lru[CachedRow], taken: Proposal | None) -> LatencyPredictor:
    try:
        predictor = with_proposal(load_model(folder, cache), taken)
    except (CdmppError, OSError) as error:
        raise ReloadRefusedError(str(error).replace("\n", " ")) from None
    reason = check_golden(predictor)
    if reason:
        raise ReloadRefusedError(f"the golden prediction of {predictor.model_id} failed: {reason}")
    return predictor


router = APIRouter()
#: Time limit for all workers together, or the service's deadline if that is longer; loading a model takes a second or
#: two.
_TIMEOUT_S = 60.0
_PATH = "/models/reload"
_MEANING = {
    404: "No job with this id has proposed a model (unknown_proposal).",
    409: "The folder has no working model, or the proposal is for another one (reload_refused); the old model stays.",
    504: "Some workers did not finish in time (deadline_exceeded); they continue to reload.",
}


class ReloadRequest(RequestModel):
    """Which proposal to take; without a body or this field the present one stays."""

    proposal: Annotated[str, Field(pattern=ID_PATTERN)] | None = Field(
        None,
        description="Job that proposed an adapted model (`proposal` of GET /observe): every worker loads it, also "
        "after a restart. null: no proposal, only the model folder.",
    )


class Reloaded(AnswerModel):
    """All workers use this model now."""

    model_id: str
    workers: int = Field(ge=1)


def install(app: FastAPI, settings: Settings) -> None:
    """Add the endpoint if there are administrators' keys."""
    if settings.admin_key_hashes:
        app.include_router(router)


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add the problems of a reload."""
    if _PATH in document["paths"]:
        add_models(schemas, ReloadRequest)
        operation = document["paths"][_PATH]["post"]
        add_body(operation, ref("ReloadRequest"), {"proposal": "0123456789abcdef0123456789abcdef"})
        operation["requestBody"]["required"] = False
        add_problems(operation, 400, 404, 408, 409, 413, 415, 422, 503, 504, meaning=_MEANING)


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Reload on SIGHUP while the application runs."""
    state = app.state
    state.reloader = Reloader(state, settings.model, state.model_fingerprint, state.model_taken)
    statuses = WorkerStatuses.of_this_process()
    status = WorkerStatus(0, state.models.base.model_id)
    tasks: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        nonlocal status
        error = ""
        try:
            await state.reloader.reload()
        except ReloadRefusedError as refused:
            error = str(refused)
        except Exception as bug:  # the old model stays, and the status must report the failure
            _log.exception("reloading failed")
            error = type(bug).__name__
        status = WorkerStatus(status.reloads + 1, state.models.base.model_id, error)
        if statuses is not None:
            statuses.write(status)

    def on_signal() -> None:
        task = asyncio.get_running_loop().create_task(reload())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    # Signals reach the main thread only; tests run the application in other threads.
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_signal)
    if statuses is not None:
        statuses.write(status)
        supervisor = multiprocessing.parent_process()
        if supervisor is not None and supervisor.pid is not None:
            # Otherwise workers whose supervisor was killed would keep the port occupied.
            die_with_parent(supervisor.pid, signal.SIGTERM)
    try:
        yield
    finally:
        if in_main_thread:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        await asyncio.gather(*tasks)


@router.post(_PATH, summary="Load the model again")
async def reload_model(request: Request) -> Reloaded:
    """Load the model folder again in every worker, with the chosen proposal; requests are served meanwhile."""
    require_administrator(request)
    state = request.app.state
    chosen = await _chosen(request)
    if chosen is None:
        return await _reload(request)
    before = await run_sync(state.proposals.taken)
    await run_sync(_take, state, chosen.proposal)
    try:
        return await _reload(request)
    except ProblemError as problem:
        if problem.problem.code == "reload_refused":
            await run_sync(state.proposals.take, None if before is None else before.job_id)
        raise


async def _chosen(request: Request) -> ReloadRequest | None:
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return None
    chosen = parse(ReloadRequest, await read_json_body(request, request.app.state.settings))
    return chosen if chosen.model_fields_set else None


def _take(state: State, job_id: str | None) -> None:
    if job_id is not None:
        proposal = state.proposals.get(job_id)
        if proposal is None:
            raise ProblemError(
                "unknown_proposal",
                f"job {job_id} has proposed no model",
                "GET /observe names the jobs, GET /jobs/{job_id} has their answers",
                status=404,
            )
        base = without_adapter(state.models.base.artifact).model_id
        if proposal.base_model_id != base:
            raise _refused(f"job {job_id} proposed a model on {proposal.base_model_id}, but the service has {base}")
    state.proposals.take(job_id)


async def _reload(request: Request) -> Reloaded:
    settings = request.app.state.settings
    limit_s = max(_TIMEOUT_S, settings.deadline_s)
    try:
        model_id: str = await request.app.state.reloader.reload()
        statuses = WorkerStatuses.of_this_process()
        if statuses is None:
            return Reloaded(model_id=model_id, workers=1)
        async with asyncio.timeout(limit_s):
            workers = await statuses.reload_all(model_id, settings.workers)
    except ReloadRefusedError as error:
        raise _refused(str(error)) from None
    except TimeoutError:
        raise ProblemError(
            "deadline_exceeded", f"not every worker has the model after {limit_s:g} s", "GET /models"
        ) from None
    errors = [worker.error for worker in workers.values() if worker.error]
    if errors:
        raise _refused(f"{len(errors)} of {len(workers)} workers: {errors[0]}")
    return Reloaded(model_id=model_id, workers=len(workers))


def _refused(reason: str) -> ProblemError:
    return ProblemError(
        "reload_refused",
        f"the model was not reloaded: {reason}",
        "put a complete model folder in place; the old model stays in use",
        status=409,
    )
