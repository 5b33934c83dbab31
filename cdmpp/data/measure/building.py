"""Compilation of scheduled programs to shared libraries, in worker processes.

CUDA kernels are compiled here too, so that the machine with the GPU needs no compiler. Without a GPU's driver TVM 0.27
packs a CUDA module as source text, and the measuring machine would compile it when it loads the library. This module
replaces the source in packed modules by nvcc's machine code for one architecture, in the format of TVM's CUDA runtime
(format, functions, code).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cdmpp.errors import MeasurementError, MissingDependencyError, install_hint

_SYMBOL = "__tvm_ffi__library_bin"


@dataclass(frozen=True)
class Library:
    """A built program."""

    path: str  # shared library with one function, ``main``
    # (shape, dtype, written) of each argument of ``main``; ``written`` marks results
    arguments: tuple[tuple[tuple[int, ...], str, bool], ...]
    build_s: float  # seconds of compiling and linking


def build_program(tvm_json: str, target: Mapping[str, Any], path: str) -> Library:
    """Compile a PrimFunc, whose loops are bound to threads for a GPU, to a shared library.

    ``target`` is a TVM target as JSON. The file at ``path`` is replaced atomically. Every program needs its own name,
    because the loader identifies libraries by name. Dynamic shapes are an error.
    """
    tvm = import_tvm_alone()
    started = time.perf_counter()
    module = main_module(tvm_json)
    arguments = argument_list(module["main"])
    tvm_target = tvm.target.Target(dict(target))
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
    """Raise a MissingDependencyError if a tool for building programs of a target is missing."""
    if target["kind"] == "cuda":
        require_nvcc()
    compiler = _compiler(target)
    if shutil.which(compiler) is None:
        raise MissingDependencyError(
            f"{compiler} is not installed; it links programs for {target['kind']}",
            hint="on Debian: apt install gcc, or the cross compiler such as gcc-aarch64-linux-gnu",
        )


def host_triple(target: Mapping[str, Any]) -> str:
    """Return the triple of the host code of a target; "" for this machine's."""
    host = target.get("host", target)
    return str(host.get("mtriple", "")) if isinstance(host, Mapping) else ""


def _compiler(target: Mapping[str, Any]) -> str:
    """Return the compiler driver for the target's host: gcc, or the cross compiler of its triple."""
    triple = host_triple(target)
    native = not triple or triple.split("-")[0] == platform.machine()
    return "gcc" if native else f"{triple}-gcc"


def _export(module: Any, path: str, target: Any, compiler: str) -> None:
    """Write a shared library; calling the linker directly takes 4 ms, the compiler driver 30 ms.

    CUDA kernels are a second object, with nvcc's machine code for ``target.attrs["arch"]``.
    """
    link = _linker(compiler)
    if not module.imports:
        compiled = f"{path}.o"
        try:
            module.write_to_file(compiled)
            link(path, [compiled])
        finally:
            Path(compiled).unlink(missing_ok=True)
        return
    if target.kind.name != "cuda":
        module.export_library(path, fcompile=link)
        return
    require_nvcc()
    import tvm

    def pack(packed: Any, is_system_lib: bool, prefix: str, folder: str) -> str:
        blob = tvm.get_global_func("runtime.ModulePackImportsToTensor")(packed).numpy().tobytes()
        source = str(module.imports[0].inspect_source())
        blob = replace_code(blob, source, lambda text: compile_source(text, str(target.attrs["arch"])))
        return _as_object(blob, Path(folder), compiler)

    module.export_library(path, fcompile=link, fpack_imports=pack)


def _linker(compiler: str) -> Callable[..., None]:
    """Return ``ld -shared``, or a cross compiler's driver, in the form that ``export_library`` calls."""

    def link(path: str, objects: Sequence[str], **_: Any) -> None:
        # -z now: a missing symbol fails when the library is loaded, not while it is timed.
        if compiler == "gcc":
            _run(["ld", "-shared", "--eh-frame-hdr", "-z", "now", "-o", path, *objects, *_system_libraries()])
        else:  # the driver finds the libraries of its machine
            _run([compiler, "-shared", "-nostartfiles", "-Wl,-z,now", "-o", path, *objects, "-lm"])

    link.object_format = "o"  # type: ignore[attr-defined]
    return link


