"""Built programs: their arguments; CUDA programs, built without a GPU, with machine code and without source."""

import re
import struct
from pathlib import Path
from typing import Any

import pytest

from cdmpp.data.measure.archive import write_job
from cdmpp.data.measure.building import argument_list, build_program, replace_code
from cdmpp.data.measure.sampling import default_program
from cdmpp.data.measure.targets import configurations
from cdmpp.errors import MeasurementError, MissingDependencyError

_ELF, _EM_CUDA = b"\x7fELF", 190


def _target(arch: str) -> dict[str, Any]:
    return {**configurations(("cuda:a100-pcie-40gb",))[0].target, "arch": arch}


def _architectures(library: bytes) -> list[int]:
    """Compute capabilities of the CUDA machine code inside a file."""
    found = []
    for match in re.finditer(re.escape(_ELF), library):
        header = library[match.start() : match.start() + 64]
        if len(header) == 64 and struct.unpack_from("<H", header, 18)[0] == _EM_CUDA:
            flags = struct.unpack_from("<I", header, 48)[0]
            # CUDA 13 moved the number up by a byte.
            found.append((flags >> 8) & 0xFF or flags & 0xFF)
    return found


@pytest.mark.tvm
@pytest.mark.native
@pytest.mark.usefixtures("nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_library_has_machine_code_for_its_architecture(arch: str, tmp_path: Path, tiny_programs: list[str]) -> None:
    path = tmp_path / "program.so"
    default = default_program(tiny_programs[1], "", _target(arch))
    built = build_program(default.tvm_json, _target(arch), str(path))
    content = path.read_bytes()
    assert _architectures(content) == [int(arch.removeprefix("sm_"))]
    assert b"__global__" not in content  # that would be source, which needs a compiler to run
    assert built.arguments == (((64, 32), "float32", False), ((64, 32), "float32", True))


@pytest.mark.tvm
@pytest.mark.native
@pytest.mark.usefixtures("nvcc")
def test_unknown_architecture_is_a_measurement_error(tmp_path: Path, tiny_programs: list[str]) -> None:
    default = default_program(tiny_programs[1], "", _target("sm_13"))
    with pytest.raises(MeasurementError, match=r"nvcc: .*compute_13"):
        build_program(default.tvm_json, _target("sm_13"), str(tmp_path / "program.so"))
    assert not list(tmp_path.iterdir())


def test_missing_nvcc_is_reported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = configurations(("cuda:a100-pcie-40gb",))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="nvcc") as caught:
        write_job(["resnet18"], chosen, tmp_path / "job")
    assert "CUDA toolkit" in caught.value.hint
    assert not (tmp_path / "job").exists()


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _packed(cuda: bytes) -> bytes:
    """A library with one CUDA module, as TVM packs it."""
    tree = struct.pack("<QQQQ", 3, 0, 1, 1) + struct.pack("<QQ", 1, 1)
    body = tree + _sized(b"_lib") + _sized(b"cuda") + _sized(cuda)
    return _sized(body)


_FUNCTIONS = (
    struct.pack("<Q", 1)
    + _sized(b"main_kernel") * 2
    + struct.pack("<Q", 2)
    + b"\3@\1\0" * 2
    + struct.pack("<Q", 1)
    + _sized(b"blockIdx.x")
    + struct.pack("<Q", 2)
    + b"\0" * 8
)


def test_source_is_replaced_and_the_rest_is_unchanged() -> None:
    source = _sized(b"cuda") + _FUNCTIONS + _sized(b"void f() {}")
    seen: list[str] = []

    def compile_source(text: str) -> bytes:
        seen.append(text)
        return b"code"

    replaced = replace_code(_packed(source), "void f() {}", compile_source)
    assert replaced == _packed(_sized(b"cubin") + _FUNCTIONS + _sized(b"code"))
    assert seen == ["void f() {}"]


def test_machine_code_is_unchanged() -> None:
    blob = _packed(_sized(b"fatbin") + _FUNCTIONS + _sized(b"code"))
    assert replace_code(blob, "void f() {}", lambda _: b"never") == blob


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_unknown_format_is_refused(cut: int) -> None:
    blob = _packed(_sized(b"cuda") + _FUNCTIONS + _sized(b"void f() {}"))
    with pytest.raises(MeasurementError, match="unknown format"):
        replace_code(blob[:-cut], "void f() {}", lambda _: b"code")


ALIAS = """
@T.prim_func
def main(A: T.Buffer((8, 8), "float32"), B: T.Buffer((8, 8), "float32")):
    T.func_attr({"tirx.noalias": True})
    flat = T.decl_buffer((64,), "float32", data=B.data)
    for i in range(64):
        flat[i] = A[i // 8, i % 8] + T.float32(1)
"""


@pytest.mark.tvm
def test_last_argument_is_the_result_even_through_an_alias() -> None:
    tvm = pytest.importorskip("tvm")
    from tvm.script import tirx

    function = tvm.script.from_source(ALIAS, extra_vars={"T": tirx})
    assert argument_list(function) == (((8, 8), "float32", False), ((8, 8), "float32", True))
