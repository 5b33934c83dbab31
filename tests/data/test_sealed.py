"""Sealed networks: chosen by a rule from a stated list, and in no part of any training."""

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import cdmpp.data.card as merging
from cdmpp.cli.main import app
from cdmpp.data.card import card_text
from cdmpp.data.load import load_table
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.data.split_file import make_splits, read_splits, renew_splits, sealed_networks, without_sealed, write_splits
from cdmpp.data.splits import TEST, TRAIN, UNUSED, sealed_names
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from cdmpp.model.artifact.model import Artifact
from cdmpp.train.adaptation.records import as_table
from cdmpp.train.config import DataConfig, TrainConfig
from cdmpp.train.dataset import make_dataset
from cdmpp.train.evaluation.parts import row_parts
from cdmpp.train.options import OptimiserConfig
from cdmpp.train.run import load_training_table, train_model
from tests.data.test_folder import ONE, TWO, schedule

NAMES = ("bert", "gpt", "vgg", "vit")
#: By the rule: see test_the_rule.
HELD = "vgg"
#: Users of each task, in turn: of the sealed network alone, in a size of it, shared with others, of others, of none.
USERS = ("vgg", "vgg:image=32", "bert;vgg", "bert", "gpt;vit", "")


def rows(tasks: range = range(60)) -> list[Measurement]:
    return [
        schedule(100 * task + n, device, task=f"task{task}", provenance={"networks": USERS[task % 6]})
        for task in tasks
        for n in range(2)
        for device in (ONE, TWO)
    ]


@pytest.fixture(scope="module")
def table() -> MeasurementTable:
    return from_measurements(rows())


@pytest.fixture
def folder(tmp_path: Path, table: MeasurementTable) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    write_records(table, place / "records.parquet")
    result = CliRunner().invoke(app, ["data", "split", str(place), "--seal", "1", "--test-network", "gpt"])
    assert result.exit_code == 0, result.output
    return place


def is_sealed(table: MeasurementTable) -> np.ndarray:
    return np.array([int(task.removeprefix("task")) % 6 < 3 for task in table.tvm.tasks])


def test_the_rule() -> None:
    def digest(name: str) -> str:
        return hashlib.sha256(f"sealed-1:{name}".encode()).hexdigest()

    assert min(NAMES, key=digest) == HELD
    assert sealed_names(NAMES, 1) == sealed_names([f"{name}:batch=2" for name in NAMES], 1) == (HELD,)
    assert set(sealed_names(NAMES, 1)) < set(sealed_names(NAMES, 2))
    for count in (0, 4):
        with pytest.raises(DataError, match=f"cannot seal {count} of 4"):
            sealed_names(NAMES, count)


def test_sealed_programs_have_no_part_in_another_split(folder: Path, table: MeasurementTable) -> None:
    splits = read_splits(folder / "splits.parquet")
    assert splits.names == ["task", "network", "sealed", "device:cpu-1t", "device:cpu-2t"]
    held = is_sealed(table)[table.program_key]
    assert ((splits.rows(table, "sealed") == TEST) == held).all()
    for name in ("task", "network", "device:cpu-1t", "device:cpu-2t"):
        parts = splits.rows(table, name)
        assert (parts[held] == UNUSED).all() and (parts[~held] == TEST).any() and (parts[~held] == TRAIN).any()
    # Tasks of no network are trained on.
    none = np.array([task.endswith("5") for task in table.tvm.tasks])
    assert {TRAIN} <= set(splits.rows(table, "sealed")[none[table.program_key]].tolist())


