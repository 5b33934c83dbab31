"""Processes that plan and adapt for the service: a few answer requests, one job at a time each."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import cdmpp
from cdmpp.errors import OverloadedError
from cdmpp_server.concurrency import Deadline
from cdmpp_server.problems import ProblemError, SchemaViolation, internal_error
from cdmpp_server.sandbox.worker import (
    OnProgress,
    Program,
    SupervisedWorker,
    Worker,
    WorkerDiedError,
    WorkerMemoryError,
    WorkerPool,
    WorkerReply,
    WorkerTimeoutError,
)

_log = logging.getLogger(__name__)
#: Largest replies in bytes: the timeline of a hundred thousand nodes has some ten million, an adapter of 1,000 programs
#: some hundred thousand.
_MAX_PLAN_BYTES, _MAX_ADAPTER_BYTES = 128 * 2**20, 64 * 2**20


@dataclass(frozen=True)
class ProcessKind:
    """Names and problems of one kind of process.

    Attributes
    ----------
    process, work : str
        Names for the log and for messages.
    too_large, memory : str
        Code and message of the problem of a job that needs too much memory.
    hint : str
        What to do where a job needs too much memory or time.
    otherwise : str
        What to do besides where too much work waits.
    """

    process: str
    work: str
    too_large: str
    memory: str
    hint: str
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
            refused = reply["refused"]
            raise ProblemError(
                refused["code"],
                refused["message"],
                refused["hint"],
                status=refused["status"],
                item=refused.get("item"),
                errors=[SchemaViolation(**violation) for violation in refused.get("errors", ())] or None,
            )


PLANNING = ProcessKind(
    "planning process",
    "search",
    "plan_too_large",
    "the plan needs more memory than is allowed",
    "send a smaller request",
    ", or send the request as a job: Prefer: respond-async",
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

    Parameters
    ----------
    role : {"inline", "jobs"}
        Whether it serves requests or jobs.
    memory_bytes : int
        Memory of each process, beyond its libraries.
    limits : mapping of str to float
        Largest sizes of requests.
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

    Parameters
    ----------
    kind : ProcessKind
    workers : int
        Maximum number of processes; each starts when it is first needed.
    make : callable
        Makes a process that is not started.
    max_queued : int
        Maximum number of requests that wait for a process.
    limit_s : float, optional
        Time limit of a job, in seconds; a process that exceeds it is replaced. A request's own deadline may be
        earlier. Then the request ends and the process finishes the job. Default: the process is killed at the
        deadline, and when the caller is cancelled.
    """

    def __init__(
        self, kind: ProcessKind, workers: int, make: Callable[[], Worker], max_queued: int, limit_s: float | None = None
    ) -> None:
        self._kind, self._limit_s = kind, limit_s
        self._pool = WorkerPool(workers, make, max_queued)

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

    async def run(
        self, header: Mapping[str, Any], payload: bytes, deadline: Deadline, cost: float = 1.0
    ) -> WorkerReply:
        """Run one job. Senders get equal shares of the processes, by the cost of their jobs in any unit.

        Raises
        ------
        ProblemError
            The refusal of the request; 409 for memory, 503 if the queue is full or the process is still being
            started, 504 at the deadline, 500 for a bug.
        """
        kill, starting = self._limit_s is None, False

        async def job(worker: SupervisedWorker) -> WorkerReply:
            nonlocal starting
            starting = True
            async with asyncio.timeout_at(deadline.at):
                await worker.ready()
            starting = False
            return await worker.run(header, payload, deadline.after_s if self._limit_s is None else self._limit_s)

        late = None if kill else deadline.exceeded()
        with self._kind.problems(header, late, deadline.after_s):
            try:
                async with asyncio.timeout_at(deadline.at):
                    reply, data = await self._pool.run(job, kill=kill, cost=cost)
            except TimeoutError:
                if not starting:
                    raise
                message = f"the {self._kind.process} is being started"
                later = {"retry-after": "5"}
                raise ProblemError("overloaded", message, "retry after some seconds", headers=later) from None
        self._kind.raise_refusal(reply)
        return reply, data


async def run_job(
    worker: Worker, header: Mapping[str, Any], payload: bytes, limit_s: float, on_progress: OnProgress
) -> WorkerReply:
    """Run one job of the queue in a planning process.

    Raises
    ------
    ProblemError
        The refusal of the request; 409 for memory, 504 for time, 500 for a crash.
    """
    with PLANNING.problems(header, limit_s=limit_s):
        reply, data = await worker.run(header, payload, limit_s, on_progress)
    PLANNING.raise_refusal(reply)
    return reply, data
