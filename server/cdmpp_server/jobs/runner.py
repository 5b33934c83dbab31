"""Doing jobs: one planning process for each runner, which takes them up one after the other."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from anyio.to_thread import run_sync

from cdmpp_server.jobs.store import MAX_ATTEMPTS, JobStore, State, Taken
from cdmpp_server.observe.store import StoreUnavailableError
from cdmpp_server.operate.metrics import Metrics
from cdmpp_server.plan.pool import Slot, run_job
from cdmpp_server.problems import ProblemError, internal_error
from cdmpp_server.sandbox.worker import Worker, WorkerDiedError, WorkerTimeoutError

_log = logging.getLogger(__name__)
#: How often the database is asked for jobs that other workers were told of, or have left behind.
_LOOK_S = 1.0
#: How often a running job's progress is written; far less than its lease.
_BEAT_S = 2.0
#: Seconds past its budget, or past being cancelled, after which a search is killed.
GRACE_S, CANCEL_S = 60.0, 5.0
#: For what has no budget.
MOST_S = 600.0


class Runner:
    """Takes jobs until it is stopped. Belongs to one event loop.

    Parameters
    ----------
    jobs : JobStore
    make : callable
        Makes a planning process that is not started.
    metrics : Metrics
    """

    def __init__(self, jobs: JobStore, make: Callable[[], Worker], metrics: Metrics) -> None:
        self._jobs, self._metrics = jobs, metrics
        self._slot = Slot(make)
        self._owner = secrets.token_hex(16)
        self._wake = asyncio.Event()
        self._running: str | None = None
        self._cancelled = asyncio.Event()

    def look(self) -> None:
        """There is a new job."""
        self._wake.set()

    def cancelled(self, id: str) -> None:
        """This job has been cancelled: end it now where it is this runner's."""
        if id == self._running:
            self._cancelled.set()

    async def serve(self) -> None:
        """Take jobs until cancelled; then the one under way is left for another."""
        try:
            while True:
                taken = await self._take()
                if taken is None:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), _LOOK_S)
                    self._wake.clear()
                    continue
                try:
                    await self._do(taken)
                except StoreUnavailableError:
                    # Its lease ends, and whoever can write then does it again.
                    _log.warning("job left: the database is away")
        finally:
            await self._slot.stop()

    async def _take(self) -> Taken | None:
        try:
            if await run_sync(self._jobs.waiting):
                return await run_sync(self._jobs.take, self._owner)
        except StoreUnavailableError:
            pass
        return None

    async def _do(self, job: Taken) -> None:
        if job.attempts > MAX_ATTEMPTS:
            problem = internal_error()
            problem.problem.detail = f"{MAX_ATTEMPTS} processes ended while they did this"
            await self._finish(job, "failed", {"error": _error(problem)})
            return
        told: dict[str, Any] = {}
        self._running = job.id
        self._cancelled.clear()
        search = asyncio.create_task(self._search(job, told))
        try:
            await self._watch(job, search, told)
        except asyncio.CancelledError:
            with suppress(StoreUnavailableError):
                await run_sync(self._jobs.give_back, job.id, self._owner)
            raise
        finally:
            self._running = None
            search.cancel()
            await asyncio.gather(search, return_exceptions=True)

    async def _search(self, job: Taken, told: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        """The end of a job: its state and columns; ``told`` is kept up to date on the way."""

        def hear(said: dict[str, Any], data: bytes) -> None:
            told.update({name: said[name] for name in ("progress", "best", "bound")})
            if data:
                told["answer"] = data.decode()

        try:
            worker = await self._slot.ready()
        except (WorkerDiedError, WorkerTimeoutError, OSError):
            return "failed", {"error": _error(ProblemError("overloaded", "plans cannot be made here"))}
        header = {"do": "solve", "kind": job.kind, "body": len(job.request), "progress": True}
        limit_s = (MOST_S if job.budget_s is None else job.budget_s) + GRACE_S
        try:
            said, data = await run_job(worker, header, job.request + job.prices, limit_s, hear)
        except ProblemError as error:
            return "failed", {**told, "error": _error(error)}
        objective: dict[str, Any] = {name: said[name] for name in ("best", "bound") if name in said}
        return "done", {**told, **objective, "answer": data.decode()}

    async def _watch(
        self, job: Taken, search: asyncio.Task[tuple[State, dict[str, Any]]], told: dict[str, Any]
    ) -> None:
        """Write progress while the search goes on, and its end."""
        written: dict[str, Any] = {}
        wish = asyncio.create_task(self._cancelled.wait())
        try:
            while True:
                await asyncio.wait({search, wish}, timeout=_BEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if search.done():
                    state, columns = search.result()
                    columns |= {"progress": 1.0} if state == "done" else {}
                    await self._finish(job, state, columns)
                    return
                new = {name: value for name, value in told.items() if written.get(name) != value}
                if wish.done() or not await run_sync(self._jobs.beat, job.id, self._owner, new):
                    break
                written |= new
        finally:
            wish.cancel()
        # Somebody cancelled it, or it is another's.
        if self._slot.worker is not None:
            self._slot.worker.interrupt()
        await asyncio.wait({search}, timeout=CANCEL_S)
        found = search.result()[1] if search.done() else told
        await run_sync(self._jobs.keep, job.id, self._owner, {**found, "error": None})
        self._metrics.job("cancelled")

    async def _finish(self, job: Taken, state: State, columns: dict[str, Any]) -> None:
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
