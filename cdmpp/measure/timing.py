"""Timing one built program so that the figure can be believed.

How often a program is run follows from how long it takes: many short runs make up one repeat, so that the
clock's resolution does not show; several repeats show the spread; a program that takes seconds is run once.
The label is the median of the repeats, which one interrupted repeat does not move.
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

from cdmpp.errors import MeasurementError
from cdmpp.measure.imports import import_tvm_alone, load_device_runtime

#: Runs the program ``number`` times for each of ``repeat`` repeats; seconds a run, one figure a repeat.
Evaluate = Callable[[int, int], Sequence[float]]
#: Shape, element type, and whether the program writes it, of each argument of a program.
Arguments = Sequence[tuple[Sequence[int], str, bool]]

_SPECIFY_ONE_CORE_PER_THREAD = -2  # tvm::runtime::threading::ThreadGroup::AffinityMode
_MAX_NUMBER = 100_000
_INPUT_BYTES_KEPT = 512 * 2**20


class TimingSettings(BaseModel):
    """How programs are timed. Part of a data set: figures taken otherwise are not mixed with it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repeat_s: float = Field(0.004, gt=0, description="a repeat lasts at least this long")
    total_s: float = Field(0.06, gt=0, description="all repeats together last about this long")
    min_repeats: int = Field(3, ge=2)
    max_repeats: int = Field(10, ge=2)
    once_s: float = Field(0.25, gt=0, description="a program that takes longer is timed once and marked")
    max_spread: float = Field(
        0.1, gt=0, description="interquartile range / median above which a record is timed anew, then flagged"
    )
    flush_cache: bool = Field(False, description="flush arguments from the CPU's caches before every run")


@dataclass(frozen=True)
class TimedRun:
    """A timing and what it took: wall-clock seconds in all, and those of the timed runs alone."""

    timing: Timing
    elapsed_s: float
    timed_s: float


@dataclass(frozen=True)
class Timing:
    """Repeats of one program.

    Attributes
    ----------
    repeats_s : tuple of float
        Seconds a run, one figure for each repeat.
    number : int
        Runs in one repeat.
    once : bool
        True when a single run took longer than the limit and is all there is.
    rounds : int
        2 when the first round's spread was over the limit; the quieter round is kept.
    """

    repeats_s: tuple[float, ...]
    number: int
    once: bool = False
    rounds: int = 1

    @property
    def latency_s(self) -> float:
        """The label: median of the repeats."""
        return float(np.median(self.repeats_s))

    @property
    def spread(self) -> float:
        """Interquartile range over median; 0 for a single run, which says nothing of its spread."""
        low, high = np.quantile(self.repeats_s, [0.25, 0.75])
        return float((high - low) / self.latency_s)


