"""The study of unseen devices, all of its parts once, on a small table of synthetic latencies."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.unseen_devices import group as group_module
from benchmarks.unseen_devices.group import HeldOutGroup
from benchmarks.unseen_devices.study import Study, network_of
from cdmpp.errors import ArtifactError
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.train.config import DataConfig, FinishConfig, TrainConfig
from cdmpp.train.options import OptimiserConfig

PEAK = {"NVIDIA L40S": 362e12, "NVIDIA B200": 2250e12}
ROWS, ASKED = 1500, 120


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in the layout of the public GEMM table: twice the roofline, plus launch."""
    rng = np.random.default_rng(0)
    m, n, k = (2 ** rng.integers(5, 14, ROWS) for _ in range(3))
    device = rng.choice(list(PEAK), ROWS)
    latency_us = 2e6 * (2.0 * m * n * k / np.array([PEAK[name] for name in device])) + 5.0
    path = tmp_path_factory.mktemp("data") / "gemm.parquet"
    constant = {"op": "linear", "framework": "vllm", "version": "1", "dtype": "bfloat16"}
    columns = {name: [value] * ROWS for name, value in constant.items()}
    columns |= {name: size.astype(np.int32) for name, size in (("m", m), ("n", n), ("k", k))}
    pq.write_table(pa.table({**columns, "device": device, "latency_us": latency_us.astype(np.float32)}), path)
    return path


def config(table: Path, *held: str) -> TrainConfig:
    return TrainConfig(
        name="tiny",
        data=DataConfig(public=False, records=(str(table),), holdout_devices=held),
        network=NetworkConfig(width=16, layers=1, heads=2, feed_forward=16, head_width=32, head_layers=1),
        optimiser=OptimiserConfig(steps=30, batch_rows=64, warmup_steps=5, average_decay=0.9, threads=1),
        finish=FinishConfig(
            xgboost_trees=10, utilisation_steps=5, baselines=("roofline", "mean", "xgboost", "utilisation")
        ),
    )


def test_a_group_is_trained_measured_and_adapted(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"ROWS_PER_TABLE": ASKED, "FEW": (10,), "MANY": (), "SEEDS": (0,), "OTHERS": ("random",)}
    for name, value in small.items():
        monkeypatch.setattr(group_module, name, value)
    without = config(table, "b200")
    study = Study.load(without, None)
    dataset = study.without(("b200",))
    artifact = network_of(without, dataset, tmp_path / "tiny")
    assert artifact.devices == ("", "l40s")
    stages = [json.dumps(entry) for entry in HeldOutGroup(study, without, dataset, artifact).measure()]
    entry = json.loads(stages[-1])
    assert len(stages) > 3 and "seconds" not in json.loads(stages[0])
    (found,) = entry["tables"]
    assert (found["device"], found["source"], found["rows"]) == ("b200", "aiconfigurator_gemm", ASKED)
    assert ASKED < found["available"] < ROWS
    assert set(found["baselines"]) == {"roofline", "mean", "xgboost", "utilisation"}
    for figures in (found["specification"], *found["baselines"].values()):
        assert figures["overall"]["n"] == figures["families"]["gemm"]["n"] == ASKED
    done = {(a["sampler"], a["k"]) for a in found["adapted"]}
    assert done == {("kmeans", 10), ("random", 10)}
    for adapted in found["adapted"]:
        # Both on the rows that were not chosen. A constant factor is wrong: a few measurements tell it.
        assert adapted["before"]["overall"]["n"] == adapted["after"]["overall"]["n"] == ASKED - adapted["k"]
        assert adapted["after"]["overall"]["mape"] < 0.7 * adapted["before"]["overall"]["mape"]
    assert entry["domain"]["n_held_out"] == ASKED and entry["domain"]["n_known"] > 0
    assert entry["known"]["n"] == entry["domain"]["n_known"]


def test_a_network_that_is_there_is_read_and_one_that_saw_the_device_refused(table: Path, tmp_path: Path) -> None:
    study, folder = Study.load(config(table), None), tmp_path / "tiny"
    first = network_of(config(table, "b200"), study.without(("b200",)), folder)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    again = network_of(config(table, "b200"), study.without(("b200",)), folder)
    assert again.model_id == first.model_id
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ArtifactError, match="was trained on l40s"):
        network_of(config(table, "l40s"), study.without(("l40s",)), folder)


def test_a_held_out_device_loses_its_ceilings_and_no_other_does(table: Path) -> None:
    study = Study.load(config(table), None)
    assert all(device.sustained is not None for device in study.dataset.devices)
    left = {d.name: d.sustained for d in study.without(("b200",)).devices}
    assert left["b200"] is None and left["l40s"] is not None
