"""A worker process with one job at a time, seen from the service: one that reads texts, or one that plans."""

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
#: What the last lines on standard error may take in the log.
_TAIL_BYTES = 4000


class WorkerDiedError(Exception):
    """The process ended in the middle of a job, or did not speak the protocol."""


class WorkerTimeoutError(Exception):
    """The job's time was up; the process has been killed."""


class WorkerMemoryError(Exception):
    """The job needed more memory than the worker has; the process has ended."""


#: Told what a worker says before its answer, and the bytes behind it; in the event loop.
OnProgress = Callable[[dict[str, Any], bytes], None]


@dataclass(frozen=True)
class Program:
    """What a worker process runs.

    Attributes
    ----------
    module : str
        Run as ``python -m MODULE MEMORY_BYTES PARENT *options``.
    name : str
        For the log.
    options : tuple of str
    environment : mapping
        Besides what every worker gets.
    max_payload : int
        Bytes that it may answer with.
    """

    module: str
    name: str
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    max_payload: int = frames.MAX_PAYLOAD_BYTES


READING = Program("cdmpp_server.sandbox", "reading worker")
READING_TVM = Program("cdmpp_server.sandbox", "reading worker", ("tvm",))


class Worker:
    """Starts a process and hands it one job at a time.

    Parameters
    ----------
    memory_bytes : int
        Memory for what it works on, beyond the libraries.
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
        """Process id while it runs."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process is not None else None

    async def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises
        ------
        WorkerDiedError, WorkerTimeoutError
            It did not get ready; the log has its last words.
        """
        begun = time.monotonic()
        # Its current folder is empty: a relative path that it opens leads nowhere.
        self._folder = tempfile.TemporaryDirectory(prefix="cdmpp-sandbox-")
        program = self.program
        command = [sys.executable, "-P", "-m", program.module, str(self.memory_bytes), str(os.getpid())]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            *program.options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(self._folder.name) | dict(program.environment),
            cwd=self._folder.name,
            limit=2**20,
            start_new_session=True,  # what it starts ends with it
        )
        self._reader = asyncio.create_task(self._keep_tail())
        try:
            ready, _ = await self._exchange(b"", START_S)
        except (WorkerDiedError, WorkerTimeoutError) as error:
            _log.error("a %s did not start: %s: %s", program.name, error, self.last_words)
            raise
        if not ready.get("memory_limited"):
            _log.warning("the system does not tell how much memory is mapped: a %s has no limit", program.name)
        if not ready.get("files_kept", True):
            _log.info("the system has no Landlock: a %s could read files", program.name)
        _log.info("%s %s ready after %.2f s", program.name, self.pid, time.monotonic() - begun)

    async def run(
        self, header: Mapping[str, Any], payload: bytes, timeout_s: float, on_progress: OnProgress | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Have one job done; ``on_progress`` hears what is said before the answer.

        Raises
        ------
        WorkerTimeoutError, WorkerMemoryError, WorkerDiedError
            After each of these the process is gone.
        """
        message = frames.pack({**header, "timeout_s": timeout_s}, payload)
        said, data = await self._exchange(message, timeout_s, on_progress)
        if said.get("memory"):
            await self.stop()
            raise WorkerMemoryError
        return said, data

    def interrupt(self) -> None:
        """Ask a planning process to end its search with what it has."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    async def stop(self) -> None:
        """Kill the process and what it started; nothing it holds is worth a goodbye."""
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
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    async def _exchange(
        self, message: bytes, timeout_s: float, on_progress: OnProgress | None = None
    ) -> tuple[dict[str, Any], bytes]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise WorkerDiedError("not started")
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(message)
                await process.stdin.drain()
                while True:
                    said, data = await self._receive(process.stdout)
                    if "progress" not in said or on_progress is None:
                        return said, data
                    on_progress(said, data)
        except TimeoutError:
            await self.stop()
            raise WorkerTimeoutError(f"no answer within {timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError, frames.BrokenFrameError) as error:
            code = await self._ended(process)
            raise WorkerDiedError(f"{type(error).__name__}, exit status {code}") from None
        except asyncio.CancelledError:
            # Half a message may be on its way: the process cannot be used again.
            await asyncio.shield(self.stop())
            raise

    async def _receive(self, stream: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
        prefix = await stream.readexactly(frames.PREFIX.size)
        header, payload = frames.lengths(prefix, frames.MAX_HEADER_BYTES, self.program.max_payload)
        text = await stream.readexactly(header)
        return frames.header_of(text), await stream.readexactly(payload)

    async def _ended(self, process: asyncio.subprocess.Process) -> int | None:
        """Exit status of a process that closed its pipe; it is given a moment to end by itself."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()
        code = process.returncode
        await self.stop()
        return code

    async def _keep_tail(self) -> None:
        """Empty standard error, so that the worker never waits for it, and keep its last lines."""
        assert self._process is not None and self._process.stderr is not None
        stream = self._process.stderr
        while chunk := await stream.read(2**16):
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    @property
    def last_words(self) -> str:
        """The end of what the process wrote to standard error, in one line of printable characters.

        Parsers may write what a stranger sent, and the log is read on terminals.
        """
        return ascii(self._tail.decode(errors="replace").strip()[-500:])[1:-1]


def _environment(folder: str) -> dict[str, str]:
    """What the worker needs to import the same code, and nothing of the service's secrets."""
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
