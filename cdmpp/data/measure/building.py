"""Compilation of scheduled programs to shared libraries, in worker processes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cdmpp.data.measure.cuda import export_kernels, require_nvcc
from cdmpp.data.measure.imports import import_tvm_alone
from cdmpp.errors import MeasurementError, MissingDependencyError


@dataclass(frozen=True)
class Library:
    """A built program.

    Attributes
    ----------
    path : str
        Shared library with one function, ``main``.
    arguments : tuple of (shape, dtype, written)
        Arguments of ``main``; ``written`` marks results.
    build_s : float
        Seconds of compiling and linking.
    """

    path: str
    arguments: tuple[tuple[tuple[int, ...], str, bool], ...]
    build_s: float


def build_program(tvm_json: str, target: Mapping[str, Any], path: str) -> Library:
    """Compile a PrimFunc to a shared library.

    Parameters
    ----------
    tvm_json : str
        The PrimFunc; for a GPU its loops are bound to threads.
    target : mapping
        TVM target, as JSON.
    path : str
        File to write; it is replaced atomically. Every program needs its own name, because the loader
        identifies libraries by name.

    Raises
    ------
    MeasurementError
        The program's shapes are dynamic, or linking failed.
    MissingDependencyError
        There is no compiler driver for linking.
    """
    tvm = import_tvm_alone()
    started = time.perf_counter()
    function = tvm.ir.load_json(tvm_json)
    arguments = argument_list(function)
    tvm_target = tvm.target.Target(dict(target))
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    if tvm_target.kind.name == "cuda":  # if TVM finds a GPU, it compiles the kernels itself
        os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")
    built = tvm.compile(module, tvm_target).mod
    aside = f"{path}.{os.getpid()}.part.so"
    try:
        _export(built, aside, tvm_target, _compiler(target))
        os.replace(aside, path)
    finally:
        Path(aside).unlink(missing_ok=True)
    return Library(path, arguments, time.perf_counter() - started)


def check_toolchain(target: Mapping[str, Any]) -> None:
    """Raise if a tool for building programs of a target is missing.

    Raises
    ------
    MissingDependencyError
    """
    if target["kind"] == "cuda":
        require_nvcc()
    compiler = _compiler(target)
    if shutil.which(compiler) is None:
        raise MissingDependencyError(
            f"{compiler} is not installed; it links programs for {target['kind']}",
            hint="on Debian: apt install gcc, or the cross compiler such as gcc-aarch64-linux-gnu",
        )


def _compiler(target: Mapping[str, Any]) -> str:
    """Return the compiler driver for the target's host: gcc, or the cross compiler of its triple."""
    host = target.get("host", target)
    triple = host.get("mtriple", "") if isinstance(host, Mapping) else ""
    native = not triple or triple.split("-")[0] == platform.machine()
    return "gcc" if native else f"{triple}-gcc"


def _export(module: Any, path: str, target: Any, compiler: str) -> None:
    """Write a shared library; calling the linker directly takes 4 ms, the compiler driver 30 ms."""
    link = _Link() if compiler == "gcc" else _CrossLink(compiler)
    if module.imports:  # code for another device is a second object
        if target.kind.name == "cuda":
            export_kernels(module, path, target, link, compiler)
        else:
            module.export_library(path, fcompile=link)
        return
    compiled = f"{path}.o"
    try:
        module.write_to_file(compiled)
        link(path, [compiled])
    finally:
        Path(compiled).unlink(missing_ok=True)


class _Link:
    """``ld -shared`` in the form that ``export_library`` calls."""

    object_format = "o"

    def __call__(self, path: str, objects: Sequence[str], **_: Any) -> None:
        # -z now: a missing symbol fails when the library is loaded, not while it is timed.
        _run(["ld", "-shared", "--eh-frame-hdr", "-z", "now", "-o", path, *objects, *_system_libraries()])


class _CrossLink:
    """A cross compiler's driver, which finds the libraries of its machine."""

    object_format = "o"

    def __init__(self, compiler: str) -> None:
        self.compiler = compiler

    def __call__(self, path: str, objects: Sequence[str], **_: Any) -> None:
        _run([self.compiler, "-shared", "-nostartfiles", "-Wl,-z,now", "-o", path, *objects, "-lm"])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeasurementError(f"linking failed: {done.stderr.strip()[:300]}", hint="see the linker's message")


@cache
def _system_libraries() -> tuple[str, ...]:
    """Return the libraries that generated code calls; the shared library stores their names, not their paths."""
    paths = []
    for name in ("libm.so.6", "libc.so.6", "libgcc.a"):
        try:
            done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            raise MissingDependencyError(
                "gcc is not installed; it links built programs", hint="on Debian: apt install gcc"
            ) from None
        if not os.path.isabs(done.stdout.strip()):  # gcc returns the bare name if it has no such library
            raise MissingDependencyError(f"gcc has no {name}", hint="on Debian: apt install gcc libc6-dev")
        paths.append(done.stdout.strip())
    return tuple(paths)


def argument_list(function: Any) -> tuple[tuple[tuple[int, ...], str, bool], ...]:
    """Return shape, element type and whether it is written, for each parameter of a PrimFunc."""
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
                "the program has dynamic shapes", hint="freeze the network's shapes before collecting"
            )
        # The last parameter is the result, even if it is stored through another buffer of the same memory.
        stored = parameter.same_as(function.params[-1]) or any(b.same_as(parameter) for b in written)
        arguments.append((tuple(int(e) for e in shape), _dtype(parameter.ty.dtype), stored))
    return tuple(arguments)


def _dtype(kind: Any) -> str:
    return str(getattr(kind, "dtype", kind)).removeprefix("T.")
