"""Compilation of CUDA kernels on the building machine, so that the machine with the GPU needs no compiler.

Without a GPU's driver TVM 0.27 packs a CUDA module as source text, and the measuring machine would compile it
when it loads the library. This module replaces the source in packed modules by nvcc's machine code for one
architecture, in the format of TVM's CUDA runtime (format, functions, code).
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cdmpp.errors import MeasurementError, MissingDependencyError

_SYMBOL = "__tvm_ffi__library_bin"


def require_nvcc() -> None:
    """Raise if nvcc, which compiles CUDA kernels, is not installed.

    Raises
    ------
    MissingDependencyError
    """
    if shutil.which("nvcc") is None:
        raise MissingDependencyError(
            "nvcc is not installed; it compiles CUDA programs",
            hint="install the CUDA toolkit on this machine; the measuring machine needs the driver only",
        )


def export_kernels(module: Any, path: str, target: Any, link: Any, compiler: str) -> None:
    """Write a host module and its CUDA module as one shared library with machine code for both.

    Parameters
    ----------
    module : tvm.runtime.Module
        Result of ``tvm.compile``; its only import has the kind "cuda".
    path : str
    target : tvm.target.Target
        With ``arch``, such as "sm_80".
    link : callable
        Linker in the form that ``export_library`` calls.
    compiler : str
        Driver of the assembler for the host.

    Raises
    ------
    MissingDependencyError
        nvcc is not installed.
    MeasurementError
        nvcc refused the source.
    """
    require_nvcc()
    import tvm

    def pack(packed: Any, is_system_lib: bool, prefix: str, folder: str) -> str:
        blob = tvm.get_global_func("runtime.ModulePackImportsToTensor")(packed).numpy().tobytes()
        blob = replace_code(blob, lambda source: compile_source(source, target))
        return _as_object(blob, Path(folder), compiler)

    module.export_library(path, fcompile=link, fpack_imports=pack)


def replace_code(blob: bytes, compile_source: Callable[[str], bytes]) -> bytes:
    """Replace every CUDA source in packed modules by its machine code.

    Parameters
    ----------
    blob : bytes
        Output of ``ModulePackImportsToTensor``. All numbers are little-endian uint64. It has the total
        length, the import tree (row pointers, children), then for each module its kind and, unless it is the
        library itself, its bytes. Those of a CUDA module end with length and text of the source.
    compile_source : callable
        Converts source to machine code.
    """
    reader = _Reader(blob)
    total = reader.number()
    if total != len(blob) - 8:
        raise _unknown_format()
    for _ in range(2):
        reader.take(8 * reader.number())
    head = blob[8 : reader.at]
    parts = [head]
    while reader.at < len(blob):
        kind = reader.text()
        parts.append(_sized(kind))
        if kind == b"_lib":
            continue
        content = reader.text()
        parts.append(_sized(_compiled(content, compile_source) if kind == b"cuda" else content))
    body = b"".join(parts)
    return struct.pack("<Q", len(body)) + body


def _compiled(content: bytes, compile_source: Callable[[str], bytes]) -> bytes:
    reader = _Reader(content)
    if reader.text() != b"cuda":  # already machine code
        return content
    functions_start = reader.at
    for _ in range(reader.number()):
        reader.text()  # key
        reader.text()  # name
        reader.take(4 * reader.number())  # argument types
        for _ in range(reader.number()):
            reader.text()  # launch parameters
        reader.take(4 * reader.number())  # attributes of arguments
    functions = content[functions_start : reader.at]
    source = reader.text()
    if reader.at != len(content):
        raise _unknown_format()
    return _sized(b"cubin") + functions + _sized(compile_source(source.decode()))


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise _unknown_format()
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def text(self) -> bytes:
        return self.take(self.number())


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _unknown_format() -> MeasurementError:
    return MeasurementError(
        "this version of TVM packs CUDA modules in an unknown format", hint="install the pinned apache-tvm"
    )


def compile_source(source: str, target: Any) -> bytes:
    """Compile with nvcc and the flags of TVM.

    Raises
    ------
    MeasurementError
        nvcc refused the source.
    """
    from tvm.support import nvcc

    suffix = str(target.attrs["arch"]).removeprefix("sm_")
    arch = ["-gencode", f"arch=compute_{suffix},code=sm_{suffix}"]
    try:
        with target:
            return bytes(nvcc.compile_cuda(source, "cubin", arch, compiler="nvcc"))
    except RuntimeError as error:
        lines = map(str.strip, str(error).splitlines())
        errors = [line for line in lines if re.search(r"(fatal|error)\b.*: *\S", line)]
        raise MeasurementError(
            f"nvcc: {(errors or [str(error)])[0][:300]}", hint="nvcc --list-gpu-arch lists its targets"
        ) from None


def _as_object(blob: bytes, folder: Path, compiler: str) -> str:
    """Write an object file with the bytes under the symbol that TVM loads from a library."""
    data, text, out = folder / "modules.bin", folder / "modules.s", folder / "modules.o"
    data.write_bytes(blob)
    text.write_text(
        f'.section .rodata\n.globl {_SYMBOL}\n.balign 16\n{_SYMBOL}:\n.incbin "{data}"\n'
        '.section .note.GNU-stack,"",%progbits\n'
    )
    done = subprocess.run([compiler, "-c", "-o", str(out), str(text)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeasurementError(f"assembling failed: {done.stderr.strip()[:300]}", hint="see the assembler's message")
    return str(out)
