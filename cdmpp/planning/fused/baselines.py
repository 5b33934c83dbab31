"""Schedules that a search begins with and is measured by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cdmpp.planning.fused.construct import construct
from cdmpp.planning.fused.problem import Model, Problem

#: Relative difference below which two makespans are equal: sums of the same terms in another order.
EQUAL = 1e-9
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """Start of each task in seconds, and what it costs."""

    start_s: Floats
    makespan_s: float
    peak: float
    peaks_sum: float

    @property
    def key(self) -> tuple[float, float, float]:
        """Order of schedules: the makespan, then memory."""
        return (self.makespan_s, self.peak, self.peaks_sum)


def priced(problem: Problem, start_s: Floats) -> Schedule:
    """A schedule with its costs."""
    tasks = problem.tasks
    peaks = tasks.peaks(start_s)
    makespan = float((start_s + tasks.duration[tasks.group]).max())
    return Schedule(start_s, makespan, float(peaks.max()), float(peaks.sum()))


def greedy(problem: Problem, limit: float) -> Schedule | None:
    """No rank waits: backward passes first, then the earlier micro-batch, then the model's number.

    None where the memory limit locks the ranks.
    """
    tasks = problem.tasks
    most = float(tasks.count.max()) + 1
    order = tasks.index * (float(tasks.lane.max()) + 1) + tasks.lane[tasks.group]
    return _once(problem, np.where(tasks.forward, most * len(tasks.count), 0.0)[tasks.group] + order, limit)


def serial_1f1b(problem: Problem) -> tuple[Floats, float]:
    """One model after the other, each 1F1B, its copies at the same time.

    Returns
    -------
    start_s : ndarray, shape (tasks,)
    makespan_s : float
        The sum of (M + P - 1) (f + b) where no limit holds micro-batches back.
    """
    starts, begin = [], 0.0
    for model in problem.models:
        # Its copies do not meet: one stands for all.
        alone = Problem(model.stages, (Model(**{**vars(model), "direction": "down"}),))
        tasks = alone.tasks
        window = model.stages - tasks.stage
        if problem.max_activations is not None:
            most = int(problem.max_activations * (1 + EQUAL) // model.activation)
            window = np.minimum(window, max(most, 1))
        priority = np.where(tasks.forward, 1.0, 0.0)[tasks.group]
        found = _once(alone, priority, np.inf, window)
        assert found is not None, "windows of one model never lock"
        starts += [found.start_s + begin] * (problem.ranks // model.stages)
        begin += found.makespan_s
    return np.concatenate(starts), begin


def _once(problem: Problem, priority: Floats, limit: float, window: Ints | None = None) -> Schedule | None:
    """One schedule without improvement; None where the limits let no task start."""
    tasks = problem.tasks
    if window is None:
        window = np.full(len(tasks.count), np.iinfo(np.int64).max)
    start, peak = np.empty(tasks.size), np.empty(problem.ranks)
    makespan = construct(
        tasks.rank_groups,
        tasks.rank_start,
        tasks.rank,
        tasks.duration,
        tasks.count,
        tasks.offset,
        tasks.before,
        tasks.after,
        tasks.forward,
        tasks.partner,
        tasks.activation,
        window,
        np.full(problem.ranks, limit),
        bool(np.isfinite(limit)),
        priority,
        0.0,
        start,
        peak,
    )
    return None if makespan < 0 else Schedule(start, makespan, float(peak.max()), float(peak.sum()))
