"""Timing of a group of programs in passes, until two passes agree on each program.

On a shared machine other tenants slow a program down for tenths of a second. Repeats in a row are slowed down
together, so their spread does not show it. Passes are seconds apart: the smaller of two that agree is the label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cdmpp.data.measure.building import Library
from cdmpp.data.measure.timers import Timers
from cdmpp.data.measure.timing import TimedRun, TimingSettings
from cdmpp.data.measure.worker import Outcome
from cdmpp.errors import MeasurementError


def time_in_passes(timers: Timers, libraries: Sequence[Library], settings: TimingSettings) -> Iterator[Outcome]:
    """Time programs; every outcome has the repeats of the pass with the smallest median.

    Parameters
    ----------
    timers : Timers
    libraries : sequence of Library
    settings : TimingSettings
        One pass for programs that ran on a quiet CPU (:mod:`cdmpp.data.measure.quiet`), ``passes`` for the others, then
        up to ``max_passes`` for those whose two fastest passes differ by more than ``agreement``.

    Yields
    ------
    Outcome
        In the order of the libraries. A program that fails in its first pass has that failure. Later failures leave
        its earlier passes.

    Raises
    ------
    MeasurementError
        The device was lost; before that come the outcomes of the programs that were timed.
    """
    outcomes: list[Outcome] = []
    runs: dict[int, list[TimedRun]] = {}
    lost: MeasurementError | None = None
    try:
        for i, outcome in enumerate(timers.time(libraries)):
            outcomes.append(outcome)
            if not outcome.failure:
                runs[i] = [outcome.value]
        for _ in range(1, settings.max_passes):
            again = [i for i in runs if not _settled(runs[i], settings)]
            if not again:
                break
            for i, outcome in zip(again, timers.time([libraries[i] for i in again]), strict=True):
                if outcome.failure:
                    outcomes[i] = replace(outcomes[i], value=_merged(runs.pop(i)))
                else:
                    runs[i].append(outcome.value)
    except MeasurementError as error:
        lost = error
    for i, passes in runs.items():
        outcomes[i] = replace(outcomes[i], value=_merged(passes))
    yield from outcomes
    if lost is not None:
        raise lost


def _settled(runs: Sequence[TimedRun], settings: TimingSettings) -> bool:
    """Whether a program needs no further pass: a quiet one, or enough that agree."""
    if any(run.quiet for run in runs):
        return True
    return len(runs) >= settings.passes and _disagreement(runs) <= settings.agreement


def _disagreement(runs: Sequence[TimedRun]) -> float:
    """Relative difference of the two fastest passes; 0 for one pass."""
    medians = sorted(run.timing.latency_s for run in runs)
    return medians[1] / medians[0] - 1 if len(medians) > 1 else 0.0


def _merged(runs: Sequence[TimedRun]) -> TimedRun:
    quiet = [run for run in runs if run.quiet]
    fastest = min(quiet or runs, key=lambda run: run.timing.latency_s)
    disagreement = 0.0 if quiet else _disagreement(runs)
    timing = replace(fastest.timing, disagreement=disagreement, rounds=sum(r.timing.rounds for r in runs))
    return TimedRun(timing, sum(r.elapsed_s for r in runs), sum(r.timed_s for r in runs), bool(quiet))
