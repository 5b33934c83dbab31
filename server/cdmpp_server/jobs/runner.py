"""Execution of jobs: each runner has one planning process and takes one job after the other."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from anyio.to_thread import run_sync

from cdmpp.errors import OverloadedError
from cdmpp.predict.requests.budget import WALL
from cdmpp_server.jobs.store import DEFAULT_BUDGET_S, MAX_ATTEMPTS, JobStore, LeasedJob, State
from cdmpp_server.observe.tables import StoreUnavailableError
from cdmpp_server.operate.metrics import Metrics
from cdmpp_server.problems import ProblemError, internal_error
from cdmpp_server.processes import run_job
from cdmpp_server.sandbox.worker import SupervisedWorker, Worker

_log = logging.getLogger(__name__)
#: Seconds between two queries for jobs that were submitted to other workers or left behind by them.
_POLL_S = 1.0
#: Seconds between two writes of a running job's progress; much shorter than its lease.
_BEAT_S = 2.0
#: Seconds after its budget, and after its cancellation, at which a search is killed.
GRACE_S, CANCEL_S = 60.0, 5.0


class Runner:
    """Executes jobs until it is stopped. Belongs to one event loop.

    ``make``: creates a planning process that is not started. ``handlers``: kind of job to a coroutine function that
    executes it and returns its answer as JSON, instead of a planning process.
    """

    def __init__(
        self,
        jobs: JobStore,
        make: Callable[[], Worker],
        metrics: Metrics,
        handlers: Mapping[str, Callable[[LeasedJob], Awaitable[str]]] | None = None,
    ) -> None:
        self._jobs, self._metrics, self._handlers = jobs, metrics, handlers or {}
        self._worker = SupervisedWorker(make)
        self._owner = secrets.token_hex(16)
        self._wake = asyncio.Event()
        self._running: str | None = None
        self._cancelled = asyncio.Event()

    def wake(self) -> None:
        """Look for jobs now: one has been submitted."""
        self._wake.set()

    def interrupt(self, id: str) -> None:
        """End the search of a cancelled job now, if this runner executes it."""
        if id == self._running:
            self._cancelled.set()

    async def serve(self) -> None:
        """Execute jobs until cancelled; an unfinished job then returns to the queue."""
        try:
            while True:
                job = await self._take()
                if job is None:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), _POLL_S)
                    self._wake.clear()
                    continue
                try:
                    await self._execute(job)
                except StoreUnavailableError:
                    # After its lease has ended, any worker that reaches the database repeats the job.
                    _log.warning("job left: the database is unavailable")
        finally:
            await self._worker.stop()

    async def _take(self) -> LeasedJob | None:
        try:
            if not await run_sync(self._jobs.waiting):
                return None
            # Cancellation does not stop the thread: it may lease a job that nobody would execute.
            taking = asyncio.ensure_future(run_sync(self._jobs.take, self._owner))
            try:
                return await asyncio.shield(taking)
            except asyncio.CancelledError:
                with suppress(StoreUnavailableError):
                    job = await taking
                    if job is not None:
                        await run_sync(self._jobs.give_back, job.id, self._owner)
                raise
        except StoreUnavailableError:
            return None

    async def _execute(self, job: LeasedJob) -> None:
        if job.attempts > MAX_ATTEMPTS:
            problem = internal_error()
            problem.problem.detail = f"the process ended in each of {MAX_ATTEMPTS} attempts"
            await self._finish(job, "failed", {"error": _error(problem)})
            return
        progress: dict[str, Any] = {}
        self._running = job.id
        self._cancelled.clear()
        search = asyncio.create_task(self._search(job, progress))
        try:
            await self._supervise(job, search, progress)
        except asyncio.CancelledError:
            with suppress(StoreUnavailableError):
                await run_sync(self._jobs.give_back, job.id, self._owner)
            raise
        finally:
            self._running = None
            search.cancel()
            await asyncio.gather(search, return_exceptions=True)

    async def _search(self, job: LeasedJob, progress: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        """Return the final state of a job and its columns; ``progress`` is updated meanwhile."""

        def on_progress(report: dict[str, Any], data: bytes) -> None:
            progress.update({name: report[name] for name in ("progress", "best", "bound")})
            if data:
                progress["answer"] = data.decode()

        if job.kind in self._handlers:
            try:
                return "done", {"answer": await self._handlers[job.kind](job)}
            except StoreUnavailableError:
                raise
            except ProblemError as error:
                return "failed", {"error": _error(error)}
        try:
            worker = await self._worker.ready()
        except OverloadedError as error:
            return "failed", {"error": _error(ProblemError(error.code, error.message, error.hint))}
        header = {"do": "solve", "kind": job.kind, "body": len(job.request), "progress": True}
        limit_s = WALL * (DEFAULT_BUDGET_S if job.budget_s is None else job.budget_s) + GRACE_S
        try:
            reply, data = await run_job(worker, header, job.request + job.prices, limit_s, on_progress)
        except ProblemError as error:
            return "failed", {**progress, "error": _error(error)}
        objective: dict[str, Any] = {name: reply[name] for name in ("best", "bound") if name in reply}
        return "done", {**progress, **objective, "answer": data.decode()}

    async def _supervise(
        self, job: LeasedJob, search: asyncio.Task[tuple[State, dict[str, Any]]], progress: dict[str, Any]
    ) -> None:
        """Write the progress of a search until it ends, is cancelled or is lost to another worker."""
        written: dict[str, Any] = {}
        cancelled = asyncio.create_task(self._cancelled.wait())
        try:
            while True:
                await asyncio.wait({search, cancelled}, timeout=_BEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if search.done():
                    state, columns = search.result()
                    columns |= {"progress": 1.0} if state == "done" else {}
                    await self._finish(job, state, columns)
                    return
                changes = {name: value for name, value in progress.items() if written.get(name) != value}
                if cancelled.done() or not await run_sync(self._jobs.beat, job.id, self._owner, changes):
                    break
                written |= changes
        finally:
            cancelled.cancel()
        if self._worker.worker is not None:
            self._worker.worker.interrupt()
        await asyncio.wait({search}, timeout=CANCEL_S)
        columns = search.result()[1] if search.done() else progress
        await run_sync(self._jobs.keep, job.id, self._owner, {**columns, "error": None})
        self._metrics.job("cancelled")

    async def _finish(self, job: LeasedJob, state: State, columns: dict[str, Any]) -> None:
        if await run_sync(self._jobs.finish, job.id, self._owner, state, columns):
            self._metrics.job(state)
        elif state == "done":
            columns.pop("progress")
            await run_sync(self._jobs.keep, job.id, self._owner, columns)
            self._metrics.job("cancelled")


def _error(error: ProblemError) -> str:
    problem = error.problem
    path = problem.errors[0].path if problem.errors else ""
    return json.dumps({"code": problem.code, "message": problem.detail, "hint": problem.hint, "path": path})
