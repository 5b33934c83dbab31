"""Import of TVM in worker processes."""

from __future__ import annotations

import sys
from typing import Any

from cdmpp.errors import MeasurementError, MissingDependencyError, install_hint


def import_tvm_alone() -> Any:
    """Import TVM without torch, which ``tvm_ffi`` would import: it saves seconds and 250 MB per worker."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None: importing it fails
    try:
        import tvm
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the package {error.name} is not installed",
            hint=f"{install_hint('tvm')}; for timing alone its compiler library may be deleted",
        ) from None
    return tvm


def load_device_runtime(tvm: Any, kind: str) -> None:
    """Load TVM's runtime for a kind of device; TVM does so itself only if its compiler is installed.

    Raises
    ------
    MeasurementError
        The runtime or its driver is missing.
    """
    if kind == "cpu":
        return
    from tvm_ffi.libinfo import load_lib_ctypes

    paths = tvm.libinfo.package_lib_paths()
    try:
        load_lib_ctypes("tvm", f"tvm_runtime_{kind}", "RTLD_LOCAL", extra_lib_paths=paths)
    except (OSError, RuntimeError) as error:
        raise MeasurementError(
            f"TVM's {kind} runtime cannot be loaded: {str(error).strip().splitlines()[0]}",
            hint="it needs the device's driver, and for cuda CUDA's libcudart, on the machine that measures",
        ) from None
