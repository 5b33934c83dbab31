"""The service's side of the sandbox: a bounded queue in front of a few reading workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal

from fastapi import FastAPI

from cdmpp.errors import CdmppError, InvalidProgramError, OverloadedError
from cdmpp.features.encode import EncodedProgram
from cdmpp.programs.query_options import Backend
from cdmpp_server.sandbox import replies
from cdmpp_server.sandbox.frames import ONNX_KIND
from cdmpp_server.sandbox.replies import InvalidReplyError, ModelSummary
from cdmpp_server.sandbox.worker import (
    READING,
    READING_TVM,
    SandboxPool,
    SupervisedWorker,
    Worker,
    WorkerDiedError,
    WorkerMemoryError,
    WorkerTimeoutError,
)
from cdmpp_server.settings import Settings

_log = logging.getLogger(__name__)

TirKind = Literal["tvm_json", "tvmscript"]
#: Programs of one request that are read before the worker may serve another request.
_TURN = 32
#: A worker is replaced after this many jobs, which frees what parsers leak.
_MAX_JOBS = 50_000


@dataclass(frozen=True)
class TirText:
    """A program as text, and the backend that runs it."""

    kind: TirKind
    text: str
    backend: Backend


@dataclass
class _SandboxJob:
    header: dict[str, Any]
    payload: bytes
    #: Converts the worker's reply to the result; raises CdmppError or InvalidReplyError.
    decode: Callable[[dict[str, Any], bytes], Any]


class Sandbox:
    """Reads untrusted bytes in worker processes. Belongs to one event loop; an async context manager.

    ``workers``: maximum number of processes for TVM JSON and ONNX, and as many for TVMScript, which needs TVM and
    seconds to start; each starts when it is first needed. ``memory_bytes``: of a worker for the texts that it reads.
    ``timeout_s``: of one program or model. ``max_queued``: waiting turns for either kind of worker; one more is
    refused.
    """

    def __init__(
        self, workers: int = 1, memory_bytes: int = 2**31, timeout_s: float = 5.0, max_queued: int = 64
    ) -> None:
        self.timeout_s = timeout_s
        # Two pools: neither a TVMScript text nor TVM's start delays texts that need no TVM.
        self._pools = {
            needs_tvm: SandboxPool(workers, partial(Worker, memory_bytes, program), max_queued, _MAX_JOBS)
            for needs_tvm, program in ((False, READING), (True, READING_TVM))
        }

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the workers; waiting and later calls raise OverloadedError."""
        for pool in self._pools.values():
            await pool.close()

    @property
    def queued(self) -> int:
        """Number of waiting turns."""
        return sum(pool.waiting for pool in self._pools.values())

    @property
    def restarts(self) -> int:
        """Number of workers replaced because of a job."""
        return sum(pool.restarts for pool in self._pools.values())

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [pid for pool in self._pools.values() for pid in pool.pids]

    async def encode_tirs(self, programs: Sequence[TirText]) -> list[EncodedProgram | CdmppError]:
        """Encode several programs; a program that cannot be encoded gives its error. The order is kept.

        Raises OverloadedError: the queue is full, or no worker can be started; this fails the whole call.
        """
        results: list[EncodedProgram | CdmppError | None] = [None] * len(programs)

        async def encode(needs_tvm: bool) -> None:
            indices = [i for i, p in enumerate(programs) if (p.kind == "tvmscript") == needs_tvm]
            for start in range(0, len(indices), _TURN):
                turn = indices[start : start + _TURN]
                encoded = await self._submit([_tir_job(programs[i]) for i in turn], needs_tvm)
                for i, result in zip(turn, encoded, strict=True):
                    results[i] = result

        await asyncio.gather(encode(False), encode(True))
        return [result for result in results if result is not None]

    async def script_as_json(self, script: str) -> str:
        """Convert TVMScript to TVM JSON, which can be read without TVM.

        Raises InvalidProgramError: the text is not a program, or exceeds the time or memory limit;
        MissingDependencyError: TVM is not installed; OverloadedError: the queue is full, or no worker can be started.
        """
        header = {"kind": "tvmscript", "backend": "tvm", "as_json": True}
        job = _SandboxJob(header, script.encode("utf-8", "surrogatepass"), replies.tvm_json)
        text: str = await self._only(job, needs_tvm=True)
        return text

    async def read_onnx(
        self, data: bytes, dims: Mapping[str, int] | None = None, *, max_programs: int = 10_000
    ) -> ModelSummary:
        """List the library kernels of an ONNX model.

        ``data``: content of the file. Weights in external files are not read. ``dims``: sizes of dynamic dimensions.
        ``max_programs``: maximum number of distinct programs; a model with more is refused.
        Raises InvalidProgramError, OverloadedError: as in :meth:`script_as_json`.
        """
        header = {"kind": ONNX_KIND, "dims": dict(dims or {}), "max_programs": max_programs}
        job = _SandboxJob(header, data, lambda reply, _: replies.model_summary(reply, max_programs))
        summary: ModelSummary = await self._only(job, needs_tvm=False)
        return summary

    async def _only(self, job: _SandboxJob, needs_tvm: bool) -> Any:
        """The result of one job, or its error raised."""
        (result,) = await self._submit([job], needs_tvm)
        if isinstance(result, CdmppError):
            raise result
        return result

    async def _submit(self, jobs: list[_SandboxJob], needs_tvm: bool) -> list[Any]:
        """Run the jobs of one turn; a job whose text is at fault gives a CdmppError.

        Raises OverloadedError: the queue is full, no worker can be started, or the service is stopping.
        """
        abandoned = asyncio.Event()

        async def turn(worker: SupervisedWorker) -> list[Any]:
            results: list[Any] = []
            for job in jobs:
                if abandoned.is_set():
                    break
                results.append(await self._run(worker, job))
            return results

        try:
            return await self._pools[needs_tvm].run(turn)
        finally:
            abandoned.set()  # if this call was cancelled, the turn stops after the current job

    async def _run(self, worker: SupervisedWorker, job: _SandboxJob) -> Any:
        """Return the result of one job, or the CdmppError that describes the text's fault."""
        text = f"{job.header['kind']} of {len(job.payload)} bytes"
        try:
            reply, data = await worker.run(job.header, job.payload, self.timeout_s)
            if "bug" in reply:
                _log.warning("reading %s: %.300r", text, reply["bug"])
                return _unreadable("the parser failed")
            return job.decode(reply, data)
        except OverloadedError:
            raise
        except CdmppError as error:
            return error
        except WorkerTimeoutError as error:
            _log.warning("reading %s: %s", text, error)
            return _unreadable(f"reading it takes more than {self.timeout_s:g} s")
        except WorkerMemoryError:
            _log.warning("reading %s exceeded the memory limit", text)
            return _unreadable("reading it needs too much memory")
        except WorkerDiedError:
            _log.warning("reading %s crashed two workers", text)
            return _unreadable("its reader crashed")
        except InvalidReplyError as error:
            _log.error("a reading worker sent an invalid reply for %s: %s", text, error)
            await worker.replace()
            return _unreadable("its reader failed")


def _tir_job(program: TirText) -> _SandboxJob:
    return _SandboxJob(
        {"kind": program.kind, "backend": program.backend},
        program.text.encode("utf-8", "surrogatepass"),
        partial(replies.encoded_program, backend=program.backend),
    )


def _unreadable(reason: str) -> InvalidProgramError:
    return InvalidProgramError(
        f"the program cannot be read: {reason}", hint="check the text; split a very large program"
    )


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Hold a sandbox; its workers start when they are first needed."""
    of_worker = (settings.sandbox_memory_bytes, settings.sandbox_timeout_s)
    async with Sandbox(settings.sandbox_workers, *of_worker, settings.max_queued) as app.state.sandbox:
        yield
