"""Optimistic latencies: unlike programs gain, near-duplicates of a pick do not."""

import numpy as np
import pytest

pytest.importorskip("tvm")

from cdmpp.integrations.online import ResidualSpread, Scales, optimistic

SCALES = Scales(length=1.0, amplitude=0.3, noise=0.1)
#: Ten near-duplicates, and one program far from them.
ROWS = np.concatenate([np.full((10, 4), 1.0) + 0.01 * np.arange(10)[:, None], np.full((1, 4), 9.0)])


def test_spread_shrinks_near_observed_programs() -> None:
    free = ResidualSpread(ROWS, ROWS[:0], SCALES)
    assert free.deviation == pytest.approx(0.3)
    near = ResidualSpread(ROWS, ROWS[:1], SCALES)
    assert (near.deviation[:10] < 0.12).all() and near.deviation[10] == pytest.approx(0.3, abs=1e-3)


def test_programs_observed_one_by_one_count_as_together() -> None:
    together = ResidualSpread(ROWS, ROWS[[2, 10, 5]], SCALES)
    single = ResidualSpread(ROWS, ROWS[[2]], SCALES)
    single.observe(10)
    single.observe(5)
    np.testing.assert_allclose(single.variance, together.variance, atol=1e-9)


def test_second_pick_is_unlike_the_first() -> None:
    # The near-duplicates are predicted a little faster than the program far from them.
    log_s = np.concatenate([np.full(10, -9.0) + 0.001 * np.arange(10), [-8.9]])
    greedy, picked = optimistic(log_s, ResidualSpread(ROWS, ROWS[:0], SCALES), 0.0, 3)
    assert picked == [0, 1, 2]
    np.testing.assert_array_equal(greedy, log_s)
    values, picked = optimistic(log_s, ResidualSpread(ROWS, ROWS[:0], SCALES), 1.0, 3)
    assert picked[:2] == [0, 10]
    assert (values <= log_s).all()
    assert values[10] < values[1:10].min()


def test_more_picks_than_candidates() -> None:
    values, picked = optimistic(np.zeros(2), ResidualSpread(ROWS[:2], ROWS[:0], SCALES), 1.0, 16)
    assert sorted(picked) == [0, 1] and np.isfinite(values).all()
