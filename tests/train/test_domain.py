"""An unlabelled target: which rows it has, that their latencies are not read, what the regulariser does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from cdmpp.errors import DataError
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.model.nn.losses import DISCREPANCIES, Discrepancy, bounded
from cdmpp.train.config import DataConfig, TrainConfig
from cdmpp.train.dataset import Dataset
from cdmpp.train.fit import target_rows, train, training_rows
from cdmpp.train.options import DomainConfig
from tests.model.nn.synthetic import dataset, training

pytestmark = pytest.mark.slow


def towards_t4(loss: Discrepancy, weight: float = 1.0, steps: int = 12) -> TrainConfig:
    config = training(steps=steps, learning_rate=5e-3)
    return config.model_copy(
        update={
            "data": DataConfig(holdout_devices=("t4",)),
            "domain": DomainConfig(loss=loss, weight=weight, rows=64, target_devices=("t4",)),
        }
    )


def with_networks() -> Dataset:
    """Programs 0-39 are of network "a", 30-79 of "b", the others of "c"."""
    data = dataset()
    names = [
        frozenset(n for n, r in (("a", range(40)), ("b", range(30, 80)), ("c", range(80, 120))) if i in r)
        for i in range(120)
    ]
    return replace(data, networks=tuple(names))


def test_the_target_is_the_training_part_of_the_held_out_device() -> None:
    data, config = dataset(), towards_t4("cmd")
    t4 = [d.name for d in data.devices].index("t4")
    index = target_rows(data, config)
    assert (data.rows.device[index] == t4).all()
    assert (data.rows.part[index] == 0).all()
    assert len(index) == ((data.rows.device == t4) & (data.rows.part == 0)).sum() > 0
    assert not set(index) & set(training_rows(data, config)[0])


def test_a_target_network_gives_its_programs_and_no_labels() -> None:
    data = with_networks()
    config = training().model_copy(update={"domain": DomainConfig(loss="cmd", target_networks=("b:image=32",))})
    labelled, unlabelled = training_rows(data, config)[0], target_rows(data, config)
    in_b = (data.rows.program >= 30) & (data.rows.program < 80)
    assert set(unlabelled) == set(np.flatnonzero(in_b & (data.rows.part == 0)))
    assert set(labelled) == set(np.flatnonzero(~in_b & (data.rows.part == 0)))
    unknown = config.model_copy(update={"domain": DomainConfig(loss="cmd", target_networks=("d",))})
    with pytest.raises(DataError, match="no record is of network d"):
        target_rows(data, unknown)


@pytest.mark.parametrize("loss", DISCREPANCIES)
def test_latencies_of_the_target_are_not_read(tmp_path: Path, loss: Discrepancy) -> None:
    data, config = dataset(), towards_t4(loss)
    target = data.rows.device == [d.name for d in data.devices].index("t4")
    blind = replace(data, rows=replace(data.rows, log_latency=np.where(target, np.nan, data.rows.log_latency)))
    one, two = (train(d, config, tmp_path / str(i))[0].state_dict() for i, d in enumerate((data, blind)))
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    none = train(data, towards_t4(loss, weight=0.0), tmp_path / "none")[0].state_dict()
    assert not torch.equal(one["leaf_in.weight"], none["leaf_in.weight"])


def test_cmd_brings_the_latents_of_source_and_target_together(tmp_path: Path) -> None:
    data = dataset()

    def apart(weight: float) -> float:
        config = towards_t4("cmd", weight, steps=60)
        network = train(data, config, tmp_path / str(weight))[0]
        inputs = NetworkInputs(data.store, data.device_matrix)
        found = []
        for index in (training_rows(data, config)[0], target_rows(data, config)):
            order = index[data.store.order(data.rows.program[index])]
            with torch.inference_mode():
                found.append(bounded(inputs.encode(network, data.rows.take(order))[0]))
        return float(DISCREPANCIES["cmd"](*found))

    assert apart(5.0) < 0.7 * apart(0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"domain": {"loss": "cmd"}}, "target_devices or target_networks"),
        ({"domain": {"target_devices": ["t4"]}}, "a loss goes with"),
        ({"domain": {"loss": "cmd", "target_devices": ["t4"]}}, "holdout_devices lacks"),
        ({"optimiser": {"ranking_weight": 1.0}}, "group_tasks"),
    ],
)
def test_settings_that_do_not_fit_together(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(content)


def test_a_device_without_training_rows_is_no_target() -> None:
    data, config = dataset(), towards_t4("coral")
    t4 = [d.name for d in data.devices].index("t4")
    part = np.where(data.rows.device == t4, 2, data.rows.part)
    with pytest.raises(DataError, match="no training rows"):
        target_rows(replace(data, rows=replace(data.rows, part=part)), config)
