"""The monotone fit against references: sorted by hand, scikit-learn's, and the optimality conditions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.isotonic import IsotonicRegression

from cdmpp.predict.curves.points import monotone_fit

FLOATS = st.floats(-5, 5, width=32)
GRIDS = arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 5)), elements=FLOATS)


def falls(grid: np.ndarray, axis: int) -> bool:
    return bool((np.diff(grid, axis=axis) < 0).any())


@settings(max_examples=60)
@given(arrays(np.float64, st.integers(1, 30), elements=FLOATS))
def test_one_axis_is_what_scikit_learn_gives(values: np.ndarray) -> None:
    theirs = IsotonicRegression().fit_transform(np.arange(len(values)), values)
    np.testing.assert_allclose(monotone_fit(values, [0]), theirs, atol=1e-9)


@settings(max_examples=60)
@given(GRIDS, st.integers(0, 2**31))
def test_two_axes_never_fall_and_are_the_nearest(grid: np.ndarray, seed: int) -> None:
    """No monotone grid is nearer: the projection's variational inequality, against drawn ones."""
    fit = monotone_fit(grid, [0, 1])
    assert not falls(fit, 0) and not falls(fit, 1)
    drawn = np.random.default_rng(seed)
    for _ in range(20):
        steps = drawn.exponential(drawn.uniform(0, 2), grid.shape) * (drawn.random(grid.shape) < 0.5)
        other = steps.cumsum(0).cumsum(1) + drawn.normal(0, 3)
        assert ((grid - fit) * (other - fit)).sum() <= 1e-2
    assert abs(((grid - fit) * fit).sum()) <= 1e-2


def test_an_axis_that_is_not_named_is_free() -> None:
    grid = np.array([[3.0, 2.0], [2.0, 5.0]])
    np.testing.assert_allclose(monotone_fit(grid, [1]), [[2.5, 2.5], [2.0, 5.0]])
    np.testing.assert_allclose(monotone_fit(grid, [0]), [[2.5, 2.0], [2.5, 5.0]])
    np.testing.assert_array_equal(monotone_fit(grid, []), grid)


def test_slices_of_a_free_axis_do_not_matter_to_each_other() -> None:
    drawn = np.random.default_rng(0).normal(size=(4, 6, 5))
    together = monotone_fit(drawn, [1, 2])
    for i in range(4):
        np.testing.assert_array_equal(together[i], monotone_fit(drawn[i], [0, 1]))


@pytest.mark.parametrize("axes", [[0], [1], [0, 1]])
def test_gaps_stay_gaps_and_bind_nobody(axes: list[int]) -> None:
    grid = np.array([[1.0, np.nan, 0.5], [np.nan, np.nan, 4.0], [0.0, 2.0, 3.0]])
    fit = monotone_fit(grid, axes)
    np.testing.assert_array_equal(np.isnan(fit), np.isnan(grid))
    nothing = np.full((2, 2), np.nan)
    np.testing.assert_array_equal(monotone_fit(nothing, [0, 1]), nothing)


def test_a_gap_in_a_line() -> None:
    fit = monotone_fit(np.array([3.0, np.nan, 1.0, 5.0]), [0])
    np.testing.assert_allclose(fit, [2.0, np.nan, 2.0, 5.0])
