"""``cdmpp eval`` and ``cdmpp data`` on small tables."""

import json
import tempfile
from pathlib import Path

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
    rows = [
        {"device": "NVIDIA L40S", "framework": "vllm", "m": 1, "n": 128, "k": 256, "latency_us": 2.5},
        {"device": "NVIDIA B200", "framework": "sglang", "m": 64, "n": 4096, "k": 8192, "latency_us": 11.0},
        {"device": "NVIDIA L40S", "framework": "trtllm", "m": 32768, "n": 65536, "k": 32, "latency_us": 9000.0},
        {"device": "NVIDIA Foo", "framework": "vllm", "m": 8, "n": 8, "k": 8, "latency_us": 3.0},
    ]
    table = pa.Table.from_pylist([{"op": "linear", "dtype": "bfloat16", **row} for row in rows])
    pq.write_table(table, tmp_path / "gemm.parquet")
    return tmp_path / "gemm.parquet"


def test_json_equals_the_python_result(run: Run, gemm: Path, predictor: LatencyPredictor) -> None:
    result = run.ok("eval", "--records", gemm, "--json")
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
    lines = run.ok("eval", "--records", gemm).stdout.splitlines()
    assert lines[0].split()[:5] == ["source", "device", "operator", "types", "n"]
    assert "NVIDIA B200" in lines[1] and "NVIDIA L40S" in lines[2] and " % " in lines[1]
    assert lines[3].startswith("all ")
    assert "unknown_device" in lines[-1] and "NVIDIA Foo" in lines[-1]


def test_several_files_and_selected_devices(run: Run, gemm: Path, tmp_path: Path) -> None:
    records = tmp_path / "records.parquet"
    assert run("data", "import", gemm, "--out", records).exit_code == 0
    single = run.json("eval", "--records", records, "--devices", "l40s,NVIDIA B200")
    assert single["overall"]["n"] == 3 and single["unsupported"] == []
    files = ("--records", records, "--records", gemm)
    both = run.json("eval", *files, "--devices", "l40s")
    assert both["overall"]["n"] == 4
    assert set(both["overall"]) == set(METRICS)


def test_short_device_name_is_its_commonest_board(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    program = '"linear:m=512,n=4096,k=1024,dtype=float16"'
    table.write_text(f"program,latency_us,device\n{program},12.5,h100-sxm\n{program},14.5,l40s\n")
    result = run.ok("eval", "--records", table, "--devices", "h100", "--json")
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
    messages = run.refused("eval", "--records", gemm, *arguments, "--json")
    assert messages.startswith("error: ") and message in messages


def test_unknown_device_is_reported_before_any_table_is_evaluated(
    run: Run, gemm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("evaluated first")

    monkeypatch.setattr("cdmpp.train.evaluation.tables.evaluate", never)
    assert "fooo" in run.refused("eval", "--records", gemm, "--devices", "l40s,fooo")
    assert "evaluated first" in run("eval", "--records", gemm, "--devices", "NVIDIA Foo").stderr


@pytest.mark.parametrize(("device", "message"), [("t4", "no row of t4 can"), ("NVIDIA Foo", "unknown_device 1")])
def test_empty_selection_is_an_error(run: Run, gemm: Path, device: str, message: str) -> None:
    messages = run.refused("eval", "--records", gemm, "--devices", device)
    assert messages.startswith("error: no row") and message in messages


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
    imported = run.json("data", "import", gemm, "--out", out)
    assert imported["rows"] == 4 and imported["unsupported"] == {"unknown_device": 1}
    assert run.json("data", "info", out)["fingerprint"] == imported["fingerprint"]
    text = run.ok("data", "info", gemm)
    assert "4 rows" in text.stdout and "unknown_device 1" in text.stdout
    assert f"wrote {out}" in run("data", "import", gemm, "--out", out).stdout


def test_dataset_folder_is_accepted_as_table(run: Run, gemm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my-cpu"
    folder.mkdir()
    assert run("eval", "--records", folder).exit_code == 1
    assert run("data", "import", gemm, "--out", folder / "records.parquet").exit_code == 0
    assert run.json("eval", "--records", folder) == run.json("eval", "--records", gemm)
    (folder / "records.parquet").rename(folder / "collect.sqlite")
    for command in (("data", "info", folder), ("eval", "--records", folder)):
        result = run.refused(*command)
        assert "is not finished" in result
        assert f"cdmpp collect ... --out {folder}" in result


def test_invalid_data_paths_are_refused(run: Run, gemm: Path, tmp_path: Path) -> None:
    for arguments in (("info", tmp_path / "no"), ("import", gemm, "--out", tmp_path / "no" / "x.parquet")):
        assert run.refused("data", *arguments).startswith("error: ")


def shape_in(part: int, count: int) -> list[int]:
    """Sizes m of linear operators (n = k = 64) whose shape is in this part of the standard split."""
    from cdmpp.data.splits import program_parts

    sizes = list(range(1, 400))
    table = load_table(_gemm_table(Path(tempfile.mkdtemp()) / "all.parquet", sizes))
    parts = program_parts(table)[table.program_key]
    return [m for m, code in zip(sizes, parts.tolist(), strict=True) if code == part][:count]


def _gemm_table(path: Path, sizes: list[int]) -> Path:
    row = {"op": "linear", "device": "NVIDIA L40S", "framework": "vllm", "dtype": "bfloat16", "n": 64, "k": 64}
    pq.write_table(pa.Table.from_pylist([{**row, "m": m, "latency_us": 5.0} for m in sizes]), path)
    return path


def test_the_report_counts_training_rows_and_split_leaves_them_out(run: Run, tmp_path: Path) -> None:
    trained, tested = shape_in(0, 3), shape_in(2, 2)
    table = _gemm_table(tmp_path / "gemm.parquet", trained + tested)
    result = run.json("eval", "--records", table)
    parts = {"train": 3, "validation": 0, "test": 2, "trained_on": 3}
    assert result["parts"] == parts
    assert "trained on 3 of these 5 rows; 2 belong to the test part" in run("eval", "--records", table).stdout
    only = run.json("eval", "--records", table, "--split", "test")
    assert only["overall"]["n"] == 2
    assert only["parts"] == {"train": 0, "validation": 0, "test": 2, "trained_on": 0}


def test_a_part_without_rows_is_an_error_that_names_it(run: Run, tmp_path: Path) -> None:
    table = _gemm_table(tmp_path / "gemm.parquet", shape_in(0, 2))
    assert "no row in the validation part" in run.refused("eval", "--records", table, "--split", "validation")
