"""Splits of the studies of scheduled programs: nothing that is tested is trained on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.schedules.document import add, check_unread, read
from benchmarks.schedules.methods import Contest, after_measurements
from benchmarks.schedules.parts import Scheduled, cpu_of
from cdmpp.errors import DataError
from cdmpp.train.config import TrainConfig
from tests.benchmarks.scheduled import DEVICES, SEALED, TEST, networks, tasks, trained

pytestmark = pytest.mark.slow


def test_loading_leaves_the_sealed_networks_out(scheduled: Scheduled, scheduled_config: TrainConfig) -> None:
    assert len(scheduled.sealed) == SEALED
    assert scheduled.test_networks == tuple(sorted(set(TEST) - set(scheduled.sealed)))
    every = np.arange(len(scheduled.dataset.rows))
    assert networks(scheduled, every).isdisjoint(scheduled.sealed)
    whole = Scheduled.load(scheduled_config, keep_sealed=True)
    assert networks(whole, np.arange(len(whole.dataset.rows))) >= set(scheduled.sealed)
    for name in ("task", "network", "device:one-1t-avx2", "cpu:one"):
        split = whole.split(name, scheduled_config)
        used = np.concatenate([trained(split), *split.tests.values()])
        assert networks(whole, used).isdisjoint(scheduled.sealed), name
    split = whole.split("sealed", scheduled_config)
    assert networks(whole, trained(split)).isdisjoint(scheduled.sealed)
    assert tasks(whole, split.tests["sealed"]).isdisjoint(tasks(whole, trained(split)))
    assert set(scheduled.sealed) <= networks(whole, split.tests["sealed"])


@pytest.mark.parametrize("name", ["task", "network"])
def test_no_task_is_trained_on_and_tested(scheduled: Scheduled, scheduled_config: TrainConfig, name: str) -> None:
    split = scheduled.split(name, scheduled_config)
    known = tasks(scheduled, trained(split))
    assert known and all(len(index) for index in split.tests.values())
    for index in split.tests.values():
        assert known.isdisjoint(tasks(scheduled, index))
    if name == "network":
        assert networks(scheduled, trained(split)).isdisjoint(scheduled.test_networks)


def test_a_configuration_is_held_out_with_its_near_twins_named(
    scheduled: Scheduled, scheduled_config: TrainConfig
) -> None:
    assert scheduled.configurations() == [*(f"device:{d.name}" for d in DEVICES), "cpu:one", "cpu:two"]
    split = scheduled.split("device:one-2t-avx2", scheduled_config)
    assert (split.held_devices, split.twins) == (("one-2t-avx2",), ("one-1t-avx2",))
    device = np.array([d.name for d in scheduled.dataset.devices])[scheduled.dataset.rows.device]
    assert set(device[trained(split)]) == {"one-1t-avx2", "two-1t-avx2"}
    assert set(device[split.tests["configuration"]]) == {"one-2t-avx2"}
    whole = scheduled.split("cpu:one", scheduled_config)
    assert whole.held_devices == ("one-1t-avx2", "one-2t-avx2") and whole.twins == ()
    assert set(device[trained(whole)]) == {"two-1t-avx2"}
    for name in ("device:none", "cpu:none", "sealed networks"):
        with pytest.raises(DataError):
            scheduled.split(name, scheduled_config)


def test_cpu_of_a_configuration() -> None:
    names = ("amd-zen3-2t-avx2", "intel-xeon-amx-1t-sse42", "t4", "my-cpu")
    assert [cpu_of(name) for name in names] == ["amd-zen3", "intel-xeon-amx", "t4", "my-cpu"]


def test_sealed_networks_are_evaluated_once_per_label(tmp_path: Path) -> None:
    out = tmp_path / "schedules.json"
    check_unread(out, "issue 17")
    add(out, "sealed_reads", "issue 17", {"date": "2026-11-23T04:00:00Z", "model": "abc"})
    add(out, "splits", "task", {"cdmpp": {"mape": 0.123456}}, held_out_networks=["net1"])
    assert read(out)["splits"] == {"task": {"cdmpp": {"mape": 0.1235}}}
    with pytest.raises(DataError, match="on 2026-11-23T04:00:00Z, with model abc"):
        check_unread(out, "issue 17")
    check_unread(out, "issue 18")


def test_baselines_are_corrected_by_the_process_of_the_network(
    scheduled: Scheduled, scheduled_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.schedules.methods.MEASURED", 8)
    optimiser = replace(scheduled_config.optimiser, steps=5)
    config = scheduled_config.model_copy(update={"optimiser": optimiser})
    contest = Contest(scheduled, scheduled.split("cpu:one", config), config)
    network = contest.network(tmp_path / "run")
    doubled = {"doubled": lambda rows: rows.log_latency + np.log(2.0)}
    for figures in after_measurements(scheduled, contest, network, doubled, tmp_path / "model").values():
        # A constant factor of two is an error of 100 % before, and mostly corrected after.
        assert figures["doubled"]["before"]["mape"] == pytest.approx(1.0)
        assert figures["doubled"]["after"]["mape"] < 0.2
