"""A MetaSchedule database, written by TVM's own classes, read as programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.load import load_programs

pytestmark = pytest.mark.tvm


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


def test_folders_that_are_no_database(tmp_path: Path) -> None:
    from cdmpp.programs.frontends.metaschedule_db import metaschedule_graph

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


def test_damaged_records(tmp_path: Path) -> None:
    write_database(tmp_path, [4])
    path = tmp_path / "database_tuning_record.json"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(InvalidProgramError):
        load_programs(tmp_path)


def test_a_trace_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    write_database(tmp_path, [4, 8])
    path = tmp_path / "database_tuning_record.json"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0].replace('["c",', '["nowhere",'), *lines[1:]]) + "\n")
    graph = load_programs(tmp_path)
    assert graph.launches == 1 and graph.alternatives == {"task0": (0,)}
    (entry,) = graph.unsupported
    assert entry.operator == "trace" and "cannot be applied" in entry.reason
