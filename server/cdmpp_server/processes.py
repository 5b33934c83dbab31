"""Processes that plan and adapt for the service: a few answer requests, one job at a time each."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import cdmpp
from cdmpp.errors import OverloadedError
from cdmpp_server.concurrency import Deadline
from cdmpp_server.load import ExpectedWork, Place
from cdmpp_server.operate.access import current_sender
from cdmpp_server.predict.admission import RefusedError
from cdmpp_server.problems import ProblemError, SchemaViolation, internal_error
from cdmpp_server.sandbox.worker import (
    OnProgress,
    Program,
    SandboxPool,
    SupervisedWorker,
    Worker,
    WorkerDiedError,
    WorkerMemoryError,
    WorkerReply,
    WorkerTimeoutError,
)

_log = logging.getLogger(__name__)
#: Largest replies in bytes: the timeline of a hundred thousand nodes has some ten million, an adapter of 1,000 programs
#: some hundred thousand.
_MAX_PLAN_BYTES, _MAX_ADAPTER_BYTES = 128 * 2**20, 64 * 2**20
#: Seconds between two signals to a process whose job is to end: the first may precede the job.
_SIGNAL_EACH_S = 0.1


@dataclass(frozen=True)
class ProcessKind:
    """Names and problems of one kind of process."""

    #: Names for the log and for messages.
    process: str
    work: str
    #: Code and message of the problem of a job that needs too much memory.
    too_large: str
    memory: str
    #: What to do where a job needs too much memory or time.
    hint: str
    #: What to do besides where too much work waits.
    otherwise: str = ""

    @contextmanager
    def problems(self, header: object, late: ProblemError | None = None, limit_s: float = 0.0) -> Iterator[None]:
        """Convert errors of processes: 409 for memory, 503 if too much work waits, 504 for time, 500 for a crash.

        ``header`` names the job in the log. ``late`` is the problem of a job that takes too long; default: it states
        the limit of ``limit_s`` seconds.
        """
        try:
            yield
        except OverloadedError as error:
            raise ProblemError(error.code, error.message, error.hint + self.otherwise) from None
        except (TimeoutError, WorkerTimeoutError):
            message = f"the {self.work} did not end within {limit_s:g} s"
            raise late or ProblemError("deadline_exceeded", message, self.hint) from None
        except WorkerMemoryError:
            raise ProblemError(self.too_large, self.memory, self.hint, status=409) from None
        except WorkerDiedError:
            _log.warning("a %s died with %s", self.process, header)
            raise internal_error() from None

    def raise_refusal(self, reply: Mapping[str, Any]) -> None:
        """Raise the problem in a process's reply, if there is one."""
        if "bug" in reply:
            _log.error("a %s failed: %s", self.process, reply["bug"])
            raise internal_error()
        if "refused" in reply:
            code, message, hint, status = (reply["refused"][name] for name in ("code", "message", "hint", "status"))
            errors = [SchemaViolation(**violation) for violation in reply["refused"].get("errors", ())] or None
            raise ProblemError(code, message, hint, status=status, item=reply["refused"].get("item"), errors=errors)


PLANNING = ProcessKind(
    "planning process",
    "search",
    "plan_too_large",
    "the plan needs more memory than is allowed",
    "send a smaller request",
    ", or send a plan as a job: Prefer: respond-async",
)
ADAPTING = ProcessKind(
    "adapting process",
    "adaptation",
    "data_error",
    "the records need more memory than is allowed",
    "send fewer records, or run cdmpp adapt on them",
)


def planning(role: str, memory_bytes: int, limits: Mapping[str, float]) -> Callable[[], Worker]:
    """Return a function that makes a planning process, not started.

    ``role``: whether it serves requests or jobs. ``memory_bytes``: memory of each process, beyond its libraries.
    ``limits``: largest sizes of requests.
    """
    options, name = (role, json.dumps(dict(limits))), f"planning process ({role})"
    program = Program("cdmpp_server.plan", name, options, _numba_cache(), max_payload=_MAX_PLAN_BYTES)
    return partial(Worker, memory_bytes, program)


def adapting(memory_bytes: int) -> Callable[[], Worker]:
    """Return a function that makes an adapting process, not started."""
    program = Program("cdmpp_server.adapt", "adapting process", max_payload=_MAX_ADAPTER_BYTES)
    return partial(Worker, memory_bytes, program)


def _numba_cache() -> dict[str, str]:
    """Environment variable with a writable folder for compiled loops; empty where numba needs none."""
    variable = "NUMBA_CACHE_DIR"
    if variable in os.environ:
        return {variable: os.environ[variable]}
    if all(os.access(folder, os.W_OK) for folder in cdmpp.__path__):
        return {}  # numba writes beside the code
    for base, default in (("XDG_CACHE_HOME", ".cache"), ("XDG_STATE_HOME", ".local/state")):
        text = os.environ.get(base, "")
        try:
            root = Path(text) if Path(text).is_absolute() else Path.home() / default
            folder = root / "cdmpp" / "compiled"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            continue
        if os.access(folder, os.W_OK):
            return {variable: str(folder)}
    return {}


