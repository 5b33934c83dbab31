"""``cdmpp adapt``: adaptation to a table of records, and use of the adapted model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdmpp.predict.predictor import LatencyPredictor
from tests.cli.conftest import Run
from tests.model.nn.synthetic import write_artifact

DEVICE = "h200"
ROWS = 60


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "base"
    write_artifact(path)
    return path


@pytest.fixture(scope="module")
def table(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Table in the layout of the public GEMM table.

    It has an H200 whose latencies are 1.5 times the predictions, one row without a size, and two rows of
    another device.
    """
    rng = np.random.default_rng(0)
    sizes = (2 ** rng.uniform(3, 12, (ROWS, 3))).astype(int)
    texts = [f"linear:m={m},n={n},k={k},dtype=bfloat16" for m, n, k in sizes.tolist()]
    predictions = LatencyPredictor.load(base).predict(texts, DEVICE, protocol="graph", framework="vllm")
    latency_us = [1.5e6 * (p.latency_s or 0) for p in predictions]
    columns: dict[str, list[Any]] = {
        "op": ["linear"] * (ROWS + 3),
        "device": ["NVIDIA H200"] * (ROWS + 1) + ["NVIDIA L40S"] * 2,
        "framework": ["vllm"] * (ROWS + 3),
        "dtype": ["bfloat16"] * (ROWS + 3),
        "m": [*sizes[:, 0].tolist(), None, 8, 8],
        "n": [*sizes[:, 1].tolist(), 8, 8, 8],
        "k": [*sizes[:, 2].tolist(), 8, 8, 16],
        "latency_us": [*latency_us, 3.0, 3.0, 3.0],
    }
    path = tmp_path_factory.mktemp("data") / "gemm.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def adapt(run: Run, base: Path, table: Path, out: Path, *more: object) -> Any:
    return run("adapt", "--model", base, "--records", table, "--out", out, *more)


def test_native_selects_the_records_of_this_machine(
    run: Run, base: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdmpp.devices.host.this_cpu_name", lambda threads: DEVICE)
    result = adapt(run, base, table, tmp_path / "mine", "--device", "native@1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["device"] == DEVICE and json.loads(result.stdout)["programs"] == ROWS
    evaluated = run("eval", "--model", base, "--records", table, "--devices", "native@1", "--json")
    assert [entry["device"] for entry in json.loads(evaluated.stdout)["groups"]] == ["NVIDIA H200"]


def test_adaptation_to_k_records_as_json(run: Run, base: Path, table: Path, tmp_path: Path) -> None:
    chosen = ("--device", DEVICE, "--k", 15, "--seed", 1, "--json")
    result = adapt(run, base, table, tmp_path / "mine", *chosen)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["k"] == 15 and len(set(report["selected"])) == 15
    assert max(report["selected"]) < ROWS
    assert report["before"]["overall"]["n"] == report["after"]["overall"]["n"] == ROWS - 15
    assert report["after"]["overall"]["mape"] < 0.5 * report["before"]["overall"]["mape"]
    assert report["unsupported"] == {"missing_size": 1}
    assert (
        adapt(run, base, table, tmp_path / "again", *chosen).stdout.split('"seconds"')[0]
        == (result.stdout.split('"seconds"')[0])
    )
    # Other commands accept the adapted model.
    evaluated = run("eval", "--records", table, "--model", tmp_path / "mine", "--devices", DEVICE, "--json")
    assert json.loads(evaluated.stdout)["overall"]["mape"] < 0.5 * report["before"]["overall"]["mape"]
    predicted = run("predict", "linear:m=64,n=64,k=64", "--model", tmp_path / "mine", "--device", DEVICE)
    assert report["model_id"] in predicted.stdout


def test_adaptation_to_all_records_as_text(run: Run, base: Path, table: Path, tmp_path: Path) -> None:
    rows = pq.read_table(table).slice(0, ROWS + 1)
    pq.write_table(rows, tmp_path / "one.parquet")
    result = adapt(run, base, tmp_path / "one.parquet", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    assert f"{ROWS} programs of {DEVICE} (gemm {ROWS})" in result.stdout
    assert "not used: 1 rows, missing_size" in result.stdout and "written to" in result.stdout
    assert (tmp_path / "mine" / "manifest.json").is_file()


def test_invalid_arguments_are_refused_in_one_line(run: Run, base: Path, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    for more, message in (
        ((), "the records are of 2 devices: h200 (61), l40s (2)"),
        (("--device", "a40"), "no record is of a40"),
        (("--device", "nonsense"), "nonsense"),
        (("--device", DEVICE, "--k", 500), "k = 500, but 60 records can be used"),
        (("--device", tmp_path / "none.toml"), "none.toml: cannot be read"),
    ):
        result = adapt(run, base, table, out, *more)
        assert result.exit_code == 1, result.output
        assert message in result.stderr and "Traceback" not in result.output
        assert not out.exists()
    result = adapt(run, base, table, base, "--device", DEVICE)
    assert result.exit_code == 1 and "base model itself" in result.stderr
    assert run("adapt", "--records", tmp_path / "none.csv", "--out", out).exit_code == 1


def test_warnings_go_to_stderr(run: Run, base: Path, table: Path, tmp_path: Path) -> None:
    result = adapt(run, base, table, tmp_path / "mine", "--device", DEVICE, "--k", 1, "--json")
    assert [w["code"] for w in json.loads(result.stdout)["warnings"]] == ["few_of_family", "not_checked"]
    assert "warning: not_checked:" in result.stderr


def test_base_is_kept_where_measurements_show_no_gain(run: Run, base: Path, tmp_path: Path) -> None:
    texts = [f"linear:m={64 * i},n=512,k=1024" for i in range(1, 5)]
    predictions = LatencyPredictor.load(base).predict(texts, DEVICE)
    # Measured faster and slower in turn: the measurements of one program mislead about the next.
    swing = (1.4, 0.7, 1.4, 0.7)
    lines = [f'"{text}",{1e6 * by * (p.latency_s or 0)}' for text, p, by in zip(texts, predictions, swing, strict=True)]
    path = tmp_path / "records.csv"
    path.write_text("program,latency_us\n" + "\n".join(lines) + "\n")
    result = adapt(run, base, path, tmp_path / "mine", "--device", DEVICE, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["weight"] == 0 and "no_gain" in [w["code"] for w in report["warnings"]]
    assert report["cross_validated"]["after"] == report["cross_validated"]["before"]
    answers = [
        run("predict", "linear:m=96,n=512,k=1024", "--model", model, "--device", DEVICE, "--json")
        for model in (base, tmp_path / "mine")
    ]
    before, after = (json.loads(answer.stdout) for answer in answers)
    assert before["results"][0].pop("model_id") != after["results"][0].pop("model_id")
    assert after["results"] == before["results"]
    text = adapt(run, base, path, tmp_path / "mine", "--device", DEVICE)
    assert "the base model's predictions are kept" in text.stdout and " after" not in text.stdout
