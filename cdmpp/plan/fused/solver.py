"""Solver of fused pipeline requests: a local search over priorities, and the plan with its explanation.

Diverse candidates are scheduled and improved, and good ones are varied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice, permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.plan.base.passes import WAYS, Execution, draw_passes, pass_colours
from cdmpp.plan.fused.list_scheduling import (
    EQUAL,
    Floats,
    FusedSchedule,
    Ints,
    greedy,
    improve,
    lower_bound_s,
    memory_bound_s,
    schedule_from,
    serial_1f1b,
)
from cdmpp.plan.fused.problem import FusedProblem, Model, run_orders
from cdmpp.plan.fused.schema import MAX_RATIO, Costs, FusedPlan, FusedRequest, StageCost
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.plot import GREY, draw_legend, new_figure
from cdmpp.predict.requests.request import Interval
from cdmpp.utils.jit import COMPILED
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Most orders of the models that are searched for an executable plan.
MAX_SEQUENCES = 24
#: Tasks and candidates of one call of the compiled code: enough to outweigh the call.
_BATCH_TASKS, _BATCH_CANDIDATES = 40_000, 64
#: Batches of one iteration. Constant rather than the number of cores, so that equal requests give equal plans.
_WORKERS = 2
_ROUNDS = 12
#: Seconds between two looks at the budget while a batch is computed.
_LOOK_S = 0.05
#: Seconds of making a plan from a schedule, for each task; the search leaves them of its budget.
_PLAN_S = 5e-6
#: Size of the elite set, and steps without a better elite after which the set is renewed.
_ELITES, _STALE_STEPS = 6, 1500
#: Once the makespan is proven optimal, memory reduction ends after so many steps without success, or when this
#: share of the budget is spent.
_PATIENCE_STEPS, _BUDGET_SHARE = 8000, 0.5


@dataclass(frozen=True)
class FusedSearchResult:
    """Best schedule of a search, with bound and baselines."""

    schedule: FusedSchedule
    lower_bound_s: float
    baselines: dict[str, float]  # makespans of simpler schedules under the same memory limit, in seconds
    steps: int  # candidates that were scheduled and improved


def search(
    problem: FusedProblem,
    control: SearchControl | None = None,
    *,
    seed: int = 0,
    max_steps: int | None = None,
    on_progress: Callable[[FusedSearchResult], None] | None = None,
) -> FusedSearchResult:
    """Search for a schedule of least makespan and, among those found, of least peak memory.

    It ends early when the makespan equals its lower bound and the memory has stopped falling; without a ``control``
    after ``max_steps`` candidates or :data:`_PATIENCE_STEPS` steps without success. Where ``max_steps`` end it, not the
    budget, equal calls give equal results. ``on_progress``: called with the best result so far after each iteration.
    """
    control = control or SearchControl()
    _compile()
    control.restart()
    return _Search(problem, control, seed, max_steps).run(on_progress)


@cache
def _compile() -> None:
    """Compile the loops, which takes seconds on a new machine and is not part of a budget."""
    run_orders(FusedProblem(1, (Model(1, 1, 1.0, 1.0),)), [np.arange(2)])
    for limit in (None, 1.0):
        _Search(FusedProblem(1, (Model(1, 1, 1.0, 1.0),), limit), SearchControl(), 0, 1).run(None)


class _Search:
    def __init__(self, problem: FusedProblem, control: SearchControl, seed: int, max_steps: int | None) -> None:
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
        self.elites: list[FusedSchedule] = []
        self.steps = self.improved_at = self.elites_improved_at = self.renewals = 0
        self.proposals = Proposals(problem, self.bound, self.limit, self.rng)
        # The serial schedule always keeps the memory limit.
        start_s, serial_s = serial_1f1b(problem)
        self.best = schedule_from(problem, start_s)
        self.baselines = {"serial_1f1b": serial_s}
        self._keep(self.best, new_best=True)
        # Greedy schedules mix the passes of the models.
        greedy_schedule = None if problem.sequence else greedy(problem, self.limit)
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
                self._keep(FusedSchedule(start_s, float(makespan), float(peak), float(peaks_sum)))

    def _keep(self, schedule: FusedSchedule, new_best: bool = False) -> None:
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

    def _elite_key(self, schedule: FusedSchedule) -> tuple[float, ...]:
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
    problem: FusedProblem, stop: Ints, priorities: Floats, patiences: Floats, windows: Floats, limits: Floats
) -> tuple[Floats, Floats]:
    """Starts and figures of each candidate; see :func:`cdmpp.plan.fused.list_scheduling.improve`."""
    tasks = problem.tasks
    guarded, structure = problem.max_activations is not None, (tasks.arrays, tasks.mirrored, tasks.group, tasks.mirror)
    starts, figures = np.empty_like(priorities), np.empty((len(priorities), 3))
    improve(*structure, windows, limits, guarded, priorities, patiences, _ROUNDS, starts, figures, stop)
    return starts, figures


class Proposals:
    """Random priorities (shape (tasks,), least value first) and windows (shape (groups,)).

    ``bound_s``: lower bound of the makespan: the scale of times. ``limit``: memory of each rank; may be infinite.
    """

    def __init__(self, problem: FusedProblem, bound_s: float, limit: float, rng: np.random.Generator) -> None:
        self.problem, self.bound, self.limit, self.rng = problem, bound_s, limit, rng
        self.tasks = problem.tasks
        self.replicas = len(problem.replicas())
        self.scale = np.array([m.forward_s + m.backward_s for m in problem.models])
        self.depth = np.array([m.stages for m in problem.models])

    def windows(self) -> Ints:
        """Most micro-batches in flight: close to those of 1F1B, or the memory limit divided among the models."""
        tasks, rng = self.tasks, self.rng
        if np.isfinite(self.limit) and rng.random() < 0.5:
            shares = rng.dirichlet(np.ones(len(self.problem.models)))
            held = [int(s * self.limit / m.activation) for s, m in zip(shares, self.problem.models, strict=True)]
            return np.maximum(held, 1)[tasks.model].astype(np.int64)
        factor = rng.choice([0.5, 1.0, 1.0, 1.5, 2.0], self.replicas)[tasks.replica]
        more = rng.integers(0, 4, self.replicas)[tasks.replica]
        in_flight = np.ceil((self.depth[tasks.model] - tasks.stage) * factor).astype(np.int64) + more
        windows: Ints = np.maximum(in_flight, 1)
        return windows

    def by_tail(self) -> Floats:
        """Priorities by a random rule: tasks with much work after them come first."""
        tasks, rng, bound = self.tasks, self.rng, self.bound
        group = tasks.group
        replica = tasks.replica[group]
        spacing = (rng.uniform(0, 1.5, self.replicas) * self.scale[[m for m, _ in self.problem.replicas()]])[replica]
        lead = (rng.uniform(-1, 1, self.replicas) * bound * rng.choice([0, 0.1, 0.5]))[replica]
        forward_lead = rng.uniform(-0.5, 0.5) * bound * rng.choice([0, 0.3, 1.0])
        urgency = tasks.tail[group] + spacing * (tasks.count[group] - tasks.index) + lead
        urgency += np.where(tasks.forward[group], forward_lead, 0.0)
        noise = rng.normal(size=tasks.size) * rng.choice([0, 0.2, 1, 4]) * self.scale.mean() / 3
        priority: Floats = noise - urgency
        return priority

    def mixed(self) -> Floats:
        """Priorities by micro-batch: those of the models in a random mixture, several in flight."""
        tasks, rng = self.tasks, self.rng
        model = tasks.model[tasks.group]
        models = self.problem.models
        jobs = sum(m.micro_batches for m in models)
        begin, end = np.sort(rng.random((2, len(models))) ** rng.choice([0.1, 1.0]), axis=0)
        begin[rng.random(len(models)) < 0.5] = 0.0
        place = begin[model] + (end - begin)[model] * (tasks.index + rng.random()) / tasks.count[tasks.group]
        largest = max(m.activation for m in models)
        max_in_flight = min(float(self.depth.max()), self.limit / largest)
        in_flight = rng.uniform(0, max_in_flight) * (1 - rng.choice([0.0, 1.0]) * tasks.stage / self.depth[tasks.model])
        priority: Floats = place * jobs + np.where(tasks.forward, 0.0, in_flight)[tasks.group]
        return priority

    def periodic(self) -> Floats:
        """Priorities by time: a model's micro-batches enter at equal intervals and never wait."""
        tasks, rng = self.tasks, self.rng
        models = self.problem.models
        chain = self.scale * self.depth
        counts = np.array([m.micro_batches for m in models])
        if rng.random() < 0.5:  # as many micro-batches in flight as memory allows
            max_in_flight = np.minimum(self.depth, self.limit / np.array([m.activation for m in models]))
            period = chain / np.maximum(np.floor(rng.uniform(1, np.maximum(max_in_flight, 1) + 1)), 1)
        else:  # all models end at the same time
            end = self.bound * rng.uniform(1.0, 1.5)
            period = np.maximum((end - chain) / np.maximum(counts - 1, 1), self.scale)
        begin = rng.random(len(models)) * rng.choice([0.0, 1.0]) * period
        late = rng.random(len(models)) < 0.2
        begin[late] = np.maximum(self.bound - chain - period * (counts - 1), 0.0)[late]
        model = tasks.model[tasks.group]
        priority: Floats = begin[model] + period[model] * tasks.index + tasks.head[tasks.group]
        return priority

    def perturbed(self, start: Floats) -> Floats:
        """Start times of a good schedule plus noise on all tasks, some tasks, groups, or an interval of time."""
        tasks, rng = self.tasks, self.rng
        size = self.scale.mean() * rng.choice([0.2, 0.5, 1, 2, 5])
        moved: Floats
        kind = rng.integers(5)
        if kind == 2:  # whole groups
            moved = rng.normal(size=len(tasks.count))[tasks.group]
        elif kind == 4:  # all passes of one kind of a replica
            shift = rng.normal(size=(self.replicas, 2))
            moved = shift[tasks.replica, tasks.forward.astype(np.int64)][tasks.group]
        else:
            moved = rng.normal(size=tasks.size)
            if kind == 1:  # a tenth of the tasks
                moved *= rng.random(tasks.size) < 0.1
            elif kind == 3:  # an interval of time
                centre = rng.random() * self.bound
                moved *= np.abs(start - centre) < self.bound * rng.choice([0.05, 0.15])
        moved *= size
        moved += start
        return moved

    def swapped(self, start: Floats) -> Floats:
        """Start times of a good schedule, with some pairs of adjacent tasks of a rank exchanged."""
        tasks, rng = self.tasks, self.rng
        rank = tasks.rank[tasks.group]
        by_time = np.lexsort((start, rank))
        first, second = by_time[:-1], by_time[1:]
        end = start[first] + tasks.duration[tasks.group[first]]
        adjacent = (rank[first] == rank[second]) & (start[second] <= end + EQUAL * self.bound)
        pairs = np.flatnonzero(adjacent & (tasks.group[first] != tasks.group[second]))
        moved = start.copy()
        for pair in rng.choice(pairs, min(len(pairs), int(rng.geometric(0.4)))) if len(pairs) else ():
            moved[first[pair]], moved[second[pair]] = moved[second[pair]], moved[first[pair]]
        return moved

    def leaner(self, start: Floats) -> Floats:
        """Start times of a good schedule, with a backward pass moved before each peak of memory."""
        tasks, rng = self.tasks, self.rng
        orders = tasks.orders(start)
        held = tasks.held(orders)
        peak = max(float(rank_held.max()) for rank_held in held)
        moved = start.copy()
        for order, rank_held in zip(orders, held, strict=True):
            if rank_held.max() < peak * (1 - EQUAL):
                continue
            for place in np.flatnonzero(rank_held >= peak * (1 - EQUAL)):
                later = order[place + 1 :]
                backward = later[~tasks.forward[tasks.group[later]]][0]
                if rng.random() < 0.5:
                    moved[backward] = start[order[place]] - EQUAL * self.bound
                else:
                    moved[order[place]] = start[backward] + EQUAL * self.bound
        return moved


