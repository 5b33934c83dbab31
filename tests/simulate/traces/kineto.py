"""Traces with the structure that Kineto writes for CUDA work, made by hand: times, ids and fields, no measured data."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HOST, STREAM, COMM_STREAM = 4242, 7, 20


class KinetoTrace:
    """Events of one process; times in µs from the beginning."""

    def __init__(self, rank: int = 0, world: int = 1, *, clock_us: float = 0.0, host: str = "node0") -> None:
        self.events: list[dict[str, Any]] = []
        self.rank, self.world, self.clock_us, self.host = rank, world, clock_us, host
        self._next = 100

    def add(self, category: str, name: str, at: float, length: float, pid: int, tid: int, **args: Any) -> None:
        """A complete event."""
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": at + self.clock_us,
                "dur": length,
                "args": args,
            }
        )

    def step(self, number: int, at: float, length: float) -> None:
        """The mark of an iteration."""
        self.add("user_annotation", f"ProfilerStep#{number}", at, length, HOST, HOST)

    def op(
        self, name: str, at: float, length: float, dims: Any = None, types: Any = None, concrete: Any = None
    ) -> None:
        """An operator on the host's thread."""
        args: dict[str, Any] = {"External id": self._next}
        if dims is not None:
            args |= {"Input Dims": dims, "Input type": types, "Concrete Inputs": concrete or [""] * len(dims)}
        self.add("cpu_op", name, at, length, HOST, HOST, **args)

    def launch(
        self,
        name: str,
        called: float,
        at: float,
        length: float,
        stream: int = STREAM,
        category: str = "kernel",
        call_us: float = 5.0,
        call: str = "cudaLaunchKernel",
        **args: Any,
    ) -> int:
        """A kernel and the call that launches it; the correlation id."""
        self._next += 1
        number = self._next
        self.add("cuda_runtime", call, called, call_us, HOST, HOST, correlation=number)
        device = {"device": 0, "stream": stream, "correlation": number, "External id": number}
        self.add(category, name, at, length, 0, stream, **device, **args)
        flow = {"id": number, "cat": "ac2g", "name": "ac2g"}
        self.events.append({"ph": "s", "pid": HOST, "tid": HOST, "ts": called + self.clock_us, **flow})
        self.events.append({"ph": "f", "pid": 0, "tid": stream, "ts": at + self.clock_us, "bp": "e", **flow})
        return number

    def runtime(self, name: str, at: float, length: float) -> int:
        """A runtime call without work of its own."""
        self._next += 1
        self.add("cuda_runtime", name, at, length, HOST, HOST, correlation=self._next)
        return self._next

    def document(self) -> dict[str, Any]:
        """The whole trace."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": HOST, "tid": HOST, "ts": 0, "args": {"name": "thread (python)"}}
        ]
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108}],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.world},
            "host_name": self.host,
            "baseTimeNanoseconds": 0,
            "traceEvents": [*names, *self.events],
        }

    def write(self, path: Path) -> Path:
        """Write the trace; gzip where the path ends so."""
        text = json.dumps(self.document())
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path


def training_step(rank: int = 0, world: int = 2, *, late: float = 0.0, clock_us: float = 0.0) -> KinetoTrace:
    """Two products, an all-reduce on a stream of its own beside a third product, an update, and a synchronisation.

    A rank that is ``late`` is ready for the all-reduce so many µs later, at most 50. With several ranks, one of them is
    50 µs late; the all-reduce ends 200 µs after that one begins.
    """
    trace = KinetoTrace(rank, world, clock_us=clock_us, host=f"node{rank}")
    product = {"dims": [[512, 1024], [1024, 1024]], "types": ["c10::Half", "c10::Half"]}
    trace.op("aten::mm", 10, 30, **product)
    trace.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_tn", 20, 30, 100)
    trace.op("aten::mm", 50, 30, **product)
    trace.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_tn", 60, 130, 100 + late)
    trace.op("c10d::allreduce_", 100, 40, [[[1048576]], [], []], ["TensorList", "", "Scalar"])
    trace.add("cpu_op", "record_param_comms", 105, 30, HOST, HOST, **_call(world))
    length = 200 + (50 - late if world > 1 else 0)
    name = "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    trace.launch(name, 110, 235 + late, length, COMM_STREAM, **_call(world))
    trace.op("aten::mm", 160, 30, **product)
    trace.launch("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_tn", 170, 231 + late, 100)
    done = 235 + late + length
    trace.op("aten::add_", 210, 20, [[4096, 4096], [4096, 4096], []], ["c10::Half", "c10::Half", "Scalar"])
    trace.launch("void at::native::vectorized_elementwise_kernel<4, add>(int, add)", 220, done + 2, 60)
    trace.launch("my_custom_kernel(float*)", 240, done + 63, 40)
    trace.runtime("cudaDeviceSynchronize", 300, done + 110 - 300)
    trace.step(3, 0, done + 120)
    return trace


def _call(world: int) -> dict[str, Any]:
    return {
        "Collective name": "allreduce",
        "In msg nelems": 1048576,
        "Out msg nelems": 1048576,
        "Group size": world,
        "dtype": "Half",
        "Process Group Name": "0",
        "Process Group Ranks": str(list(range(world))),
    }
