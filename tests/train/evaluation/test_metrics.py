"""Metrics against plain definitions, and against scipy."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from cdmpp.train.evaluation.metrics import METRICS, kendall_tau, measure


def test_figures_by_hand() -> None:
    measured = np.array([1.0, 2.0, 4.0, 10.0])
    predicted = np.array([1.05, 1.7, 4.0, 15.0])  # errors 0.05, 0.15, 0, 0.5
    found = measure(predicted, measured, np.array([0.9, 1.5, 4.1, 9.0]), np.array([1.1, 2.5, 5.0, 11.0]))
    assert tuple(found) == METRICS
    assert found["n"] == 4
    assert found["mape"] == pytest.approx(0.175)
    assert found["median_ape"] == pytest.approx(0.1)
    assert (found["within_10"], found["within_20"], found["coverage"]) == (0.5, 0.75, 0.75)
    assert found["kendall_tau"] == 1.0


def test_few_rows_give_null_not_an_invented_figure() -> None:
    nothing = measure(*(np.zeros(0),) * 4)
    assert nothing == {"n": 0, **dict.fromkeys(METRICS[1:])}
    one = measure(np.array([1.1]), np.array([1.0]), np.array([0.5]), np.array([2.0]))
    assert one["n"] == 1 and one["coverage"] == 1.0 and one["kendall_tau"] is None
    assert measure(np.array([1.1]), np.array([1.0]))["coverage"] is None
    assert "NaN" not in json.dumps([nothing, one])


@pytest.mark.parametrize("side", [0, 1])
def test_tau_of_a_constant_is_not_defined(side: int) -> None:
    columns = [np.arange(5.0), np.arange(5.0)]
    columns[side] = np.full(5, 3.0)
    assert kendall_tau(*columns) is None


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=2, max_size=60))
def test_tau_is_scipys(pairs: list[tuple[int, int]]) -> None:
    x, y = np.array(pairs, dtype=np.float64).T
    mine = kendall_tau(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert mine is None
    else:
        assert mine == pytest.approx(kendalltau(x, y).statistic, abs=1e-12)


def test_tau_of_many_rows() -> None:
    rng = np.random.default_rng(0)
    y = np.round(rng.lognormal(size=20_000), 2)
    x = y * rng.lognormal(sigma=0.3, size=len(y))
    assert kendall_tau(x, y) == pytest.approx(kendalltau(x, y).statistic, abs=1e-12)
