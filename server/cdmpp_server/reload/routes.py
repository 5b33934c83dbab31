"""``SIGHUP``, and ``POST /models/reload`` for administrators."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from cdmpp_server.feature import Schema
from cdmpp_server.openapi import add_problems
from cdmpp_server.operate.middleware import require_administrator
from cdmpp_server.problems import ProblemError
from cdmpp_server.reload.reloader import Reloader, ReloadRefusedError
from cdmpp_server.reload.worker_status import WorkerStatus, WorkerStatuses
from cdmpp_server.sandbox.confine import die_with_parent
from cdmpp_server.settings import Settings

router = APIRouter()
_log = logging.getLogger(__name__)
#: Time limit for all workers together; loading a model takes a second or two.
_TIMEOUT_S = 60.0
_PATH = "/models/reload"
_MEANING = {
    409: "The folder has no working model (reload_refused); the old model stays.",
    504: "Some workers did not finish in time (deadline_exceeded); they continue to reload.",
}


class Reloaded(BaseModel):
    """All workers use this model now."""

    model_config = ConfigDict(extra="forbid")

    model_id: str
    workers: Annotated[int, Field(ge=1)]


def install(app: FastAPI, settings: Settings) -> None:
    """Add the endpoint if there are administrators' keys."""
    if settings.admin_key_hashes:
        app.include_router(router)


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add the problems of a reload."""
    if _PATH in document["paths"]:
        add_problems(document["paths"][_PATH]["post"], 409, 504, meaning=_MEANING)


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Reload on SIGHUP while the application runs."""
    state = app.state
    state.reloader = Reloader(state, settings.model, state.model_fingerprint)
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
    """Load the configured model folder again in every worker; requests are served meanwhile."""
    require_administrator(request)
    try:
        model_id: str = await request.app.state.reloader.reload()
        statuses = WorkerStatuses.of_this_process()
        if statuses is None:
            return Reloaded(model_id=model_id, workers=1)
        async with asyncio.timeout(_TIMEOUT_S):
            workers = await statuses.reload_all(model_id, request.app.state.settings.workers)
    except ReloadRefusedError as error:
        raise _refused(str(error)) from None
    except TimeoutError:
        raise ProblemError(
            "deadline_exceeded", f"not every worker has the model after {_TIMEOUT_S:g} s", "GET /models"
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