def test_a_grown_list_of_networks_does_not_change_what_is_sealed(folder: Path) -> None:
    more = [f"net{n}" for n in range(40)]
    first = sealed_names([*NAMES, *more], 1)
    assert first != (HELD,)
    grown = [schedule(9000 + n, task=f"new{n}", provenance={"networks": name}) for n, name in enumerate(more)]
    new = schedule(9900, task="new-of-sealed", provenance={"networks": "vgg:image=64"})
    write_records(from_measurements([*rows(), *grown, new]), folder / "records.parquet")
    # A program measured after the split file was written is sealed by its network.
    assert "new-of-sealed" not in load_training_table(of(folder), None, ()).tvm.tasks
    result = CliRunner().invoke(app, ["data", "split", str(folder)])
    assert result.exit_code == 0, result.output
    splits = read_splits(folder / "splits.parquet")
    assert splits.about["sealed"] == [HELD] and splits.about["sealed_from"] == list(NAMES)
    assert splits.programs["sealed"][f"{9900:032x}"] == TEST
    result = CliRunner().invoke(app, ["data", "split", str(folder), "--seal", "2"])
    assert result.exit_code == 1 and "seals 1 networks (vgg), not 2" in result.output


def of(folder: Path) -> TrainConfig:
    return TrainConfig(data=DataConfig(public=False, records=(str(folder),)))


