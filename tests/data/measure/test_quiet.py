"""The check for a quiet CPU, on a machine whose speed the tests set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdmpp.data.measure import timing
from cdmpp.data.measure.timing import QuietCheck


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds of the next samples; the last one holds for ever. A clock that moves by the samples."""
    values, now = [1e-3], [0.0]

    def sample(_: QuietCheck) -> float:
        seconds = values.pop(0) if len(values) > 1 else values[0]
        now[0] += seconds
        return seconds

    monkeypatch.setattr(QuietCheck, "_sample_s", sample)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    yield values


def test_a_core_that_another_tenant_slows_is_not_quiet(speeds: list[float]) -> None:
    check = QuietCheck([0], tolerance=0.1, patience_s=1.0)
    assert check.is_quiet()
    speeds[:] = [1.3e-3]
    assert not check.is_quiet()
    speeds[:] = [1.05e-3]
    assert check.is_quiet()


def test_waiting_ends_with_the_disturbance_or_with_the_patience(speeds: list[float]) -> None:
    check = QuietCheck([0], tolerance=0.1, patience_s=0.5)
    check.begin()
    speeds[:] = [1.4e-3] * 100 + [1e-3]
    check.wait()
    assert check.is_quiet() and check.has_patience
    speeds[:] = [1.4e-3]
    check.wait()
    assert not check.has_patience
    check.begin()
    assert check.has_patience


def test_repeated_runs_take_from_the_patience(speeds: list[float]) -> None:
    check = QuietCheck([0], tolerance=0.1, patience_s=0.5)
    check.begin()
    check.spend(0.3)
    assert check.has_patience
    check.spend(0.3)
    assert not check.has_patience
