"""The original as a baseline: its inputs, its terms, and a run on made-up programs."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cdmpp.data.records import write_records
from cdmpp.devices.registry import lookup
from cdmpp.errors import ArtifactError, DataError, InvalidProgramError
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.nn.positions import encode_positions
from cdmpp.train.config import DataConfig, FinishConfig, ReferenceConfig, TrainConfig, load_config
from cdmpp.train.dataset import Dataset
from cdmpp.train.fit import training_rows
from cdmpp.train.options import DomainConfig, OptimiserConfig
from cdmpp.train.reference.network import (
    ReferenceNetwork,
    ReferencePrograms,
    device_row,
    per_store_features,
    published_cmd,
    published_mmd,
    reference_loss,
    store_positions,
)
from cdmpp.train.reference.train import ReferenceModel, cyclic
from cdmpp.train.run import train_model
from tests.features.builder import Builder
from tests.model.nn.synthetic import dataset
from tests.train.schedules import DEVICES, measured, program

pytestmark = pytest.mark.slow


def stores(data: Dataset, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Made-up features and positions: one to three stores a program, the first column its work."""
    rng = np.random.default_rng(seed)
    out = []
    for key in range(len(data.store.bucket)):
        rows = rng.random((1 + key % 3, 164)).astype(np.float32)
        rows[:, 0] = data.store.summary[key, 0]
        out.append(rows)
    return out, [np.arange(len(rows)) for rows in out]


def setting(steps: int = 4, **more: Any) -> TrainConfig:
    return TrainConfig(
        name="original",
        optimiser=OptimiserConfig(steps=steps),
        reference=ReferenceConfig(batch_rows=64),
        finish=FinishConfig(xgboost_trees=5),
        **more,
    )


def test_the_network_has_the_published_dimensions() -> None:
    network = ReferenceNetwork(5)
    parts = {name: sum(p.numel() for p in part.parameters()) for name, part in network.named_children()}
    published = {"encoder": 8_611_372, "flatten": 3_312_015, "device": 43_983, "norm": 0, "decoder": 1_803_271}
    assert parts == published
    network.eval()
    groups = [torch.rand(2, count, 164) for count in (0, 3, 7)]
    out = network.latent(groups, torch.rand(6, 8))
    assert network.output(out).shape == (6,)
    # Missing leaves are zeros for the flatten layer, and leaves after the last are not read by it.
    seen: list[torch.Tensor] = []
    network.flatten.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0]))
    network.latent(groups, torch.rand(6, 8))
    assert seen[0].shape == (6, 5 * 164)
    assert not seen[0][:2].any()
    assert not seen[0][2:4, 3 * 164 :].any()
    torch.testing.assert_close(seen[0][4:], network.encoder(groups[2])[:, :5].flatten(1))


def test_the_rate_goes_up_and_down() -> None:
    shares = [cyclic(share) for share in (0.0, 0.25, 0.5, 0.75, 0.999)]
    assert shares == pytest.approx([0.1, 5.05, 10.0, 5.05, 0.1198])


def test_features_are_scaled_by_the_range_of_training_programs() -> None:
    rng = np.random.default_rng(0)
    features = [rng.random((1 + key % 2, 164)).astype(np.float32) * (9 if key == 7 else 1) for key in range(8)]
    positions = [np.array([key, 3 * key])[: 1 + key % 2] for key in range(8)]
    found = ReferencePrograms.of(features, positions, 2, np.array([2, 3, 4, 5, 6, 6]))
    assert found.count.tolist() == [0, 0, 1, 2, 1, 2, 1, 2, 1, 2]
    train = np.concatenate([features[i] for i in range(5)])
    low, high = train.min(axis=0), train.max(axis=0)
    for key in range(2, 10):
        own = features[key - 2]
        place = encode_positions("published", positions[key - 2], 164)
        tensor = found.leaves[len(own)][found.slot[key]].numpy()
        np.testing.assert_allclose(tensor, (own - low) / (high - low) + place, rtol=1e-4, atol=1e-5)


