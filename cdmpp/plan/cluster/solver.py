"""Solving a cluster request: servers to return, workers for the jobs, baselines (Aryl).

Extra workers are a multiple-choice knapsack. Jobs get the fewest workers that they need first, the shortest remaining
time first, as long as the cluster has that many. What is left goes to the choice of worker counts that shortens the
admitted jobs' times most in sum: one item of each job, its weight the extra workers, its value the seconds saved.

:func:`reclaim` finds the borrowed servers to give back that end the least work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.cluster.schema import ClusterPlan, ClusterRequest, JobPlan, ReclaimPlan
from cdmpp.predict.rendering import interval_text
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.plot import BLUE, PALE_GREY, new_figure
from cdmpp.predict.requests.pricing import cost_of
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ClusterJob:
    """An elastic job."""

    name: str
    workers: tuple[int, ...]  # counts that it can run with, growing; the first is what it needs
    remaining_s: tuple[float, ...]  # seconds it would still take with each
    layouts: tuple[str, ...] = ()  # of a language model, with each
    remarks: tuple[str, ...] = ()  # how it trains, with each; then what was left out

    def time_s(self, workers: int) -> float:
        """Seconds with one of its counts."""
        return self.remaining_s[self.workers.index(workers)]


#: Workers by job, in the jobs' order; 0 for a job that waits.
Allocation = list[int]


def least(jobs: Sequence[ClusterJob], capacity: int) -> Allocation:
    """The fewest workers each, shortest remaining time first; 0 for what does not fit any more."""
    out = [0] * len(jobs)
    for i in sorted(range(len(jobs)), key=lambda i: (jobs[i].remaining_s[0], i)):
        if jobs[i].workers[0] <= capacity:
            out[i] = jobs[i].workers[0]
            capacity -= out[i]
    return out


def allocate(jobs: Sequence[ClusterJob], capacity: int) -> Allocation:
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


def equal_share(jobs: Sequence[ClusterJob], capacity: int) -> Allocation:
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


def greedy(jobs: Sequence[ClusterJob], capacity: int) -> Allocation:
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


def total_s(jobs: Sequence[ClusterJob], chosen: Allocation) -> float:
    """Sum of the remaining times of the jobs that run."""
    return float(sum(job.time_s(n) for job, n in zip(jobs, chosen, strict=True) if n))


def most_saved(jobs: Sequence[ClusterJob], chosen: Allocation, spare: int) -> float:
    """No allocation of ``spare`` extra workers to the jobs that run saves more: the linear relaxation.

    ``chosen``: of :func:`least`: only whether a job runs is read.
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


def _items(job: ClusterJob) -> list[tuple[int, float]]:
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


def reclaim(
    servers: Mapping[str, Mapping[str, int]],
    wanted: int,
    workers: Mapping[str, int],
    needed: Mapping[str, int],
    cost_s: Mapping[str, float],
) -> ReclaimPlan:
    """The ``wanted`` servers whose return costs least; equal costs: fewer jobs shrunk, then by name.

    ``workers``, ``needed``: what a job has in all, and what it cannot do without. ``cost_s``: seconds lost when it is
    preempted (its work since the last checkpoint, and its start). All sets are tried: with 16 servers 12,870 at most.
    """
    names = sorted(servers)
    return min(
        (_of(chosen, servers, workers, needed, cost_s) for chosen in combinations(names, wanted)),
        key=lambda plan: (plan.cost_s, len(plan.preempted), len(plan.shrunk), plan.servers),
    )


def _of(
    chosen: Sequence[str],
    servers: Mapping[str, Mapping[str, int]],
    workers: Mapping[str, int],
    needed: Mapping[str, int],
    cost_s: Mapping[str, float],
) -> ReclaimPlan:
    lost: dict[str, int] = {}
    for server in chosen:
        for job, count in servers[server].items():
            lost[job] = lost.get(job, 0) + count
    preempted = sorted(job for job, count in lost.items() if workers[job] - count < needed[job])
    return ReclaimPlan(
        servers=list(chosen),
        preempted=preempted,
        shrunk=sorted(job for job in lost if job not in preempted),
        cost_s=float(sum(cost_s[job] for job in preempted)),
    )


def solve(request: ClusterRequest, control: SearchControl) -> ClusterPlan:
    """The allocation with the least sum of remaining times.

    Raises FieldError: a step takes no time.
    Raises InfeasibleError: every job needs more workers than there are.
    """
    jobs = [_job(request, number) for number in range(len(request.jobs))]
    returned = _returned(request, jobs)
    borrowed = sum(
        loan.gpus // loan.gpus_per_worker
        for loan in request.loans
        if returned is None or loan.name not in returned.servers
    )
    capacity = request.gpus + borrowed
    first = least(jobs, capacity)
    if not any(first):
        smallest = min(job.workers[0] for job in jobs)
        raise InfeasibleError.at(
            "gpus", f"{capacity} workers, and every job needs more", hint=f"the smallest job needs {smallest}"
        )
    chosen = allocate(jobs, capacity)
    total = total_s(jobs, chosen)
    policies = {"least_workers": first, "equal_share": equal_share(jobs, capacity), "greedy": greedy(jobs, capacity)}
    return ClusterPlan(
        total_remaining_s=total,
        mean_remaining_s=total / sum(map(bool, chosen)),
        workers=capacity,
        jobs=[
            JobPlan(
                name=job.name,
                workers=n,
                remaining_s=job.time_s(n) if n else None,
                least_remaining_s=job.remaining_s[0],
                layout=job.layouts[job.workers.index(n)] if n and job.layouts else None,
            )
            for job, n in zip(jobs, chosen, strict=True)
        ],
        reclaimed=returned,
        baselines={name: total_s(jobs, policy) for name, policy in policies.items()},
        lower_bound_s=total_s(jobs, first) - most_saved(jobs, first, capacity - sum(first)),
        explanation=_explain(request, jobs, chosen, capacity, borrowed),
    )


