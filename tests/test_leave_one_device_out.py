"""Pure parts of the study of devices that training never saw."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.leave_one_device_out import config_of, merged
from benchmarks.report.results import GROUPS
from benchmarks.unseen_devices.study import figures, sample
from cdmpp.devices.registry import lookup
from cdmpp.model.nn.config import LEVELS
from cdmpp.train.config import load_config

CONFIGS = Path(__file__).parents[1] / "configs"


def test_a_group_replaces_itself_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for name, seconds in (("hopper", 1), ("t4-bx00", 2), ("hopper", 3)):
        path.write_text(json.dumps(merged(path, name, {"seconds": seconds})))
    groups = json.loads(path.read_text())["groups"]
    assert groups == {"t4-bx00": {"seconds": 2}, "hopper": {"seconds": 3}}
    assert list(groups) == ["t4-bx00", "hopper"]  # the order of GROUPS, whatever was run first


def test_figures_weigh_rows_overall_and_families_in_the_macro_mean() -> None:
    measured = np.log([1e-3, 1e-3, 1e-3, 2e-3])
    point = np.log([1.1e-3, 1.1e-3, 1.1e-3, 3e-3])
    family = np.array(["gemm", "gemm", "gemm", "conv"])
    by_family = figures(measured, point, family)
    assert by_family["overall"]["mape"] == pytest.approx((3 * 0.1 + 0.5) / 4, abs=1e-4)
    assert by_family["macro"] == pytest.approx((0.1 + 0.5) / 2, abs=1e-4)
    assert by_family["families"]["gemm"]["n"] == 3
    assert by_family["overall"]["coverage"] is None


def test_coverage_counts_the_scaled_interval() -> None:
    away = np.array([-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3])[: len(LEVELS)]
    levels = np.tile(np.interp(LEVELS, np.linspace(0, 1, len(away)), away), (2, 1))
    measured, family = np.array([0.0, levels[0, LEVELS.index(0.9)] * 1.5]), np.array(["gemm", "gemm"])
    narrow = figures(measured, np.zeros(2), family, levels, np.ones(2))
    wide = figures(measured, np.zeros(2), family, levels, np.full(2, 2.0))
    assert (narrow["overall"]["coverage"], wide["overall"]["coverage"]) == (0.5, 1.0)


def test_sample_is_seeded_and_in_order() -> None:
    rows = np.arange(0, 300, 3)
    chosen = sample(rows, 20, [0, 1])
    assert len(chosen) == 20 and (np.diff(chosen) > 0).all() and np.isin(chosen, rows).all()
    assert np.array_equal(chosen, sample(rows, 20, [0, 1]))
    assert not np.array_equal(chosen, sample(rows, 20, [1, 1]))
    assert np.array_equal(sample(rows, 1000, 0), rows)


def test_every_group_is_the_shipped_model_without_its_devices() -> None:
    base = load_config(CONFIGS / "base.toml")
    configs = [config_of(name, base) for name in GROUPS]
    held = [name for config in configs for name in config.data.holdout_devices]
    # The names that the tables' devices resolve to; near twins go together.
    assert len(set(held)) == len(held) and all(lookup(name).name == name for name in held)
    assert lookup("NVIDIA H100 80GB (vidur)").name in GROUPS["hopper"]
    for config in configs:
        assert config.network == base.network and config.data.weights == base.data.weights
        assert config.optimiser.start_from is None and config.optimiser.seconds is None
