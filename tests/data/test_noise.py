"""Records that deviate by more than a multiple of the noise floor."""

from __future__ import annotations

import pytest

from cdmpp.data.records import Measurement, from_measurements
from cdmpp.data.summary import disturbed
from cdmpp.errors import DataError
from tests.data.test_folder import TWO, schedule


def steady(number: int, latency_s: float = 1.0, spread: float = 0.0, **changes) -> Measurement:
    """A record of five repeats with this interquartile range / median."""
    low, high = latency_s * (1 - spread / 2), latency_s * (1 + spread / 2)
    return schedule(number, latency_s=latency_s, repeats_s=(low, low, latency_s, high, high), **changes)


def test_spread_and_second_measurement_are_compared_with_the_floor_of_the_device() -> None:
    records = [
        steady(1),
        steady(2, spread=0.25),  # 2.5 x the floor
        steady(3, spread=0.35),  # 3.5 x the floor
        steady(4),  # 5 x the floor the second time
        steady(5, latency_s=2.0),
        schedule(6, latency_s=None, failure="crashed"),
        steady(1, device=TWO, spread=0.015),
        steady(2, device=TWO, spread=0.25),
        schedule(7, latency_s=1.0, repeats_s=(0.5, 1.5)),  # too few repeats for a spread
    ]
    relative = 0.1

    def later(latency_s: float, share: float) -> float:
        return latency_s * (1 + share / 2) / (1 - share / 2)

    again = [
        schedule(1, latency_s=later(1.0, relative)),
        schedule(5, latency_s=later(2.0, relative)),
        schedule(4, latency_s=later(1.0, 5 * relative)),
        schedule(1, TWO, later(1.0, 0.01)),
    ]
    table, repeats = from_measurements(records), from_measurements(again)
    found = disturbed(table, repeats)
    assert [(one.row, one.key[1]) for one in found] == [(2, "cpu-1t"), (3, "cpu-1t"), (7, "cpu-2t")]
    assert [one.floor for one in found] == pytest.approx([0.1, 0.1, 0.01])
    assert found[0].spread == pytest.approx(0.35) and found[1].difference == pytest.approx(0.5)
    assert [one.row for one in disturbed(table, repeats, factor=2.0)] == [1, 2, 3, 7]


def test_an_unknown_floor_and_an_impossible_factor_are_refused() -> None:
    table = from_measurements([steady(1), steady(1, device=TWO)])
    repeats = from_measurements([schedule(1, latency_s=1.1)])
    with pytest.raises(DataError, match="no program was measured twice on cpu-2t"):
        disturbed(table, repeats)
    with pytest.raises(DataError, match="cpu-1t, cpu-2t"):
        disturbed(table, None)
    with pytest.raises(DataError, match="factor = 0"):
        disturbed(table, repeats, factor=0.0)
