"""Logs of Ansor and MetaSchedule, and tables of them, become measurements of scheduled programs."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from cdmpp.data.importers import IMPORTERS, SCHEDULE_IMPORTERS, ansor, ansor_program, metaschedule_program
from cdmpp.data.importers.built import ProgramCache
from cdmpp.data.load import detect, import_tables, load_public, load_table
from cdmpp.data.summary import fingerprint, summarise
from cdmpp.devices import lookup
from cdmpp.errors import DataError, InvalidProgramError
from cdmpp.features import launch_summary
from cdmpp.programs.frontends.tir import program_from_tvmscript
from cdmpp.programs.frontends.workload_script import tvmscript_of_json

HERE = Path(__file__).parent
#: One row of each workload function and sketch.
ROWS: list[dict[str, Any]] = json.loads((HERE / "ansor_lowered.json").read_text())
#: A folder as MetaSchedule of TVM before 0.27 wrote it: one workload, seven records.
METASCHEDULE = HERE / "metaschedule"
RELU = '["relu_layer", 64]'


def relu_steps(threads: int) -> str:
    """Steps of a vector of 64 elements with so many threads a block."""
    return json.dumps([["SP", 1, 0, 64, [threads], 1], ["AN", 1, 0, 5], ["AN", 1, 1, 6]])


def ansor_columns() -> dict[str, list[Any]]:
    """Relu on two devices: schedules of 1 to 64 threads, the last one failed."""
    threads = [1, 2, 4, 8, 16, 32, 64]
    return {
        "device": ["Tesla V100-PCIE-16GB"] * 7 + ["NVIDIA GeForce RTX 3080"] * 7,
        "workload": [RELU] * 14,
        "epilogue": [""] * 14,
        "steps": [relu_steps(t) for t in threads] * 2,
        "latency_us": [*(64.0 / t + 4 for t in threads[:-1]), None, *(32.0 / t + 2 for t in threads[:-1]), None],
        "error_no": ([0] * 6 + [4]) * 2,
    }


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CDMPP_CACHE", str(folder))
    return folder


def ansor_log(path: Path, records: list[tuple[str, Any, list[float], int]]) -> Path:
    """JSON lines as TVM's auto_scheduler writes them."""
    lines = [
        {
            "i": [[key, "cuda -keys=cuda,gpu", [-1, 16], "", 0, []], [[], steps]],
            "r": [costs, error, 1.5, 1],
            "v": "v0.6",
        }
        for key, steps, costs, error in records
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_tables_of_tuners_are_recognised(save, columns_of) -> None:
    named = {"ansor": {"device", "workload", "steps"}, "metaschedule": {"device", "workload", "trace"}}
    for name, columns in named.items():
        assert [i.name for i in (*IMPORTERS, *SCHEDULE_IMPORTERS) if i.matches(columns)] == [name]
    assert getattr(detect(columns_of("vidur")), "name", "") == "vidur"


def test_rows_of_ansor_become_scheduled_programs(save) -> None:
    table = load_table(save(ansor_columns()))
    assert table.program_key.tolist() == [*range(7), *range(7)]
    assert table.device.array().tolist() == ["v100-pcie-16gb"] * 7 + ["rtx-3080"] * 7
    assert table.failure is not None and table.failure.array().tolist() == (
        ["run-time error" if i == 6 else "" for i in range(7)] * 2
    )
    assert table.tvm.tasks == (RELU,) * 7
    assert (table.op.used(), table.backend.used(), table.source.used()) == (("relu_layer",), ("tvm",), ("ansor",))
    assert table.latency_s[:2].tolist() == pytest.approx([68e-6, 36e-6])
    assert np.flatnonzero(table.excluded.is_("failed")).tolist() == [6, 13]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{json.loads(row['workload'])[0]} {row['epilogue']}".strip())
def test_every_sketch_is_imported_with_five_columns(save, row: dict[str, Any]) -> None:
    columns = {name: [row[name]] for name in ("workload", "epilogue")}
    table = load_table(save({**columns, "device": ["k"], "steps": [json.dumps(row["steps"])], "latency_us": [1.0]}))
    program = ansor_program(row["workload"], row["steps"], epilogue=row["epilogue"])
    assert table.program_hashes == (program.hash,)
    assert table.tvm.tasks == (f"{row['workload']} {row['epilogue']}".strip(),)


def test_epilogue_has_to_agree_with_the_steps() -> None:
    fused = next(row for row in ROWS if row["epilogue"] == "add_relu")
    with pytest.raises(InvalidProgramError, match="they are of a result with an epilogue"):
        ansor_program(fused["workload"], fused["steps"])
    tiled = next(row for row in ROWS if any(step[0] == "CHW" for step in row["steps"]))
    with pytest.raises(InvalidProgramError, match="they are of a result without an epilogue"):
        ansor_program(tiled["workload"], tiled["steps"], epilogue="add")


def test_log_of_ansor_becomes_records_with_reasons(tmp_path) -> None:
    fused = next(row for row in ROWS if row["epilogue"] == "add")
    hashed = '["0d4a1d2d94f2d1bc4ed25a1d3b2f8b36", 1, 224]'
    log = ansor_log(
        tmp_path / "search.json",
        [
            (fused["workload"], fused["steps"], [2e-5, 4e-5], 0),
            (fused["workload"], fused["steps"][:-1], [1e10], 7),
            (hashed, [], [1e-5], 0),
            ('["softmax_layer", 8]', [], [1e-5], 0),
            (fused["workload"], [["XX", 1]], [1e-5], 0),
        ],
    )
    with log.open("a") as file:
        file.write('{"i": [["cut off\n')
    out = tmp_path / "records.parquet"
    table = import_tables([log, log], out, device=lookup("v100-pcie-16gb"), epilogue="add")
    again = load_table(out)
    assert fingerprint(again) == fingerprint(table)
    assert (len(table), table.n_programs) == (12, 2)
    assert table.latency_s[0] == pytest.approx(3e-5)
    assert table.failure is not None and table.failure[1] == "run time-out"
    assert set(table.device.used()) == set(table.device_name.used()) == {"v100-pcie-16gb"}
    summary = summarise(again)
    assert summary["unsupported"] == {"unknown_workload": 6, "inexpressible_schedule": 2}
    refused = " | ".join(summary["inexpressible"])
    parts = (
        "hash of a graph, as in TenSet",
        "'softmax_layer': register it with --workloads",
        "step XX",
        "not a record",
    )
    assert all(part in refused for part in parts)


def test_log_without_a_device_has_rows_of_an_unknown_device(tmp_path) -> None:
    log = ansor_log(tmp_path / "search.json", [(RELU, json.loads(relu_steps(8)), [1e-5], 0)])
    assert load_table(log).unsupported.array().tolist() == ["unknown_device"]


def test_registered_workload_functions_are_known(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ansor, "WORKLOADS", dict(ansor.WORKLOADS))
    monkeypatch.setattr(ansor, "_FILES", {})
    file = tmp_path / "workloads.py"
    body = "def double(n):\n    a = te.placeholder((n,))\n    return [a, te.compute((n,), lambda i: a[i] * {})]\n"
    log = ansor_log(tmp_path / "search.json", [('["double", 64]', json.loads(relu_steps(8)), [1e-5], 0)])
    assert load_table(log).unsupported.used() == ("unknown_workload",)
    hashes = []
    for factor in (2, 3):
        file.write_text("from tvm import te\n" + body.format(factor))
        assert ansor.register_workloads(file) == ["double"]
        hashes += load_table(log).program_hashes
    assert len(set(hashes)) == 2  # the cache is of the file's content, too
    file.write_text("1 / 0")
    with pytest.raises(DataError, match="ZeroDivisionError"):
        ansor.register_workloads(file)
    file.write_text("x = 1")
    with pytest.raises(DataError, match="has no function"):
        ansor.register_workloads(file)


def test_few_schedules_of_each_task_and_device_are_kept(save) -> None:
    path = save(ansor_columns())
    few = load_table(path, per_task=3)
    rows = few.source_row.reshape(2, 3)
    assert {4, 5} <= set(rows[0]) and {11, 12} <= set(rows[1])  # the fastest that ran
    assert (rows[1] - 7 == rows[0]).all()  # the third by a hash, on both devices
    assert few.n_programs == 3
    assert len(load_table(path, per_task=100)) == 12
    with pytest.raises(DataError, match="is no tuning log"):
        load_table(save({"program": ["relu:rows=8,cols=8"], "latency_us": [1.0]}, "programs.csv"), per_task=3)


def test_public_tables_are_thinned_by_task(save, tmp_path) -> None:
    save(ansor_columns(), "sched_ansor.parquet")
    assert len(load_public(tmp_path, ["ansor"], per_task=2)) == 4


def test_programs_are_built_once(save, monkeypatch, cache: Path) -> None:
    path = save(ansor_columns())
    first = load_table(path)
    monkeypatch.setattr(ansor, "ansor_program", None)
    monkeypatch.setattr("cdmpp.data.importers.tuning_logs.ansor_program", None)
    assert fingerprint(load_table(path)) == fingerprint(first)
    for file in (cache / "schedules").iterdir():
        file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(TypeError):  # a damaged file counts as empty: the programs are built again
        load_table(path)


def test_cache_that_cannot_be_written_is_no_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    cache = ProgramCache("w", lambda steps: ansor_program(RELU, steps), tmp_path / "file")
    assert cache.get(relu_steps(8)).hash == ansor_program(RELU, relu_steps(8)).hash
    cache.write()


# -- MetaSchedule -------------------------------------------------------------------------------------------------
def records() -> list[Any]:
    return [json.loads(line) for line in (METASCHEDULE / "database_tuning_record.json").read_text().splitlines()]


def older_json() -> str:
    encoded = json.loads((METASCHEDULE / "database_workload.json").read_text())[1]
    return base64.b64decode(encoded)[8:].decode()


def test_folder_of_older_metaschedule_becomes_measurements() -> None:
    table = load_table(METASCHEDULE)
    assert table.program_key.tolist() == [0, 1, 0, 2, -1, -1, -1]
    assert table.latency_s[0] == pytest.approx(1.3e-5)
    assert table.failure is not None and table.failure.array().tolist() == ["", "", "unknown error", *[""] * 4]
    assert table.provenance["inexpressible"].array().tolist()[4:] == [
        "not a trace: decision [4, 2] of instruction 99 ",
        "not a trace: SampleCategorical has no decision",
        "no such workload",
    ]
    assert len(set(table.tvm.tasks)) == 1
    launch = launch_summary(metaschedule_program(older_json(), records()[0][1][0]))[0]
    assert (launch["blocks"], launch["threads"], launch["main_store_trips"]) == (16, 8, 8)


def test_workload_of_older_json_equals_that_of_todays() -> None:
    from tvm import ir

    from cdmpp.programs.frontends.tir import module_from_tvmscript

    script = tvmscript_of_json(older_json())
    today = str(ir.save_json(module_from_tvmscript(script)))
    programs = {metaschedule_program(text, "").hash for text in (script, today, older_json())}
    assert programs == {program_from_tvmscript(script).hash}


def test_table_of_metaschedule_reads_the_workloads_beside_it(save) -> None:
    trace = json.dumps(records()[1][1][0])
    columns = {"device": ["a100-pcie-40gb"], "workload": [3], "trace": [trace], "latency_us": [9.0]}
    path = save(columns, "search.parquet")
    with pytest.raises(DataError, match="no search_workloads"):
        load_table(path)
    script = tvmscript_of_json(older_json())
    save({"workload": [3], "tvmscript": [script]}, "search_workloads.parquet")
    beside, within = load_table(path), load_table(save({**columns, "tvmscript": [script]}, "whole.parquet"))
    part = load_table(save(columns, "search_part.parquet"))
    assert (
        part.program_hashes
        == beside.program_hashes
        == within.program_hashes
        == (load_table(METASCHEDULE).program_hashes[1],)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[1].append([0, [1]]), "decision"),
        (lambda t: t[1][0].__setitem__(1, [8, 0]), "decision"),
        (lambda t: t[1].clear(), "SamplePerfectTile has no decision"),
        (lambda t: t[0][3][3].__setitem__(0, {}), "arguments of GetLoops"),
        (lambda t: t[0][20][1].__setitem__(0, None), "arguments of Annotate"),
        (lambda t: t[0].__delitem__(1), "decision"),
        (lambda t: t[0][0].__setitem__(0, "Nope"), "cannot be applied"),
        (lambda t: t.pop(), "not a trace"),
    ],
)
def test_damaged_traces_are_refused(change, message: str) -> None:
    trace = records()[0][1][0]
    change(trace)
    with pytest.raises(InvalidProgramError, match=message):
        metaschedule_program(older_json(), trace)


def test_damaged_workloads_are_refused() -> None:
    document = json.loads(older_json())
    kinds = [node["type_key"] for node in document["nodes"]]
    add = kinds.index("tir.Sub")
    for index, attributes in (
        (add, {"a": str(add)}),
        (kinds.index("tir.For"), {"kind": "2"}),
        (add, {"a": "10000000"}),
    ):
        damaged = json.loads(older_json())
        damaged["nodes"][index]["attrs"] |= attributes
        with pytest.raises(InvalidProgramError, match="the workload's TVM JSON cannot be read"):
            tvmscript_of_json(json.dumps(damaged))
