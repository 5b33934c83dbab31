"""The service's side of the sandbox: a bounded queue before one or a few reading workers."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal

from cdmpp.errors import CdmppError, InvalidProgramError, OverloadedError
from cdmpp.features.encoded import EncodedProgram
from cdmpp.programs.query_options import Backend
from cdmpp_server.sandbox import answers
from cdmpp_server.sandbox.answers import DistrustedAnswerError, ModelSummary
from cdmpp_server.sandbox.frames import ONNX_KIND
from cdmpp_server.sandbox.worker import (
    READING,
    READING_TVM,
    Worker,
    WorkerDiedError,
    WorkerMemoryError,
    WorkerTimeoutError,
)

_log = logging.getLogger(__name__)

TirKind = Literal["tvm_json", "tvmscript"]
#: Programs of one request that are read before another request has its turn.
_TURN = 32
#: A worker is replaced after so many jobs: what parsers leak goes with it.
_MAX_JOBS = 50_000


@dataclass(frozen=True)
class TirText:
    """A program as text, and what runs it."""

    kind: TirKind
    text: str
    backend: Backend


@dataclass
class _Job:
    header: dict[str, Any]
    payload: bytes
    #: Turns the worker's words into the result; raises CdmppError or DistrustedAnswerError.
    read: Callable[[dict[str, Any], bytes], Any]


@dataclass
class _Turn:
    jobs: list[_Job]
    done: asyncio.Future[list[Any]]
    #: Of the request, so that what is logged about its texts carries its id.
    context: contextvars.Context = field(default_factory=contextvars.copy_context)


@dataclass
class Sandbox:
    """Reads hostile bytes in worker processes. Belongs to one event loop; an async context manager.

    Parameters
    ----------
    workers : int
        Processes at most for TVM JSON and ONNX, and as many for TVMScript, which need TVM and seconds to
        start; each starts when it is first needed.
    memory_bytes : int
        Memory of a worker for what it reads.
    timeout_s : float
        Time for one program or model.
    max_queued : int
        Turns that may wait for either kind; one more is refused.

    Attributes
    ----------
    restarts : int
        Workers that were replaced because a job killed them.
    """

    workers: int = 1
    memory_bytes: int = 2**31
    timeout_s: float = 5.0
    max_queued: int = 64
    restarts: int = 0
    _lanes: dict[bool, _Lane] = field(default_factory=dict)
    _closed: bool = False

    def __post_init__(self) -> None:
        # A text in TVMScript, or TVM's start, must not hold up what needs no TVM.
        self._lanes = {tvm: _Lane(self, tvm) for tvm in (False, True)}

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the workers; what still waits is refused."""
        self._closed = True
        for lane in self._lanes.values():
            await lane.close()

    @property
    def queued(self) -> int:
        """Turns that wait."""
        return sum(lane.turns.qsize() for lane in self._lanes.values())

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        workers = [slot.worker for lane in self._lanes.values() for slot in lane.slots]
        return [pid for worker in workers if worker is not None and (pid := worker.pid) is not None]

    async def encode_tir(self, kind: TirKind, text: str, backend: Backend = "tvm") -> EncodedProgram:
        """Features of one TIR program.

        Parameters
        ----------
        kind : {"tvm_json", "tvmscript"}
        text : str
        backend : {"library", "tvm"}

        Raises
        ------
        InvalidProgramError, MissingDependencyError
            The text is no program, takes too long or needs too much memory to read; TVMScript, and TVM is not
            installed.
        OverloadedError
            The queue is full, or no worker can be started.
        """
        (result,) = await self.encode_tirs([TirText(kind, text, backend)])
        if isinstance(result, CdmppError):
            raise result
        return result

    async def encode_tirs(self, programs: Sequence[TirText]) -> list[EncodedProgram | CdmppError]:
        """Features of many programs, each with an error of its own; order is kept.

        Raises
        ------
        OverloadedError
            The queue is full, or no worker can be started: of the whole call.
        """
        results: list[EncodedProgram | CdmppError | None] = [None] * len(programs)

        async def read(needs_tvm: bool) -> None:
            places = [i for i, p in enumerate(programs) if (p.kind == "tvmscript") == needs_tvm]
            for start in range(0, len(places), _TURN):
                turn = places[start : start + _TURN]
                said = await self._submit([_tir_job(programs[i]) for i in turn], needs_tvm)
                for i, result in zip(turn, said, strict=True):
                    results[i] = result

        await asyncio.gather(read(False), read(True))
        return [result for result in results if result is not None]

    async def script_as_json(self, script: str) -> str:
        """The TVM JSON of a TVMScript text, which can then be read without TVM.

        Raises
        ------
        InvalidProgramError, MissingDependencyError, OverloadedError
            As in :meth:`encode_tir`.
        """
        header = {"kind": "tvmscript", "backend": "tvm", "as_json": True}
        job = _Job(header, script.encode("utf-8", "surrogatepass"), answers.tvm_json)
        (result,) = await self._submit([job], tvm=True)
        if isinstance(result, CdmppError):
            raise result
        assert isinstance(result, str)
        return result

    async def read_onnx(
        self, data: bytes, dims: Mapping[str, int] | None = None, *, max_programs: int = 10_000
    ) -> ModelSummary:
        """The library kernels of an ONNX model.

        Parameters
        ----------
        data : bytes
            The file. Weights in external files are not read.
        dims : mapping of str to int, optional
            Sizes of dynamic dimensions.
        max_programs : int
            Models with more different programs are refused.

        Raises
        ------
        InvalidProgramError, OverloadedError
            As in :meth:`encode_tir`.
        """
        header = {"kind": ONNX_KIND, "dims": dict(dims or {}), "max_programs": max_programs}
        job = _Job(header, data, lambda said, _: answers.model_summary(said, max_programs))
        (result,) = await self._submit([job], tvm=False)
        if isinstance(result, CdmppError):
            raise result
        assert isinstance(result, ModelSummary)
        return result

    async def _submit(self, jobs: list[_Job], tvm: bool) -> list[Any]:
        if self._closed:
            raise _overloaded("the service is being stopped")
        return await self._lanes[tvm].submit(jobs)


