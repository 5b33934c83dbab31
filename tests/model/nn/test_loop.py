"""The training loop on a small synthetic data set."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cdmpp.errors import DataError
from cdmpp.model.nn.batch import NetworkInputs, predict_rows
from cdmpp.model.nn.losses import ranking_loss
from cdmpp.train.checkpoint import CHECKPOINT
from cdmpp.train.fit import train, training_rows
from cdmpp.train.loop import METRICS, matrix_precision, precision_of
from cdmpp.train.step import epoch_order, pairs_within
from tests.model.nn.synthetic import dataset, training

pytestmark = pytest.mark.slow


class KilledError(Exception):
    """Stands for the end of the process."""


def weights(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def assert_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_a_resumed_run_ends_bit_for_bit_where_the_unbroken_one_does(tmp_path: Path) -> None:
    data, config = dataset(), training(steps=60, checkpoint_every=17)
    whole, _ = train(data, config, tmp_path / "whole")

    def stop(step: int, steps: int, metrics: dict[str, float]) -> None:
        if step == 50:
            raise KilledError

    with pytest.raises(KilledError):
        train(data, config, tmp_path / "broken", progress=stop)
    assert (tmp_path / "broken" / CHECKPOINT).exists()
    resumed, summary = train(data, config, tmp_path / "broken")
    assert_equal(weights(whole), weights(resumed))
    assert summary["steps"] == 60


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    data, config = dataset(), training()
    first, _ = train(data, config, tmp_path)
    assert_equal(weights(first), weights(train(data, config, tmp_path)[0]))


def test_the_seed_decides(tmp_path: Path) -> None:
    data, config = dataset(), training()
    one, again = (weights(train(data, config, tmp_path / name)[0]) for name in "ab")
    assert_equal(one, again)
    other = weights(train(data, config.model_copy(update={"seed": 1}), tmp_path / "c")[0])
    assert not torch.equal(one["leaf_in.weight"], other["leaf_in.weight"])


def test_another_configuration_is_not_continued(tmp_path: Path) -> None:
    train(dataset(), training(), tmp_path)
    with pytest.raises(DataError, match="another configuration"):
        train(dataset(), training(learning_rate=1e-4), tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"fingerprint": "0" * 32},
        {"devices": tuple(reversed(dataset().devices))},
        {"rows": replace(dataset().rows, part=np.roll(dataset().rows.part, 1))},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_run_on_other_data_is_not_continued(tmp_path: Path, changed: dict[str, Any]) -> None:
    train(dataset(), training(), tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(DataError, match="holds a run on other data") as caught:
        train(replace(dataset(), **changed), training(), tmp_path)
    assert "--run" in caught.value.hint
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    train(dataset(), training(), tmp_path)


def test_a_checkpoint_that_does_not_say_its_data_is_not_continued(tmp_path: Path) -> None:
    train(dataset(), training(), tmp_path)
    path = str(tmp_path / CHECKPOINT)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["devices"]) == [device.name for device in dataset().devices]
    old = {name: metadata[name] for name in ("step", "seconds", "config")}
    save_file(load_file(path), path, old)
    with pytest.raises(DataError, match="holds a run on other data"):
        train(dataset(), training(), tmp_path)


def test_the_loss_falls_and_is_written_down(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []
    config = training(steps=200, learning_rate=5e-3)
    train(dataset(), config, tmp_path, progress=lambda step, _, m: seen.append((step, m["loss"])))
    assert [step for step, _ in seen] == [50, 100, 150, 200]
    assert seen[-1][1] < 0.6 * seen[0][1]
    last = json.loads((tmp_path / METRICS).read_text().splitlines()[-1])
    assert last["step"] == 200


def test_lower_precision_ends_with_the_training(tmp_path: Path) -> None:
    data, seen = dataset(), []
    before = torch.get_float32_matmul_precision()
    exact, _ = train(data, training(steps=60), tmp_path / "a")
    fast, _ = train(
        data,
        training(steps=60, precision="medium"),
        tmp_path / "b",
        progress=lambda *_: seen.append(torch.get_float32_matmul_precision()),
    )
    assert seen == [before] * len(seen) != []
    assert torch.get_float32_matmul_precision() == before
    inputs = NetworkInputs(data.store, data.device_matrix)
    one, two = (predict_rows(network, inputs, data.rows)[0] for network in (exact, fast))
    np.testing.assert_allclose(one, two, atol=0.05)


def test_the_last_steps_are_computed_in_full_precision() -> None:
    assert [precision_of(step / 20, "medium") for step in range(20)] == ["medium"] * 18 + ["highest"] * 2
    assert precision_of(0.0, "highest") == "highest"
    with pytest.raises(KilledError), matrix_precision("medium"):
        assert torch.get_float32_matmul_precision() == "medium"
        raise KilledError
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_budget_of_time_ends_a_run_where_it_ran_out(tmp_path: Path) -> None:
    data, config = dataset(), training(steps=1_000_000, seconds=0.5)
    _, summary = train(data, config, tmp_path)
    assert 0 < summary["steps"] < 1_000_000
    assert summary["train_seconds"] >= 0.5
    # It is over: nothing is added to it.
    assert train(data, config, tmp_path)[1]["steps"] == summary["steps"]
    assert train(data, training(steps=3, seconds=1e6), tmp_path / "b")[1]["steps"] == 3


def test_predictions_follow_the_rows_whatever_the_batch(tmp_path: Path) -> None:
    data = dataset()
    network, _ = train(data, training(), tmp_path)
    inputs = NetworkInputs(data.store, data.device_matrix)
    point, levels = predict_rows(network, inputs, data.rows)
    small, small_levels = predict_rows(network, inputs, data.rows, batch=13)
    np.testing.assert_allclose(point, small, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(levels, small_levels, rtol=1e-5, atol=1e-5)
    order = np.random.default_rng(0).permutation(len(data.rows))
    moved, _ = predict_rows(network, inputs, data.rows.take(order))
    np.testing.assert_allclose(moved, point[order], rtol=1e-5, atol=1e-5)
    hidden, _ = predict_rows(network, inputs, data.rows, known=False)
    assert (hidden != point).any()


def test_only_training_rows_of_devices_that_are_not_held_out() -> None:
    data, config = dataset(), training()
    held = config.model_copy(update={"data": config.data.model_copy(update={"holdout_devices": ("t4",)})})
    index, weight = training_rows(data, held)
    assert (data.rows.part[index] == 0).all()
    assert {data.devices[d].name for d in data.rows.device[index]} == {"l4", "a100-pcie-40gb"}
    assert (weight == 1).all()


def test_an_epoch_draws_each_row_as_often_as_its_weight_says() -> None:
    index, weight = np.arange(1000), np.where(np.arange(1000) < 500, 0.5, 2.0)
    drawn = np.bincount(epoch_order(index, weight, seed=0, epoch=0), minlength=1000)
    assert set(drawn[500:]) == {2}
    assert set(drawn[:500]) == {0, 1}
    assert drawn[:500].mean() == pytest.approx(0.5, abs=0.1)
    orders = [epoch_order(index, weight, 0, epoch).tolist() for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_programs_of_a_task_are_drawn_together() -> None:
    index = np.arange(100, 160)
    group = np.repeat([-1, 3, 7, 9], [10, 20, 25, 5])
    order = epoch_order(index, np.ones(60), 0, 0, group=group, together=8)
    assert sorted(order) == sorted(index)
    drawn = group[order - 100]
    # Blocks of one group: 20 rows are 8 + 8 + 4, 25 are 8 + 8 + 8 + 1.
    lengths: dict[int, list[int]] = {g: [] for g in (3, 7, 9)}
    start = 0
    for stop in [*np.flatnonzero(np.diff(drawn)) + 1, 60]:
        if drawn[start] >= 0:
            lengths[int(drawn[start])].append(int(stop - start))
        start = stop
    assert {g: sum(n) for g, n in lengths.items()} == {3: 20, 7: 25, 9: 5}
    # Adjacent blocks of one group look like one: every run is made of whole blocks.
    assert all(n % 8 in {0, 4, 1, 5} for n in lengths[3] + lengths[7] + lengths[9])
    again, later = (epoch_order(index, np.ones(60), 0, e, group=group, together=8) for e in (0, 1))
    assert (order == again).all()
    assert (order != later).any()
    # Which rows of a task meet changes from epoch to epoch.
    first = {frozenset(o[group[o - 100] == 7][:8].tolist()) for o in (order, later)}
    assert len(first) == 2


def test_pairs_are_of_one_task_and_come_once() -> None:
    group = np.array([5, -1, 2, 5, 2, -1, 5, 8])
    first, second = pairs_within(group)
    distinct_pairs = {frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    assert distinct_pairs == {frozenset(p) for p in [(0, 3), (0, 6), (3, 6), (2, 4)]}
    assert len(first) == 4
    for none in (np.full(4, -1), np.arange(4), np.zeros(0, dtype=np.int64)):
        assert len(pairs_within(none)[0]) == 0


def test_ranking_within_tasks_orders_what_the_error_alone_does_not(tmp_path: Path) -> None:
    data = dataset(programs=60)
    # Programs of a task differ by a few per cent, tasks by far more.
    task = np.arange(60) // 6
    rng = np.random.default_rng(1)
    latency = data.rows.log_latency + 0.05 * rng.standard_normal(60)[data.rows.program]
    data = replace(data, task=task, rows=replace(data.rows, log_latency=latency))
    group = data.group(data.rows)
    pairs = pairs_within(group)
    inputs = NetworkInputs(data.store, data.device_matrix)

    def loss_of(**optimiser: float) -> float:
        config = training(steps=70, learning_rate=5e-3, group_tasks=8, **optimiser)
        network, _ = train(data, config, tmp_path / str(optimiser))
        point = torch.from_numpy(predict_rows(network, inputs, data.rows)[0])
        measured = torch.from_numpy(data.rows.log_latency)
        return float(ranking_loss(point, measured, *(torch.from_numpy(p) for p in pairs)))

    assert loss_of(ranking_weight=10.0) < loss_of(ranking_weight=0.0)
