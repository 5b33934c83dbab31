"""Running error and drift, compared with figures computed from all observations at once."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp_server.observe.figures import MIN_REFERENCE, RATIO_LIMIT, RECENT, REFERENCE, MeasuredErrors, Running


def figures(ratios: np.ndarray, sizes: list[int] | None = None) -> MeasuredErrors:
    """Running state after observations with these ratios measured / predicted, in batches of these sizes."""
    kept = Running()
    predicted = np.full(len(ratios), 1e-4)
    for part in np.split(np.arange(len(ratios)), np.cumsum(sizes or [])):
        kept.add(predicted[part] * ratios[part], predicted[part], 0.9 * predicted[part], 1.2 * predicted[part])
    return kept.figures()


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 3000), sizes=st.lists(st.integers(1, 700), max_size=6))
def test_batches_match_the_definitions(seed: int, count: int, sizes: list[int]) -> None:
    ratios = np.exp(np.random.default_rng(seed).normal(0.1, 0.2, count))
    running, logs = figures(ratios, sizes), np.log(ratios)
    assert running.count == count
    assert running.mape == pytest.approx(np.mean(np.abs(1 / ratios - 1)))
    assert running.bias == pytest.approx(math.exp(logs.mean()) - 1)
    assert running.coverage == pytest.approx(np.mean((ratios >= 0.9) & (ratios <= 1.2)))
    recent, earlier = logs[-RECENT:], logs[:-RECENT][:REFERENCE]
    assert running.recent_bias == pytest.approx(math.exp(recent.mean()) - 1)
    if len(earlier) < MIN_REFERENCE:
        assert running.drift is None and not running.drifting
    else:
        error = math.sqrt(recent.var(ddof=1) / len(recent) + earlier.var(ddof=1) / len(earlier))
        assert running.drift == pytest.approx((recent.mean() - earlier.mean()) / error, rel=1e-6)


@given(factor=st.floats(1e-30, 1e30), count=st.integers(1, 50))
def test_ratio_beyond_the_limit_counts_as_the_limit(factor: float, count: int) -> None:
    ratios = np.ones(50)
    ratios[:count] = factor
    expected = figures(np.clip(ratios, 1 / RATIO_LIMIT, RATIO_LIMIT))
    running = figures(ratios)
    assert (running.mape, running.bias, running.recent_bias) == (expected.mape, expected.bias, expected.recent_bias)
    assert running.mape <= RATIO_LIMIT - 1


def test_constant_bias_is_not_drift() -> None:
    quiet = 0
    for seed in range(50):
        running = figures(np.exp(np.random.default_rng(seed).normal(math.log(2), 0.3, 2000)))
        assert running.bias == pytest.approx(1.0, abs=0.1)
        quiet += not running.drifting
    assert quiet == 50


@pytest.mark.parametrize("change", [-0.2, 0.2])
def test_change_is_reported_within_the_window_and_stays_reported(change: float) -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 20_000)
    noise[1500:] += change
    assert not figures(np.exp(noise[:1500])).drifting
    for count in (1650, 1700, 5000, 20_000):
        running = figures(np.exp(noise[:count]))
        assert running.drifting
        assert running.drift is not None and math.copysign(1, running.drift) == math.copysign(1, change)


def test_small_significant_change_is_not_drift() -> None:
    ratios = np.ones(1000)
    ratios[800:] = 1.02
    running = figures(ratios)
    assert running.drift is not None and running.drift > 100
    assert not running.drifting
