"""Start of a worker process, and the exchange of one job at a time with it; used by the sandbox and the planners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cdmpp_server.sandbox import frames

_log = logging.getLogger(__name__)

#: Seconds for a worker to start: imports, and TVM's on a busy machine.
START_S = 120.0
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
    """The command of a worker process.

    Attributes
    ----------
    module : str
        Run as ``python -m MODULE MEMORY_BYTES PARENT *options``.
    name : str
        Name in the log.
    options : tuple of str
    environment : mapping
        Environment variables beyond those of every worker.
    max_payload : int
        Largest payload of a reply, in bytes.
    """

    module: str
    name: str
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    max_payload: int = frames.MAX_PAYLOAD_BYTES


READING = Program("cdmpp_server.sandbox", "reading worker")
READING_TVM = Program("cdmpp_server.sandbox", "reading worker", ("tvm",))


class Worker:
    """A worker process that does one job at a time.

    Parameters
    ----------
    memory_bytes : int
        Memory for jobs, beyond what the libraries map.
    program : Program
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

        Raises
        ------
        WorkerDiedError, WorkerTimeoutError
            It did not become ready; the log has the end of its standard error.
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

        Raises
        ------
        WorkerTimeoutError, WorkerMemoryError, WorkerDiedError
            The process has ended after each of these.
        """
        message = frames.pack({**header, "timeout_s": timeout_s}, payload)
        reply, data = await self._exchange(message, timeout_s, on_progress)
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
