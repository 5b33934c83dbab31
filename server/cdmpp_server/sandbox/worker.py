"""Worker processes: one job at a time each, replaced when a job ends them, behind a bounded queue.

The sandbox, the planning processes and the adapting processes use them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from cdmpp.errors import OverloadedError
from cdmpp_server.operate.access import current_sender
from cdmpp_server.sandbox import frames

_log = logging.getLogger(__name__)

#: Seconds for a worker to start: imports, and TVM's on a busy machine.
START_S = 120.0
#: A job that is predicted to take longer is a long one, in seconds.
LONG_S = 1.0
#: Bytes of standard error kept for the log.
_TAIL_BYTES = 4000


class WorkerDiedError(Exception):
    """The process ended during a job, or sent bytes that break the protocol."""


class WorkerTimeoutError(Exception):
    """The job exceeded its time limit; the process has been killed."""


class WorkerMemoryError(Exception):
    """The job exceeded the memory limit; the process has ended."""


#: A reply: its header, and raw bytes.
WorkerReply = tuple[dict[str, Any], bytes]
#: Called in the event loop with each reply that precedes the last one.
OnProgress = Callable[[dict[str, Any], bytes], None]


@dataclass(frozen=True)
class Program:
    """The command of a worker process."""

    #: Run as ``python -m MODULE MEMORY_BYTES PARENT *options``.
    module: str
    #: Name in the log.
    name: str
    options: tuple[str, ...] = ()
    #: Environment variables beyond those of every worker.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Largest payload of a reply, in bytes.
    max_payload: int = frames.MAX_PAYLOAD_BYTES


READING = Program("cdmpp_server.sandbox", "reading worker")
READING_TVM = Program("cdmpp_server.sandbox", "reading worker", ("tvm",))


class Worker:
    """A worker process that does one job at a time.

    ``memory_bytes``: memory for jobs, beyond what the libraries map.
    """

    def __init__(self, memory_bytes: int, program: Program = READING) -> None:
        self.memory_bytes, self.program = memory_bytes, program
        self._process: asyncio.subprocess.Process | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tail = b""
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id while the process runs, else None."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process is not None else None

    async def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises WorkerDiedError, WorkerTimeoutError: it did not become ready; the log has the end of its standard error.
        """
        begun = time.monotonic()
        # The current folder is empty, so that a relative path opens nothing.
        self._folder = tempfile.TemporaryDirectory(prefix="cdmpp-sandbox-")
        program = self.program
        _close_files_on_exec()
        command = [sys.executable, "-P", "-m", program.module, str(self.memory_bytes), str(os.getpid())]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *program.options,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(self._folder.name) | dict(program.environment),
                cwd=self._folder.name,
                limit=2**20,
                start_new_session=True,  # its children are killed with it
            )
        except OSError:
            await self.stop()
            raise
        self._reader = asyncio.create_task(self._keep_tail())
        try:
            ready, _ = await self._exchange(b"", START_S)
        except (WorkerDiedError, WorkerTimeoutError) as error:
            _log.error("a %s did not start: %s: %s", program.name, error, self.stderr_tail)
            raise
        if not ready.get("memory_limited"):
            _log.warning(
                "the size of the mapped memory is unknown on this system: a %s has no memory limit", program.name
            )
        if not ready.get("files_kept", True):
            _log.info("this system has no Landlock: a %s is able to read files", program.name)
        _log.info("%s %s ready after %.2f s", program.name, self.pid, time.monotonic() - begun)

    async def run(
        self, header: Mapping[str, Any], payload: bytes, timeout_s: float, on_progress: OnProgress | None = None
    ) -> WorkerReply:
        """Run one job; ``on_progress`` is called with each progress reply.

        Raises WorkerTimeoutError, WorkerMemoryError, WorkerDiedError: the process has ended after each of these.
        """
        message = frames.pack({**header, "timeout_s": timeout_s}, payload)
        try:
            reply, data = await self._exchange(message, timeout_s, on_progress)
        except WorkerDiedError as error:
            _log.warning("a %s died: %s: %s", self.program.name, error, self.stderr_tail)
            raise
        if reply.get("memory"):
            await self.stop()
            raise WorkerMemoryError
        return reply, data

    def interrupt(self) -> None:
        """Ask a planning process to end its search and return its best plan."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    async def stop(self) -> None:
        """Kill the process and its children."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            if process.stdin is not None:
                process.stdin.close()
        if self._reader is not None:
            await self._reader
            self._reader = None
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the current folder of a process that has ended."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    async def _exchange(self, message: bytes, timeout_s: float, on_progress: OnProgress | None = None) -> WorkerReply:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise WorkerDiedError("not started")
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(message)
                await process.stdin.drain()
                while True:
                    reply, data = await self._receive(process.stdout)
                    if "progress" not in reply or on_progress is None:
                        return reply, data
                    on_progress(reply, data)
        except TimeoutError:
            await self.stop()
            raise WorkerTimeoutError(f"no answer within {timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError, frames.BrokenFrameError) as error:
            code = await self._ended(process)
            raise WorkerDiedError(f"{type(error).__name__}, exit status {code}") from None
        except asyncio.CancelledError:
            # Half a message may have been sent: the process cannot be used again.
            await asyncio.shield(self.stop())
            raise

    async def _receive(self, stream: asyncio.StreamReader) -> WorkerReply:
        prefix = await stream.readexactly(frames.PREFIX.size)
        header, payload = frames.lengths(prefix, frames.MAX_HEADER_BYTES, self.program.max_payload)
        text = await stream.readexactly(header)
        return frames.header_of(text), await stream.readexactly(payload)

    async def _ended(self, process: asyncio.subprocess.Process) -> int | None:
        """Exit status of a process that closed its pipe; it has a second to end by itself."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()
        code = process.returncode
        await self.stop()
        return code

    async def _keep_tail(self) -> None:
        """Read standard error, so that the worker never blocks on it, and keep its end."""
        assert self._process is not None and self._process.stderr is not None
        stream = self._process.stderr
        while chunk := await stream.read(2**16):
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    @property
    def stderr_tail(self) -> str:
        """End of the process's standard error, as one line of printable characters.

        Parsers may print parts of a client's text, and the log may be shown in a terminal.
        """
        return ascii(self._tail.decode(errors="replace").strip()[-500:])[1:-1]


def _close_files_on_exec() -> None:
    """Keep this process's files from the next one it starts, as :mod:`subprocess` does and uvloop does not.

    The sockets that uvicorn's workers listen on are inheritable: a process that had one would keep the port open
    after the service has stopped listening.
    """
    with contextlib.suppress(FileNotFoundError):  # a system without /dev/fd
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the listing's own
                if int(name) > 2:
                    os.set_inheritable(int(name), False)


def _environment(folder: str) -> dict[str, str]:
    """Environment that lets the worker import the same code; it holds no secret of the service."""
    path = [os.path.abspath(entry) for entry in sys.path]
    kept = {key: os.environ[key] for key in ("LD_LIBRARY_PATH", "SYSTEMROOT") if key in os.environ}
    return {
        **kept,
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": folder,
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


T = TypeVar("T")


class SupervisedWorker:
    """One worker process, started when it is first needed and replaced when it has ended.

    ``make``: returns a worker that is not started. ``max_jobs``: jobs after which the process is replaced, which frees
    what parsers leak. ``restarts``: number of processes replaced because of a job.
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
            if self.worker is not None:  # its process was killed from outside
                self.worker.remove_folder()
            self.worker, self._jobs = self._make(), 0
            # An empty context: the process belongs to no request.
            self._starting = asyncio.create_task(self.worker.start(), context=contextvars.Context())
            self._starting.add_done_callback(self._started)
        return self._starting

    async def ready(self) -> Worker:
        """Return the running process.

        Raises OverloadedError: no process can be started.
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

        Raises OverloadedError: no process can be started.
        Raises WorkerTimeoutError, WorkerMemoryError, WorkerDiedError: the job ended so; a new process is being started.
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
            except WorkerDiedError:
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


@dataclass(eq=False)
class _WaitingJob:
    """A job that waits for a worker; the one with the smallest ``turn`` is next."""

    sender: str
    turn: float
    long: bool
    worker: asyncio.Future[SupervisedWorker]


class SandboxPool:
    """Assigns jobs to a few supervised workers; further jobs wait in a bounded queue. Belongs to one event loop.

    Senders get equal shares of the work. The queue is that of :class:`cdmpp_server.jobs.store.JobStore`: self-clocked
    fair queueing. When it is full, the sender with the most waiting jobs loses its last one. A sender that runs a long
    job gets the last free worker for short jobs only, so that the others need not wait for two of its long jobs.

    ``workers``: maximum number of processes; each is made, not started, by ``make``, starts when it is first needed,
    and is replaced after ``max_jobs`` jobs. ``max_queued``: maximum number of jobs that wait.
    """

    def __init__(self, workers: int, make: Callable[[], Worker], max_queued: int, max_jobs: int | None = None) -> None:
        self._workers = [SupervisedWorker(make, max_jobs) for _ in range(workers)]
        # Last in, first out: the process that worked last is used first, so that others need not be started.
        self._idle = self._workers[::-1]
        self._queue: list[_WaitingJob] = []
        #: Turn of the job that began last, and of the last job of each sender that is not before it.
        self._turn, self._last_turns = 0.0, dict[str, float]()
        self._capacity = workers + max_queued
        self._running: set[asyncio.Task[Any]] = set()
        self._long_jobs = Counter[str]()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of jobs that wait."""
        return len(self._queue)

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

    async def run(
        self,
        job: Callable[[SupervisedWorker], Coroutine[Any, Any, T]],
        *,
        kill: bool = False,
        cost: float = 1.0,
        first: bool = True,
    ) -> T:
        """Run ``job`` of the current sender with an idle worker.

        A job that has begun continues when the caller is cancelled: its process stays usable. With ``kill`` the job
        is cancelled too, which kills its process.

        ``cost``: seconds of the job, by which senders get equal shares. ``first``: False for a further job of a request
        whose cost was charged with its first one: it is next.
        Raises OverloadedError: as many jobs wait as may, no process can be started, or the pool is closed.
        """
        if self._closed:
            raise _closed()
        sender, long = current_sender.get(), cost > LONG_S
        worker = await self._worker(sender, cost, long, first)
        if self._closed:
            raise _closed()
        task = asyncio.create_task(job(worker))
        self._running.add(task)
        self._long_jobs[sender] += long
        task.add_done_callback(partial(self._ended, worker, sender, long))
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
        for waiting in self._queue:
            if not waiting.worker.done():
                waiting.worker.set_exception(_closed())
        for worker in self._workers:
            await worker.stop()

    def charge(self, sender: str, seconds: float) -> None:
        """Charge a sender for time beyond the cost of its jobs; no effect where it is negative."""
        if seconds > 0:
            self._last_turns[sender] = max(self._turn, self._last_turns.get(sender, 0.0)) + seconds

    async def _worker(self, sender: str, cost: float, long: bool, first: bool) -> SupervisedWorker:
        """A worker for the next job of this sender, when it is the job's turn."""
        count = len(self._running) + self.waiting
        if not self._idle and count >= self._capacity:
            self._make_room(sender, count)
        turn = self._turn
        if first:
            turn = self._last_turns[sender] = max(turn, self._last_turns.get(sender, 0.0)) + cost
        waiting = _WaitingJob(sender, turn, long, asyncio.get_running_loop().create_future())
        if self._idle and self._may_begin(waiting):
            self._turn = turn
            return self._idle.pop()
        self._queue.append(waiting)
        try:
            return await waiting.worker
        except asyncio.CancelledError:
            if waiting.worker.done() and not waiting.worker.cancelled() and waiting.worker.exception() is None:
                self._free(waiting.worker.result())
            raise
        finally:
            if waiting in self._queue:
                self._queue.remove(waiting)

    def _make_room(self, sender: str, count: int) -> None:
        """Refuse the last waiting job of the sender with the most, or this job if its sender has as many."""
        held = Counter(waiting.sender for waiting in self._queue)
        largest = max(held, key=held.__getitem__, default=sender)
        error = OverloadedError(f"{count} requests are being worked on or wait", hint="retry after a second")
        if held[largest] <= held[sender] + 1:
            raise error
        refused = next(waiting for waiting in reversed(self._queue) if waiting.sender == largest)
        self._queue.remove(refused)
        refused.worker.set_exception(error)

    def _may_begin(self, waiting: _WaitingJob) -> bool:
        """Whether an idle worker may take a job."""
        last = len(self._idle) == 1 < len(self._workers)
        return not (waiting.long and last and self._long_jobs[waiting.sender])

    def _free(self, worker: SupervisedWorker) -> None:
        """Give idle workers to the jobs whose turn it is."""
        self._idle.append(worker)
        while self._idle and (
            open := [waiting for waiting in self._queue if not waiting.worker.done() and self._may_begin(waiting)]
        ):
            following = min(open, key=lambda waiting: waiting.turn)
            self._queue.remove(following)
            self._turn = max(self._turn, following.turn)
            following.worker.set_result(self._idle.pop())
        self._last_turns = {sender: turn for sender, turn in self._last_turns.items() if turn > self._turn}

    def _ended(self, worker: SupervisedWorker, sender: str, long: bool, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._long_jobs[sender] -= long
        self._long_jobs += Counter()  # removes zeros
        self._free(worker)
        if not task.cancelled():
            task.exception()  # marks it as retrieved if no caller waits any more


def _closed() -> OverloadedError:
    return OverloadedError("the service is being stopped", hint="retry after some seconds")
