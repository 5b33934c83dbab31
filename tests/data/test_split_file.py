"""Splits as data: whole tasks, no task of a test network in training, checked on hashes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cdmpp.cli.main import app
from cdmpp.data.load import load_table
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.data.split_file import make_splits, read_splits, write_splits
from cdmpp.data.splits import TEST, TRAIN, UNUSED, VALIDATION, program_parts
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from tests.data.test_folder import ONE, TWO, schedule

NETWORKS = ("bert", "bert;gpt", "gpt", "vgg", "")


@pytest.fixture(scope="module")
def table() -> MeasurementTable:
    """50 tasks of 4 schedules on two devices; a fifth of them is of two networks, a fifth of none."""
    rows = [
        schedule(100 * task + n, device, task=f"task{task}", provenance={"networks": NETWORKS[task % 5]})
        for task in range(50)
        for n in range(4)
        for device in (ONE, TWO)
    ]
    return from_measurements([*rows, Measurement("softmax:rows=8,cols=8", "operator", "t4", 1e-3)])


def hashes(table: MeasurementTable, parts: np.ndarray, part: int) -> set[str]:
    rows = np.flatnonzero(parts == part)
    return {table.program_hashes[k] for k in table.program_key[rows]}


def tasks(table: MeasurementTable, parts: np.ndarray, part: int) -> set[str]:
    wanted = hashes(table, parts, part)
    return {t for h, t in zip(table.tvm.hashes, table.tvm.tasks, strict=True) if h in wanted}


def test_by_task(table: MeasurementTable) -> None:
    splits = make_splits(table)
    assert splits.names == ["task", "device:cpu-1t", "device:cpu-2t", "device:t4"]
    parts = splits.rows(table, "task")
    assert parts.tolist() == program_parts(table, test=0.2, validation=0.1)[table.program_key].tolist()
    result = [tasks(table, parts, part) for part in (TRAIN, VALIDATION, TEST)]
    assert len(result[0] | result[1] | result[2]) == sum(map(len, result)) == 50
    assert all(result)


def test_by_network_nothing_of_a_test_network_is_trained_on(table: MeasurementTable) -> None:
    parts = make_splits(table, test_networks=["gpt"]).rows(table, "network")
    test, rest = hashes(table, parts, TEST), hashes(table, parts, TRAIN) | hashes(table, parts, VALIDATION)
    assert test.isdisjoint(rest)
    assert tasks(table, parts, TEST) == {f"task{n}" for n in range(50) if n % 5 in (1, 2)}
    # Of BERT only what GPT does not use is left to train on.
    left = tasks(table, parts, TRAIN) | tasks(table, parts, VALIDATION)
    assert left == {f"task{n}" for n in range(50) if n % 5 in (0, 3)}
    assert len(hashes(table, parts, UNUSED)) == 10 * 4 + 1


def test_by_device(table: MeasurementTable) -> None:
    splits = make_splits(table)
    parts = splits.rows(table, "device:cpu-2t")
    assert (parts == TEST).tolist() == (table.device.array() == "cpu-2t").tolist()
    assert set(parts.tolist()) == {TRAIN, TEST}
    alone = from_measurements([schedule(1)])
    assert make_splits(alone).devices == {}
    other = from_measurements([schedule(1), Measurement("softmax:rows=8,cols=8", "operator", "l4", 1e-3)])
    assert splits.rows(other, "device:cpu-2t").tolist() == [TRAIN, UNUSED]
    with pytest.raises(DataError, match="no split 'device:l4'"):
        splits.rows(other, "device:l4")


def test_round_trip(table: MeasurementTable, tmp_path: Path) -> None:
    splits = make_splits(table, test_networks=["gpt"])
    write_splits(splits, tmp_path / "splits.parquet")
    again = read_splits(tmp_path / "splits.parquet")
    assert again.about == {"test_networks": ["gpt"], "test_share": 0.2, "validation_share": 0.1}
    for name in splits.names:
        assert again.rows(table, name).tolist() == splits.rows(table, name).tolist()
    assert again == splits
    assert [p.name for p in tmp_path.iterdir()] == ["splits.parquet"]
    with pytest.raises(DataError, match="cannot write"):
        write_splits(splits, tmp_path / "no" / "splits.parquet")


def test_mistakes_of_the_caller(table: MeasurementTable) -> None:
    with pytest.raises(DataError, match="no record is of network resnet") as caught:
        make_splits(table, test_networks=["resnet"])
    assert "bert, gpt, vgg" in caught.value.hint
    some = from_measurements([schedule(1)])
    with pytest.raises(DataError, match="nothing is left"):
        make_splits(some, test_networks=["vgg11"])


def test_a_leak_is_an_error_on_hashes(table: MeasurementTable, tmp_path: Path) -> None:
    splits = make_splits(table, test_networks=["gpt"])
    digest = table.tvm.hashes[0]
    moved = {**splits.programs["task"], digest: (splits.programs["task"][digest] + 1) % 3}
    with pytest.raises(DataError, match="split task: task task0 is in"):
        write_splits(replace(splits, programs={"task": moved}), tmp_path / "splits.parquet")
    assert list(tmp_path.iterdir()) == []
    # A whole task of a test network in training: no task is divided, and it is a leak all the same.
    shared = {h for h, task in splits.tasks.items() if task == "task1"}
    trained = {h: TRAIN if h in shared else part for h, part in splits.programs["network"].items()}
    with pytest.raises(DataError, match="test network gpt is in train"):
        replace(splits, programs={"network": trained}).check()


def all_of(part: str, table: pa.Table) -> pa.Table:
    return table.set_column(3, "part", pa.array([part] * len(table)).dictionary_encode())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.drop_columns(["task"]), "lack task"),
        (lambda t: pa.concat_tables([t, all_of("validation", t.slice(0, 1))]), "two parts"),
        (lambda t: all_of("holdout", t), "unknown unit"),
    ],
)
def test_damaged_files(table: MeasurementTable, tmp_path: Path, damage, message: str) -> None:
    path = tmp_path / "splits.parquet"
    write_splits(make_splits(table), path)
    arrow = pq.read_table(path)
    index = next(i for i, part in enumerate(arrow.column("part").to_pylist()) if part == "train")
    arrow = pa.concat_tables([arrow.slice(index), arrow.slice(0, index)])  # a training row first
    pq.write_table(damage(arrow), path)
    with pytest.raises(DataError, match=message):
        read_splits(path)
    path.write_bytes(b"PAR1 not")
    with pytest.raises(DataError, match="no readable file of splits"):
        read_splits(path)


def test_the_command(table: MeasurementTable, tmp_path: Path) -> None:
    write_records(table, tmp_path / "records.parquet")
    result = CliRunner().invoke(app, ["data", "split", str(tmp_path), "--test-network", "vgg"])
    assert result.exit_code == 0, result.output
    assert "network: train " in result.output and " test 40" in result.output
    splits = read_splits(tmp_path / "splits.parquet")
    assert (splits.rows(load_table(tmp_path), "network") == TEST).sum() == 80
    result = CliRunner().invoke(app, ["data", "split", str(tmp_path), "--test-network", "alexnet"])
    assert result.exit_code == 1
