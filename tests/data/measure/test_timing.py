"""Choice of runs and repeats from the run time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.data.measure.timing import Arguments, Clock, Timing, TimingSettings, index_bound, random_array, time_program
from cdmpp.errors import MeasurementError

SETTINGS = TimingSettings()


class Recorder:
    """A program of a stated run time, which remembers how it was run."""

    def __init__(self, run_s: float, noise: tuple[float, ...] = (1.0,)) -> None:
        self.run_s, self.noise, self.calls = run_s, noise, list[tuple[int, int]]()

    def __call__(self, number: int, repeat: int) -> list[float]:
        self.calls.append((number, repeat))
        return [self.run_s * self.noise[i % len(self.noise)] for i in range(repeat)]


@settings(deadline=None)
@given(run_s=st.floats(1e-8, 0.24))
def test_repeats_respect_minimum_and_total_time(run_s: float) -> None:
    program = Recorder(run_s)
    timing = time_program(program, SETTINGS)
    number, repeats = timing.number, len(timing.repeats_s)
    assert number == program.calls[-1][0]
    assert SETTINGS.min_repeats <= repeats <= SETTINGS.max_repeats
    assert number * run_s >= SETTINGS.repeat_s * 0.999 or number == 100_000
    assert number * repeats * run_s <= max(SETTINGS.total_s, SETTINGS.min_repeats * max(run_s, 2 * SETTINGS.repeat_s))
    assert timing.latency_s == pytest.approx(run_s)


def test_slow_program_runs_once_and_is_marked() -> None:
    program = Recorder(1.5)
    timing = time_program(program, SETTINGS)
    assert timing.once and timing.repeats_s == (1.5,) and timing.spread == 0
    assert program.calls == [(1, 1)]


def test_noisy_round_is_repeated_and_the_quieter_is_kept() -> None:
    class Calming(Recorder):
        def __call__(self, number: int, repeat: int) -> list[float]:
            self.noise = (1.0, 3.0) if len(self.calls) < 2 else (1.0, 1.01)
            return super().__call__(number, repeat)

    timing = time_program(Calming(5e-3), SETTINGS)
    assert timing.rounds == 2 and timing.spread < 0.02
    assert time_program(Recorder(5e-3), SETTINGS).rounds == 1


def test_persistently_noisy_program_keeps_its_spread() -> None:
    timing = time_program(Recorder(5e-3, (1.0, 1.5)), SETTINGS)
    assert timing.rounds == 2 and timing.spread > SETTINGS.max_spread


def test_cache_is_flushed_before_every_run() -> None:
    assert time_program(Recorder(1e-5), TimingSettings(flush_cache=True)).number == 1


@pytest.mark.parametrize("figure", [0.0, -1e-6, float("nan"), float("inf")])
def test_invalid_clock_values_raise(figure: float) -> None:
    with pytest.raises(MeasurementError, match="clock"):
        time_program(lambda number, repeat: [figure] * repeat, SETTINGS)


def test_spread_is_interquartile_range_over_median() -> None:
    timing = Timing((1.0, 2.0, 3.0, 4.0, 5.0), 1)
    assert timing.latency_s == 3.0 and timing.spread == pytest.approx(2 / 3)


IDS, OUT = ((1, 64), "int64", False), ((1, 64, 128), "float32", True)
TABLE, POSITIONS = ((30522, 128), "float32", False), ((1, 64, 128), "float32", False)


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        ([IDS, TABLE, OUT], 30522),
        # Fusion drops or adds axes of extent 1.
        ([((64,), "int32", False), TABLE, OUT], 30522),
        ([((1, 64), "int64", False), ((8, 300, 7), "float32", False), ((8, 64, 7), "float32", True)], 300),
        # Either axis: the smaller.
        ([((5,), "int64", False), ((40, 40), "float32", False), ((5, 40), "float32", True)], 40),
        # Another array might be indexed, too.
        ([IDS, TABLE, POSITIONS, OUT], 64),
        ([IDS, IDS, TABLE, OUT], 64),
        # One value of each row, along which axis nobody can say.
        ([((30, 1), "int64", False), ((30, 8), "float32", False), ((30, 1), "float32", True)], 8),
        ([((128,), "int64", False), ((128, 10), "float32", False), ((128, 10), "float32", True)], 10),
        ([((500, 900), "int64", False), ((500, 900), "float32", True)], 128),
        ([IDS], 2),
    ],
)
def test_integers_are_valid_indices(arguments: Arguments, bound: int) -> None:
    assert index_bound(arguments) == bound


@pytest.mark.parametrize(("dtype", "highest"), [("int64", 30521), ("int8", 127), ("uint8", 255)])
def test_integers_cover_the_valid_range(dtype: str, highest: int) -> None:
    drawn = random_array((100, 100), dtype, 30522, np.random.default_rng(0))
    assert str(drawn.dtype) == dtype and drawn.min() >= 0 and 0.9 * highest < drawn.max() <= highest


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool"])
def test_inputs_are_random_and_nonzero(dtype: str) -> None:
    drawn = random_array((64, 64), dtype, 50, np.random.default_rng(0))
    assert str(drawn.dtype) == dtype and drawn.shape == (64, 64)
    assert np.count_nonzero(drawn) > 1000 and len(np.unique(drawn)) > 1


def test_elapsed_time_includes_loading() -> None:
    started = time.perf_counter() - 100.0  # as if loading had taken so long
    run = Clock(None, None, (), SETTINGS, started).finish(Timing((1e-3,), 1))
    assert 100.0 <= run.elapsed_s < 1000.0 and run.timed_s == 0.0
