"""One function for everything that a user may name; MetaSchedule databases written by TVM's own classes."""

import sys
from pathlib import Path

import pytest

from cdmpp.errors import InvalidProgramError, UnsupportedOperatorError
from cdmpp.programs.frontends.graph import ProgramGraph
from cdmpp.programs.frontends.load import load_programs
from cdmpp.programs.program import TensorProgram
from tests.programs.frontends.onnx_models import model, weight
from tests.programs.frontends.test_tvmscript import COPY

TEXT = "linear:m=4,n=6,k=8,dtype=float16"


def test_operator_text() -> None:
    graph = load_programs(TEXT)
    assert graph.programs[0].hash == TensorProgram.from_operator(TEXT).hash
    assert graph.programs[0].backend == "library" and graph.counts == (1,) and graph.edges == ()
    assert load_programs(TEXT, backend="tvm").programs[0].backend == "tvm"


def test_onnx_file(tmp_path: Path) -> None:
    from onnx import helper

    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = tmp_path / "net.ONNX"
    path.write_bytes(model([node], {"x": ["n", 8]}, ["y"], {"w": weight(8, 6)}))
    graph = load_programs(str(path), dims={"n": 4})
    assert graph.programs[0].hash == TensorProgram.from_operator("linear:m=4,n=6,k=8").hash
    assert graph.source == "net.ONNX"


@pytest.mark.tvm
def test_tvmscript_and_json_files(tmp_path: Path) -> None:
    import tvm

    (tmp_path / "p.py").write_text(COPY)
    script = load_programs(tmp_path / "p.py")
    assert script.programs[0].name == "f"
    text = script.programs[0].tvm_json or ""
    (tmp_path / "p.json").write_text(text)
    assert load_programs(tmp_path / "p.json").programs[0].hash == script.programs[0].hash
    function = tvm.ir.load_json(text)
    other = tvm.ir.load_json(load_programs(tmp_path / "p.py").programs[0].tvm_json)
    (tmp_path / "two.json").write_text(tvm.ir.save_json(tvm.IRModule({"f": function, "g": other})))
    both = load_programs(tmp_path / "two.json")
    assert both.counts == (2,) and len(both.nodes) == 2


@pytest.mark.parametrize("name", ["nothing", "none.onnx", "a:b", "x" * 5000, "\x00", "", "linear"])
def test_text_that_is_neither_file_nor_operator_is_refused(name: str) -> None:
    with pytest.raises(InvalidProgramError) as caught:
        load_programs(name)
    assert "linear:m=512" in caught.value.hint and ".onnx" in caught.value.hint


def test_operator_texts_with_mistakes_are_refused() -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        load_programs("linaer:m=4,n=6,k=8")
    assert "linear" in caught.value.hint
    with pytest.raises(InvalidProgramError):
        load_programs("linear:m=4")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", b"hello"),
        ("a.json", b"{}"),
        ("a.json", b""),
        ("a.json", b"\xff\xfe"),
        ("a.json", b"[1"),
        ("a.py", b"import os"),
        ("a.py", b""),
        ("a.py", b"\xff"),
        ("a.onnx", b""),
        ("a.onnx", b"x"),
    ],
)
def test_files_that_are_no_programs(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidProgramError):
        load_programs(tmp_path / name)


def test_folders_and_options(tmp_path: Path) -> None:
    with pytest.raises(InvalidProgramError, match="database_workload"):
        load_programs(tmp_path)
    with pytest.raises(InvalidProgramError, match="backend"):
        load_programs(TEXT, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(InvalidProgramError, match="dimensions"):
        load_programs(TEXT, dims={"n": 3})


def test_a_list_of_programs_counts_equal_ones() -> None:
    other = TensorProgram.from_operator("relu:rows=2,cols=3")
    program = TensorProgram.from_operator(TEXT)
    graph = ProgramGraph.of([program, other, program])
    assert graph.counts == (2, 1) and graph.launches == 3
    assert len({n.id for n in graph.nodes}) == 3


def write_database(folder: Path, tiles: list[int], size: int = 64) -> list[str]:
    """Add records of a matmul split by each tile; returns the scheduled modules' hashes."""
    from tvm import te
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord
    from tvm.target import Target

    from cdmpp.programs.frontends.tir import programs_from_tir

    a, b = (te.placeholder((size, size), name=n) for n in "ab")
    r = te.reduce_axis((0, size), name="r")
    c = te.compute((size, size), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="c")
    module = IRModule({"main": te.create_prim_func([a, b, c])})
    database = JSONDatabase(work_dir=str(folder))
    workload = database.commit_workload(module)
    hashes = []
    for tile in tiles:
        schedule = Schedule(module)
        i, j, _ = schedule.get_loops(schedule.get_sblock("c"))
        schedule.parallel(i)
        schedule.split(j, [None, tile])
        target = Target({"kind": "llvm", "num-cores": 2})
        info = ArgInfo.from_prim_func(module["main"])
        database.commit_tuning_record(TuningRecord(schedule.trace, workload, [1e-3 / tile], target, info))
        hashes.append(programs_from_tir(schedule.mod)[0].hash)
    return hashes


@pytest.mark.tvm
def test_records_become_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = write_database(tmp_path, [4, 8, 8])
    monkeypatch.delitem(sys.modules, "tvm.s_tir.tensor_intrin", raising=False)  # of another test
    graph = load_programs(tmp_path)
    assert graph.unsupported == () and graph.edges == ()
    assert {p.hash for p in graph.programs} == set(hashes)
    assert sorted(graph.counts) == [1, 2] and len(graph.nodes) == 3
    assert {p.backend for p in graph.programs} == {"tvm"}
    assert graph.alternatives == {"task0": (0, 1)}
    assert [p.name for p in graph.programs] == ["task0/record0", "task0/record1"]
    assert "tvm.s_tir.tensor_intrin" not in sys.modules


@pytest.mark.tvm
def test_folders_that_are_no_database(tmp_path: Path) -> None:
    from cdmpp.programs.frontends.metaschedule import metaschedule_graph

    with pytest.raises(InvalidProgramError, match="database_workload"):
        metaschedule_graph(tmp_path)
    (tmp_path / "database_workload.json").write_text("")
    with pytest.raises(InvalidProgramError, match="database_tuning_record"):
        load_programs(tmp_path)
    assert not (tmp_path / "database_tuning_record.json").exists()
    (tmp_path / "database_tuning_record.json").write_text("")
    with pytest.raises(InvalidProgramError, match="no tuning records"):
        load_programs(tmp_path)
    (tmp_path / "database_workload.json").write_text("[1, 2")
    with pytest.raises(InvalidProgramError) as caught:
        load_programs(tmp_path)
    assert caught.value.hint


@pytest.mark.tvm
def test_damaged_records(tmp_path: Path) -> None:
    write_database(tmp_path, [4])
    path = tmp_path / "database_tuning_record.json"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(InvalidProgramError):
        load_programs(tmp_path)


@pytest.mark.tvm
def test_a_trace_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    write_database(tmp_path, [4, 8])
    path = tmp_path / "database_tuning_record.json"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0].replace('["c",', '["nowhere",'), *lines[1:]]) + "\n")
    graph = load_programs(tmp_path)
    assert graph.launches == 1 and graph.alternatives == {"task0": (0,)}
    (entry,) = graph.unsupported
    assert entry.operator == "trace" and "cannot be applied" in entry.reason