def test_training_reads_no_sealed_program(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = load_table(folder)
    with caplog.at_level(logging.WARNING):
        table = load_training_table(of(folder), None, ())
    assert caplog.messages == ["left out 60 programs of the sealed networks vgg"]
    assert set(table.tvm.tasks) == {f"task{n}" for n in range(60) if n % 6 >= 3}
    assert len(table) == len(whole) // 2 and table.n_programs == 60
    # Rows still belong to their programs.
    expected = {(h, d) for h, d, s in keyed(whole, is_sealed(whole)) if not s}
    assert {(h, d) for h, d, _ in keyed(table, is_sealed(table))} == expected
    kept = load_training_table(of(folder), None, (), keep_sealed=True)
    assert kept.n_programs == 120 and sealed_networks([folder]) == (HELD,)


def keyed(table: MeasurementTable, mask: np.ndarray) -> list[tuple[str, str, bool]]:
    keys, devices = table.program_key.tolist(), table.device.array().tolist()
    return [(table.program_hashes[k], d, bool(mask[k])) for k, d in zip(keys, devices, strict=True)]


def test_a_second_table_brings_no_sealed_task_in(folder: Path, tmp_path: Path) -> None:
    # The records name another network, but the task is a sealed one; this file has no splits beside it.
    again = [schedule(77_000, task="task0", provenance={"networks": "bert"}), schedule(77_001, task="task3")]
    write_records(from_measurements(again), tmp_path / "more.parquet")
    table = load_training_table(of(folder), None, [tmp_path / "more.parquet"])
    assert f"{77_001:032x}" in table.tvm.hashes and f"{77_000:032x}" not in table.tvm.hashes
    # Alone, that file seals nothing.
    alone = load_training_table(TrainConfig(data=DataConfig(public=False)), None, [tmp_path / "more.parquet"])
    assert alone.n_programs == 2


@pytest.mark.parametrize("data", [{}, {"split": "network", "test_networks": ("gpt",)}])
def test_no_part_of_a_dataset_has_a_sealed_program(folder: Path, table: MeasurementTable, data: dict) -> None:
    loaded = load_training_table(of(folder), None, ())
    sealed = {h for h, s in zip(table.tvm.hashes, is_sealed(table), strict=True) if s}
    assert sealed.isdisjoint(loaded.program_hashes)
    networks = make_dataset(loaded, DataConfig(public=False, **data)).networks
    assert networks and not any(HELD in users for users in networks)


def test_a_start_that_may_have_seen_sealed_programs_is_refused(folder: Path, tmp_path: Path) -> None:
    start = tmp_path / "old"
    start.mkdir()
    (start / "manifest.json").write_text(json.dumps({"format_version": 1, "data": {}}))
    config = of(folder).model_copy(update={"optimiser": OptimiserConfig(start_from=str(start))})
    with pytest.raises(DataError, match="may have been trained on the sealed networks vgg"):
        train_model(config, out=tmp_path / "out", run=tmp_path / "run")
    assert not (tmp_path / "out").exists() and not (tmp_path / "run").exists()


def test_leaks_and_edited_lists_are_refused(folder: Path, table: MeasurementTable) -> None:
    splits = read_splits(folder / "splits.parquet")
    digest = next(iter(splits.sealed))
    task = {h for h, name in splits.tasks.items() if name == splits.tasks[digest]}
    for split, message in (("task", "split task: sealed program"), ("sealed", "of sealed network vgg is in train")):
        moved = {h: TRAIN if h in task else part for h, part in splits.programs[split].items()}
        with pytest.raises(DataError, match=message):
            replace(splits, programs={**splits.programs, split: moved}).check()
    for about in ({"sealed": ["bert"]}, {"sealed_from": ["bert", "gpt", "vit"]}):
        with pytest.raises(DataError, match="do not follow from the stated list"):
            replace(splits, about={**splits.about, **about}).check()
    (folder / "splits.parquet").write_bytes(b"damaged")
    with pytest.raises(DataError, match="the networks that it seals are unknown"):
        renew_splits(table, folder / "splits.parquet")


def test_a_sealed_network_is_no_test_network(table: MeasurementTable, tmp_path: Path) -> None:
    splits = make_splits(table, test_networks=["gpt", HELD], sealed=1, sealed_from=NAMES)
    assert splits.about["test_networks"] == ["gpt"]
    write_splits(splits, tmp_path / "splits.parquet")
    assert read_splits(tmp_path / "splits.parquet") == splits
    metadata = pq.read_schema(tmp_path / "splits.parquet").metadata
    assert json.loads(metadata[b"cdmpp_splits"])["sealed_from"] == list(NAMES)


def test_the_card_names_the_sealed_networks(folder: Path) -> None:
    text = card_text(folder)
    assert "Sealed networks: vgg." in text and "Only the final evaluation of a model may read them" in text


def test_without_split_files_tables_stay_as_they_are(table: MeasurementTable, tmp_path: Path) -> None:
    write_records(table, tmp_path / "records.parquet")
    assert without_sealed(table, [tmp_path / "records.parquet"]) is table


def test_sealed_networks_stay_sealed_when_folders_are_merged(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    more = [schedule(9000 + n, task=f"new{n}", provenance={"networks": f"net{n}"}) for n in range(40)]
    write_records(from_measurements([*more, schedule(1, task="task0")]), other / "records.parquet")
    out = tmp_path / "both"
    result = CliRunner().invoke(app, ["data", "merge", str(folder), str(other), "--out", str(out)])
    assert result.exit_code == 0, result.output
    splits = read_splits(out / "splits.parquet")
    assert (splits.about["sealed"], splits.about["sealed_from"]) == ([HELD], list(NAMES))
    # A program of a sealed task that the other machine measured is sealed, too.
    assert splits.programs["sealed"][f"{1:032x}"] == TEST
    write_splits(make_splits(load_table(other), sealed=1, sealed_from=["net1", "net2"]), other / "splits.parquet")
    result = CliRunner().invoke(app, ["data", "merge", str(folder), str(other), "--out", str(tmp_path / "again")])
    assert result.exit_code == 1 and "seal different networks" in result.output and not (tmp_path / "again").exists()


def test_a_merge_that_ends_early_leaves_no_records_without_their_seal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(merging, "write_records", killed)
    with pytest.raises(KeyboardInterrupt):
        merging.merge_folders([folder], tmp_path / "both")
    assert {file.name for file in (tmp_path / "both").iterdir()} == {"splits.parquet"}


def test_adaptation_reads_no_sealed_program(folder: Path) -> None:
    assert as_table(folder, "kernel", None).n_programs == 60
    assert as_table(load_table(folder), "kernel", None).n_programs == 120


def test_sealed_rows_are_in_no_part_of_the_split_of_a_model(table: MeasurementTable) -> None:
    split = {"split": "shape", "test_share": 0.2, "validation_share": 0.1}
    manifest = {"config": {"data": split}, "data": {"sealed": [HELD]}}
    parts = row_parts(cast(Artifact, SimpleNamespace(manifest=manifest, scheduled=None)), table)
    assert (parts[is_sealed(table)[table.program_key]] == UNUSED).all()
    assert (parts[~is_sealed(table)[table.program_key]] != UNUSED).any()
