"""``cdmpp eval`` and ``cdmpp data`` on small tables."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdmpp.data.load import load_table
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.train.evaluation.metrics import METRICS
from cdmpp.train.evaluation.tables import evaluate
from tests.cli.conftest import Run

pytestmark = pytest.mark.slow


@pytest.fixture
def gemm(tmp_path: Path) -> Path:
    """Table of four rows in the layout of the public GEMM table, one of them with an unknown device."""
    columns: dict[str, list[Any]] = {
        "op": ["linear"] * 4,
        "device": ["NVIDIA L40S", "NVIDIA B200", "NVIDIA L40S", "NVIDIA Foo"],
        "framework": ["vllm", "sglang", "trtllm", "vllm"],
        "dtype": ["bfloat16"] * 4,
        "m": [1, 64, 32768, 8],
        "n": [128, 4096, 65536, 8],
        "k": [256, 8192, 32, 8],
        "latency_us": [2.5, 11.0, 9000.0, 3.0],
    }
    pq.write_table(pa.table(columns), tmp_path / "gemm.parquet")
    return tmp_path / "gemm.parquet"


def test_json_equals_the_python_result(run: Run, gemm: Path, predictor: LatencyPredictor) -> None:
    result = run("eval", "--records", gemm, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report == evaluate(predictor, [load_table(gemm)])
    assert report["overall"]["n"] == 3
    assert {(g["source"], g["device"], g["op"], g["dtype"]): g["n"] for g in report["groups"]} == {
        ("aiconfigurator_gemm", "NVIDIA B200", "linear", "bfloat16"): 1,
        ("aiconfigurator_gemm", "NVIDIA L40S", "linear", "bfloat16"): 2,
    }
    where = {"source": "aiconfigurator_gemm", "device": "NVIDIA Foo", "op": "linear"}
    assert report["unsupported"] == [{**where, "reason": "unknown_device", "n": 1}]


def test_table_has_a_line_per_device_and_a_total(run: Run, gemm: Path) -> None:
    result = run("eval", "--records", gemm)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:5] == ["source", "device", "operator", "types", "n"]
    assert "NVIDIA B200" in lines[1] and "NVIDIA L40S" in lines[2] and " % " in lines[1]
    assert lines[3].startswith("all ")
    assert "unknown_device" in lines[-1] and "NVIDIA Foo" in lines[-1]


def test_several_files_and_selected_devices(run: Run, gemm: Path, tmp_path: Path) -> None:
    records = tmp_path / "records.parquet"
    assert run("data", "import", gemm, "--out", records).exit_code == 0
    single = json.loads(run("eval", "--records", records, "--devices", "l40s,NVIDIA B200", "--json").stdout)
    assert single["overall"]["n"] == 3 and single["unsupported"] == []
    files = ("--records", records, "--records", gemm)
    both = json.loads(run("eval", *files, "--devices", "l40s", "--json").stdout)
    assert both["overall"]["n"] == 4
    assert set(both["overall"]) == set(METRICS)


def test_short_device_name_is_its_commonest_board(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    program = '"linear:m=512,n=4096,k=1024,dtype=float16"'
    table.write_text(f"program,latency_us,device\n{program},12.5,h100-sxm\n{program},14.5,l40s\n")
    result = run("eval", "--records", table, "--devices", "h100", "--json")
    assert result.exit_code == 0, result.output
    assert [group["device"] for group in json.loads(result.stdout)["groups"]] == ["h100-sxm"]
    assert "note: h100 is read as h100-sxm" in result.stderr
    both = run("eval", "--records", table, "--devices", "NVIDIA L40S,h100-sxm", "--json")
    assert json.loads(both.stdout)["overall"]["n"] == 2 and both.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "foo"], "foo"),
        (["--records", "nowhere.parquet"], "nowhere.parquet"),
        (["--records", __file__], "known"),
        (["--model", "nowhere"], "model folder"),
    ],
)
def test_invalid_arguments_are_refused(run: Run, gemm: Path, arguments: list[str], message: str) -> None:
    result = run("eval", "--records", gemm, *arguments, "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr


def test_unknown_device_is_reported_before_any_table_is_evaluated(
    run: Run, gemm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("evaluated first")

    monkeypatch.setattr("cdmpp.train.evaluation.tables.evaluate", never)
    result = run("eval", "--records", gemm, "--devices", "l40s,fooo")
    assert result.exit_code == 1 and "fooo" in result.stderr
    assert "evaluated first" in run("eval", "--records", gemm, "--devices", "NVIDIA Foo").stderr


@pytest.mark.parametrize(("device", "message"), [("t4", "no row of t4 can"), ("NVIDIA Foo", "unknown_device 1")])
def test_empty_selection_is_an_error(run: Run, gemm: Path, device: str, message: str) -> None:
    result = run("eval", "--records", gemm, "--devices", device)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: no row") and message in result.stderr


@pytest.mark.parametrize(("device", "advice"), [("h100", "h100-sxm"), ("", "add a column device")])
def test_table_without_usable_devices_names_what_is_wrong(run: Run, tmp_path: Path, device: str, advice: str) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(f'program,latency_us,device\n"linear:m=512,n=4096,k=1024",12.5,{device}\n')
    assert advice in run("eval", "--records", table).stderr
    assert advice in run("data", "info", table).stdout


def test_missing_records_option_exits_with_code_2(run: Run) -> None:
    assert run("eval").exit_code == 2


def test_data_import_and_info_agree(run: Run, gemm: Path, tmp_path: Path) -> None:
    out = tmp_path / "records.parquet"
    imported = json.loads(run("data", "import", gemm, "--out", out, "--json").stdout)
    assert imported["rows"] == 4 and imported["unsupported"] == {"unknown_device": 1}
    info = json.loads(run("data", "info", out, "--json").stdout)
    assert info["fingerprint"] == imported["fingerprint"]
    text = run("data", "info", gemm)
    assert text.exit_code == 0 and "4 rows" in text.stdout and "unknown_device 1" in text.stdout
    assert f"wrote {out}" in run("data", "import", gemm, "--out", out).stdout


def test_dataset_folder_is_accepted_as_table(run: Run, gemm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my-cpu"
    folder.mkdir()
    assert run("eval", "--records", folder).exit_code == 1
    assert run("data", "import", gemm, "--out", folder / "records.parquet").exit_code == 0
    report = json.loads(run("eval", "--records", folder, "--json").stdout)
    assert report == json.loads(run("eval", "--records", gemm, "--json").stdout)
    (folder / "records.parquet").rename(folder / "collect.sqlite")
    for command in (("data", "info", folder), ("eval", "--records", folder)):
        result = run(*command)
        assert result.exit_code == 1 and "is not finished" in result.stderr
        assert f"cdmpp collect ... --out {folder}" in result.stderr


def test_invalid_data_paths_are_refused(run: Run, gemm: Path, tmp_path: Path) -> None:
    for arguments in (("info", tmp_path / "no"), ("import", gemm, "--out", tmp_path / "no" / "x.parquet")):
        result = run("data", *arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")


def shape_in(part: int, count: int) -> list[int]:
    """Sizes m of linear operators (n = k = 64) whose shape is in this part of the standard split."""
    from cdmpp.data.splits import program_parts

    sizes = list(range(1, 400))
    table = load_table(_gemm_table(Path(tempfile.mkdtemp()) / "all.parquet", sizes))
    parts = program_parts(table)[table.program_key]
    return [m for m, code in zip(sizes, parts.tolist(), strict=True) if code == part][:count]


def _gemm_table(path: Path, sizes: list[int]) -> Path:
    count = len(sizes)
    columns: dict[str, list[Any]] = {
        "op": ["linear"] * count,
        "device": ["NVIDIA L40S"] * count,
        "framework": ["vllm"] * count,
        "dtype": ["bfloat16"] * count,
        "m": sizes,
        "n": [64] * count,
        "k": [64] * count,
        "latency_us": [5.0] * count,
    }
    pq.write_table(pa.table(columns), path)
    return path


def test_the_report_counts_training_rows_and_split_leaves_them_out(run: Run, tmp_path: Path) -> None:
    trained, tested = shape_in(0, 3), shape_in(2, 2)
    table = _gemm_table(tmp_path / "gemm.parquet", trained + tested)
    result = run("eval", "--records", table, "--json")
    assert result.exit_code == 0, result.output
    parts = {"train": 3, "validation": 0, "test": 2, "trained_on": 3}
    assert json.loads(result.stdout)["parts"] == parts
    assert "trained on 3 of these 5 rows; 2 belong to the test part" in run("eval", "--records", table).stdout
    only = json.loads(run("eval", "--records", table, "--split", "test", "--json").stdout)
    assert only["overall"]["n"] == 2
    assert only["parts"] == {"train": 0, "validation": 0, "test": 2, "trained_on": 0}


def test_a_part_without_rows_is_an_error_that_names_it(run: Run, tmp_path: Path) -> None:
    table = _gemm_table(tmp_path / "gemm.parquet", shape_in(0, 2))
    result = run("eval", "--records", table, "--split", "validation")
    assert result.exit_code == 1
    assert "no row in the validation part" in result.stderr
