"""Stand-in for the GPU, to run a job's flow on any machine. Its times are no measurements; no import takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import programs
from .run import HOST, KitError, PartFile

#: Constant time of the stand-in, in seconds.
STAND_IN_S = 1e-4


class StandInCuda:
    """Memory without content; it downloads what the last launch is said to write."""

    name, driver, l2_bytes = "stand-in", 13000, 1024

    def __init__(self, arch: str) -> None:
        digits = "".join(c for c in arch if c.isdigit())
        self.capability = (int(digits[:-1]), int(digits[-1]))
        self._sizes: dict[int, int] = {}
        self._next = 2**40
        self.byte = b"\x3f"

    def allocate(self, size: int) -> int:
        """Return an address that no other memory has."""
        pointer, self._next = self._next, self._next + max(1, size)
        self._sizes[pointer] = size
        return pointer

    def free(self, pointer: int) -> None:
        """Free memory that was allocated."""
        del self._sizes[pointer]

    def upload(self, pointer: int, content: bytes) -> None:
        """Check the size."""
        if len(content) != self._sizes[pointer]:
            raise KitError(f"{len(content)} bytes for memory of {self._sizes[pointer]}")

    def download(self, pointer: int, size: int) -> bytes:
        """Return equal bytes."""
        return self.byte * size

    def load(self, code: bytes) -> bytes:
        """Return the code."""
        return code

    def prepare(self, module: bytes, name: str, *_: Any) -> bytes:
        """Check that the code has the kernel."""
        if name.encode() not in module:
            raise KitError(f"the code has no kernel {name}")
        return module

    def elapsed_s(self, *_: Any) -> float:
        """Return a constant."""
        return STAND_IN_S

    def _nothing(self, *_: Any) -> None:
        """Do nothing."""

    copy = fill = unload = launch = synchronize = event = record = graph = launch_graph = free_graph = _nothing


class Kind(programs.Kind):
    """Programs and host cases on the stand-in."""

    def __init__(self, part: PartFile, folder: Path) -> None:
        super().__init__(part, folder)
        self._is_warm = True

    def open_driver(self) -> Any:
        """Return the stand-in."""
        return StandInCuda(str(self._part.about.get("arch", "sm_00")))

    def open(self) -> dict[str, Any]:
        """Describe the stand-in."""
        return {"gpu": StandInCuda.name} if self._part.kind == HOST else super().open()

    def measure(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return constant times."""
        if self._part.kind == HOST:
            return {"repeats_s": {"host": [STAND_IN_S]}, "failure": ""}
        return super().measure(item)
