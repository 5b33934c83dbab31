"""Test double of the CUDA driver whose programs fail as their code says. Its times are no measurements.

``// crash`` ends the process, ``// hang`` never ends, ``// error`` is an error of the driver, ``// wrong`` gives
another result, and ``// large`` finds no memory.
"""

import os
import time
from typing import Any

from cdmpp.data.measure.runtime import stand_in
from cdmpp.data.measure.runtime.driver import CudaError, OutOfMemoryError
from cdmpp.data.measure.runtime.run import HOST, KitError, PartFile

#: Name of the GPU in the environment, and its default.
GPU, H100 = "KIT_GPU", "NVIDIA H100 80GB HBM3"


class MarkedCuda(stand_in.StandInCuda):
    """The stand-in under the name of a GPU."""

    def __init__(self, arch: str) -> None:
        super().__init__("sm_80" if os.environ.get(GPU, H100).startswith("NVIDIA A100") else arch)
        self.name = os.environ.get(GPU, H100)

    def load(self, code: bytes) -> bytes:
        if b"// large" in code:
            raise OutOfMemoryError("cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY")
        return code

    def launch(self, launch: bytes) -> None:
        if b"// crash" in launch:
            os._exit(7)
        if b"// hang" in launch:
            time.sleep(600)
        if b"// error" in launch:
            raise CudaError("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS")
        self.byte = b"\x40" if b"// wrong" in launch else b"\x3f"


class Kind(stand_in.Kind):
    """Programs and host cases on the stand-in; ``KIT_GPU=no torch`` has no host part."""

    def __init__(self, part: PartFile, folder: Any) -> None:
        super().__init__(part, folder)
        if part.kind == HOST and os.environ.get(GPU) == "no torch":
            raise KitError("PyTorch finds no CUDA device")

    def open_driver(self) -> MarkedCuda:
        return MarkedCuda(str(self._part.about["arch"]))

    def open(self) -> dict[str, Any]:
        return {"gpu": os.environ.get(GPU, H100)} if self._part.kind == HOST else super().open()
