"""Passes over a group of programs: when they end, and which repeats are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from cdmpp.data.measure.building import Library
from cdmpp.data.measure.pools import Outcome
from cdmpp.data.measure.timers import time_in_passes
from cdmpp.data.measure.timing import TimedRun, Timing, TimingSettings

SETTINGS = TimingSettings(passes=2, max_passes=4, agreement=0.05)


class Replayed:
    """Timers that give each program its listed medians, one in each pass; None is a failure."""

    def __init__(self, medians: dict[str, list[float | None]]) -> None:
        self.medians = {name: list(values) for name, values in medians.items()}
        self.passes: list[list[str]] = []

    def ready(self) -> None:
        pass

    def close(self) -> None:
        pass

    def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
        self.passes.append([library.path for library in libraries])
        for library in libraries:
            median = self.medians[library.path].pop(0)
            if median is None:
                yield Outcome(None, "crash")
            else:
                yield Outcome(TimedRun(Timing((median,) * 3, 1), 1.0, 0.5))


def outcomes(medians: dict[str, list[float | None]]) -> tuple[Replayed, dict[str, Outcome]]:
    timers = Replayed(medians)
    libraries = [Library(name, (), 0.0) for name in medians]
    return timers, dict(zip(medians, time_in_passes(timers, libraries, SETTINGS), strict=True))


def test_programs_are_timed_until_two_passes_agree() -> None:
    timers, found = outcomes({"quiet": [1.0, 1.02], "disturbed": [1.9, 1.0, 1.5, 1.01], "never": [4.0, 3.0, 2.0, 1.0]})
    assert timers.passes == [["quiet", "disturbed", "never"]] * 2 + [["disturbed", "never"]] * 2
    assert [found[name].value.timing.latency_s for name in found] == [1.0, 1.0, 1.0]
    assert found["disturbed"].value.timing.spread == pytest.approx(0.01)
    # What no pass confirms has a spread above the limit, which flags the record.
    assert found["never"].value.timing.spread == pytest.approx(1.0)
    assert found["quiet"].value.elapsed_s == 2.0 and found["never"].value.timed_s == 2.0


def test_a_pass_on_a_quiet_cpu_needs_no_second_one() -> None:
    class Quiet(Replayed):
        def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
            for outcome in super().time(libraries):
                yield replace(outcome, value=replace(outcome.value, quiet=outcome.value.timing.latency_s < 2.0))

    timers = Quiet({"quiet": [1.0], "later": [2.5, 1.5], "never": [3.0, 3.3, 3.1, 3.2]})
    found = list(time_in_passes(timers, [Library(name, (), 0.0) for name in timers.medians], SETTINGS))
    assert [len(names) for names in timers.passes] == [3, 2, 1]
    assert [outcome.value.timing.latency_s for outcome in found] == [1.0, 1.5, 3.0]
    assert [outcome.value.timing.disagreement for outcome in found] == [0.0, 0.0, pytest.approx(0.1 / 3)]


def test_a_failure_in_the_first_pass_is_the_outcome_and_a_later_one_leaves_the_earlier_passes() -> None:
    timers, found = outcomes({"broken": [None], "later": [1.0, None]})
    assert found["broken"].failure == "crash" and timers.passes[1] == ["later"]
    assert found["later"].value.timing.latency_s == 1.0 and not found["later"].failure
