"""Timing of one built program.

The run time determines the number of runs. Many short runs form one repeat, so that the clock's resolution
does not matter; several repeats show the spread; a program that takes seconds is run once. The label is the
median of the repeats, which is robust against one interrupted repeat.

On a CPU, runs begin while the cores have their full speed. On a shared host a virtual core loses a quarter to a half of
its speed for tenths of a second, while another tenant works on the same physical core. Small matrix products of
constant size show it within a millisecond. They do not show contention for the last cache or for memory.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from cdmpp.data.measure.building import import_tvm_alone, load_device_runtime
from cdmpp.data.measure.runtime.programs import random_array
from cdmpp.errors import MeasurementError

#: Side of the matrices, products in one sample (some 30 us), and samples in one check, of which the median counts.
_SIDE, _PRODUCTS, _SAMPLES = 64, 4, 9
#: A core that slept has lower clocks for about this long; threads of a parallel program spin for less.
_WARM_S = 0.002
#: Time in which the full speed of each core is found at first.
_FIRST_S = 1.0
#: Runs the program ``number`` times for each of ``repeat`` repeats; seconds per run, one value per repeat.
Evaluate = Callable[[int, int], Sequence[float]]
#: Shape, element type, and whether the program writes it, for each argument of a program.
Arguments = Sequence[tuple[Sequence[int], str, bool]]
_SPECIFY_ONE_CORE_PER_THREAD = -2  # tvm::runtime::threading::ThreadGroup::AffinityMode
_MAX_NUMBER = 100_000
_INPUT_BYTES_KEPT = 512 * 2**20


class TimingSettings(BaseModel):
    """Timing settings. They are part of a dataset, which never mixes measurements of different settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repeat_s: float = Field(0.004, gt=0, description="a repeat lasts at least this long")
    total_s: float = Field(0.02, gt=0, description="all repeats of a pass together last about this long")
    min_repeats: int = Field(3, ge=2)
    max_repeats: int = Field(5, ge=2)
    passes: int = Field(2, ge=1, description="passes over a group of programs in which each is timed")
    max_passes: int = Field(5, ge=1, description="passes for programs whose two fastest passes do not agree")
    agreement: float = Field(0.05, gt=0, description="relative difference up to which two passes agree")
    once_s: float = Field(0.25, gt=0, description="a program that takes longer is timed once and marked")
    max_spread: float = Field(
        0.1, gt=0, description="interquartile range / median above which a record is timed again, then flagged"
    )
    quiet_tolerance: float = Field(
        0.1, gt=0, description="relative slowdown of a reference product up to which a CPU counts as quiet"
    )
    patience_s: float = Field(1.0, ge=0, description="longest wait of a pass for a quiet CPU; 0: it is not checked")
    flush_cache: bool = Field(False, description="flush arguments from the CPU's caches before every run")


@dataclass(frozen=True)
class Timing:
    """Repeats of one program."""

    repeats_s: tuple[float, ...]  # seconds per run, one value per repeat
    number: int  # runs in one repeat
    once: bool = False  # whether a single run exceeded the limit; it is the only repeat
    disagreement: float = 0.0  # relative difference of the two fastest passes (:mod:`cdmpp.data.measure.timers`)

    @property
    def latency_s(self) -> float:
        """The label: median of the repeats."""
        return float(np.median(self.repeats_s))

    @property
    def spread(self) -> float:
        """Interquartile range over median (0 for a single run), or the disagreement of passes if it is larger."""
        low, high = np.quantile(self.repeats_s, [0.25, 0.75])
        return max(float((high - low) / self.latency_s), self.disagreement)


@dataclass(frozen=True)
class TimedRun:
    """A timing, its total wall-clock seconds, the seconds of the timed runs, and whether the CPU was quiet."""

    timing: Timing
    elapsed_s: float
    timed_s: float
    quiet: bool = False


