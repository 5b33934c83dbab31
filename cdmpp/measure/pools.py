"""Long-lived worker processes that may crash, hang or eat memory without harm to the rest.

Pebble's process pool does the work: it restarts a worker that died or was killed for its time limit. Added
here: memory limits, pinned cores, a death with the parent, and reasons that a person can read.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from cdmpp.errors import CdmppError, MeasurementError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker process may use.

    Attributes
    ----------
    time_limit_s : float
        A task that takes longer is given up and its worker replaced.
    memory_bytes : int
        Address space of a worker; an allocation beyond it fails inside the worker. 0: no limit.
    cores : tuple of int
        Cores that the worker may run on; empty for all.
    environment : mapping of str to str
        Variables set before anything is imported.
    log : str
        File that gets what workers and the native code in them print; empty: the terminal.
    """

    time_limit_s: float = 30.0
    memory_bytes: int = 6 * 2**30
    cores: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    log: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of one task: a value, or why there is none.

    ``transient`` is True when the task is not at fault and may be tried again.
    """

    value: Any = None
    failure: str = ""
    transient: bool = False


class WorkerPool:
    """Processes that run functions of importable modules; a context manager.

    Parameters
    ----------
    workers : int
    settings : WorkerSettings
    prepare : callable, optional
        Called once in every new worker (imports, thread settings), with ``arguments``.
    """

    def __init__(
        self,
        workers: int,
        settings: WorkerSettings,
        prepare: Callable[..., None] | None = None,
        arguments: Sequence[Any] = (),
    ) -> None:
        self.settings = settings
        self._pool = ProcessPool(
            max_workers=workers,
            # Never fork: torch's and TVM's threads do not survive it.
            context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(os.getpid(), settings, prepare, tuple(arguments)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers, whatever they do."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def run(self, function: Callable[..., Any], tasks: Iterable[Sequence[Any]]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks, each as soon as it is there.

        Parameters
        ----------
        function : callable
            A function of a module (workers import it).
        tasks : iterable of sequence
            Arguments of each call.
        """
        limit = self.settings.time_limit_s
        futures = [self._pool.schedule(function, args=tuple(task), timeout=limit) for task in tasks]
        try:
            for future in futures:
                yield self._outcome(future, limit)
        finally:
            for future in futures:
                future.cancel()  # type: ignore[no-untyped-call]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """One call whose failure is an error.

        Raises
        ------
        MeasurementError
            The worker died or took too long.
        CdmppError
            The function's own expected errors.
        """
        (outcome,) = self.run(_carry, [(function, arguments)])
        if outcome.failure:
            raise MeasurementError(outcome.failure, hint="see --time-limit-s and --memory-gib")
        value, error = outcome.value
        if error is not None:
            raise error
        return value

    def _outcome(self, future: Any, limit: float) -> Outcome:
        try:
            return Outcome(value=future.result())
        except FutureTimeoutError:
            return Outcome(failure=f"timeout: longer than {limit:g} s")
        except ProcessExpired as died:
            return Outcome(failure=f"crash: {_cause(died.exitcode)}")
        except MemoryError:
            return Outcome(failure=self._memory())
        except MeasurementError as error:
            return Outcome(failure=f"{error.code}: {error.message}", transient=error.transient)
        except Exception as error:  # TVM and LLVM raise whatever their checks are made of
            if "bad_alloc" in str(error):
                return Outcome(failure=self._memory())
            return Outcome(failure=f"error: {last_line(error)}")

    def _memory(self) -> str:
        return f"memory: more than {self.settings.memory_bytes / 2**30:.3g} GiB"


def last_line(error: BaseException) -> str:
    """The line of a long report that says what happened, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("File ", "-->", "^", "Traceback"))] or lines
    last = kept[-1] if kept else type(error).__name__
    return next((line for line in reversed(kept) if "rror" in line), last)[:300]


def _cause(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"the worker was ended by {signal.Signals(-exit_code).name}"
    return f"the worker ended with exit code {exit_code}"


def _carry(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, CdmppError | None]:
    """Expected errors as values, so that they arrive with their class and hint."""
    try:
        return function(*arguments), None
    except CdmppError as error:
        return None, error


def _begin(
    parent: int, settings: WorkerSettings, prepare: Callable[..., None] | None, arguments: Sequence[Any]
) -> None:
    """First thing in a worker."""
    # Ctrl-C goes to the whole group: the parent decides what to end.
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

        if limit := settings.memory_bytes:
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
        # A crashed program must not leave gigabytes of core files behind.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if prepare is not None:
        prepare(*arguments)


def _die_with(parent: int) -> None:
    """End this process with its parent, even inside native code (Linux); elsewhere it ends with its pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # died before the line above
        os._exit(1)
