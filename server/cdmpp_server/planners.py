"""Planning processes of the service: a few answer requests, one job at a time each."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
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
#: Largest reply in bytes: the timeline of a hundred thousand nodes has some ten million.
MAX_ANSWER_BYTES = 128 * 2**20


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
    program = Program(
        "cdmpp_server.plan",
        f"planning process ({role})",
        (role, json.dumps(dict(limits))),
        _numba_cache(),
        max_payload=MAX_ANSWER_BYTES,
    )
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


class Planners:
    """Planning processes for requests that are answered at once. Belongs to one event loop.

    Parameters
    ----------
    workers : int
        Number of processes.
    make : callable
        Makes a planning process that is not started.
    max_queued : int
        Maximum number of jobs that wait for a process.
    limit_s : float
        Time limit of a job, in seconds; a process that exceeds it is replaced. A request's own deadline may
        be earlier. Then the request ends and the process finishes the job.
    """

    def __init__(self, workers: int, make: Callable[[], Worker], max_queued: int, limit_s: float) -> None:
        self._pool = WorkerPool(workers, make, max_queued)
        self._limit_s = limit_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes."""
        await self._pool.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running planning processes."""
        return self._pool.pids

    def start(self) -> None:
        """Begin to start the first process before a request needs it."""
        self._pool.start()

    async def run(self, header: Mapping[str, Any], payload: bytes, deadline: Deadline) -> WorkerReply:
        """Run one job; a job that has begun is finished even if the caller is cancelled.

        Raises
        ------
        ProblemError
            The refusal of the request; 409 for memory, 503 if the queue is full, 504 at the deadline, 500 for a bug.
        """
        starting = False

        async def job(worker: SupervisedWorker) -> WorkerReply:
            nonlocal starting
            starting = True
            async with asyncio.timeout_at(deadline.at):
                await worker.ready()
            starting = False
            return await worker.run(header, payload, self._limit_s)

        try:
            async with asyncio.timeout_at(deadline.at):
                reply, data = await self._pool.run(job)
        except OverloadedError as error:
            hint = f"{error.hint}, or send the request as a job: Prefer: respond-async"
            raise ProblemError(error.code, error.message, hint, headers={"retry-after": "1"}) from None
        except TimeoutError:
            if starting:
                raise ProblemError(
                    "overloaded",
                    "the planning process is being started",
                    "retry after some seconds",
                    headers={"retry-after": "5"},
                ) from None
            raise deadline.exceeded() from None
        except WorkerTimeoutError:
            raise deadline.exceeded() from None
        except WorkerMemoryError:
            raise too_large() from None
        except WorkerDiedError:
            _log.warning("two planning processes died with %s", header)
            raise internal_error() from None
        raise_refusal(reply)
        return reply, data


async def run_job(
    worker: Worker, header: Mapping[str, Any], payload: bytes, limit_s: float, on_progress: OnProgress
) -> WorkerReply:
    """Run one job of the queue in a process.

    Raises
    ------
    ProblemError
        The refusal of the request; 409 for memory, 504 for time, 500 for a crash.
    """
    try:
        reply, data = await worker.run(header, payload, limit_s, on_progress)
    except WorkerTimeoutError:
        raise ProblemError(
            "deadline_exceeded", f"the search did not end within {limit_s:g} s", "send a smaller request"
        ) from None
    except WorkerMemoryError:
        raise too_large() from None
    except WorkerDiedError as error:
        _log.warning("a planning process died with %s: %s: %s", header, error, worker.stderr_tail)
        raise internal_error() from None
    raise_refusal(reply)
    return reply, data


def too_large() -> ProblemError:
    """Problem of a request that needs more memory than a planning process has (409)."""
    return ProblemError(
        "plan_too_large", "the plan needs more memory than is allowed", "send a smaller request", status=409
    )


def raise_refusal(reply: Mapping[str, Any]) -> None:
    """Raise the problem in a process's reply, if there is one."""
    if "bug" in reply:
        _log.error("a planning process failed: %s", reply["bug"])
        raise internal_error()
    if "refused" in reply:
        refused = reply["refused"]
        raise ProblemError(
            refused["code"],
            refused["message"],
            refused["hint"],
            status=refused["status"],
            errors=[SchemaViolation(**violation) for violation in refused["errors"]] or None,
        )
