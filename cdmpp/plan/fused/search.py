"""Local search over priorities: diverse candidates are scheduled and improved, and good ones are varied."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache

import numpy as np

from cdmpp.plan.fused.baselines import EQUAL, Floats, Ints, Schedule, greedy, schedule_from, serial_1f1b
from cdmpp.plan.fused.bound import lower_bound_s
from cdmpp.plan.fused.list_scheduling import improve
from cdmpp.plan.fused.problem import Model, Problem
from cdmpp.plan.fused.proposals import Proposals
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.utils.jit import COMPILED

#: Tasks and candidates of one call of the compiled code: enough to outweigh the call.
_BATCH_TASKS, _BATCH_CANDIDATES = 40_000, 64
#: Batches of one iteration. Constant rather than the number of cores, so that equal requests give equal plans.
_WORKERS = 2
_ROUNDS = 12
#: Seconds between two looks at the budget while a batch is computed.
_LOOK_S = 0.05
#: Seconds of making a plan from a schedule, for each task; the search leaves them of its budget.
_PLAN_S = 2e-5
#: Size of the elite set, and steps without a better elite after which the set is renewed.
_ELITES, _STALE_STEPS = 6, 1500
#: Once the makespan is proven optimal, memory reduction ends after so many steps without success, or when this
#: share of the budget is spent.
_PATIENCE_STEPS, _BUDGET_SHARE = 8000, 0.5


@dataclass(frozen=True)
class FusedSearchResult:
    """Best schedule of a search, with bound and baselines.

    Attributes
    ----------
    schedule : Schedule
    lower_bound_s : float
    baselines : dict of str to float
        Makespans of simpler schedules under the same memory limit, in seconds.
    steps : int
        Candidates that were scheduled and improved.
    """

    schedule: Schedule
    lower_bound_s: float
    baselines: dict[str, float]
    steps: int


def search(
    problem: Problem,
    control: SearchControl | None = None,
    *,
    seed: int = 0,
    max_steps: int | None = None,
    on_progress: Callable[[FusedSearchResult], None] | None = None,
) -> FusedSearchResult:
    """Search for a schedule of least makespan and, among those found, of least peak memory.

    Parameters
    ----------
    problem : Problem
    control : SearchControl, optional
        Budget; without one the search ends after ``max_steps`` or :data:`_PATIENCE_STEPS` steps without success.
    seed : int
    max_steps : int, optional
        Candidates to schedule. Where these end the search, not the budget, equal calls give equal results.
    on_progress : callable, optional
        Called with the best result so far after each iteration.

    Notes
    -----
    The search ends early when the makespan equals its lower bound and the memory has stopped falling.
    """
    control = control or SearchControl()
    _compile()
    control.restart()
    return _Search(problem, control, seed, max_steps).run(on_progress)


@cache
def _compile() -> None:
    """Compile the loops, which takes seconds on a new machine and is not part of a budget."""
    for limit in (None, 1.0):
        _Search(Problem(1, (Model(1, 1, 1.0, 1.0),), limit), SearchControl(), 0, 1).run(None)


class _Search:
    def __init__(self, problem: Problem, control: SearchControl, seed: int, max_steps: int | None) -> None:
        self.problem, self.control = problem, control
        self.deadline = control.part(reserve_s=min(_PLAN_S * problem.tasks.size, (control.budget_s or 0.0) / 2))
        self.stop = np.zeros(1, np.int64)
        self.tasks = problem.tasks
        self.rng = np.random.default_rng(seed)
        self.max_steps = max_steps
        self.bound = lower_bound_s(problem)
        limit = np.inf if problem.max_activations is None else problem.max_activations
        # Sums of activations differ from the limit in their last digits.
        self.limit = self.memory_goal = limit * (1 + EQUAL)
        self.elites: list[Schedule] = []
        self.steps = self.improved_at = self.elites_improved_at = self.renewals = 0
        self.proposals = Proposals(problem, self.bound, self.limit, self.rng)
        # The serial schedule always keeps the memory limit.
        start_s, serial_s = serial_1f1b(problem)
        self.best = schedule_from(problem, start_s)
        self.baselines = {"serial_1f1b": serial_s}
        self._keep(self.best, new_best=True)
        greedy_schedule = greedy(problem, self.limit)
        if greedy_schedule is not None:
            self.baselines["greedy"] = greedy_schedule.makespan_s
            self._keep(greedy_schedule)

    def run(self, on_progress: Callable[[FusedSearchResult], None] | None) -> FusedSearchResult:
        candidates = max(1, min(_BATCH_CANDIDATES, _BATCH_TASKS // self.tasks.size))
        if self.max_steps is not None:
            candidates = min(candidates, -(-self.max_steps // _WORKERS))
        with ThreadPoolExecutor(_WORKERS if COMPILED else 1) as pool:
            while True:
                if not self.deadline.expired:
                    self._renew_elites()
                    self._run_batches(pool, [self._propose(candidates) for _ in range(_WORKERS)])
                result = FusedSearchResult(self.best, self.bound, dict(self.baselines), self.steps)
                if on_progress is not None:
                    on_progress(result)
                if self._finished():
                    return result

    def _run_batches(self, pool: ThreadPoolExecutor, batches: list[tuple[Floats, ...]]) -> None:
        """Schedule and improve candidates; what is not ready at the end of the budget is left out."""
        runs = [pool.submit(_improve, self.problem, self.stop, *batch) for batch in batches]
        while wait(runs, _LOOK_S).not_done:
            if self.deadline.expired:
                self.stop[0] = 1
        for run in runs:
            self._take(*run.result())

    @property
    def _proven(self) -> bool:
        return self.best.makespan_s <= self.bound * (1 + EQUAL)

    def _finished(self) -> bool:
        if self.deadline.expired or (self.max_steps is not None and self.steps >= self.max_steps):
            return True
        budget_s = self.control.budget_s
        idle = self.steps - self.improved_at >= _PATIENCE_STEPS
        if self._proven and budget_s is not None:
            return idle or self.control.spent_s >= _BUDGET_SHARE * budget_s
        return idle and budget_s is None and self.max_steps is None

    def _take(self, starts: Floats, figures: Floats) -> None:
        """Keep the valid schedules of a batch."""
        for start_s, (makespan, peak, peaks_sum) in zip(starts, figures, strict=True):
            self.steps += makespan > -2.0
            if makespan >= 0 and peak <= self.limit:
                self._keep(Schedule(start_s, float(makespan), float(peak), float(peaks_sum)))

    def _keep(self, schedule: Schedule, new_best: bool = False) -> None:
        """Update the best schedule, and replace the worst and oldest of the elites."""
        if new_best or schedule.key < self.best.key:
            self.best = schedule
            self.improved_at = self.steps
            if self._proven:
                # From here on the search is for an equal makespan with less memory.
                self.memory_goal = schedule.peak * (1 - EQUAL)
        if any(np.array_equal(schedule.start_s, elite.start_s) for elite in self.elites):
            return
        if not self.elites or self._elite_key(schedule) < min(map(self._elite_key, self.elites)):
            self.elites_improved_at = self.steps
        if len(self.elites) < _ELITES:
            self.elites.append(schedule)
            return
        # Ties are accepted: elites that drift reach schedules that fixed ones do not.
        worst = max(range(_ELITES), key=lambda at: (self._elite_key(self.elites[at]), -at))
        if self._elite_key(schedule) <= self._elite_key(self.elites[worst]):
            del self.elites[worst]
            self.elites.append(schedule)

    def _renew_elites(self) -> None:
        """Restart after many steps without a better elite: in turn from an empty set and from the best schedule."""
        if self.steps - self.elites_improved_at < _STALE_STEPS:
            return
        self.renewals += 1
        self.elites = [self.best] if self.renewals % 2 == 0 else []
        self.elites_improved_at = self.steps

    def _elite_key(self, schedule: Schedule) -> tuple[float, ...]:
        """Sort key of elites: the memory above the goal, then the makespan."""
        return (max(schedule.peak, self.memory_goal), schedule.makespan_s)

    def _propose(self, candidates: int) -> tuple[Floats, ...]:
        """Priorities, patiences, windows and limits of a batch of candidates."""
        tasks, rng, proposals = self.tasks, self.rng, self.proposals
        priorities = np.empty((candidates, tasks.size))
        patiences = rng.choice([0.0, 0.3, 0.7, 1.0], candidates)
        windows = np.full((candidates, len(tasks.count)), np.iinfo(np.int64).max)
        limits = np.full((candidates, self.problem.ranks), self.limit)
        new = 0.35 if np.isfinite(self.limit) else 0.25
        for row in range(candidates):
            reduce_memory = rng.random() < (0.9 if self._proven else 0.15)
            if reduce_memory:
                peak = self.best.peak * (1 - EQUAL) * rng.choice([1.0, 1.0, 0.95, 0.9])
                limits[row] = min(self.memory_goal, peak)
            if rng.random() < 0.4:
                windows[row] = proposals.windows()
            kind = rng.random() * (1.0 if self.elites else new)
            if kind < 0.15:
                priorities[row] = proposals.by_tail()
            elif kind < new:
                priorities[row] = proposals.mixed() if rng.random() < 0.5 else proposals.periodic()
                patiences[row] = rng.choice([-1.0, patiences[row]])
            elif kind < 0.8:
                priorities[row] = proposals.perturbed(self._random_elite())
            else:
                start = self._random_elite()
                leaner = reduce_memory and rng.random() < 0.3
                priorities[row] = proposals.leaner(start) if leaner else proposals.swapped(start)
                patiences[row] = rng.choice([-1.0, patiences[row]])
        return priorities, patiences, windows, limits

    def _random_elite(self) -> Floats:
        return self.elites[self.rng.integers(len(self.elites))].start_s


def _improve(
    problem: Problem, stop: Ints, priorities: Floats, patiences: Floats, windows: Floats, limits: Floats
) -> tuple[Floats, Floats]:
    """Starts and figures of each candidate; see :func:`cdmpp.plan.fused.list_scheduling.improve`."""
    tasks = problem.tasks
    guarded = problem.max_activations is not None
    starts, figures = np.empty_like(priorities), np.empty((len(priorities), 3))
    improve(
        tasks.arrays,
        tasks.mirrored,
        tasks.group,
        tasks.mirror,
        windows,
        limits,
        guarded,
        priorities,
        patiences,
        _ROUNDS,
        starts,
        figures,
        stop,
    )
    return starts, figures
