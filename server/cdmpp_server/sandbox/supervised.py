"""Supervised worker processes: one job at a time each, replaced when a job ends them, behind a bounded queue."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from cdmpp.errors import OverloadedError
from cdmpp_server.sandbox.worker import (
    OnProgress,
    Worker,
    WorkerDiedError,
    WorkerMemoryError,
    WorkerReply,
    WorkerTimeoutError,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")


class SupervisedWorker:
    """One worker process, started when it is first needed and replaced when it has ended.

    Parameters
    ----------
    make : callable
        Returns a worker that is not started.
    max_jobs : int, optional
        Jobs after which the process is replaced, which frees what parsers leak.

    Attributes
    ----------
    worker : Worker or None
    restarts : int
        Number of processes replaced because of a job.
    """

    def __init__(self, make: Callable[[], Worker], max_jobs: int | None = None) -> None:
        self._make, self._max_jobs = make, max_jobs
        self.worker: Worker | None = None
        self.restarts = 0
        self._jobs = 0
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None] | None:
        """Begin to start the process if it does not run; the start continues if the caller is cancelled."""
        if self._starting is None and (self.worker is None or self.worker.pid is None):
            self.worker, self._jobs = self._make(), 0
            # An empty context: the process belongs to no request.
            self._starting = asyncio.create_task(self.worker.start(), context=contextvars.Context())
            self._starting.add_done_callback(self._started)
        return self._starting

    async def ready(self) -> Worker:
        """Return the running process.

        Raises
        ------
        OverloadedError
            No process can be started.
        """
        if self._starting is None and self._max_jobs is not None and self._jobs >= self._max_jobs:
            await self.stop()
        starting = self.start()
        if starting is not None:
            try:
                await asyncio.shield(starting)
            except (WorkerDiedError, WorkerTimeoutError, OSError) as error:
                _log.error("no worker process: %s", error)
                raise OverloadedError("no worker process can be started", hint="retry after some seconds") from None
        assert self.worker is not None
        return self.worker

    async def run(
        self, header: Mapping[str, Any], payload: bytes, timeout_s: float, on_progress: OnProgress | None = None
    ) -> WorkerReply:
        """Run one job; a second process tries it again if the first one dies.

        The first process may die because of an earlier job, or be killed from outside.

        Raises
        ------
        OverloadedError
            No process can be started.
        WorkerTimeoutError, WorkerMemoryError, WorkerDiedError
            The job's end; a new process is being started.
        """
        for last in (False, True):
            worker = await self.ready()
            self._jobs += 1
            try:
                return await worker.run(header, payload, timeout_s, on_progress)
            except (WorkerTimeoutError, WorkerMemoryError):
                await self.replace()
                raise
            except asyncio.CancelledError:  # the cancelled exchange has killed the process
                self.restarts += 1
                self.start()
                raise
            except WorkerDiedError as error:
                _log.warning("a %s died: %s: %s", worker.program.name, error, worker.stderr_tail)
                await self.replace()
                if last:
                    raise
        raise AssertionError("the second attempt returns or raises")

    async def replace(self) -> None:
        """Kill the process and begin to start another."""
        self.restarts += 1
        await self.stop()
        self.start()

    async def stop(self) -> None:
        """Kill the process."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        worker, self.worker = self.worker, None
        if worker is not None:
            await worker.stop()

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        if not task.cancelled() and task.exception() is not None:
            self.worker = None


class WorkerPool:
    """Assigns jobs to a few supervised workers; further jobs wait in a bounded queue. Belongs to one event loop.

    Parameters
    ----------
    workers : int
        Maximum number of processes; each starts when it is first needed.
    make : callable
        Returns a worker that is not started.
    max_queued : int
        Maximum number of jobs that wait.
    max_jobs : int, optional
        Jobs after which a process is replaced.
    """

    def __init__(self, workers: int, make: Callable[[], Worker], max_queued: int, max_jobs: int | None = None) -> None:
        self._workers = [SupervisedWorker(make, max_jobs) for _ in range(workers)]
        # Last in, first out: the process that worked last is used first, so that others need not be started.
        self._idle: asyncio.LifoQueue[SupervisedWorker] = asyncio.LifoQueue()
        for worker in reversed(self._workers):
            self._idle.put_nowait(worker)
        self._capacity = workers + max_queued
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.waiting = 0

    @property
    def restarts(self) -> int:
        """Number of processes replaced because of a job."""
        return sum(worker.restarts for worker in self._workers)

    @property
    def busy(self) -> int:
        """Number of jobs that have begun."""
        return len(self._running)

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        processes = [worker.worker for worker in self._workers]
        return [pid for process in processes if process is not None and (pid := process.pid) is not None]

    def start(self) -> None:
        """Begin to start the first process before a job needs it."""
        self._workers[0].start()

    async def run(self, job: Callable[[SupervisedWorker], Coroutine[Any, Any, T]], *, kill: bool = False) -> T:
        """Run ``job`` with an idle worker.

        A job that has begun continues when the caller is cancelled: its process stays usable. With ``kill`` the job
        is cancelled too, which kills its process.

        Raises
        ------
        OverloadedError
            As many jobs wait as may, no process can be started, or the pool is closed.
        """
        if self._closed:
            raise _closed()
        count = len(self._running) + self.waiting
        if count >= self._capacity:
            raise OverloadedError(f"{count} requests are being worked on or wait", hint="retry after a second")
        self.waiting += 1
        try:
            worker = await self._idle.get()
        finally:
            self.waiting -= 1
        if self._closed:
            raise _closed()
        task = asyncio.create_task(job(worker))
        self._running.add(task)
        task.add_done_callback(partial(self._ended, worker))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise _closed() from None
            if kill:
                task.cancel()
            raise

    async def close(self) -> None:
        """Kill the processes; jobs that run or wait raise OverloadedError."""
        self._closed = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for _ in range(self.waiting):  # wakes one waiting job each
            self._idle.put_nowait(self._workers[0])
        for worker in self._workers:
            await worker.stop()

    def _ended(self, worker: SupervisedWorker, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._idle.put_nowait(worker)
        if not task.cancelled():
            task.exception()  # marks it as retrieved if no caller waits any more


def _closed() -> OverloadedError:
    return OverloadedError("the service is being stopped", hint="retry after some seconds")
