"""Test double of the CUDA driver, so that the flow of the kit runs without a GPU. Its times are no measurements.

A source says how its kernels behave: ``// crash`` ends the process, ``// hang`` never ends, ``// error`` is an error of
the driver, ``// wrong`` gives another result, and ``// large`` finds no memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cdmpp.data.measure.runtime import programs
from cdmpp.data.measure.runtime.driver import CudaError, OutOfMemoryError
from cdmpp.data.measure.runtime.run import KitError

#: Constant time of the stand-in.
STAND_IN_S = 1e-4


class StandInCuda:
    """Memory in this process; a launch fills all memory that was not uploaded."""

    name, capability, driver, l2_bytes = "NVIDIA H100 80GB HBM3", (9, 0), 13000, 1024

    def __init__(self) -> None:
        self._memory: dict[int, bytearray] = {}
        self._uploaded: set[int] = set()
        self._next = 1

    def allocate(self, size: int) -> int:
        self._next += 1
        self._memory[self._next] = bytearray(size)
        return self._next

    def free(self, pointer: int) -> None:
        del self._memory[pointer]
        self._uploaded.discard(pointer)

    def upload(self, pointer: int, content: bytes) -> None:
        assert len(content) == len(self._memory[pointer])
        self._memory[pointer][:] = content
        self._uploaded.add(pointer)

    def download(self, pointer: int, size: int) -> bytes:
        assert size == len(self._memory[pointer])
        return bytes(self._memory[pointer])

    def fill(self, pointer: int, byte: int, size: int) -> None:
        self._memory[pointer][:] = bytes([byte]) * size

    def load(self, code: bytes) -> str:
        if b"// large" in code:
            raise OutOfMemoryError("cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY")
        return code.decode()

    def unload(self, module: str) -> None:
        pass

    def prepare(
        self,
        module: str,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        shared: int,
        values: Sequence[tuple[str, Any]],
    ) -> tuple[str, list[int]]:
        assert f" {name}(" in module
        return module, [value for kind, value in values if kind == "pointer"]

    def launch(self, launch: tuple[str, list[int]]) -> None:
        code, pointers = launch
        if "// crash" in code:
            os._exit(7)
        if "// hang" in code:
            time.sleep(600)
        if "// error" in code:
            raise CudaError("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS")
        for pointer in pointers:
            if pointer not in self._uploaded:
                self.fill(pointer, 0x40 if "// wrong" in code else 0x3F, len(self._memory[pointer]))

    def synchronize(self) -> None:
        pass

    def event(self) -> object:
        return object()

    def record(self, event: object) -> None:
        pass

    def elapsed_s(self, start: object, end: object) -> float:
        return STAND_IN_S

    def graph(self, launches: Sequence[Any]) -> list[Any]:
        return list(launches)

    def launch_graph(self, graph: list[Any]) -> None:
        pass

    def free_graph(self, graph: list[Any]) -> None:
        pass


class Kind(programs.Kind):
    """Programs on the stand-in: sources are not compiled."""

    def open_driver(self) -> StandInCuda:
        return StandInCuda()

    def check_compiler(self) -> None:
        pass

    def compile(self, source: bytes, item: Mapping[str, Any], limit_s: float) -> bytes:
        if b"// refused" in source:
            raise KitError("error: this is not CUDA")
        return source
