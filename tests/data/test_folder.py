"""Tables on disk: dataset folders, imported files, and the public tables, each missing one named with its source."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cdmpp.cli.main import app
from cdmpp.data.folder import records_file, repeats_file
from cdmpp.data.importers import IMPORTERS
from cdmpp.data.load import (
    ENVIRONMENT,
    find_public_tables,
    import_table,
    list_public_tables,
    load_public,
    load_table,
    public_data_dir,
)
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.data.summary import count_duplicates, fingerprint, info
from cdmpp.errors import DataError
from tests.data.test_device_specs import cpu

ONE, TWO = cpu("cpu-1t"), cpu("cpu-2t", compute_units=2, peak_flops_fp32=4 * 16 * 2.6e9)


def schedule(number: int, device=ONE, latency_s: float | None = 1e-3, **changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "program": json.dumps({"nodes": [number]}),
        "program_kind": "tvm_json",
        "program_hash": f"{number:032x}",
        "device": device.name,
        "device_spec": device,
        "backend": "tvm",
        "latency_s": latency_s,
        "task": f"task{number // 10}",
        "provenance": {"networks": "vgg11;resnet18" if number < 10 else "vgg11"},
    }
    return Measurement(**(fields | changes))


def records() -> list[Measurement]:
    return [
        schedule(1),
        schedule(1, TWO, 0.6e-3),
        schedule(2, latency_s=2e-3, excluded_reason="unstable"),
        schedule(2, TWO, None, failure="stopped after 10 s"),
        schedule(11, latency_s=4e-3),
        schedule(1, latency_s=1.1e-3),  # measured before: a duplicate
        schedule(12, latency_s=None, failure="does not compile"),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "my-cpu"
    place.mkdir()
    write_records(from_measurements(records()), place / "records.parquet")
    again = [
        schedule(1, latency_s=1.2e-3),
        schedule(1, TWO, 0.6e-3),
        schedule(2, latency_s=1e-3),
        schedule(11, latency_s=None, failure="crashed"),
        schedule(99, latency_s=1.0),  # never measured before: no pair
    ]
    write_records(from_measurements(again), place / "repeats.parquet")
    return place


def test_counts(folder: Path) -> None:
    summary = json.loads(json.dumps(info(folder), allow_nan=False))
    wanted = {
        "rows": 7,
        "records": 5,
        "programs": 4,
        "tasks": 2,
        "networks": ["resnet18", "vgg11"],
        "devices": ["cpu-1t", "cpu-2t"],
        "failed": 2,
        "flagged": 1,
        "duplicates": 1,
        "repeats": 4,
    }
    assert {name: summary[name] for name in wanted} == wanted
    assert {name: type(summary[name]) for name in ("records", "failed", "duplicates")} == dict.fromkeys(
        ("records", "failed", "duplicates"), int
    )
    # |1.0 - 1.2| / 1.1, |0.6 - 0.6| / 0.6, |2 - 1| / 1.5: the first record of a program is the one compared.
    assert summary["noise_floor"] == pytest.approx(0.2 / 1.1)
    by_device = summary["noise_floor_by_device"]
    assert by_device["cpu-2t"] == {"n": 1, "median": 0.0, "p90": 0.0}
    pairs = [0.2 / 1.1, 1 / 1.5]
    assert by_device["cpu-1t"]["n"] == 2
    assert by_device["cpu-1t"]["median"] == pytest.approx(np.mean(pairs))
    assert by_device["cpu-1t"]["p90"] == pytest.approx(pairs[0] + 0.9 * (pairs[1] - pairs[0]))


def test_a_folder_is_read_as_its_file(folder: Path, tmp_path: Path) -> None:
    table = load_table(folder)
    assert fingerprint(table) == fingerprint(load_table(folder / "records.parquet"))
    assert repeats_file(folder) == folder / "repeats.parquet"
    assert import_table(folder, tmp_path / "copy.parquet").n_programs == 4
    # Of the file alone the repeats are not known.
    alone = info(folder / "records.parquet")
    assert (alone["records"], alone["noise_floor"], alone["repeats"]) == (5, None, 0)
    (folder / "repeats.parquet").unlink()
    assert info(folder)["noise_floor"] is None
    with pytest.raises(DataError, match="would be lost"):
        import_table(folder, folder / "records.parquet")


def test_rows_without_a_program_are_no_duplicates() -> None:
    rows = [Measurement("", "operator", "t4", 1e-3) for _ in range(3)]
    assert count_duplicates(from_measurements(rows)) == 0
    softmax = "softmax:rows=8,cols=8"
    rows = [Measurement(softmax, "operator", "t4", 1e-3, framework=f) for f in ("", "vllm", "")]
    assert count_duplicates(from_measurements(rows)) == 1


def test_unfinished_and_other_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"without records\.parquet"):
        records_file(tmp_path)
    sqlite3.connect(tmp_path / "collect.sqlite").execute("CREATE TABLE meta (key TEXT)")
    with pytest.raises(DataError, match="is not finished") as caught:
        load_table(tmp_path)
    assert f"cdmpp collect ... --out {tmp_path}" in caught.value.hint
    with pytest.raises(DataError, match="cannot read"):
        load_table(tmp_path / "nowhere")


def test_the_command_prints_the_summary(folder: Path) -> None:
    result = CliRunner().invoke(app, ["data", "info", str(folder)])
    assert result.exit_code == 0, result.output
    assert "5 records; 1 flagged, 1 duplicates, 2 failed; 2 tasks" in result.output
    assert "networks (2): resnet18, vgg11" in result.output
    assert "noise floor on cpu-2t: median 0.0 %" in result.output
    result = CliRunner().invoke(app, ["data", "info", str(folder), "--json"])
    assert json.loads(result.output)["records"] == 5


def test_merged_folders_have_the_records_and_second_measurements_of_all(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other-cpu"
    other.mkdir()
    three = cpu("cpu-3t", compute_units=3, peak_flops_fp32=6 * 16 * 2.6e9)
    write_records(from_measurements([schedule(1, three), schedule(21, three)]), other / "records.parquet")
    out = tmp_path / "both"
    result = CliRunner().invoke(app, ["data", "merge", str(folder), str(other), "--out", str(out)])
    assert result.exit_code == 0, result.output
    merged, parts = info(out), [info(folder), info(other)]
    assert merged["records"] == sum(part["records"] for part in parts) == 7
    assert merged["programs"] == 5  # program 1 of both is stored once
    assert merged["noise_floor_by_device"] == parts[0]["noise_floor_by_device"]
    assert (out / "README.md").is_file()
    result = CliRunner().invoke(app, ["data", "merge", str(folder), "--out", str(out)])
    assert result.exit_code == 1 and "not empty" in result.output


def test_a_table_is_not_overwritten_by_its_own_records(tmp_path: Path) -> None:
    path = tmp_path / "gemm.parquet"
    columns = {"op": ["linear"], "device": ["Tesla T4"], "framework": ["vllm"], "dtype": ["bfloat16"]}
    pq.write_table(pa.table({**columns, "m": [1], "n": [2], "k": [3], "latency_us": [4.0]}), path)
    before = path.read_bytes()
    with pytest.raises(DataError, match="the table itself"):
        import_table(path, path)
    assert path.read_bytes() == before
    assert len(import_table(path, tmp_path / "records.parquet")) == 1


@pytest.fixture
def public_folder(columns_of, save, tmp_path):
    for importer in IMPORTERS:
        save(columns_of(importer.name), importer.file_name)
    save({"device": ["x"], "step_time_ms": [1.0]}, "e2e_other.csv.gz")
    (tmp_path / "README.md").write_text("no table")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    return tmp_path


def test_finds_every_table_and_passes_over_the_rest(public_folder, monkeypatch):
    assert {source: t.path.name for t in list_public_tables(public_folder) for source in t.sources} == {
        i.name: i.file_name for i in IMPORTERS
    }
    monkeypatch.setenv(ENVIRONMENT, str(public_folder))
    assert len(find_public_tables()) == len(IMPORTERS)
    table = load_public(sources=["vidur", "miopen"])
    assert sorted(table.source.used()) == ["miopen", "vidur"]


def test_missing_table_is_named_with_its_source(public_folder):
    (public_folder / "ops_vidur_fp16.parquet").unlink()
    with pytest.raises(DataError) as caught:
        find_public_tables(public_folder)
    assert "ops_vidur_fp16.parquet" in caught.value.message
    assert "microsoft/vidur @ 7d47513, MIT" in caught.value.hint
    assert len(find_public_tables(public_folder, ["neusight"])) == 1


def test_no_folder(tmp_path, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(DataError) as caught:
        public_data_dir()
    assert "--public-data" in caught.value.hint
    assert ENVIRONMENT in caught.value.hint
    with pytest.raises(DataError, match="absent"):
        public_data_dir(tmp_path / "absent")


def test_unknown_source(public_folder):
    with pytest.raises(DataError, match="atari"):
        find_public_tables(public_folder, ["atari"])
