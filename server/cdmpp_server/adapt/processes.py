"""Adapting processes of the service: a few, one request at a time each, killed at the request's deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from cdmpp.errors import OverloadedError
from cdmpp_server.concurrency import Deadline
from cdmpp_server.problems import ProblemError, internal_error
from cdmpp_server.sandbox.worker import (
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
_ADVICE = "send fewer records, or run cdmpp adapt on them"
#: Largest reply in bytes: an adapter of 1,000 programs has some hundred thousand.
_MAX_REPLY_BYTES = 64 * 2**20


def adapting(memory_bytes: int) -> Callable[[], Worker]:
    """Return a function that makes an adapting process, not started."""
    program = Program("cdmpp_server.adapt", "adapting process", max_payload=_MAX_REPLY_BYTES)
    return partial(Worker, memory_bytes, program)


class AdaptProcesses:
    """Adapting processes. Belongs to one event loop; an async context manager.

    Parameters
    ----------
    workers : int
        Maximum number of processes; each starts when it is first needed.
    make : callable
        Makes a process that is not started.
    max_queued : int
        Maximum number of requests that wait for a process.
    """

    def __init__(self, workers: int, make: Callable[[], Worker], max_queued: int) -> None:
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

    async def run(self, header: Mapping[str, Any], payload: bytes, deadline: Deadline, records: int = 1) -> WorkerReply:
        """Run one job; its process is killed at the deadline, and when the caller is cancelled.

        Senders get equal shares of the processes, by the number of records.

        Raises
        ------
        ProblemError
            The refusal of the request; 409 for memory, 503 if the queue is full or the process is still being
            started, 504 at the deadline, 500 for a bug.
        """
        starting = False

        async def job(worker: SupervisedWorker) -> WorkerReply:
            nonlocal starting
            starting = True
            await worker.ready()
            starting = False
            return await worker.run(header, payload, deadline.after_s)

        try:
            async with asyncio.timeout_at(deadline.at):
                reply, data = await self._pool.run(job, kill=True, cost=records)
        except (TimeoutError, WorkerTimeoutError):
            if starting:
                raise ProblemError(
                    "overloaded",
                    "the adapting process is being started",
                    "retry after some seconds",
                    headers={"retry-after": "5"},
                ) from None
            raise ProblemError(
                "deadline_exceeded", f"the adaptation did not end within {deadline.after_s:g} s", _ADVICE
            ) from None
        except OverloadedError as error:
            raise ProblemError(error.code, error.message, error.hint, headers={"retry-after": "1"}) from None
        except WorkerMemoryError:
            raise ProblemError(
                "data_error", "the records need more memory than is allowed", _ADVICE, status=409
            ) from None
        except WorkerDiedError:
            _log.warning("two adapting processes died with %s", header)
            raise internal_error() from None
        check(reply)
        return reply, data


def check(reply: Mapping[str, Any]) -> None:
    """Raise the problem in a process's reply, if there is one."""
    if "bug" in reply:
        _log.error("an adapting process failed: %s", reply["bug"])
        raise internal_error()
    if "refused" in reply:
        refused = reply["refused"]
        raise ProblemError(
            refused["code"], refused["message"], refused["hint"], status=refused["status"], item=refused["item"]
        )
