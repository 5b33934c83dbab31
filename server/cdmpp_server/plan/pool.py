"""The service's side of the planning processes: a few that answer requests, one job at a time each."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import cdmpp
from cdmpp_server.deadline import Deadline
from cdmpp_server.problems import ProblemError, SchemaViolation, internal_error
from cdmpp_server.sandbox.worker import (
    OnProgress,
    Program,
    Worker,
    WorkerDiedError,
    WorkerMemoryError,
    WorkerTimeoutError,
)

_log = logging.getLogger(__name__)
#: Bytes of the largest answer: a timeline of a hundred thousand nodes has some ten million.
MAX_ANSWER_BYTES = 128 * 2**20
WorkerReply = tuple[dict[str, Any], bytes]


def planning(role: str, memory_bytes: int) -> Callable[[], Worker]:
    """Makes processes that plan, for requests (``inline``) or for jobs (``jobs``), not started.

    Parameters
    ----------
    role : {"inline", "jobs"}
    memory_bytes : int
        Of each, beyond its libraries.
    """
    program = Program(
        "cdmpp_server.plan", f"planning process ({role})", (role,), _compiled(), max_payload=MAX_ANSWER_BYTES
    )
    return partial(Worker, memory_bytes, program)


def _compiled() -> dict[str, str]:
    """Where compiled loops are kept for the next process: numba's own variable, where it is needed."""
    variable = "NUMBA_CACHE_DIR"
    if variable in os.environ:
        return {variable: os.environ[variable]}
    if all(os.access(folder, os.W_OK) for folder in cdmpp.__path__):
        return {}  # beside the code, as in other processes
    for named, otherwise in (("XDG_CACHE_HOME", ".cache"), ("XDG_STATE_HOME", ".local/state")):
        text = os.environ.get(named, "")
        try:
            root = Path(text) if Path(text).is_absolute() else Path.home() / otherwise
            folder = root / "cdmpp" / "compiled"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            continue
        if os.access(folder, os.W_OK):
            return {variable: str(folder)}
    return {}


