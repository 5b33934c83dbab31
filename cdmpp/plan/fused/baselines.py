"""Baseline schedules; the search starts from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cdmpp.plan.fused.list_scheduling import list_schedule
from cdmpp.plan.fused.problem import Model, Problem

#: Relative difference below which two makespans are equal: sums of the same terms in another order.
EQUAL = 1e-9
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """Start times of all tasks, with makespan and memory.

    Attributes
    ----------
    start_s : ndarray, shape (tasks,)
        Start of each task, in seconds.
    makespan_s : float
    peak : float
        Largest peak memory of the ranks, in the unit of ``Model.activation``.
    peaks_sum : float
        Sum of the peak memory of the ranks.
    """

    start_s: Floats
    makespan_s: float
    peak: float
    peaks_sum: float

    @property
    def key(self) -> tuple[float, float, float]:
        """Sort key: the makespan, then memory."""
        return (self.makespan_s, self.peak, self.peaks_sum)


def schedule_from(problem: Problem, start_s: Floats) -> Schedule:
    """The schedule with these start times in seconds, shape (tasks,)."""
    tasks = problem.tasks
    peaks = tasks.peaks(start_s)
    makespan = float((start_s + tasks.duration[tasks.group]).max())
    return Schedule(start_s, makespan, float(peaks.max()), float(peaks.sum()))


def greedy(problem: Problem, limit: float) -> Schedule | None:
    """Greedy schedule: no rank idles while it can run a pass.

    Backward passes go first, then the earlier micro-batch, then the model of smaller index.

    Parameters
    ----------
    limit : float
        Memory of each rank; may be infinite.

    Returns
    -------
    Schedule or None
        None where the memory limit leads to a deadlock.
    """
    tasks = problem.tasks
    largest_count = float(tasks.count.max()) + 1
    order = tasks.index * (float(tasks.replica.max()) + 1) + tasks.replica[tasks.group]
    forward_last = np.where(tasks.forward, largest_count * len(tasks.count), 0.0)[tasks.group]
    return _schedule_once(problem, forward_last + order, limit)


def serial_1f1b(problem: Problem) -> tuple[Floats, float]:
    """Serial schedule: one model after the other, each by 1F1B, its replicas at the same time.

    Returns
    -------
    start_s : ndarray, shape (tasks,)
    makespan_s : float
        The sum of (M + P - 1) (f + b) where no limit holds micro-batches back.
    """
    starts, begin_s = [], 0.0
    for model in problem.models:
        # The replicas share no rank: one schedule holds for all.
        single = Problem(model.stages, (Model(**{**vars(model), "direction": "down"}),))
        tasks = single.tasks
        window = model.stages - tasks.stage
        if problem.max_activations is not None:
            in_flight = int(problem.max_activations * (1 + EQUAL) // model.activation)
            window = np.minimum(window, max(in_flight, 1))
        priority = np.where(tasks.forward, 1.0, 0.0)[tasks.group]
        schedule = _schedule_once(single, priority, np.inf, window)
        assert schedule is not None, "the windows of a single model cannot deadlock"
        starts += [schedule.start_s + begin_s] * (problem.ranks // model.stages)
        begin_s += schedule.makespan_s
    return np.concatenate(starts), begin_s


def _schedule_once(problem: Problem, priority: Floats, limit: float, window: Ints | None = None) -> Schedule | None:
    """One list schedule without improvement; None on a deadlock."""
    tasks = problem.tasks
    if window is None:
        window = np.full(len(tasks.count), np.iinfo(np.int64).max)
    start, peak = np.empty(tasks.size), np.empty(problem.ranks)
    limits, guarded = np.full(problem.ranks, limit), bool(np.isfinite(limit))
    makespan = list_schedule(tasks.arrays, window, limits, guarded, priority, 0.0, start, peak, np.zeros(1, np.int64))
    return None if makespan < 0 else Schedule(start, makespan, float(peak.max()), float(peak.sum()))
