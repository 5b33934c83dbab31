"""How often a program is run follows from how long it takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.errors import MeasurementError
from cdmpp.measure.timing import Timing, TimingSettings, index_bound, random_array, time_program

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
def test_repeats_are_long_enough_for_the_clock_and_short_enough_together(run_s: float) -> None:
    program = Recorder(run_s)
    timing = time_program(program, SETTINGS)
    number, repeats = timing.number, len(timing.repeats_s)
    assert number == program.calls[-1][0]
    assert SETTINGS.min_repeats <= repeats <= SETTINGS.max_repeats
    assert number * run_s >= SETTINGS.repeat_s * 0.999 or number == 100_000
    assert number * repeats * run_s <= max(
        SETTINGS.total_s, SETTINGS.min_repeats * max(run_s, 2 * SETTINGS.repeat_s)
    )
    assert timing.latency_s == pytest.approx(run_s)


def test_a_slow_program_is_run_once_and_marked() -> None:
    program = Recorder(1.5)
    timing = time_program(program, SETTINGS)
    assert timing.once and timing.repeats_s == (1.5,) and timing.spread == 0
    assert program.calls == [(1, 1)]


def test_a_noisy_first_round_gets_a_second_and_the_quieter_is_kept() -> None:
    class Calming(Recorder):
        def __call__(self, number: int, repeat: int) -> list[float]:
            self.noise = (1.0, 3.0) if len(self.calls) < 2 else (1.0, 1.01)
            return super().__call__(number, repeat)

    timing = time_program(Calming(5e-3), SETTINGS)
    assert timing.rounds == 2 and timing.spread < 0.02
    assert time_program(Recorder(5e-3), SETTINGS).rounds == 1


def test_a_program_that_stays_noisy_keeps_its_spread() -> None:
    timing = time_program(Recorder(5e-3, (1.0, 1.5)), SETTINGS)
    assert timing.rounds == 2 and timing.spread > SETTINGS.max_spread


def test_caches_are_flushed_before_every_run() -> None:
    assert time_program(Recorder(1e-5), TimingSettings(flush_cache=True)).number == 1


@pytest.mark.parametrize("figure", [0.0, -1e-6, float("nan"), float("inf")])
def test_a_clock_that_gives_no_latency_is_an_error(figure: float) -> None:
    with pytest.raises(MeasurementError, match="clock"):
        time_program(lambda number, repeat: [figure] * repeat, SETTINGS)


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    timing = Timing((1.0, 2.0, 3.0, 4.0, 5.0), 1)
    assert timing.latency_s == 3.0 and timing.spread == pytest.approx(2 / 3)


def test_integers_are_indices_into_every_axis() -> None:
    arguments = [((1, 64), "int64", False), ((30522, 128), "float32", False), ((1, 64, 128), "float32", True)]
    assert index_bound(arguments) == 64
    rng = np.random.default_rng(0)
    drawn = random_array((1, 64), "int64", index_bound(arguments), rng)
    assert drawn.dtype == np.int64 and drawn.min() >= 0 and drawn.max() < 64 and len(np.unique(drawn)) > 10


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool"])
def test_inputs_are_random_and_not_zeros(dtype: str) -> None:
    drawn = random_array((64, 64), dtype, 50, np.random.default_rng(0))
    assert str(drawn.dtype) == dtype and drawn.shape == (64, 64)
    assert np.count_nonzero(drawn) > 1000 and len(np.unique(drawn)) > 1
