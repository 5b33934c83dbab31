"""Extra workers as a multiple-choice knapsack (Aryl, elastic resource allocation).

Jobs get the fewest workers that they need first, the shortest remaining time first, as long as the cluster
has that many. What is left goes to the choice of worker counts that shortens the admitted jobs' times most in
sum: one item of each job, its weight the extra workers, its value the seconds that they save.

:func:`reclaim` finds the borrowed servers to give back that end the least work (Aryl, server reclaiming).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class Job:
    """An elastic job.

    Attributes
    ----------
    name : str
    workers : tuple of int
        Counts that it can run with, growing; the first is what it needs.
    remaining_s : tuple of float
        Seconds it would still take with each.
    """

    name: str
    workers: tuple[int, ...]
    remaining_s: tuple[float, ...]

    def time_s(self, workers: int) -> float:
        """Seconds with one of its counts."""
        return self.remaining_s[self.workers.index(workers)]


#: Workers by job, in the jobs' order; 0 for a job that waits.
Allocation = list[int]


def least(jobs: Sequence[Job], capacity: int) -> Allocation:
    """The fewest workers each, shortest remaining time first; 0 for what does not fit any more."""
    out = [0] * len(jobs)
    for i in sorted(range(len(jobs)), key=lambda i: (jobs[i].remaining_s[0], i)):
        if jobs[i].workers[0] <= capacity:
            out[i] = jobs[i].workers[0]
            capacity -= out[i]
    return out


def allocate(jobs: Sequence[Job], capacity: int) -> Allocation:
    """The best worker counts: :func:`least`, then the knapsack over what is left, exactly.

    Dynamic programming over jobs and workers: O(jobs x capacity x counts).
    """
    chosen = least(jobs, capacity)
    spare = capacity - sum(chosen)
    admitted = [i for i, workers in enumerate(chosen) if workers]
    saved = np.zeros(spare + 1)  # most seconds saved with so many extra workers
    picks: list[np.ndarray] = []
    for i in admitted:
        best, pick = saved.copy(), np.zeros(spare + 1, dtype=np.int32)
        for option, (extra, value) in enumerate(_items(jobs[i])):
            if option and extra <= spare:
                with_it = saved[: spare + 1 - extra] + value
                better = with_it > best[extra:]
                best[extra:][better] = with_it[better]
                pick[extra:][better] = option
        saved = best
        picks.append(pick)
    left = int(saved.argmax())  # the fewest workers among equal sums
    for i, pick in zip(reversed(admitted), reversed(picks), strict=True):
        option = int(pick[left])
        chosen[i] = jobs[i].workers[option]
        left -= chosen[i] - jobs[i].workers[0]
    return chosen


def equal_share(jobs: Sequence[Job], capacity: int) -> Allocation:
    """Baseline: the next larger count to each admitted job in turn, while it fits."""
    chosen = least(jobs, capacity)
    spare, grown = capacity - sum(chosen), True
    while grown:
        grown = False
        for i, workers in enumerate(chosen):
            larger = next((w for w in jobs[i].workers if w > workers), None) if workers else None
            if larger is not None and larger - workers <= spare:
                spare -= larger - workers
                chosen[i], grown = larger, True
    return chosen


def greedy(jobs: Sequence[Job], capacity: int) -> Allocation:
    """Baseline: again and again the step that saves most seconds for each worker."""
    chosen = least(jobs, capacity)
    spare = capacity - sum(chosen)
    while True:
        steps = [
            ((jobs[i].time_s(now) - jobs[i].time_s(w)) / (w - now), -i, w)
            for i, now in enumerate(chosen)
            if now
            for w in jobs[i].workers
            if now < w <= now + spare
        ]
        rate, minus_i, workers = max(steps, default=(0.0, 0, 0))
        if rate <= 0:
            return chosen
        spare -= workers - chosen[-minus_i]
        chosen[-minus_i] = workers


def total_s(jobs: Sequence[Job], chosen: Allocation) -> float:
    """Sum of the remaining times of the jobs that run."""
    return float(sum(job.time_s(n) for job, n in zip(jobs, chosen, strict=True) if n))


def most_saved(jobs: Sequence[Job], chosen: Allocation, spare: int) -> float:
    """No allocation of ``spare`` extra workers to the jobs that run saves more: the linear relaxation.

    Parameters
    ----------
    chosen : allocation
        Of :func:`least`: only whether a job runs is read.
    """
    slopes: list[tuple[float, int]] = []
    for job, n in zip(jobs, chosen, strict=True):
        if n:
            slopes += _concave(_items(job))
    saved = 0.0
    for rate, extra in sorted(slopes, reverse=True):
        used = min(extra, spare)
        saved, spare = saved + rate * used, spare - used
    return saved


def _items(job: Job) -> list[tuple[int, float]]:
    """Extra workers and the seconds that they save, of each count."""
    return [
        (workers - job.workers[0], job.remaining_s[0] - seconds)
        for workers, seconds in zip(job.workers, job.remaining_s, strict=True)
    ]


def _concave(items: Sequence[tuple[int, float]]) -> list[tuple[float, int]]:
    """Steps (seconds saved a worker, workers) of the upper hull, falling; none that saves nothing."""
    out: list[tuple[float, int]] = []
    at = 0
    while at < len(items) - 1:
        rates = [
            ((value - items[at][1]) / (extra - items[at][0]), j) for j, (extra, value) in enumerate(items) if j > at
        ]
        rate, to = max(rates)
        if rate <= 0:
            break
        out.append((rate, items[to][0] - items[at][0]))
        at = to
    return out


@dataclass(frozen=True)
class Reclaimed:
    """Servers to give back.

    Attributes
    ----------
    servers : tuple of str
    preempted : tuple of str
        Jobs that are left with fewer workers than they need, and start again from their checkpoint.
    shrunk : tuple of str
        Jobs that go on with fewer workers.
    cost_s : float
        Sum of the preempted jobs' costs.
    """

    servers: tuple[str, ...]
    preempted: tuple[str, ...]
    shrunk: tuple[str, ...]
    cost_s: float


def reclaim(
    servers: Mapping[str, Mapping[str, int]],
    wanted: int,
    workers: Mapping[str, int],
    needed: Mapping[str, int],
    cost_s: Mapping[str, float],
) -> Reclaimed:
    """The ``wanted`` servers whose return costs least; equal costs: fewer jobs shrunk, then by name.

    Parameters
    ----------
    servers : mapping of server to (mapping of job to its workers there)
    wanted : int
        At most the number of servers.
    workers, needed : mapping of job to int
        What a job has in all, and what it cannot do without.
    cost_s : mapping of job to float
        Seconds lost when it is preempted (its work since the last checkpoint, and its start).

    Notes
    -----
    All sets are tried: with 16 servers 12,870 at most.
    """
    names = sorted(servers)
    return min(
        (_of(chosen, servers, workers, needed, cost_s) for chosen in combinations(names, wanted)),
        key=lambda each: (each.cost_s, len(each.preempted), len(each.shrunk), each.servers),
    )


def _of(
    chosen: Sequence[str],
    servers: Mapping[str, Mapping[str, int]],
    workers: Mapping[str, int],
    needed: Mapping[str, int],
    cost_s: Mapping[str, float],
) -> Reclaimed:
    lost: dict[str, int] = {}
    for server in chosen:
        for job, count in servers[server].items():
            lost[job] = lost.get(job, 0) + count
    preempted = tuple(sorted(job for job, count in lost.items() if workers[job] - count < needed[job]))
    shrunk = tuple(sorted(job for job in lost if job not in preempted))
    return Reclaimed(tuple(chosen), preempted, shrunk, float(sum(cost_s[job] for job in preempted)))
