"""Long-lived worker processes that may crash, hang or exhaust their memory without affecting other tasks.

Pebble's process pool restarts a worker that died or was killed at its time limit. This module adds memory
limits, pinned cores, termination with the parent, a new pool when pebble gives one up, and readable reasons
of failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import Any, NoReturn, Self

from pebble import ProcessExpired, ProcessPool

from cdmpp.errors import CdmppError, InvalidDeviceError, MeasurementError, MissingDependencyError, UnknownDeviceError

_PR_SET_PDEATHSIG = 1
_IDENTIFY_S = 0.02
_memory_bytes = 0
_unready: CdmppError | None = None
#: Number of new pools without a completed task after which an error is raised.
RESTARTS = 3
#: Longest wait for the start of workers, in seconds.
_START_S = 300.0
_POLL_S = 0.5
#: Errors that are not caused by a task: they end the whole run.
_NOT_OF_A_TASK = (InvalidDeviceError, MissingDependencyError, UnknownDeviceError)


@dataclass(frozen=True)
class WorkerSettings:
    """Limits of a worker process."""

    time_limit_s: float = 30.0  # of a task; a task that exceeds it fails, and its worker is replaced
    memory_bytes: int = 6 * 2**30  # limit of the address space; a larger allocation fails inside the worker; 0: none
    cores: tuple[int, ...] = ()  # that the worker may run on; empty for all
    environment: Mapping[str, str] = field(default_factory=dict)  # variables set before anything is imported
    log: str = ""  # file for the output of workers and their native code; empty: the terminal


@dataclass(frozen=True)
class Outcome:
    """Result of one task: a value, or a reason of failure.

    ``transient`` is True if the task did not cause the failure and may be tried again. ``error`` is an expected error
    of the function, with class and hint; if ``unready``, of the worker's preparation: it cannot run any task.
    """

    value: Any = None
    failure: str = ""
    transient: bool = False
    error: CdmppError | None = field(default=None, compare=False)
    unready: bool = field(default=False, compare=False)


class WorkerPool:
    """Processes that run functions of importable modules; a context manager.

    ``prepare`` is called once in every new worker with ``arguments``, for imports and thread settings. Its error is
    raised by the next task.
    """

    def __init__(
        self,
        workers: int,
        settings: WorkerSettings,
        prepare: Callable[..., None] | None = None,
        arguments: Sequence[Any] = (),
    ) -> None:
        self.settings = settings
        self._workers = workers
        self._initial = (os.getpid(), settings, prepare, tuple(arguments))
        self._pool = self._new()
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers at once."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def run(self, function: Callable[..., Any], tasks: Iterable[Sequence[Any]]) -> Iterator[Outcome]:
        """Run a function of a module (workers import it) on the arguments of each task; yields outcomes in the order of
        the tasks, each as soon as it is available.

        Raises a transient MeasurementError if the workers repeatedly end before they run a task, and the error of
        ``prepare``, or of a missing requirement.
        """
        for outcome in self._outcomes(function, tasks):
            if isinstance(outcome.error, _NOT_OF_A_TASK):
                raise outcome.error
            yield outcome

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run one call; its failure is raised, a MeasurementError if the worker died or took too long."""
        (outcome,) = self._outcomes(function, [arguments])
        if outcome.error is not None:
            raise outcome.error
        if outcome.failure:
            limits = f"a worker may take {self.settings.time_limit_s:g} s"
            if self.settings.memory_bytes:
                limits += f" and {self.settings.memory_bytes / 2**30:.3g} GiB"
            raise MeasurementError(outcome.failure, hint=f"{limits}; {self._where_to_look()}")
        return outcome.value

    def start(self) -> None:
        """Begin to start the workers now instead of at the first task."""
        self._started = True
        for _ in range(self._workers):
            self._schedule((identify, ()))

    def ready(self) -> None:
        """Wait until every worker has started, including replacements of dead ones.

        A starting worker imports TVM, which occupies a core for seconds and would disturb timing. A pool that never had
        a task has no workers, and the call returns at once.
        """
        if not self._started:
            return
        end = time.monotonic() + _START_S
        # Short tasks run in different workers only once all workers are ready.
        while len({o.value for o in self.run(identify, [()] * self._workers)} - {None}) < self._workers:
            if time.monotonic() > end:
                self._give_up()

    def _outcomes(self, function: Callable[..., Any], tasks: Iterable[Sequence[Any]]) -> Iterator[Outcome]:
        calls = [(function, tuple(task)) for task in tasks]
        self._started = self._started or bool(calls)
        pool, futures = self._pool, [self._schedule(call) for call in calls]
        try:
            for index in range(len(calls)):
                restarts = 0
                while not self._finished(pool, futures, index):
                    if (restarts := restarts + 1) > RESTARTS:
                        self._give_up()
                    if pool is self._pool:
                        self.close()
                        self._pool = self._new()
                    pool = self._pool
                    # Pebble gives up a pool only while no task runs, so pending tasks can be scheduled again.
                    futures = [
                        future if _done(future) else self._schedule(call)
                        for future, call in zip(futures, calls, strict=True)
                    ]
                outcome = self._outcome(futures[index])
                if outcome.unready and outcome.error is not None:
                    raise outcome.error
                yield outcome
        finally:
            for future in futures:
                future.cancel()

    def _new(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._workers,
            # No fork: threads of torch and TVM do not survive it.
            context=multiprocessing.get_context("spawn"),
            initializer=begin,
            initargs=self._initial,
        )

    def _schedule(self, call: tuple[Callable[..., Any], Sequence[Any]]) -> Future[Any]:
        try:
            with _interrupts_blocked():
                return self._pool.schedule(perform, args=call, timeout=self.settings.time_limit_s)
        except RuntimeError as error:  # the pool has died, or cannot start a process
            lost = Future[Any]()
            lost.set_exception(BrokenProcessPool(str(error)))
            return lost

    def _finished(self, pool: ProcessPool, futures: Sequence[Future[Any]], index: int) -> bool:
        """Wait for one task; return False if its pool has died.

        Every task has a time limit. A pool without progress beyond it has lost a message of a dying worker,
        and counts as dead too.
        """
        limit = self.settings.time_limit_s + _START_S
        seen, since = -1, time.monotonic()
        while not wait([futures[index]], _POLL_S).done:
            if pool is not self._pool or not pool.active:
                break
            progress = sum(2 * future.done() + future.running() for future in futures)
            if progress != seen:
                seen, since = progress, time.monotonic()
            elif time.monotonic() > since + limit:
                break
        return _done(futures[index])

    def _outcome(self, future: Future[Any]) -> Outcome:
        try:
            outcome: Outcome = future.result()
        except FutureTimeoutError:
            return Outcome(failure=f"timeout: longer than {self.settings.time_limit_s:g} s")
        except ProcessExpired as died:
            return Outcome(failure=f"crash: {_cause(died.exitcode)}")
        except Exception as error:  # arguments or a value that cannot be pickled
            return Outcome(failure=f"error: {last_line(error)}")
        return outcome

    def _give_up(self) -> NoReturn:
        raise MeasurementError(
            "worker processes end before they run a task",
            hint=f"check the free memory; {self._where_to_look()}; repeat the same command to resume",
            transient=True,
        )

    def _where_to_look(self) -> str:
        return f"its output is {'in ' + self.settings.log if self.settings.log else 'on the terminal'}"


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
        # pebble's request to end this worker.
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(os.getpid(), signal.SIGKILL))
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


def perform(function: Callable[..., Any], arguments: Sequence[Any]) -> Outcome:
    """Run one task in a worker. Every outcome can be unpickled: a failure to do so would end the pool."""
    if _unready is not None:
        return Outcome(failure=_unready.message, transient=True, error=_unready, unready=True)
    try:
        return Outcome(function(*arguments))
    except CdmppError as error:
        transient = isinstance(error, MeasurementError) and error.transient
        return Outcome(failure=f"{error.code}: {error.message}", transient=transient, error=error)
    except BaseException as error:  # TVM and LLVM raise many kinds of errors
        return Outcome(failure=_memory() if _is_memory(error) else f"error: {last_line(error)}")


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


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in processes and threads that are started meanwhile; this thread gets it afterwards.

    A worker ignores Ctrl-C as soon as it runs :func:`cdmpp.data.measure.pools.begin`. Before, it would print a
    traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else the first worker would start it, which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _cause(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"the worker was ended by {signal.Signals(-exit_code).name}"
    return f"the worker ended with exit code {exit_code}"


def _done(future: Future[Any]) -> bool:
    return future.done() and not isinstance(future.exception(), BrokenProcessPool)
