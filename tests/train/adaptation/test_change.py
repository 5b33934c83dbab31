"""The last change of a device, found in the ratios of its measurements."""

import numpy as np
import pytest

from cdmpp.train.adaptation.observed import SEGMENT, last_change


@pytest.mark.parametrize("before, after", [(300, 60), (60, 300), (SEGMENT, SEGMENT), (800, 200)])
@pytest.mark.parametrize("factor", [1.3, 0.7])
def test_change_is_found_where_it_was(before: int, after: int, factor: float) -> None:
    rng = np.random.default_rng(before)
    ratios = rng.normal(0, 0.05, before + after)
    ratios[before:] += np.log(factor)
    assert abs(last_change(ratios) - before) <= 2


def test_last_of_several_changes_counts() -> None:
    rng = np.random.default_rng(0)
    ratios = rng.normal(0, 0.05, 400)
    ratios[100:] += 0.4
    ratios[250:] -= 0.2
    assert abs(last_change(ratios) - 250) <= 2


def test_constant_ratios_change_exactly_where_they_change() -> None:
    assert last_change(np.repeat([0.0, 0.3], [230, 50])) == 230
    assert last_change(np.full(500, 0.3)) == 0


@pytest.mark.parametrize("count", [0, 1, 2 * SEGMENT - 1, 200, 1000])
def test_noise_is_no_change(count: int) -> None:
    for seed in range(20):
        assert last_change(np.random.default_rng(seed).normal(0.2, 0.1, count)) == 0