def time_program(evaluate: Evaluate, settings: TimingSettings) -> Timing:
    """Time a program: warm up, choose the numbers of runs and repeats, and repeat a noisy round once."""
    first = _positive(evaluate(1, 1))
    if first[0] > settings.once_s:
        return Timing(first, 1, once=True)
    number, repeats = _plan(first[0], settings)
    if number > 1:  # the first run had cold caches: time warm runs before choosing the number
        number, repeats = _plan(min(*first, *_positive(evaluate(max(1, number // 8), 1))), settings)
        best = Timing(_positive(evaluate(number, repeats)), number)
    else:  # a long run that a warm-up run preceded counts as a repeat
        best = Timing((*first, *_positive(evaluate(1, repeats - 1))), 1)
    if best.spread > settings.max_spread:
        again = Timing(_positive(evaluate(number, repeats)), number)
        best = again if again.spread < best.spread else best
    return best


def _plan(run_s: float, settings: TimingSettings) -> tuple[int, int]:
    """Return the number of runs in a repeat, and of repeats."""
    number = 1 if settings.flush_cache else min(_MAX_NUMBER, max(1, math.ceil(settings.repeat_s / run_s)))
    repeats = math.floor(settings.total_s / (number * run_s))
    return number, min(settings.max_repeats, max(settings.min_repeats, repeats))


def _positive(figures: Sequence[float]) -> tuple[float, ...]:
    values = tuple(float(f) for f in figures)
    if not values or not all(math.isfinite(f) and f > 0 for f in values):
        raise MeasurementError(f"the clock returned {values}", hint="check the timer of the device")
    return values


class QuietCheck:
    """Waits until the cores run at full speed.

    ``cores`` are those of the timed program; the calling thread is pinned to the first one and returns to it. A core
    runs at full speed up to a relative excess of ``tolerance`` over its fastest check. ``patience_s`` is the longest
    time to wait for one program and to repeat its runs; ``left_s`` is what is left of it.
    """

    def __init__(self, cores: Sequence[int], tolerance: float, patience_s: float) -> None:
        self._cores, self._tolerance, self._patience_s = tuple(cores), tolerance, patience_s
        rng = np.random.default_rng(0)
        self._a, self._b = (rng.random((_SIDE, _SIDE), dtype=np.float32) for _ in range(2))
        self._out = np.empty_like(self._a)
        self._best_s = dict.fromkeys(self._cores, float("inf"))
        self.left_s = patience_s
        end = time.perf_counter() + _FIRST_S
        while time.perf_counter() < end:
            self.is_quiet()

    def begin(self) -> None:
        """Begin a program, with its full patience."""
        self.left_s = self._patience_s

    def is_quiet(self) -> bool:
        """Whether every core runs at full speed now."""
        quiet = True
        for core in reversed(self._cores):  # ends on the first one
            if len(self._cores) > 1:
                os.sched_setaffinity(0, {core})
                self._warm()
            seconds = float(np.median([self._sample_s() for _ in range(_SAMPLES)]))
            self._best_s[core] = min(self._best_s[core], seconds)
            quiet = quiet and seconds <= self._best_s[core] * (1 + self._tolerance)
        return quiet

    def wait(self) -> None:
        """Wait until the cores are quiet or the patience ends."""
        started = time.perf_counter()
        self._warm()
        while not self.is_quiet() and time.perf_counter() - started < self.left_s:
            pass
        self.left_s -= time.perf_counter() - started

    def _warm(self) -> None:
        end = time.perf_counter() + _WARM_S
        while time.perf_counter() < end:
            self._sample_s()

    def _sample_s(self) -> float:
        started = time.perf_counter()
        for _ in range(_PRODUCTS):
            np.dot(self._a, self._b, out=self._out)
        return time.perf_counter() - started


class Clock:
    """TVM's timer on a loaded module, local or remote, as an :data:`Evaluate` that sums the timed seconds.

    ``time_evaluator`` runs the program once before it starts the clock. ``started`` is the
    ``time.perf_counter`` at which work on the program began, including loading and inputs. With ``quiet``, runs begin
    on a quiet CPU, and are repeated if it is not quiet after them, while there is patience.
    """

    def __init__(
        self,
        module: Any,
        device: Any,
        arguments: Sequence[Any],
        settings: TimingSettings,
        started: float,
        quiet: QuietCheck | None = None,
    ) -> None:
        self._module, self._device, self._arguments = module, device, arguments
        self._prepare = "cache_flush_cpu_non_first_arg" if settings.flush_cache else ""
        self._started, self._quiet = started, quiet
        self.timed_s, self._was_quiet = 0.0, False
        if quiet is not None:
            quiet.begin()

    def __call__(self, number: int, repeat: int) -> Sequence[float]:
        figures = self._once(number, repeat)
        if self._quiet is not None:
            while not (is_quiet := self._quiet.is_quiet()) and self._quiet.left_s > 0:
                figures = self._once(number, repeat)
                self._quiet.left_s -= number * sum(figures)
            self._was_quiet = is_quiet
        return figures

    def _once(self, number: int, repeat: int) -> Sequence[float]:
        if self._quiet is not None:
            self._quiet.wait()
        run = self._module.time_evaluator("main", self._device, number=number, repeat=repeat, f_preproc=self._prepare)
        figures = tuple(run(*self._arguments).results)
        self.timed_s += number * sum(figures)
        return figures

    def finish(self, timing: Timing) -> TimedRun:
        """Return the timing with the seconds since the start."""
        return TimedRun(timing, time.perf_counter() - self._started, self.timed_s, self._was_quiet)


def index_bound(arguments: Arguments) -> int:
    """Return a bound below which every integer is a valid index into the arrays that a program reads.

    The arguments do not state which array is indexed. It is clear if the program reads one integer array and
    one float array, and the result has the shape of a gather: the table with one axis replaced by the shape
    of the indices, such as (30522, 128) and (1, 64) to (1, 64, 128). The bound is that axis then, so that
    the indices cover the whole table. Otherwise it is the smallest extent of all float arrays, and at most
    128.
    """
    read = [(tuple(shape), _is_float(dtype)) for shape, dtype, written in arguments if not written]
    tables = [shape for shape, is_float in read if is_float]
    indices = [shape for shape, is_float in read if not is_float]
    if len(tables) == len(indices) == 1:
        table, picked = tables[0], indices[0]
        results = [_squeezed(shape) for shape, _, written in arguments if written]
        # A result like the table or like the indices may be picked element by element, along any axis.
        if _squeezed(table) not in results and _squeezed(picked) not in results:
            gathered = [
                extent
                for axis, extent in enumerate(table)
                if _squeezed((*table[:axis], *picked, *table[axis + 1 :])) in results
            ]
            if gathered:
                return min(gathered)
    extents = [e for shape, dtype, _ in arguments if _is_float(dtype) for e in shape if e > 1]
    return min(*extents, 128) if extents else 2


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent > 1)


class Inputs:
    """Random tensors on a device, created once per position, shape and type, and kept while they fit into memory."""

    def __init__(self, device: Any) -> None:
        self._device, self._rng = device, np.random.default_rng(0)
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._bytes = 0

    def of(self, arguments: Arguments) -> list[Any]:
        """Return one tensor per argument; two arguments of one call never share a tensor.

        No program reads the results of another: they may contain infinities, or denormal numbers, whose
        arithmetic is slow.
        """
        import tvm.runtime

        bound = index_bound(arguments)
        tensors = []
        for position, (shape, dtype, written) in enumerate(arguments):
            key = (position, tuple(shape), dtype, written, bound if dtype.startswith(("int", "uint")) else 0)
            if key not in self._kept:
                array = random_array(shape, dtype, bound, self._rng)
                if self._bytes + array.nbytes > _INPUT_BYTES_KEPT:
                    self._kept.clear()
                    self._bytes = 0
                tensor = tvm.runtime.empty(tuple(shape), dtype, self._device)
                tensor.copyfrom(array)  # converts float32 to bfloat16
                self._kept[key] = tensor
                self._bytes += array.nbytes
            tensors.append(self._kept[key])
        return tensors


class LocalTimer:
    """Times libraries in this process, which is a worker (:func:`prepare_timer`)."""

    def __init__(self, kind: str, settings: TimingSettings, cores: Sequence[int] = ()) -> None:
        import tvm.runtime

        load_device_runtime(tvm, kind)
        self.settings = settings
        self.device = tvm.runtime.device(kind, 0)
        if not self.device.exist:
            raise MeasurementError(
                f"TVM finds no {kind} device on this machine",
                hint="check the driver, or measure elsewhere: cdmpp collect --build-only, cdmpp measure",
            )
        self.inputs = Inputs(self.device)
        is_checked = kind == "cpu" and bool(cores) and settings.patience_s > 0 and hasattr(os, "sched_setaffinity")
        self._quiet = QuietCheck(cores, settings.quiet_tolerance, settings.patience_s) if is_checked else None

    def time(self, library: str, arguments: Arguments) -> TimedRun:
        """Time the function ``main`` of a shared library."""
        import tvm.runtime

        started = time.perf_counter()
        module = tvm.runtime.load_module(library)
        clock = Clock(module, self.device, self.inputs.of(arguments), self.settings, started, self._quiet)
        return clock.finish(time_program(clock, self.settings))


#: The timer of a worker; :func:`prepare_timer` makes it.
_timer: LocalTimer


def prepare_timer(kind: str, settings: TimingSettings, cores: Sequence[int]) -> None:
    """Prepare a worker for timing: pin each TVM thread to a core, and this thread to the first one."""
    global _timer
    tvm = import_tvm_alone()
    if cores:
        names = [str(core) for core in cores]
        tvm.get_global_func("runtime.config_threadpool")(_SPECIFY_ONE_CORE_PER_THREAD, len(cores), names)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {cores[0]})
    _timer = LocalTimer(kind, settings, cores)


def driver_name() -> str:
    """Return the driver's name of the device, in a worker after :func:`prepare_timer`."""
    return str(_timer.device.device_name)


def time_library(library: str, arguments: Arguments) -> TimedRun:
    """Time one library in a worker after :func:`prepare_timer`."""
    return _timer.time(library, arguments)