def figure_of(request: ClusterRequest, plan: ClusterPlan) -> float:
    """Sum of the remaining times with the workers of a plan and the costs of this request."""
    jobs = [_job(request, number, row.layout) for number, row in enumerate(plan.jobs) if row.workers]
    return total_s(jobs, [job.workers for job in plan.jobs if job.workers])


def _job(request: ClusterRequest, number: int, layout: str | None = None) -> ClusterJob:
    """A job; of a language model with the fastest layouts, or with one of this name alone."""
    form = request.jobs[number]
    if form.training is not None:
        steps = dict(sorted(form.training.steps(layout).items()))
        needed = form.remaining_samples / form.training.global_batch
        names = tuple(step.layout.named() for step in steps.values())
        remarks = tuple(
            f"{form.name}: a step of {step.layout.global_batch} sequences takes {format_latency(step.step_s)} "
            f"({interval_text(step.lower_s, step.upper_s)}), {step.domain}"
            for step in steps.values()
        )
        if missing := [str(count) for count in form.workers if count not in steps]:
            counts = ", ".join(missing)
            remarks += (f"{form.name}: no layout of {counts} workers divides and fits the memory: left out",)
        return ClusterJob(
            form.name, tuple(steps), tuple(needed * step.step_s for step in steps.values()), names, remarks
        )
    if form.step is None:
        assert form.samples_per_s is not None
        rates = form.samples_per_s
    else:
        compute_s = cost_of(form.step.compute).latency_s
        if not compute_s:
            raise FieldError(f"{form.name}: a step of 0 s has no throughput", path="jobs")
        rates = [n * form.step.samples / (compute_s + request.exchange_s(number, n)) for n in form.workers]
    return ClusterJob(form.name, tuple(form.workers), tuple(form.remaining_samples / rate for rate in rates))


def _returned(request: ClusterRequest, jobs: Sequence[ClusterJob]) -> ReclaimPlan | None:
    if not request.reclaim:
        return None
    servers = {loan.name: loan.running for loan in request.loans}
    workers = {job.name: job.running for job in request.jobs}
    for running in servers.values():
        for name, count in running.items():
            workers[name] += count
    return reclaim(
        servers,
        request.reclaim,
        workers,
        {job.name: job.workers[0] for job in jobs},
        {job.name: job.preemption_cost_s for job in request.jobs},
    )


def _explain(
    request: ClusterRequest, jobs: Sequence[ClusterJob], chosen: Sequence[int], capacity: int, borrowed: int
) -> list[str]:
    waiting = [job.name for job, n in zip(jobs, chosen, strict=True) if not n]
    _, longest = max((job.time_s(n), job.name) for job, n in zip(jobs, chosen, strict=True) if n)
    steps = [(form.name, cost_of(form.step.compute).largest()) for form in request.jobs if form.step is not None]
    exchanges = [
        f"{form.name}: the all-reduce between {n} workers takes {format_latency(request.exchange_s(number, n))}"
        for number, (form, n) in enumerate(zip(request.jobs, chosen, strict=True))
        if form.step is not None and form.step.all_reduce is not None and n > 1
    ]
    return [
        f"{sum(chosen)} of {capacity} workers are allocated; {borrowed} workers are lent",
        f"the longest job is {longest}",
        *([f"waiting for workers: {', '.join(waiting)}"] if waiting else []),
        *(f"{name}: a step is mostly {largest}" for name, largest in steps if largest),
        *exchanges,
        *(job.remarks[job.workers.index(n)] for job, n in zip(jobs, chosen, strict=True) if n and job.layouts),
        *(line for job in jobs for line in job.remarks[len(job.layouts) :]),
    ]


_HOUR_S = 3600.0


def draw(request: ClusterRequest, plan: ClusterPlan) -> Figure:
    """Two bars for each job; the label has its number of workers."""
    figure = new_figure(7, 1.2 + 0.3 * len(plan.jobs))
    axes = figure.subplots()
    names = [f"{job.name} ({job.workers})" for job in plan.jobs]
    least = [job.least_remaining_s / _HOUR_S for job in plan.jobs]
    allocated = [(job.remaining_s or 0.0) / _HOUR_S for job in plan.jobs]
    axes.barh(names, least, color=PALE_GREY, label="smallest number of workers")
    axes.barh(names, allocated, height=0.45, color=BLUE, label="allocated workers")
    axes.invert_yaxis()
    axes.set_xlabel("remaining time (h)")
    axes.set_title(f"{plan.workers} workers; {100 * plan.gap:.2f} % above the lower bound")
    axes.legend(frameon=False)
    return figure
