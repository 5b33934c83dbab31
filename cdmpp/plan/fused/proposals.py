"""Random candidates for the list scheduler: priorities by random rules, and small changes of good schedules."""

from __future__ import annotations

import numpy as np

from cdmpp.plan.fused.baselines import EQUAL, Floats, Ints
from cdmpp.plan.fused.problem import Problem


class Proposals:
    """Random priorities (shape (tasks,), least value first) and windows (shape (groups,)).

    Parameters
    ----------
    problem : Problem
    bound_s : float
        Lower bound of the makespan in seconds: the scale of times.
    limit : float
        Memory of each rank; may be infinite.
    rng : numpy.random.Generator
    """

    def __init__(self, problem: Problem, bound_s: float, limit: float, rng: np.random.Generator) -> None:
        self.problem, self.bound, self.limit, self.rng = problem, bound_s, limit, rng
        self.tasks = problem.tasks
        self.by_rank = self.tasks.by_rank()
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
        most = min(float(self.depth.max()), self.limit / largest)
        in_flight = rng.uniform(0, most) * (1 - rng.choice([0.0, 1.0]) * tasks.stage / self.depth[tasks.model])
        priority: Floats = place * jobs + np.where(tasks.forward, 0.0, in_flight)[tasks.group]
        return priority

    def periodic(self) -> Floats:
        """Priorities by time: a model's micro-batches enter at equal intervals and never wait."""
        tasks, rng = self.tasks, self.rng
        models = self.problem.models
        chain = self.scale * self.depth
        counts = np.array([m.micro_batches for m in models])
        if rng.random() < 0.5:  # as many micro-batches in flight as memory allows
            most = np.minimum(self.depth, self.limit / np.array([m.activation for m in models]))
            period = chain / np.maximum(np.floor(rng.uniform(1, np.maximum(most, 1) + 1)), 1)
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
        change = tasks.memory_change()
        orders = [numbers[np.argsort(start[numbers], kind="stable")] for numbers in self.by_rank]
        held = [np.cumsum(change[tasks.group[order]]) for order in orders]
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