def test_a_buffer_has_the_position_of_its_last_store() -> None:
    builder = Builder()
    builder.x, y = (builder.buffer(name, [8]) for name in "xy")
    loops = []
    for value in (None, builder.x, y):
        i = builder.variable("i")
        stored = None if value is None else builder.load(i, value)
        loops.append(builder.loop(builder.integer(8), builder.store(i, stored, y), i))
    text = json.dumps(builder.program(builder.sequence(*loops)))
    # Ranks: loops 1, 3 and 5, stores 2, 4 and 6, all of depth 2.
    assert [p.tolist() for p in store_positions([text])] == [[2 * 6 - 2]]
    # Constants alone have no features.
    assert [p.tolist() for p in store_positions([program(4, 8, 0)])] == [[]]


def test_the_eight_numbers_of_a_device() -> None:
    t4 = lookup("t4")
    row = device_row(t4)
    assert row[0] == 1
    assert row[1] == pytest.approx(t4.clock_hz / 2e9)
    assert row[2] == pytest.approx(np.log2(16) / 6)  # the sheet's 16 GB
    assert row[6] == pytest.approx(np.log2(320) / 11)
    assert row[7] == pytest.approx(t4.peak_flops_fp32 / 12e12)
    assert row[3:6] == pytest.approx([6 / 8, 2 / 6, 6 / 8])  # 64 KiB shared, 4 MiB, 64 KiB
    assert device_row(replace_memory(t4))[2] == 0
    zen = device_row(lookup("amd-zen3-1t-avx2"))
    assert zen[3:6] == pytest.approx([15 / 8, 0, 5 / 8])  # 32 MiB last cache in KiB, 0.5 MiB, 32 KiB


def replace_memory(device: Any) -> Any:
    return device.model_copy(update={"memory_bytes": None, "nominal_memory_bytes": None})


def test_terms_are_the_published_formulas() -> None:
    rng = np.random.default_rng(3)
    source, target = rng.random((20, 7)), rng.random((15, 7)) + 0.2
    expected = np.linalg.norm(source.mean(0) - target.mean(0))
    for k in range(2, 6):
        moments = [((z - z.mean(0)) ** k).mean(0) for z in (source, target)]
        expected += np.linalg.norm(moments[0] - moments[1])
    tensors = torch.from_numpy(source), torch.from_numpy(target)
    assert float(published_cmd(*tensors)) == pytest.approx(expected)

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        squared = ((a[:, None] - b[None]) ** 2).sum(-1)
        return float(sum(np.exp(-g * squared) for g in (1, 0.1, 0.001)).mean())

    expected = kernel(source, source) + kernel(target, target) - 2 * kernel(source, target)
    assert float(published_mmd(*tensors)) == pytest.approx(expected)
    wanted = torch.tensor([1.0, -2.0])
    assert float(reference_loss(torch.tensor([1.5, -2.0]), wanted)) == pytest.approx(1000 * 0.125 + 0.25)


def test_it_learns_and_predicts_unseen_leaf_counts() -> None:
    data = dataset(rows=300)
    # Programs of two stores take e^4 times as long; those of three stores are not trained on.
    count = 1 + data.rows.program % 3
    noise = 0.1 * np.random.default_rng(0).standard_normal(300)
    part = np.where(count == 3, 2, 0).astype(np.int8)
    rows = replace(data.rows, log_latency=4.0 * count - 16 + noise, part=part)
    data = replace(data, rows=rows)
    config = setting(30).model_copy(update={"reference": ReferenceConfig(batch_rows=100, learning_rate=1e-4, layers=1)})
    losses: list[float] = []
    model = ReferenceModel(data, config, *stores(data))
    model.fit(training_rows(data, config)[0], lambda step, steps, m: losses.append(m["loss"]))
    assert model.summary["steps"] == len(losses) == 30
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3])
    found = model.predict_log(data.rows)
    assert np.isfinite(found).all()
    # Rows are predicted in their order, whatever their leaf counts.
    assert found[count == 2].mean() > found[count == 1].mean() + 2
    assert model.predict_log(data.rows.take(np.arange(7)))[5] == pytest.approx(found[5], abs=1e-4)


@pytest.mark.parametrize("loss", ["cmd", "mmd"])
def test_latencies_of_the_target_are_not_read(loss: Any) -> None:
    data = dataset(rows=120)
    config = setting(
        3, data=DataConfig(holdout_devices=("t4",)), domain=DomainConfig(loss=loss, weight=1.0, target_devices=("t4",))
    )
    target = data.rows.device == [d.name for d in data.devices].index("t4")
    blind = replace(data, rows=replace(data.rows, log_latency=np.where(target, np.nan, data.rows.log_latency)))
    weights = [
        ReferenceModel(d, c, *stores(data)).fit(training_rows(d, c)[0]).network.state_dict()
        for d, c in ((data, config), (blind, config), (data, config.model_copy(update={"domain": DomainConfig()})))
    ]
    assert [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])] == []
    name = "encoder.layers.0.linear1.weight"
    assert not torch.equal(weights[0][name], weights[2][name])


