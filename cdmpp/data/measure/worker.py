"""Worker process of :class:`cdmpp.data.measure.pools.WorkerPool`: its limits, its tasks, and their results."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cdmpp.errors import CdmppError, MeasurementError

_PR_SET_PDEATHSIG = 1
_IDENTIFY_S = 0.02


@dataclass(frozen=True)
class WorkerSettings:
    """Limits of a worker process.

    Attributes
    ----------
    time_limit_s : float
        Time limit of a task; a task that exceeds it fails, and its worker is replaced.
    memory_bytes : int
        Limit of the address space; a larger allocation fails inside the worker. 0: no limit.
    cores : tuple of int
        Cores that the worker may run on; empty for all.
    environment : mapping of str to str
        Variables set before anything is imported.
    log : str
        File for the output of workers and their native code; empty: the terminal.
    """

    time_limit_s: float = 30.0
    memory_bytes: int = 6 * 2**30
    cores: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    log: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of one task: a value, or a reason of failure.

    ``transient`` is True if the task did not cause the failure and may be tried again.
    """

    value: Any = None
    failure: str = ""
    transient: bool = False


@dataclass(frozen=True)
class Report:
    """Message from a worker; it can always be unpickled, because a failure to do so would end the pool."""

    outcome: Outcome
    #: Expected error of the function, with class and hint.
    error: CdmppError | None = None
    #: Error of the worker's preparation; it cannot run any task.
    unready: CdmppError | None = None


_memory_bytes = 0
_unready: CdmppError | None = None


def begin(parent: int, settings: WorkerSettings, prepare: Callable[..., None] | None, arguments: Sequence[Any]) -> None:
    """First thing in a worker. Its failure is kept for the first task: pebble would show it to nobody."""
    global _memory_bytes, _unready
    _memory_bytes = settings.memory_bytes
    try:
        _limit(parent, settings)
        if prepare is not None:
            prepare(*arguments)
    except MeasurementError as error:
        error.transient = True  # not caused by a program
        _unready = error
    except CdmppError as error:
        _unready = error
    except Exception as error:
        reason = _memory() if _is_memory(error) else last_line(error)
        _unready = MeasurementError(
            f"a worker process cannot start: {reason}", hint="see --memory-gib and the log", transient=True
        )


def _limit(parent: int, settings: WorkerSettings) -> None:
    # Ctrl-C signals the whole group: the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(parent)
    os.environ.update(settings.environment)
    if settings.log:
        descriptor = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
    if settings.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings.cores)
    if sys.platform != "win32":
        import resource

        # A separate process group, so that a compiler started by a task ends with it.
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, _end_group)
        if limit := settings.memory_bytes:
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
        # No core files, which may have gigabytes.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _die_with(parent: int) -> None:
    """End this process with its parent, even inside native code (Linux); on other systems it ends with its pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def _end_group(*_: object) -> None:
    """Handle pebble's request to end this worker."""
    os.killpg(os.getpid(), signal.SIGKILL)


def perform(function: Callable[..., Any], arguments: Sequence[Any]) -> Report:
    """Run one task in a worker."""
    if _unready is not None:
        return Report(Outcome(failure=_unready.message, transient=True), unready=_unready)
    try:
        return Report(Outcome(function(*arguments)))
    except CdmppError as error:
        transient = isinstance(error, MeasurementError) and error.transient
        return Report(Outcome(failure=f"{error.code}: {error.message}", transient=transient), error)
    except BaseException as error:  # TVM and LLVM raise many kinds of errors
        return failed(_memory() if _is_memory(error) else f"error: {last_line(error)}")


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "bad_alloc" in str(error)


def _memory() -> str:
    return f"memory: more than {_memory_bytes / 2**30:.3g} GiB"


def identify() -> int:
    time.sleep(_IDENTIFY_S)
    return os.getpid()


def last_line(error: BaseException) -> str:
    """Return the most informative line of an error message, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("File ", "-->", "^", "Traceback"))] or lines
    last = kept[-1] if kept else type(error).__name__
    return next((line for line in reversed(kept) if "rror" in line), last)[:300]


def failed(reason: str) -> Report:
    return Report(Outcome(failure=reason))
