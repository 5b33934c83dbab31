"""Imports of torch and of TVM's tensor intrinsics."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from cdmpp.errors import MissingDependencyError, install_hint


def import_torch() -> Any:
    """The package torch with ``torch.export``; raises :class:`MissingDependencyError` where it is not installed."""
    try:
        import torch
        import torch.export
    except ImportError as error:
        raise MissingDependencyError("torch programs need torch", hint=install_hint("torch")) from error
    return torch


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
