"""The best of many schedules: diverse starts, each improved, then the best ones shaken and improved again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cdmpp.compose.jit import COMPILED
from cdmpp.compose.watch import Watch
from cdmpp.planning.fused.bound import lower_bound_s
from cdmpp.planning.fused.construct import construct, improve
from cdmpp.planning.fused.problem import Model, Problem

#: Relative difference below which two makespans are equal: sums of the same terms in another order.
EQUAL = 1e-9
#: Rows improved together: enough tasks that the compiled code outweighs its call.
_TASKS_TOGETHER, _MOST_ROWS = 40_000, 64
#: Workers of a turn. Fixed, not the number of cores: equal requests are to give equal answers.
_WORKERS = 2
_ROUNDS = 12
_ELITES = 6
#: Once the makespan is proven least, lowering the memory ends after so many fruitless steps, or when this
#: share of the budget is spent.
_PATIENCE_STEPS, _BUDGET_SHARE = 8000, 0.5


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


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes
    ----------
    schedule : Schedule
    lower_bound_s : float
    baselines : dict of str to float
        Makespans of simpler schedules under the same limit.
    steps : int
        Schedules that were made and improved.
    """

    schedule: Schedule
    lower_bound_s: float
    baselines: dict[str, float]
    steps: int


def search(
    problem: Problem,
    watch: Watch | None = None,
    *,
    seed: int = 0,
    max_steps: int | None = None,
    describe: Callable[[Found], dict[str, Any]] | None = None,
) -> Found:
    """A schedule of least makespan and, among those found, of least peak memory.

    Parameters
    ----------
    problem : Problem
    watch : Watch, optional
        Budget; without one the search ends after ``max_steps`` or :data:`_PATIENCE_STEPS` fruitless steps.
    seed : int
    max_steps : int, optional
        Schedules to make. Where these end the search, not the budget, equal calls give equal results.
    describe : callable, optional
        Makes an answer of what was found so far, for who listens to the watch.

    Notes
    -----
    It ends early when the makespan is at its lower bound and the memory has stopped falling.
    """
    return _Search(problem, watch or Watch(), seed, max_steps).run(describe)