def _tir_job(program: TirText) -> _Job:
    return _Job(
        {"kind": program.kind, "backend": program.backend},
        program.text.encode("utf-8", "surrogatepass"),
        partial(answers.encoded_program, backend=program.backend),
    )


class _Lane:
    """A queue, and the slots that serve it."""

    def __init__(self, sandbox: Sandbox, tvm: bool) -> None:
        self.sandbox, self.tvm = sandbox, tvm
        self.turns: asyncio.Queue[_Turn] = asyncio.Queue()
        self.slots: list[_Slot] = []

    async def submit(self, jobs: list[_Job]) -> list[Any]:
        """Results of a turn.

        Raises
        ------
        OverloadedError
            The queue is full, or no worker can be started.
        """
        busy = sum(not slot.idle for slot in self.slots)
        if self.turns.qsize() + busy >= self.sandbox.workers + self.sandbox.max_queued:
            raise _overloaded(f"{self.turns.qsize()} texts wait to be read")
        turn = _Turn(jobs, asyncio.get_running_loop().create_future())
        self.turns.put_nowait(turn)
        idle = sum(slot.idle for slot in self.slots)
        if idle < self.turns.qsize() and len(self.slots) < self.sandbox.workers:
            self.slots.append(_Slot(self))
        return await turn.done

    async def close(self) -> None:
        """End the workers; what still waits is refused."""
        for slot in self.slots:
            slot.task.cancel()
        await asyncio.gather(*(slot.task for slot in self.slots), return_exceptions=True)
        for slot in self.slots:
            await slot.drop()
        while not self.turns.empty():
            turn = self.turns.get_nowait()
            if not turn.done.done():
                turn.done.set_exception(_overloaded("the service is being stopped"))