def time_program(evaluate: Evaluate, settings: TimingSettings) -> Timing:
    """Warm up, choose number and repeats from the run time, time; a second round if the first was noisy.

    Raises
    ------
    MeasurementError
        The clock gave no positive figure.
    """
    first = _positive(evaluate(1, 1))
    if first[0] > settings.once_s:
        return Timing(first, 1, once=True)
    number, repeats = _plan(first[0], settings)
    if number > 1:  # the first run paid for cold caches: look again, warm, before settling the number
        number, repeats = _plan(min(*first, *_positive(evaluate(max(1, number // 8), 1))), settings)
        best = Timing(_positive(evaluate(number, repeats)), number)
    else:  # a long run, warmed up by one before it: it is a repeat like the others
        best = Timing((*first, *_positive(evaluate(1, repeats - 1))), 1)
    if best.spread > settings.max_spread:
        again = Timing(_positive(evaluate(number, repeats)), number, rounds=2)
        quieter = again if again.spread < best.spread else best
        best = Timing(quieter.repeats_s, number, rounds=2)
    return best


def _plan(run_s: float, settings: TimingSettings) -> tuple[int, int]:
    """Runs in a repeat, and repeats."""
    number = 1 if settings.flush_cache else min(_MAX_NUMBER, max(1, math.ceil(settings.repeat_s / run_s)))
    repeats = math.floor(settings.total_s / (number * run_s))
    return number, min(settings.max_repeats, max(settings.min_repeats, repeats))


def _positive(figures: Sequence[float]) -> tuple[float, ...]:
    found = tuple(float(f) for f in figures)
    if not found or not all(math.isfinite(f) and f > 0 for f in found):
        raise MeasurementError(f"the clock gave {found}", hint="no device is that fast: check its timer")
    return found


class Clock:
    """TVM's timer on a loaded module, local or remote, as an :data:`Evaluate` that adds up what it timed.

    ``time_evaluator`` runs the program once before it starts the clock. ``started``: when work on the program
    began, by ``time.perf_counter``; loading and inputs are part of what a timing takes.
    """

    def __init__(
        self, module: Any, device: Any, arguments: Sequence[Any], settings: TimingSettings, started: float
    ) -> None:
        self._module, self._device, self._arguments = module, device, arguments
        self._prepare = "cache_flush_cpu_non_first_arg" if settings.flush_cache else ""
        self._started = started
        self.timed_s = 0.0

    def __call__(self, number: int, repeat: int) -> Sequence[float]:
        run = self._module.time_evaluator("main", self._device, number=number, repeat=repeat, f_preproc=self._prepare)
        figures = tuple(run(*self._arguments).results)
        self.timed_s += number * sum(figures)
        return figures

    def finish(self, timing: Timing) -> TimedRun:
        """The timing with what it took since the start."""
        return TimedRun(timing, time.perf_counter() - self._started, self.timed_s)


def random_array(shape: Sequence[int], dtype: str, bound: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random values: floats in [-1, 1), integers in [0, bound), since integers may be indices."""
    if dtype == "bool":
        return rng.integers(0, 2, size=tuple(shape)).astype(bool)
    if _is_float(dtype):
        # bfloat16 is made of float32 by whoever fills the tensor.
        return (rng.random(tuple(shape), dtype=np.float32) * 2 - 1).astype("float32" if dtype == "bfloat16" else dtype)
    highest = min(bound - 1, np.iinfo(dtype).max)
    return rng.integers(0, highest, size=tuple(shape), endpoint=True).astype(dtype)


def index_bound(arguments: Arguments) -> int:
    """A bound below which every integer is a valid index into what a program reads.

    Arguments do not say what is indexed. They leave no doubt where one array of integers and one of floats
    are read, and the result has the shape of a gather: the table's with one axis replaced by the shape of
    the indices, as (30522, 128) and (1, 64) make (1, 64, 128). The bound is that axis then, so that rows come
    from all over the table. Otherwise it is the least extent of all floats, which holds for every axis, and
    at most 128.
    """
    read = [(tuple(shape), _is_float(dtype)) for shape, dtype, written in arguments if not written]
    tables = [shape for shape, is_float in read if is_float]
    indices = [shape for shape, is_float in read if not is_float]
    if len(tables) == len(indices) == 1:
        table, picked = tables[0], indices[0]
        results = [_squeezed(shape) for shape, _, written in arguments if written]
        # A result like the table or like the indices may be picked element by element, along any axis.
        if _squeezed(table) not in results and _squeezed(picked) not in results:
            found = [
                extent
                for axis, extent in enumerate(table)
                if _squeezed((*table[:axis], *picked, *table[axis + 1 :])) in results
            ]
            if found:
                return min(found)
    extents = [e for shape, dtype, _ in arguments if _is_float(dtype) for e in shape if e > 1]
    return min(*extents, 128) if extents else 2


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent > 1)


class Inputs:
    """Random tensors on a device, made once for each shape and type and kept while they fit in memory.

    Parameters
    ----------
    device : tvm.runtime.Device
    seed : int
    """

    def __init__(self, device: Any, seed: int = 0) -> None:
        self._device, self._rng = device, np.random.default_rng(seed)
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._bytes = 0

    def of(self, arguments: Arguments) -> list[Any]:
        """One tensor for each argument; two arguments of one call never share a tensor.

        What programs write is never read by another: results may hold infinities or denormal numbers, and
        arithmetic on the latter is slow.
        """
        import tvm.runtime

        bound = index_bound(arguments)
        count: dict[tuple[Any, ...], int] = {}
        tensors = []
        for shape, dtype, written in arguments:
            kind = (tuple(shape), dtype, written, bound if dtype.startswith(("int", "uint")) else 0)
            count[kind] = count.get(kind, 0) + 1
            key = (*kind, count[kind])
            if key not in self._kept:
                array = random_array(shape, dtype, bound, self._rng)
                if self._bytes + array.nbytes > _INPUT_BYTES_KEPT:
                    self._kept.clear()
                    self._bytes = 0
                tensor = tvm.runtime.empty(tuple(shape), dtype, self._device)
                tensor.copyfrom(array)
                self._kept[key] = tensor
                self._bytes += array.nbytes
            tensors.append(self._kept[key])
        return tensors


class LocalTimer:
    """Times libraries in this process; lives in a worker (:func:`prepare_timer`)."""

    def __init__(self, kind: str, settings: TimingSettings) -> None:
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

    def time(self, library: str, arguments: Arguments) -> TimedRun:
        """Time the function ``main`` of a shared library."""
        import tvm.runtime

        started = time.perf_counter()
        module = tvm.runtime.load_module(library)
        clock = Clock(module, self.device, self.inputs.of(arguments), self.settings, started)
        return clock.finish(time_program(clock, self.settings))


_timer: LocalTimer | None = None


def thread_environment(threads: int) -> dict[str, str]:
    """Environment of a worker that times with a fixed number of threads; it needs TVM's runtime alone."""
    return {"TVM_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads), "TVM_USE_RUNTIME_LIB": "1"}


def prepare_timer(kind: str, settings: TimingSettings, cores: Sequence[int]) -> None:
    """Make a worker ready to time: TVM's threads pinned one to a core, this thread to the first."""
    global _timer
    tvm = import_tvm_alone()
    if cores:
        names = [str(core) for core in cores]
        tvm.get_global_func("runtime.config_threadpool")(_SPECIFY_ONE_CORE_PER_THREAD, len(cores), names)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {cores[0]})
    _timer = LocalTimer(kind, settings)


def driver_name() -> str:
    """What the driver calls the device, in a worker that :func:`prepare_timer` made ready."""
    if _timer is None:
        raise RuntimeError("prepare_timer was not called in this process")
    return str(_timer.device.device_name)


def time_library(library: str, arguments: Arguments) -> TimedRun:
    """Time one library in a worker that :func:`prepare_timer` made ready."""
    if _timer is None:
        raise RuntimeError("prepare_timer was not called in this process")
    return _timer.time(library, arguments)