class Processes:
    """Processes for requests that are answered at once. Belongs to one event loop; an async context manager.

    ``workers``: maximum number of processes; each is made, not started, by ``make``, and starts when it is first
    needed. ``max_queued``: maximum number of requests that wait for one. ``limit_s``: time limit of a job; a process
    that exceeds it is replaced. A request's own deadline may be earlier. Then the request ends, and the process ends
    the job if it is ``stoppable``, else finishes it. Default: the process is killed at the deadline, and when the
    caller is cancelled.
    """

    def __init__(
        self, kind: ProcessKind, workers: int, make: Callable[[], Worker], max_queued: int, limit_s: float | None = None
    ) -> None:
        self._kind, self._limit_s = kind, limit_s
        self._pool, self._load = SandboxPool(workers, make, max_queued), ExpectedWork(workers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes."""
        await self._pool.close()

    @property
    def busy(self) -> int:
        """Number of jobs that have begun."""
        return self._pool.busy

    @property
    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        return self._pool.pids

    def start(self) -> None:
        """Begin to start the first process before a request needs it."""
        self._pool.start()

    @contextmanager
    def admitted(self, kind: str, deadline: Deadline, size: float = 1.0) -> Iterator[Place]:
        """Admit a request of one or more jobs; pass the place to :meth:`run`.

        ``kind``: requests of a kind take about the same time for each unit of their size.
        Raises ProblemError: 503 if the request would probably miss its deadline.
        """
        try:
            place = self._load.admit(current_sender.get(), kind, size, deadline.left_s())
        except RefusedError as refused:
            later = {"retry-after": str(min(60, max(1, math.ceil(refused.retry_after_s))))}
            message = f"the {self._kind.process}es have too much work for an answer within {deadline.after_s:g} s"
            hint = "retry after the seconds of Retry-After" + self._kind.otherwise
            raise ProblemError("overloaded", message, hint, headers=later) from None
        done = False
        try:
            yield place
            done = True
        finally:
            self._load.end(place, done)
            self._pool.charge(place.sender, place.used_s - place.charged_s)

    async def run(
        self,
        header: Mapping[str, Any],
        payload: bytes,
        deadline: Deadline,
        place: Place | None = None,
        *,
        seconds: float = 0.0,
        stoppable: bool = False,
    ) -> WorkerReply:
        """Run one job. Senders get equal shares of the processes, by the time of their requests.

        ``place``: of :meth:`admitted`; default: the request has this job only. ``seconds``: predicted time of this job,
        where it is known better than from earlier requests. ``stoppable``: whether the process ends the job on a
        signal.
        Raises ProblemError: the refusal of the request; 409 for memory, 503 if it is not admitted, the queue is full or
        the process is still being started, 504 at the deadline, 500 for a bug.
        """
        if place is None:
            with self.admitted(f"{header.get('do')} {header.get('kind')}", deadline) as place:
                return await self.run(header, payload, deadline, place, seconds=seconds, stoppable=stoppable)
        kill, starting, gone = self._limit_s is None, False, asyncio.Event()
        limit_s = deadline.after_s if self._limit_s is None else self._limit_s

        async def job(worker: SupervisedWorker) -> WorkerReply:
            nonlocal starting
            starting = True
            async with asyncio.timeout_at(deadline.at):
                await worker.ready()
            starting = False
            if gone.is_set():
                raise TimeoutError
            begun = time.monotonic()
            try:
                work = worker.run(header, payload, limit_s)
                return await (stopped_by(gone, worker, work) if stoppable else work)
            finally:
                place.used_s += time.monotonic() - begun

        cost, first = seconds or self._load.seconds(place), not place.charged_s
        place.charged_s = place.charged_s or cost
        late = None if kill else deadline.exceeded()
        with self._kind.problems(header, late, deadline.after_s):
            try:
                async with asyncio.timeout_at(deadline.at):
                    reply, data = await self._pool.run(job, kill=kill, cost=cost, first=first)
            except TimeoutError:
                if not starting:
                    raise
                message = f"the {self._kind.process} is being started"
                later = {"retry-after": "5"}
                raise ProblemError("overloaded", message, "retry after some seconds", headers=later) from None
            finally:
                gone.set()
        self._kind.raise_refusal(reply)
        return reply, data


async def stopped_by(
    gone: asyncio.Event, worker: SupervisedWorker, work: Coroutine[Any, Any, WorkerReply]
) -> WorkerReply:
    """Result of a job; once ``gone`` is set, its process is signalled until the job ends."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone.wait())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        while not task.done():
            if worker.worker is not None:
                worker.worker.interrupt()
            await asyncio.wait((task,), timeout=_SIGNAL_EACH_S)
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()


async def run_job(
    worker: Worker, header: Mapping[str, Any], payload: bytes, limit_s: float, on_progress: OnProgress
) -> WorkerReply:
    """Run one job of the queue in a planning process.

    Raises ProblemError: the refusal of the request; 409 for memory, 504 for time, 500 for a crash.
    """
    with PLANNING.problems(header, limit_s=limit_s):
        reply, data = await worker.run(header, payload, limit_s, on_progress)
    PLANNING.raise_refusal(reply)
    return reply, data