def _run(command: Sequence[str], step: str = "linking") -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeasurementError(f"{step} failed: {done.stderr.strip()[:300]}", hint="see the message of the tool")


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


def main_module(tvm_json: str) -> Any:
    """Return a module whose function ``main`` is a PrimFunc."""
    import tvm

    return tvm.IRModule({"main": tvm.ir.load_json(tvm_json).with_attr("global_symbol", "main")})


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
    """Load TVM's runtime for a kind of device; TVM does so itself only if its compiler is installed."""
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


def require_nvcc() -> None:
    """Raise a MissingDependencyError if nvcc, which compiles CUDA kernels, is not installed."""
    if shutil.which("nvcc") is None:
        raise MissingDependencyError(
            "nvcc is not installed; it compiles CUDA programs",
            hint="install the CUDA toolkit on this machine; the measuring machine needs the driver only",
        )


def replace_code(blob: bytes, source: str, compile_source: Callable[[str], bytes]) -> bytes:
    """Replace the CUDA source in packed modules by its machine code.

    ``blob`` is the output of ``ModulePackImportsToTensor`` for a library with one CUDA module. All numbers are
    little-endian uint64. It has the total length, the import tree, the kind of the library, and the kind and the bytes
    of the CUDA module: format, functions, code. Each text has its length before it. ``source`` is the source of the
    module; ``compile_source`` is not called if the module has machine code already.
    """
    kind, code = _sized(b"cuda"), _sized(source.encode())
    head, _, module = blob.partition(kind)
    content = module[8:]
    is_source = content.startswith(kind)
    if blob != _sized(blob[8:]) or module != _sized(content) or (is_source and not content.endswith(code)):
        raise MeasurementError(
            "this version of TVM packs CUDA modules in an unknown format", hint="install the pinned apache-tvm"
        )
    if not is_source:
        return blob
    functions = content[len(kind) : -len(code)]
    compiled = _sized(b"cubin") + functions + _sized(compile_source(source))
    return _sized(head[8:] + kind + _sized(compiled))


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def compile_source(source: str, arch: str, *, cpu_s: int = 0) -> bytes:
    """Compile CUDA source to machine code with nvcc, for an architecture such as "sm_90". ``cpu_s``: limit of the CPU
    seconds of each step of nvcc; 0: none."""
    with tempfile.TemporaryDirectory() as folder:
        code, result = Path(folder, "program.cu"), Path(folder, "program.cubin")
        code.write_text(source)
        command = ["nvcc", *nvcc_flags(arch), "-o", str(result), str(code)]
        if cpu_s:
            command = ["sh", "-c", f'ulimit -t {cpu_s}; exec "$@"', "sh", *command]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.returncode:
            return result.read_bytes()
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    errors = [line for line in lines if re.search(r"(fatal|error|died|Killed)\b", line)]
    limit = f" (each step may take {cpu_s} s of CPU time)" if cpu_s else ""
    raise MeasurementError(
        f"nvcc: {(errors or lines or [f'exit code {done.returncode}'])[0][:300]}{limit}",
        hint="nvcc --list-gpu-arch lists its targets",
    )


def nvcc_flags(arch: str) -> list[str]:
    """Return the flags with which TVM 0.27 calls nvcc (tvm.support.nvcc), for an architecture such as "sm_90"."""
    suffix = arch.removeprefix("sm_")
    enabled = (
        f"-U__CUDA_NO_{kind}_{what}__"
        for kind in ("HALF", "BFLOAT16", "BFLOAT162")
        for what in ("OPERATORS", "CONVERSIONS")
    )
    return [
        *("--cubin", "-O3", "-gencode", f"arch=compute_{suffix},code=sm_{suffix}", *enabled),
        *("--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math"),
        "--ptxas-options=-v,--register-usage-level=10,--warn-on-local-memory-usage",
    ]


def _as_object(blob: bytes, folder: Path, compiler: str) -> str:
    """Write an object file with the bytes under the symbol that TVM loads from a library."""
    data, text, out = folder / "modules.bin", folder / "modules.s", folder / "modules.o"
    data.write_bytes(blob)
    text.write_text(
        f'.section .rodata\n.globl {_SYMBOL}\n.balign 16\n{_SYMBOL}:\n.incbin "{data}"\n'
        '.section .note.GNU-stack,"",%progbits\n'
    )
    _run([compiler, "-c", "-o", str(out), str(text)], "assembling")
    return str(out)