def solve(request: FusedRequest, control: SearchControl) -> FusedPlan:
    """Search for a schedule of least makespan."""
    problem = request.problem()
    seconds = [s for model in problem.models for s in (model.forward_s, model.backward_s)]
    if max(seconds) > MAX_RATIO * min(seconds):
        raise FieldError.at(
            "models",
            f"the longest pass takes more than {MAX_RATIO:g} times the shortest",
            hint="leave out models whose passes take negligible time",
        )

    def on_progress(result: FusedSearchResult) -> None:
        control.report(
            best=result.schedule.makespan_s, bound=result.lower_bound_s, answer=partial(_plan, request, problem, result)
        )

    if not request.executable:
        result = search(problem, control, seed=request.seed, max_steps=request.max_steps, on_progress=on_progress)
        return _plan(request, problem, result)
    _compile()
    control.restart()
    # Mixed passes in half of the budget, then the models in each order: torch runs one schedule after the other.
    models = range(len(problem.models))
    orders = list(islice(permutations(models), MAX_SEQUENCES)) if len(models) > 1 else []
    results: list[FusedSearchResult] = []

    def on_executable(result: FusedSearchResult) -> None:
        if all(result.schedule.key < earlier.schedule.key for earlier in results[1:]):
            on_progress(result)

    for number, sequence in enumerate([None, *orders]):
        budget_s = control.left_s / (2 if number == 0 and orders else len(orders) + 1 - number)
        part = control.part(budget_s if np.isfinite(budget_s) else None)
        max_steps = request.max_steps and -(-request.max_steps // (1 + len(orders)))
        listener = None if sequence is None and orders else on_executable
        changed = replace(problem, sequence=sequence)
        results.append(search(changed, part, seed=request.seed, max_steps=max_steps, on_progress=listener))
    free, best = results[0], min(results[1:] or results, key=lambda result: result.schedule.key)
    return _plan(request, problem, replace(best, steps=sum(r.steps for r in results)), free.schedule.makespan_s)


def _plan(
    request: FusedRequest, problem: FusedProblem, result: FusedSearchResult, unrestricted_s: float | None = None
) -> FusedPlan:
    tasks, start_s = problem.tasks, result.schedule.start_s
    orders = tasks.orders(start_s)
    begin_s, end_s = run_orders(problem, orders)
    makespan = float(end_s.max())
    held = [float(rank_held.max()) for rank_held in tasks.held(orders)]
    costs = request.costs()
    interval = None
    if any(cost.parts for pair in costs for cost in pair):
        lower_s, upper_s = (run_orders(request.problem(name), orders)[1].max() for name in ("lower_s", "upper_s"))
        interval = Interval(lower_s=float(lower_s), upper_s=float(upper_s))
    execution = None if unrestricted_s is None else Execution.of(makespan, unrestricted_s)
    copies = np.array([copy for _, copy in problem.replicas()])[tasks.replica]
    names = ("model", "copy", "pass", "micro_batch", "start_s", "end_s")
    ways, groups = np.where(tasks.forward, "F", "B"), [tasks.group[order] for order in orders]
    columns = [
        (tasks.model[group], copies[group], ways[group], tasks.index[order], begin_s[order], end_s[order])
        for order, group in zip(orders, groups, strict=True)
    ]
    # Rows as mappings: made and validated several times as fast as models one by one.
    rows: Any = [
        [dict(zip(names, row, strict=True)) for row in zip(*(column.tolist() for column in rank), strict=True)]
        for rank in columns
    ]
    return FusedPlan(
        makespan_s=makespan,
        # Sums of the same terms in another order may differ in their last digits.
        lower_bound_s=min(result.lower_bound_s, makespan),
        baselines={name: max(seconds, makespan) for name, seconds in result.baselines.items()},
        peak_activations=max(held),
        rank_peak_activations=held,
        interval=interval,
        costs=[StageCost(forward_s=f.latency_s, backward_s=b.latency_s, transfer_s=t.latency_s) for f, b, t in costs],
        steps=result.steps,
        order=rows,
        execution=execution,
        explanation=[*_explain(problem, result, makespan, costs), *([str(execution)] if execution else [])],
    )


def _explain(problem: FusedProblem, result: FusedSearchResult, makespan: float, costs: Sequence[Costs]) -> list[str]:
    """Shares of the models, what determines the lower bound, and the programs of each model."""
    work = [m.micro_batches * (m.forward_s + m.backward_s) for m in problem.models]
    chains = [
        (m.micro_batches + m.stages - 1) * (m.forward_s + m.backward_s) + 2 * (m.stages - 1) * m.transfer_s
        for m in problem.models
    ]
    busy = sum(work)
    lines = [
        f"every rank works {format_latency(busy)} of {format_latency(makespan)} ({100 * busy / makespan:.1f} %): "
        + ", ".join(f"model {m} {100 * s / makespan:.1f} %" for m, s in enumerate(work))
    ]
    longest = max(range(len(chains)), key=chains.__getitem__)
    if chains[longest] >= result.lower_bound_s * (1 - 1e-9):
        sent = " + 2 x (stages - 1) x transfer" if problem.models[longest].transfer_s else ""
        lines.append(
            f"model {longest} alone takes as long as the lower bound, (micro-batches + stages - 1) x "
            f"(forward + backward){sent} = {chains[longest]:.6g} s; the other models run in its bubbles"
        )
    elif memory_bound_s(problem) >= result.lower_bound_s * (1 - 1e-9):
        lines.append(
            "the memory limit sets the lower bound: micro-batches are held until they have been to the last "
            f"stage and back, at most {problem.max_activations:g} on a rank"
        )
    else:
        lines.append(
            f"one rank sets the lower bound: its work of {busy:.6g} s, and {result.lower_bound_s - busy:.6g} s "
            "until its first micro-batches can arrive and after its last ones have left"
        )
    for m, pair in enumerate(costs):
        for name, cost in zip(("forward", "backward", "transfer"), pair, strict=True):
            if cost.parts:
                lines.append(f"model {m} {name}, {cost.latency_s:.4g} s per stage: {cost.largest()}")
    return lines


def draw(request: FusedRequest, plan: FusedPlan) -> Figure:
    """One row for each rank: its passes over time, and its peak memory; the lower bound as a vertical line."""
    figure = new_figure(12, 1.6 + 0.28 * len(plan.order))
    timeline, memory = figure.subplots(1, 2, sharey=True, width_ratios=[8, 1])
    colours = pass_colours(range(len(request.models)))
    marks = {"lower_bound": plan.lower_bound_s}
    draw_passes(timeline, plan.order, lambda step: colours[step.model, step.pass_], plan.makespan_s, **marks)
    memory.barh(range(len(plan.order)), plan.rank_peak_activations, color=GREY)
    memory.set_xlabel("peak activations")
    names = [f"model {m} ({model.direction}) {way}" for m, model in enumerate(request.models) for way in WAYS]
    draw_legend(figure, dict(zip(names, colours.values(), strict=True)))
    return figure
