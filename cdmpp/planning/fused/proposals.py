"""Where schedules come from: priorities of random rules, and those of good schedules, changed a little."""

from __future__ import annotations

import numpy as np

from cdmpp.planning.fused.baselines import EQUAL, Floats, Ints
from cdmpp.planning.fused.problem import Problem


class Proposals:
    """Random priorities (shape (tasks,), the least first) and windows (shape (groups,)).

    Parameters
    ----------
    problem : Problem
    bound_s : float
        Lower bound of the makespan: the scale of times.
    limit : float
        Most memory of a rank; may be infinite.
    rng : numpy.random.Generator
    """

    def __init__(self, problem: Problem, bound_s: float, limit: float, rng: np.random.Generator) -> None:
        self.problem, self.bound, self.limit, self.rng = problem, bound_s, limit, rng
        self.tasks = problem.tasks
        rank = self.tasks.rank[self.tasks.group]
        self.by_rank = [np.flatnonzero(rank == r) for r in range(problem.ranks)]
        self.lanes = len(problem.lanes())
        self.scale = np.array([m.forward_s + m.backward_s for m in problem.models])
        self.depth = np.array([m.stages for m in problem.models])

    def windows(self) -> Ints:
        """Random numbers of micro-batches in flight: about as in 1F1B, or the limit shared out."""
        tasks, rng = self.tasks, self.rng
        if np.isfinite(self.limit) and rng.random() < 0.5:
            parts = rng.dirichlet(np.ones(len(self.problem.models)))
            held = [int(s * self.limit / m.activation) for s, m in zip(parts, self.problem.models, strict=True)]
            return np.maximum(held, 1)[tasks.model].astype(np.int64)
        share = rng.choice([0.5, 1.0, 1.0, 1.5, 2.0], self.lanes)[tasks.lane]
        more = rng.integers(0, 4, self.lanes)[tasks.lane]
        found = np.ceil((self.depth[tasks.model] - tasks.stage) * share).astype(np.int64) + more
        least: Ints = np.maximum(found, 1)
        return least

    def fresh(self) -> Floats:
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
        most = min(float(self.depth.max()), self.limit / largest)
        flight = rng.uniform(0, most) * (1 - rng.choice([0.0, 1.0]) * tasks.stage / self.depth[tasks.model])
        priority: Floats = place * jobs + np.where(tasks.forward, 0.0, flight)[tasks.group]
        return priority

    def periodic(self) -> Floats:
        """Priorities by the clock: a model's micro-batches enter at equal intervals and are never held up."""
        tasks, rng = self.tasks, self.rng
        models = self.problem.models
        chain = self.scale * self.depth
        counts = np.array([m.micro_batches for m in models])
        if rng.random() < 0.5:  # as many in flight as may be
            most = np.minimum(self.depth, self.limit / np.array([m.activation for m in models]))
            period = chain / np.maximum(np.floor(rng.uniform(1, np.maximum(most, 1) + 1)), 1)
        else:  # all over at the same time
            end = self.bound * rng.uniform(1.0, 1.5)
            period = np.maximum((end - chain) / np.maximum(counts - 1, 1), self.scale)
        begin = rng.random(len(models)) * rng.choice([0.0, 1.0]) * period
        late = rng.random(len(models)) < 0.2
        begin[late] = np.maximum(self.bound - chain - period * (counts - 1), 0.0)[late]
        model = tasks.model[tasks.group]
        priority: Floats = begin[model] + period[model] * tasks.index + tasks.head[tasks.group]
        return priority

    def shaken(self, start: Floats) -> Floats:
        """Priorities near a good schedule: its starts, some of them moved."""
        tasks, rng = self.tasks, self.rng
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
                moved *= np.abs(start - where) < self.bound * rng.choice([0.05, 0.15])
        moved *= size
        moved += start
        return moved

    def swapped(self, start: Floats) -> Floats:
        """Priorities near a good schedule: some neighbours exchanged that follow each other at once."""
        tasks, rng = self.tasks, self.rng
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

    def leaner(self, start: Floats) -> Floats:
        """Priorities near a good schedule: where a rank holds most, a backward pass goes earlier."""
        tasks, rng = self.tasks, self.rng
        change = np.where(tasks.forward, tasks.activation, -tasks.activation)
        rows = [mine[np.argsort(start[mine], kind="stable")] for mine in self.by_rank]
        held = [np.cumsum(change[tasks.group[row]]) for row in rows]
        most = max(float(one.max()) for one in held)
        moved = start.copy()
        for row, one in zip(rows, held, strict=True):
            if one.max() < most * (1 - EQUAL):
                continue
            for at in np.flatnonzero(one >= most * (1 - EQUAL)):
                later = row[at + 1 :]
                closing = later[~tasks.forward[tasks.group[later]]][0]
                if rng.random() < 0.5:
                    moved[closing] = start[row[at]] - EQUAL * self.bound
                else:
                    moved[row[at]] = start[closing] + EQUAL * self.bound
        return moved