class Slot:
    """One process, started when it is first needed and replaced when it has ended.

    Parameters
    ----------
    make : callable
        Makes a worker that is not started.
    """

    def __init__(self, make: Callable[[], Worker]) -> None:
        self._make = make
        self.worker: Worker | None = None
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None] | None:
        """Begin to start the process where it does not run; the start outlives who asked for it."""
        if self._starting is None and (self.worker is None or self.worker.pid is None):
            self.worker = self._make()
            # A context of its own: it belongs to no request.
            self._starting = asyncio.create_task(self.worker.start(), context=contextvars.Context())
            self._starting.add_done_callback(self._started)
        return self._starting

    async def ready(self) -> Worker:
        """The running process.

        Raises
        ------
        WorkerDiedError, WorkerTimeoutError, OSError
            It could not be started.
        """
        starting = self.start()
        if starting is not None:
            await asyncio.shield(starting)
        assert self.worker is not None
        return self.worker

    async def stop(self) -> None:
        """End the process."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self.worker is not None:
            await self.worker.stop()
            self.worker = None

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        if not task.cancelled() and task.exception() is not None:
            self.worker = None


class Planners:
    """Planning processes for requests that are answered at once. Belongs to one event loop.

    Parameters
    ----------
    workers : int
    make : callable
        Makes a planning process that is not started.
    max_queued : int
        Pieces of work that may wait for a process.
    limit_s : float
        A process that works on one longer than this is replaced. Who asked may have gone long before: one
        that waited for most of its time shall not cost the others a process.
    """

    def __init__(self, workers: int, make: Callable[[], Worker], max_queued: int, limit_s: float) -> None:
        self._slots = [Slot(make) for _ in range(workers)]
        # The one that worked last is taken first: others need not run.
        self._free: asyncio.LifoQueue[Slot] = asyncio.LifoQueue()
        for slot in reversed(self._slots):
            self._free.put_nowait(slot)
        self._places, self._inside, self._limit_s = workers + max_queued, 0, limit_s
        self._tasks: set[asyncio.Task[WorkerReply]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self._slots:
            await slot.stop()

    def start(self) -> None:
        """Begin to start the first process, before anybody asks."""
        self._slots[0].start()

    async def run(self, header: Mapping[str, Any], payload: bytes, deadline: Deadline) -> WorkerReply:
        """Have a process do something; what has begun is done to its end, also for who has gone.

        Raises
        ------
        ProblemError
            The refusal of the request; 503 where too many wait, 504 at the deadline, 500 for a bug.
        """
        if self._inside >= self._places:
            raise ProblemError(
                "overloaded",
                f"{self._inside} plans are being made or wait",
                "retry after a second, or send it as a job: Prefer: respond-async",
                headers={"retry-after": "1"},
            )
        self._inside += 1
        task = asyncio.create_task(self._do(header, payload, deadline))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            async with asyncio.timeout_at(deadline.at):
                said, data = await asyncio.shield(task)
        except TimeoutError:
            raise deadline.exceeded() from None
        raise_refusal(said)
        return said, data

    def _ended(self, task: asyncio.Task[WorkerReply]) -> None:
        self._inside -= 1
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also where nobody waits for it any more

    async def _do(self, header: Mapping[str, Any], payload: bytes, deadline: Deadline) -> WorkerReply:
        try:
            async with asyncio.timeout_at(deadline.at):
                slot = await self._free.get()
        except TimeoutError:
            raise deadline.exceeded() from None
        try:
            return await self._on(slot, header, payload, deadline)
        finally:
            self._free.put_nowait(slot)

    async def _on(self, slot: Slot, header: Mapping[str, Any], payload: bytes, deadline: Deadline) -> WorkerReply:
        for last in (False, True):
            try:
                async with asyncio.timeout_at(deadline.at):
                    worker = await slot.ready()
            except TimeoutError:
                raise ProblemError(
                    "overloaded",
                    "the planning process is being started",
                    "retry after some seconds",
                    headers={"retry-after": "5"},
                ) from None
            except (WorkerDiedError, WorkerTimeoutError, OSError) as error:
                _log.error("no planning process: %s", error)
                raise ProblemError("overloaded", "plans cannot be made at the moment") from None
            try:
                return await worker.run(header, payload, self._limit_s)
            except WorkerTimeoutError:
                slot.start()  # for the next one
                raise deadline.exceeded() from None
            except WorkerMemoryError:
                slot.start()
                raise too_large() from None
            except WorkerDiedError as error:
                # It may have died of what came before, or been killed from outside: a second one decides.
                _log.warning("a planning process died with %s: %s: %s", header, error, worker.last_words)
                if last:
                    raise internal_error() from None
        raise AssertionError("a second attempt has an outcome")


async def run_job(
    worker: Worker, header: Mapping[str, Any], payload: bytes, limit_s: float, on_progress: OnProgress
) -> WorkerReply:
    """Have a process do a job.

    Raises
    ------
    ProblemError
        Why it failed: the request's refusal, 409 for memory, 504 for time, 500 for a crash.
    """
    try:
        said, data = await worker.run(header, payload, limit_s, on_progress)
    except WorkerTimeoutError:
        raise ProblemError(
            "deadline_exceeded", f"the search did not end within {limit_s:g} s", "ask for less"
        ) from None
    except WorkerMemoryError:
        raise too_large() from None
    except WorkerDiedError as error:
        _log.warning("a planning process died with %s: %s: %s", header, error, worker.last_words)
        raise internal_error() from None
    raise_refusal(said)
    return said, data


def too_large() -> ProblemError:
    """What a request is told that needs more memory than a planning process has (409)."""
    return ProblemError(
        "plan_too_large", "this needs more memory than a plan may use", "ask for less at once", status=409
    )


def raise_refusal(said: Mapping[str, Any]) -> None:
    """Raise the problem that a process answers with, if it does."""
    if "bug" in said:
        _log.error("a planning process failed: %s", said["bug"])
        raise internal_error()
    if "refused" in said:
        refused = said["refused"]
        raise ProblemError(
            refused["code"],
            refused["message"],
            refused["hint"],
            status=refused["status"],
            errors=[SchemaViolation(**each) for each in refused["errors"]] or None,
        )
