"""Residuals that intervals need beside the bounds of their kernels."""

import math

import numpy as np
import pytest

from benchmarks.spreads import Miss, needed, residuals, spread


def test_needed_residual_makes_the_interval_hold_the_measurement() -> None:
    figures = np.array([1.0, 0.9, 1.1])
    residual = needed(figures, 1.3)
    upper = math.exp(math.hypot(math.log(1.1), 1.2816 * residual))
    assert upper == pytest.approx(1.3)
    assert needed(figures, 1.05) == needed(figures, 0.95) == 0.0
    assert math.exp(1.2816 * needed(figures, 0.5, widest=True)) == pytest.approx(2.0)


def test_spread_holds_four_fifths_of_sources_and_prefers_the_own_engine() -> None:
    rng = np.random.default_rng(0)
    misses = [Miss("a", i, "in", float(value)) for i, value in enumerate(rng.exponential(0.1, 1000))]
    assert np.mean([miss.needed <= spread(misses, "b") for miss in misses]) == pytest.approx(0.8, abs=0.01)
    # Many rows of one model do not outweigh other models.
    repeated = misses + [Miss("a", "often", "in", 9.0)] * 1000
    assert spread(repeated, "b") < 0.2
    wide = misses[:50] + [Miss("own", f"own {i}", "in", 1.0) for i in range(10)]
    assert spread(wide, "other") < 1.0 == spread(wide, "own")
    assert spread([], "a") == 0.0


def test_residuals_grow_with_the_distance() -> None:
    misses = [Miss("a", label, label, value) for label, value in (("in", 0.3), ("near", 0.1), ("out", 0.5))]
    assert residuals(misses, "a") == {"residual": 0.3, "near_residual": 0.3, "out_residual": 0.5}
