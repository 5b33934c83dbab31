"""Timing: numbers of runs and repeats, the measuring machine, passes over a group of programs, and the check for a
quiet CPU, on a machine whose speed the tests set.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.data.measure import timers, timing
from cdmpp.data.measure.building import Library
from cdmpp.data.measure.pools import Outcome
from cdmpp.data.measure.runtime.programs import random_array
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.targets import Configuration
from cdmpp.data.measure.timers import named, on_this_machine, time_in_passes
from cdmpp.data.measure.timing import (
    Arguments,
    Clock,
    QuietCheck,
    TimedRun,
    Timing,
    TimingSettings,
    index_bound,
    time_program,
)
from cdmpp.devices.registry import family, lookup
from cdmpp.errors import InvalidDeviceError, MeasurementError

SETTINGS = TimingSettings()


class Recorder:
    """A program of a stated run time, which remembers how it was run."""

    def __init__(self, run_s: float, noise: tuple[float, ...] = (1.0,)) -> None:
        self.run_s, self.noise, self.calls = run_s, noise, list[tuple[int, int]]()

    def __call__(self, number: int, repeat: int) -> list[float]:
        self.calls.append((number, repeat))
        return [self.run_s * self.noise[i % len(self.noise)] for i in range(repeat)]


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

    noisy, quiet = Calming(5e-3), Recorder(5e-3)
    assert time_program(noisy, SETTINGS).spread < 0.02
    time_program(quiet, SETTINGS)
    assert len(noisy.calls) == len(quiet.calls) + 1


def test_persistently_noisy_program_keeps_its_spread() -> None:
    program = Recorder(5e-3, (1.0, 1.5))
    assert time_program(program, SETTINGS).spread > SETTINGS.max_spread
    assert len(program.calls) == 3


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


def gpu(*names: str) -> Configuration:
    return Configuration({"kind": "cuda", "arch": "sm_80"}, 1, (), lookup(names[0]), names)


def test_driver_identifies_the_board_of_a_family_and_a_named_board_is_kept() -> None:
    found = named(gpu(*family("a100")), "NVIDIA A100-SXM4-80GB")
    assert found.name == "a100-sxm4-80gb" and found.device == lookup("a100-sxm4-80gb")
    board = gpu("a100-pcie-40gb")
    assert named(board, "NVIDIA A100-PCIE-40GB") is board


@pytest.mark.parametrize(
    ("names", "seen", "reason"),
    [
        (("a100-pcie-40gb",), "NVIDIA A100-SXM4-80GB", "this machine has a100-sxm4-80gb"),
        (("a100-pcie-40gb", "a100-sxm4-40gb"), "Tesla T4", "names a100-pcie-40gb or a100-sxm4-40gb"),
        # A slice of a board is another device.
        (("a100-sxm4-40gb",), "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "MIG 3g.20gb"),
    ],
)
def test_other_board_is_refused(names: tuple[str, ...], seen: str, reason: str) -> None:
    with pytest.raises(InvalidDeviceError, match=reason) as caught:
        named(gpu(*names), seen)
    assert "--device" in caught.value.hint


def on_cpu(monkeypatch: pytest.MonkeyPatch, name: str, named_as: str, one_thread: Configuration) -> Configuration:
    """A CPU of a name, of which a configuration thinks that it is another; no worker is started."""

    def host_device(threads: int, isa: str, bandwidth: float, **_: Any) -> SimpleNamespace:
        assert (threads, isa) == (1, "sse4.2") and bandwidth > 0  # given: none is measured
        return SimpleNamespace(name=name)

    class NoPool:
        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> NoPool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def call(self, *_: Any) -> None: ...

    monkeypatch.setattr(timers, "host_device", host_device)
    monkeypatch.setattr(timers, "WorkerPool", NoPool)
    target, cores, device = one_thread.target, one_thread.cores, one_thread.device
    return on_this_machine(Configuration(target, 1, cores, device, (named_as,)), CollectSettings())


def test_cpu_of_another_machine_must_match(monkeypatch: pytest.MonkeyPatch, one_thread: Configuration) -> None:
    name = "some-cpu-9000-1t-sse42"
    assert on_cpu(monkeypatch, name, name, one_thread).device is one_thread.device
    with pytest.raises(InvalidDeviceError, match="this machine has 'some-cpu-9000-1t-sse42'"):
        on_cpu(monkeypatch, name, "other-cpu-1-1t-sse42", one_thread)


PASSES = TimingSettings(passes=2, max_passes=4, agreement=0.05)


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
    return timers, dict(zip(medians, time_in_passes(timers, libraries, PASSES), strict=True))


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
    found = list(time_in_passes(timers, [Library(name, (), 0.0) for name in timers.medians], PASSES))
    assert [len(names) for names in timers.passes] == [3, 2, 1]
    assert [outcome.value.timing.latency_s for outcome in found] == [1.0, 1.5, 3.0]
    assert [outcome.value.timing.disagreement for outcome in found] == [0.0, 0.0, pytest.approx(0.1 / 3)]


def test_a_failure_in_the_first_pass_is_the_outcome_and_a_later_one_leaves_the_earlier_passes() -> None:
    timers, found = outcomes({"broken": [None], "later": [1.0, None]})
    assert found["broken"].failure == "crash" and timers.passes[1] == ["later"]
    assert found["later"].value.timing.latency_s == 1.0 and not found["later"].failure


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
    assert check.is_quiet() and check.left_s > 0
    speeds[:] = [1.4e-3]
    check.wait()
    assert check.left_s <= 0
    check.begin()
    assert check.left_s > 0


def test_repeated_runs_take_from_the_patience(speeds: list[float]) -> None:
    check = QuietCheck([0], tolerance=0.1, patience_s=0.5)
    runs: list[int] = []
    results = SimpleNamespace(results=[0.3])
    module = SimpleNamespace(time_evaluator=lambda *_, number, **__: lambda: runs.append(number) or results)
    clock = Clock(module, None, (), SETTINGS, 0.0, check)
    speeds[:] = [1.4e-3]  # the CPU is never quiet
    clock(1, 1)
    assert check.left_s <= 0 and len(runs) <= 3
