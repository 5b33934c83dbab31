"""Import of TVM's tensor intrinsics, which parses some 250 TVMScript functions."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any


def import_intrinsics(part: str = "") -> None:
    """Import ``tvm.s_tir.tensor_intrin``, or one module of it.

    TVM's parser calls ``inspect.stack()`` for each function, and ``inspect.getmodule`` searches all modules for each
    frame of the import system. Without that search the import takes 5 s of CPU instead of 33 (TVM 0.27).
    """
    search = inspect.getmodule

    def without_frozen(value: Any, _filename: str | None = None) -> Any:
        return None if _filename is not None and _filename.startswith("<frozen") else search(value, _filename)

    inspect.getmodule = without_frozen  # type: ignore[assignment]
    try:
        import_module("tvm.s_tir.tensor_intrin" + (f".{part}" if part else ""))
    finally:
        inspect.getmodule = search
