"""The best of many schedules: diverse starts, each improved, and the best ones changed and improved again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.jit import COMPILED
from cdmpp.planning.fused.baselines import EQUAL, Floats, Schedule, greedy, priced, serial_1f1b
from cdmpp.planning.fused.bound import lower_bound_s
from cdmpp.planning.fused.construct import improve
from cdmpp.planning.fused.problem import Problem
from cdmpp.planning.fused.proposals import Proposals

#: Rows improved together: enough tasks that the compiled code outweighs its call.
_TASKS_TOGETHER, _MOST_ROWS = 40_000, 64
#: Workers of a turn. Fixed, not the number of cores: equal requests are to give equal answers.
_WORKERS = 2
_ROUNDS = 12
#: Schedules that others are made from, and steps without a better one after which they are renewed.
_ELITES, _STALE_STEPS = 6, 1500
#: Once the makespan is proven least, lowering the memory ends after so many fruitless steps, or when this
#: share of the budget is spent.
_PATIENCE_STEPS, _BUDGET_SHARE = 8000, 0.5


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
    watch: SearchControl | None = None,
    *,
    seed: int = 0,
    max_steps: int | None = None,
    describe: Callable[[Found], dict[str, Any]] | None = None,
) -> Found:
    """A schedule of least makespan and, among those found, of least peak memory.

    Parameters
    ----------
    problem : Problem
    watch : SearchControl, optional
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
    return _Search(problem, watch or SearchControl(), seed, max_steps).run(describe)


class _Search:
    def __init__(self, problem: Problem, watch: SearchControl, seed: int, max_steps: int | None) -> None:
        self.problem, self.watch = problem, watch
        self.tasks = problem.tasks
        self.rng = np.random.default_rng(seed)
        self.max_steps = max_steps
        self.bound = lower_bound_s(problem)
        limit = np.inf if problem.max_activations is None else problem.max_activations
        # Sums of activations differ from the limit in their last digits.
        self.limit = self.goal = limit * (1 + EQUAL)
        self.best_known: list[Schedule] = []
        self.elites: list[Schedule] = []
        self.steps = self.better_at = self.elites_better_at = self.renewals = 0
        self.baselines: dict[str, float] = {}
        self.proposals = Proposals(problem, self.bound, self.limit, self.rng)

    def run(self, describe: Callable[[Found], dict[str, Any]] | None) -> Found:
        self._baselines()
        rows = max(1, min(_MOST_ROWS, _TASKS_TOGETHER // self.tasks.size))
        if self.max_steps is not None:
            rows = min(rows, -(-self.max_steps // _WORKERS))
        with ThreadPoolExecutor(_WORKERS if COMPILED else 1) as pool:
            # At least one turn: on a fresh machine compiling alone may take the budget.
            while True:
                self._renew()
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
            if self._proven:
                # From here on the search is for a makespan as short with less memory.
                self.goal = new.peak * (1 - EQUAL)
        if any(np.array_equal(new.start_s, old.start_s) for old in self.elites):
            return
        if not self.elites or self._rank(new) < min(map(self._rank, self.elites)):
            self.elites_better_at = self.steps
        if len(self.elites) < _ELITES:
            self.elites.append(new)
            return
        # As good is good enough: elites that drift find what a fixed one does not.
        worst = max(range(_ELITES), key=lambda at: (self._rank(self.elites[at]), -at))
        if self._rank(new) <= self._rank(self.elites[worst]):
            del self.elites[worst]
            self.elites.append(new)

    def _renew(self) -> None:
        """Other elites after many steps without a better one: by turns from nothing, and from the best."""
        if self.steps - self.elites_better_at < _STALE_STEPS:
            return
        self.renewals += 1
        self.elites = [self.best] if self.renewals % 2 == 0 else []
        self.elites_better_at = self.steps

    def _rank(self, schedule: Schedule) -> tuple[float, ...]:
        """What elites are judged by: the makespan, among those that hold little enough."""
        return (max(schedule.peak, self.goal), schedule.makespan_s)

    def _propose(self, rows: int) -> tuple[Floats, ...]:
        """Priorities, patiences, windows and limits of ``rows`` schedules."""
        tasks, rng, made = self.tasks, self.rng, self.proposals
        priorities = np.empty((rows, tasks.size))
        patiences = rng.choice([0.0, 0.3, 0.7, 1.0], rows)
        windows = np.full((rows, len(tasks.count)), np.iinfo(np.int64).max)
        limits = np.full((rows, self.problem.ranks), self.limit)
        best = self.best
        new = 0.35 if np.isfinite(self.limit) else 0.25
        for row in range(rows):
            memory = rng.random() < (0.9 if self._proven else 0.15)
            if memory:
                most = best.peak * (1 - EQUAL) * rng.choice([1.0, 1.0, 0.95, 0.9])
                limits[row] = min(self.goal, most)
            if rng.random() < 0.4:
                windows[row] = made.windows()
            kind = rng.random() * (1.0 if self.elites else new)
            if kind < 0.15:
                priorities[row] = made.fresh()
            elif kind < new:
                priorities[row] = made.mixed() if rng.random() < 0.5 else made.periodic()
                patiences[row] = rng.choice([-1.0, patiences[row]])
            elif kind < 0.8:
                priorities[row] = made.shaken(self._elite())
            else:
                start = self._elite()
                leaner = memory and rng.random() < 0.3
                priorities[row] = made.leaner(start) if leaner else made.swapped(start)
                patiences[row] = rng.choice([-1.0, patiences[row]])
        return priorities, patiences, windows, limits

    def _elite(self) -> Floats:
        return self.elites[self.rng.integers(len(self.elites))].start_s

    def _baselines(self) -> None:
        """Simple schedules; the first elites. The serial one always keeps the limit."""
        start, makespan = serial_1f1b(self.problem)
        self.baselines["serial_1f1b"] = makespan
        self._keep(priced(self.problem, start))
        quick = greedy(self.problem, self.limit)
        if quick is not None:
            self.baselines["greedy"] = quick.makespan_s
            self._keep(quick)


def _improve(
    problem: Problem, priorities: Floats, patiences: Floats, windows: Floats, limits: Floats
) -> tuple[Floats, Floats]:
    """Starts and figures of each row; see :func:`cdmpp.planning.fused.construct.improve`."""
    tasks = problem.tasks
    starts = np.empty_like(priorities)
    figures = np.empty((len(priorities), 3))
    improve(
        tasks.rank_groups,
        tasks.rank_start,
        tasks.rank,
        tasks.duration,
        tasks.count,
        tasks.offset,
        tasks.before,
        tasks.after,
        tasks.forward,
        ~tasks.forward,
        tasks.partner,
        tasks.activation,
        tasks.group,
        tasks.mirror,
        windows,
        limits,
        problem.max_activations is not None,
        priorities,
        patiences,
        _ROUNDS,
        starts,
        figures,
    )
    return starts, figures
