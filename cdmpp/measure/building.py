"""Compiling scheduled programs to shared libraries, in worker processes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cdmpp.errors import MeasurementError, MissingDependencyError
from cdmpp.measure.imports import import_tvm_alone


@dataclass(frozen=True)
class Library:
    """A built program.

    Attributes
    ----------
    path : str
        Shared library with one function, ``main``.
    arguments : tuple of (shape, dtype, written)
        What ``main`` takes; ``written`` for the results.
    build_s : float
        Seconds of compiling and linking.
    """

    path: str
    arguments: tuple[tuple[tuple[int, ...], str, bool], ...]
    build_s: float


def prepare_builder() -> None:
    """Import TVM once for each worker."""
    import_tvm_alone()


def build_program(tvm_json: str, target: Mapping[str, Any], path: str, scheduled: bool = True) -> Library:
    """Compile a PrimFunc to a shared library.

    Parameters
    ----------
    tvm_json : str
        The PrimFunc.
    target : mapping
        TVM target, as JSON.
    path : str
        File to write; written aside, then renamed. A new name for every program: the loader takes a library
        of a name that it has already loaded for the same one.
    scheduled : bool
        False for a task as lowered, which a GPU runs only after its loops are bound to threads: TVM's default
        binding is taken then.

    Raises
    ------
    MeasurementError
        The program's shapes are dynamic, or linking failed.
    MissingDependencyError
        There is no compiler driver to link with.
    """
    tvm = import_tvm_alone()
    started = time.perf_counter()
    function = tvm.ir.load_json(tvm_json)
    arguments = argument_list(function)
    goal = tvm.target.Target(dict(target))
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    if not scheduled and goal.kind.name != "llvm":
        with goal:
            module = tvm.s_tir.transform.DefaultGPUSchedule()(module)
    built = tvm.compile(module, goal).mod
    aside = f"{path}.{os.getpid()}.part.so"
    try:
        _export(built, aside)
        os.replace(aside, path)
    finally:
        Path(aside).unlink(missing_ok=True)
    return Library(path, arguments, time.perf_counter() - started)


def _export(module: Any, path: str) -> None:
    """Write a shared library. The linker is called by itself: 4 ms, where the compiler's driver takes 30."""
    if module.imports:  # code for another device is packed into a second object
        module.export_library(path, fcompile=_Link())
        return
    compiled = f"{path}.o"
    try:
        module.write_to_file(compiled)
        _Link()(path, [compiled])
    finally:
        Path(compiled).unlink(missing_ok=True)


class _Link:
    """``ld -shared`` in the form that ``export_library`` wants."""

    object_format = "o"

    def __call__(self, path: str, objects: Sequence[str], **_: Any) -> None:
        # -z now: a missing symbol shows when the library is loaded, not as a crash while it is timed.
        command = ["ld", "-shared", "--eh-frame-hdr", "-z", "now", "-o", path, *objects, *_system_libraries()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MeasurementError(f"linking failed: {done.stderr.strip()[:300]}", hint="see ld's message")


@cache
def _system_libraries() -> tuple[str, ...]:
    """What generated code calls (mathematics, memset). A library keeps their names, not the paths."""
    found = []
    for name in ("libm.so.6", "libc.so.6", "libgcc.a"):
        try:
            done = subprocess.run(
                ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            raise MissingDependencyError(
                "gcc is needed to link built programs", hint="on Debian: apt install gcc"
            ) from None
        if not os.path.isabs(done.stdout.strip()):  # gcc answers with the bare name when it has none
            raise MissingDependencyError(f"gcc has no {name}", hint="on Debian: apt install gcc libc6-dev")
        found.append(done.stdout.strip())
    return tuple(found)


def argument_list(function: Any) -> tuple[tuple[tuple[int, ...], str, bool], ...]:
    """Shape, element type and whether it is written, for each parameter of a PrimFunc."""
    import tvm_ffi
    from tvm import tirx

    written: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.BufferStore) and not any(node.buffer.same_as(b) for b in written):
            written.append(node.buffer)

    tvm_ffi.structural_walk(function.body, (tvm_ffi.Object, visit), order="pre")
    arguments = []
    for parameter in function.params:
        shape = parameter.ty.shape
        if not all(isinstance(extent, tirx.IntImm) for extent in shape):
            raise MeasurementError(
                "its shapes are dynamic", hint="freeze the network's shapes before collecting"
            )
        stored = any(buffer.same_as(parameter) for buffer in written)
        arguments.append((tuple(int(e) for e in shape), _dtype(parameter.ty.dtype), stored))
    return tuple(arguments)


def _dtype(kind: Any) -> str:
    return str(getattr(kind, "dtype", kind)).removeprefix("T.")