class _Search:
    def __init__(self, problem: Problem, watch: Watch, seed: int, max_steps: int | None) -> None:
        self.problem, self.watch = problem, watch
        self.tasks = problem.tasks
        self.rng = np.random.default_rng(seed)
        self.max_steps = max_steps
        self.bound = lower_bound_s(problem)
        limit = np.inf if problem.max_activations is None else problem.max_activations
        # Sums of activations differ from the limit in their last digits.
        self.limit = limit * (1 + EQUAL)
        self.best_known: list[Schedule] = []
        self.elites: list[Schedule] = []
        self.steps = self.better_at = 0
        self.baselines: dict[str, float] = {}
        lanes = int(self.tasks.lane.max()) + 1
        self.lanes = lanes
        self.scale = np.array([m.forward_s + m.backward_s for m in problem.models])
        self.depth = np.array([m.stages for m in problem.models])

    def run(self, describe: Callable[[Found], dict[str, Any]] | None) -> Found:
        self._baselines()
        rows = max(1, min(_MOST_ROWS, _TASKS_TOGETHER // self.tasks.size))
        if self.max_steps is not None:
            rows = min(rows, -(-self.max_steps // _WORKERS))
        with ThreadPoolExecutor(_WORKERS if COMPILED else 1) as pool:
            # At least one turn: on a fresh machine compiling alone may take the budget.
            while True:
                proposals = [self._propose(rows) for _ in range(_WORKERS)]
                for starts, figures in pool.map(lambda p: _improve(self.problem, *p), proposals):
                    self._take(starts, figures)
                found = Found(self.best, self.bound, dict(self.baselines), self.steps)
                answer = None if describe is None else partial(describe, found)
                self.watch.report(best=self.best.makespan_s, bound=self.bound, answer=answer)
                if self._finished():
                    return found

    @property
    def best(self) -> Schedule:
        return self.best_known[0]

    @property
    def _proven(self) -> bool:
        return self.best.makespan_s <= self.bound * (1 + EQUAL)

    def _finished(self) -> bool:
        if self.watch.expired or (self.max_steps is not None and self.steps >= self.max_steps):
            return True
        budget = self.watch.budget_s
        idle = self.steps - self.better_at >= _PATIENCE_STEPS
        if self._proven and budget is not None:
            return idle or self.watch.spent_s >= _BUDGET_SHARE * budget
        return idle and budget is None and self.max_steps is None

    def _take(self, starts: Floats, figures: Floats) -> None:
        for start, (makespan, peak, whole) in zip(starts, figures, strict=True):
            self.steps += 1
            if makespan >= 0 and peak <= self.limit:
                self._keep(Schedule(start, float(makespan), float(peak), float(whole)))

    def _keep(self, new: Schedule) -> None:
        """Take a schedule in for the best, and for the one of the elites that is worst and oldest."""
        if not self.best_known or new.key < self.best.key:
            self.best_known = [new]
            self.better_at = self.steps
        if any(np.array_equal(new.start_s, old.start_s) for old in self.elites):
            return
        if len(self.elites) < _ELITES:
            self.elites.append(new)
            return
        # As good is good enough: elites that drift find what a fixed one does not.
        worst = max(range(_ELITES), key=lambda at: (self._rank(self.elites[at]), -at))
        if self._rank(new) <= self._rank(self.elites[worst]):
            del self.elites[worst]
            self.elites.append(new)

    def _rank(self, schedule: Schedule) -> tuple[float, ...]:
        """What elites are judged by: memory too once the makespan cannot fall any further."""
        return schedule.key if self._proven else schedule.key[:1]

    def _propose(self, rows: int) -> tuple[Floats, ...]:
        """Priorities, patiences, windows and limits of ``rows`` schedules."""
        tasks, rng = self.tasks, self.rng
        priorities = np.empty((rows, tasks.size))
        patiences = rng.choice([0.0, 0.3, 0.7, 1.0], rows)
        windows = np.full((rows, len(tasks.count)), np.iinfo(np.int64).max)
        limits = np.full((rows, self.problem.ranks), self.limit)
        best = self.best
        for row in range(rows):
            memory = rng.random() < (0.9 if self._proven else 0.3)
            if memory:
                limits[row] = min(self.limit, best.peak * rng.choice([1.0, 1.0, 0.95, 0.9]) * (1 - EQUAL))
            if rng.random() < 0.4:
                windows[row] = self._windows()
            kind = rng.random()
            if kind < 0.2:
                priorities[row] = self._fresh()
            elif kind < (0.4 if np.isfinite(self.limit) else 0.3):
                priorities[row] = self._mixed()
                patiences[row] = rng.choice([-1.0, patiences[row]])
            elif kind < 0.8:
                priorities[row] = self._shaken()
            else:
                priorities[row] = self._swapped()
                patiences[row] = rng.choice([-1.0, patiences[row]])
        return priorities, patiences, windows, limits

    def _windows(self) -> Ints:
        """Random numbers of micro-batches in flight: about as in 1F1B, or the limit shared out."""
        tasks, rng = self.tasks, self.rng
        if np.isfinite(self.limit) and rng.random() < 0.5:
            parts = rng.dirichlet(np.ones(len(self.problem.models)))
            held = [
                int(s * self.limit / m.activation) for s, m in zip(parts, self.problem.models, strict=True)
            ]
            return np.maximum(held, 1)[tasks.model].astype(np.int64)
        share = rng.choice([0.5, 1.0, 1.0, 1.5, 2.0], self.lanes)[tasks.lane]
        more = rng.integers(0, 4, self.lanes)[tasks.lane]
        found = np.ceil((self.depth[tasks.model] - tasks.stage) * share).astype(np.int64) + more
        least: Ints = np.maximum(found, 1)
        return least

    def _fresh(self) -> Floats:
        """Priorities from a random rule: what has long to run after it comes first."""
        tasks, rng, bound = self.tasks, self.rng, self.bound
        group = tasks.group
        lane = tasks.lane[group]
        spacing = (rng.uniform(0, 1.5, self.lanes) * self.scale[[m for m, _ in self.problem.lanes()]])[lane]
        lead = (rng.uniform(-1, 1, self.lanes) * bound * rng.choice([0, 0.1, 0.5]))[lane]
        early = rng.uniform(-0.5, 0.5) * bound * rng.choice([0, 0.3, 1.0])
        urgency = tasks.tail[group] + spacing * (tasks.count[group] - tasks.index) + lead
        urgency += np.where(tasks.forward[group], early, 0.0)
        noise = rng.normal(size=tasks.size) * rng.choice([0, 0.2, 1, 4]) * self.scale.mean() / 3
        priority: Floats = noise - urgency
        return priority

    def _mixed(self) -> Floats:
        """Priorities by micro-batch: those of the models in a random mixture, several in flight."""
        tasks, rng = self.tasks, self.rng
        model = tasks.model[tasks.group]
        models = self.problem.models
        jobs = sum(m.micro_batches for m in models)
        begin, end = np.sort(rng.random((2, len(models))) ** rng.choice([0.1, 1.0]), axis=0)
        begin[rng.random(len(models)) < 0.5] = 0.0
        place = begin[model] + (end - begin)[model] * (tasks.index + rng.random()) / tasks.count[tasks.group]
        largest = max(m.activation for m in models)
        most = min(float(self.depth.max()), self.limit / largest)
        flight = rng.uniform(0, most) * (1 - rng.choice([0.0, 1.0]) * tasks.stage / self.depth[tasks.model])
        priority: Floats = place * jobs + np.where(tasks.forward, 0.0, flight)[tasks.group]
        return priority

    def _shaken(self) -> Floats:
        """Priorities near a good schedule: its starts, some of them moved."""
        tasks, rng = self.tasks, self.rng
        base = self._elite()
        size = self.scale.mean() * rng.choice([0.2, 0.5, 1, 2, 5])
        moved: Floats
        kind = rng.integers(5)
        if kind == 2:  # whole groups
            moved = rng.normal(size=len(tasks.count))[tasks.group]
        elif kind == 4:  # passes of lanes
            shift = rng.normal(size=(self.lanes, 2))
            moved = shift[tasks.lane, tasks.forward.astype(np.int64)][tasks.group]
        else:
            moved = rng.normal(size=tasks.size)
            if kind == 1:  # some tasks
                moved *= rng.random(tasks.size) < 0.1
            elif kind == 3:  # a while
                where = rng.random() * self.bound
                moved *= np.abs(base - where) < self.bound * rng.choice([0.05, 0.15])
        moved *= size
        moved += base
        return moved

    def _elite(self) -> Floats:
        return self.elites[self.rng.integers(len(self.elites))].start_s

    def _swapped(self) -> Floats:
        """Priorities near a good schedule: some neighbours exchanged that follow each other at once."""
        tasks, rng, start = self.tasks, self.rng, self._elite()
        rank = tasks.rank[tasks.group]
        by_time = np.lexsort((start, rank))
        first, second = by_time[:-1], by_time[1:]
        end = start[first] + tasks.duration[tasks.group[first]]
        near = (rank[first] == rank[second]) & (start[second] <= end + EQUAL * self.bound)
        places = np.flatnonzero(near & (tasks.group[first] != tasks.group[second]))
        moved = start.copy()
        for at in rng.choice(places, min(len(places), int(rng.geometric(0.4)))) if len(places) else ():
            moved[first[at]], moved[second[at]] = moved[second[at]], moved[first[at]]
        return moved

    def _baselines(self) -> None:
        """Simple schedules; the first elites. The serial one always keeps the limit."""
        start, makespan = serial_1f1b(self.problem)
        self.baselines["serial_1f1b"] = makespan
        self._keep(self._priced(start))
        greedy = _once(self.problem, self._greedy(), self.limit)
        if greedy is not None:
            self.baselines["greedy"] = greedy.makespan_s
            self._keep(greedy)

    def _greedy(self) -> Floats:
        """Backward passes before forward ones, then the earlier micro-batch, then the model's number."""
        tasks = self.tasks
        return np.where(tasks.forward, 1e9, 0.0)[tasks.group] + tasks.index * 1e3 + tasks.lane[tasks.group]

    def _priced(self, start: Floats) -> Schedule:
        tasks = self.tasks
        peaks = tasks.peaks(start)
        makespan = float((start + tasks.duration[tasks.group]).max())
        return Schedule(start, makespan, float(peaks.max()), float(peaks.sum()))


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
        tasks.rank_groups, tasks.rank_start, tasks.rank, tasks.duration, tasks.count, tasks.offset,
        tasks.before, tasks.after, tasks.forward, tasks.partner, tasks.activation, window,
        np.full(problem.ranks, limit), priority, 0.0, start, peak,
    )  # fmt: skip
    return None if makespan < 0 else Schedule(start, makespan, float(peak.max()), float(peak.sum()))


def _improve(
    problem: Problem, priorities: Floats, patiences: Floats, windows: Floats, limits: Floats
) -> tuple[Floats, Floats]:
    """Starts and figures of each row; see :func:`cdmpp.planning.fused.construct.improve`."""
    tasks = problem.tasks
    starts = np.empty_like(priorities)
    figures = np.empty((len(priorities), 3))
    improve(
        tasks.rank_groups, tasks.rank_start, tasks.rank, tasks.duration, tasks.count, tasks.offset,
        tasks.before, tasks.after, tasks.forward, ~tasks.forward, tasks.partner, tasks.activation,
        tasks.group, tasks.mirror, windows, limits, priorities, patiences, _ROUNDS, starts, figures,
    )  # fmt: skip
    return starts, figures