def test_coral_is_not_among_its_terms() -> None:
    config = setting(
        data=DataConfig(holdout_devices=("t4",)), domain=DomainConfig(loss="coral", target_devices=("t4",))
    )
    with pytest.raises(DataError, match="coral"):
        ReferenceModel(dataset(), config, [], [])
    with pytest.raises(DataError, match="no section"):
        ReferenceModel(dataset(), TrainConfig(), [], [])


def test_train_runs_it_from_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(measured(12), tmp_path / "records.parquet")
    rng = np.random.default_rng(0)
    monkeypatch.setattr(
        "cdmpp.train.reference.train.scheduled_features",
        lambda table: (
            [rng.random((2, 164)).astype(np.float32) for _ in table.tvm.texts],
            [np.arange(2) for _ in table.tvm.texts],
        ),
    )
    data = DataConfig(public=False, records=(str(tmp_path / "records.parquet"),), test_share=0.3, validation_share=0.2)
    result = train_model(setting(2, data=data), out=tmp_path / "out")
    assert result["train"]["samples"] > 0
    paper = load_config("configs/paper.toml")
    held = DEVICES[:1]
    few = {"optimiser": OptimiserConfig(steps=2), "finish": FinishConfig(xgboost_trees=5)}
    few |= {"data": data.model_copy(update={"holdout_devices": held})}
    few |= {"domain": replace(paper.domain, target_devices=held)}
    published = train_model(paper.model_copy(update=few), out=tmp_path / "paper")
    assert published["metrics"]["held_out_devices"]["overall"]["n"] > 0
    overall = result["metrics"]["overall"]
    assert set(overall["baselines"]) == {"roofline", "mean", "xgboost"}
    assert overall["ranked_groups"] > 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["kind"] == "reference"
    with pytest.raises(ArtifactError):
        load_artifact(tmp_path / "out")


def test_operators_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("program,latency_us,device\nlinear:m=8,n=8,k=8,5.0,t4\n".replace("m=8,n=8,k=8", "m=8;n=8"))
    path.write_text('program,latency_us,device\n"softmax:rows=512,cols=1024",5.0,t4\n')
    with pytest.raises(DataError, match="reads scheduled programs"):
        train_model(setting(data=DataConfig(public=False)), out=tmp_path / "out", records=[path])
    assert not (tmp_path / "out").exists()


def test_the_shipped_presets_train_on_the_data_of_the_schedules() -> None:
    preset, paper, ours = (load_config(f"configs/{name}.toml") for name in ("reference", "paper", "cpu"))
    assert preset.data == ours.data
    assert paper.reference == ReferenceConfig()
    assert (paper.domain.loss, paper.domain.weight) == ("cmd", 1.0)
    assert paper.domain.target_devices == paper.data.holdout_devices


@pytest.mark.tvm
def test_features_are_kept_and_the_intrinsics_stay_out(tmp_path: Path) -> None:
    tvm = pytest.importorskip("tvm")
    texts = []
    for size in (8, 64):
        a = tvm.te.placeholder((size,), name="a")
        b = tvm.te.compute((size,), lambda i: a[i] + 1.0, name="b")  # noqa: B023
        texts.append(tvm.ir.save_json(tvm.IRModule({"main": tvm.te.create_prim_func([a, b])})))
    before = "tvm.s_tir.tensor_intrin" in sys.modules
    found = per_store_features(texts, tmp_path)
    assert ("tvm.s_tir.tensor_intrin" in sys.modules) == before
    assert [f.shape for f in found] == [(1, 164)] * 2
    assert (found[0] != found[1]).any()
    (kept,) = tmp_path.iterdir()
    again = per_store_features(texts, tmp_path)
    for one, two in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert list(tmp_path.iterdir()) == [kept]
    with pytest.raises(InvalidProgramError, match="program 1 is not TVM JSON"):
        per_store_features([texts[0], "{}"], tmp_path)