class _Slot:
    """Serves turns with one worker at a time, which it replaces when a job has killed it."""

    def __init__(self, lane: _Lane) -> None:
        self._lane, self._sandbox = lane, lane.sandbox
        self.worker: Worker | None = None
        self.idle = True
        self._jobs = 0
        self.task = asyncio.create_task(self.serve(), context=contextvars.Context())

    async def drop(self) -> None:
        """End the worker."""
        worker, self.worker = self.worker, None
        if worker is not None:
            await worker.stop()

    async def serve(self) -> None:
        """Take turns until cancelled."""
        while True:
            turn = await self._lane.turns.get()
            self.idle = False
            try:
                await asyncio.create_task(self._take(turn), context=turn.context)
            finally:
                self.idle = True

    async def _take(self, turn: _Turn) -> None:
        try:
            results: list[Any] = []
            for job in turn.jobs:
                if turn.done.done():  # nobody waits any more
                    return
                results.append(await self._one(job))
            if not turn.done.done():
                turn.done.set_result(results)
        except asyncio.CancelledError:
            if not turn.done.done():
                turn.done.set_exception(_overloaded("the service is being stopped"))
            raise
        except Exception as error:  # not even a bug here leaves the request without an answer
            if not turn.done.done():
                turn.done.set_exception(error)

    async def _one(self, job: _Job) -> Any:
        # A worker may die of what it read before, or be killed from outside: a second one decides.
        for last in (False, True):
            try:
                return await self._try(job)
            except OverloadedError:
                raise
            except CdmppError as error:
                return error
            except WorkerDiedError:
                if last:
                    return _unreadable("its reader crashed")
        raise AssertionError("a second attempt has an outcome")

    async def _try(self, job: _Job) -> Any:
        """Have one worker do a job.

        Raises
        ------
        CdmppError
            The text's fault.
        OverloadedError
            No worker can be started.
        WorkerDiedError
            The worker's end, whosever fault.
        """
        try:
            worker = await self._ready()
        except (WorkerDiedError, WorkerTimeoutError, OSError) as error:
            await self.drop()
            _log.error("no reading worker: %s", error)
            raise _overloaded("programs cannot be read at the moment") from None
        self._jobs += 1
        about = f"{job.header['kind']} of {len(job.payload)} bytes"
        try:
            said, data = await worker.run(job.header, job.payload, self._sandbox.timeout_s)
            if "bug" not in said:
                return job.read(said, data)
            _log.warning("reading %s: %.300r", about, said["bug"])
            raise _unreadable("the parser cannot make sense of it")
        except WorkerTimeoutError as error:
            _log.warning("reading %s: %s", about, error)
            problem = _unreadable(f"it takes more than {self._sandbox.timeout_s:g} s to read")
        except WorkerMemoryError:
            _log.warning("reading %s takes more memory than it may", about)
            problem = _unreadable("it needs too much memory to read")
        except DistrustedAnswerError as error:
            _log.error("a reading worker said what it cannot say about %s: %s", about, error)
            problem = _unreadable("its reader failed")
        except WorkerDiedError as error:
            _log.warning("a reading worker died with %s: %s: %s", about, error, worker.last_words)
            await self._replace()
            raise
        await self._replace()
        raise problem

    async def _replace(self) -> None:
        self._sandbox.restarts += 1
        await self.drop()

    async def _ready(self) -> Worker:
        """A worker that runs."""
        worker = self.worker
        if worker is not None and (self._jobs >= _MAX_JOBS or worker.pid is None):
            await self.drop()
            worker = None
        if worker is None:
            self._jobs = 0
            program = READING_TVM if self._lane.tvm else READING
            worker = self.worker = Worker(self._sandbox.memory_bytes, program)
            await worker.start()
        return worker


def _unreadable(why: str) -> InvalidProgramError:
    return InvalidProgramError(f"the program cannot be read: {why}", hint="check the text; split a very large program")


def _overloaded(message: str) -> OverloadedError:
    return OverloadedError(message, hint="retry after a second")
