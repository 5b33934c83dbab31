"""Solving a cluster request: servers to return, workers for the jobs, baselines."""

from __future__ import annotations

from collections.abc import Sequence

from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.cluster.allocate import Job, allocate, equal_share, greedy, least, most_saved, reclaim, total_s
from cdmpp.plan.cluster.schema import ClusterPlan, ClusterRequest, JobPlan, ReclaimPlan
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.pricing import cost_of
from cdmpp.utils.units import format_latency


def solve(request: ClusterRequest, control: SearchControl) -> ClusterPlan:
    """The allocation with the least sum of remaining times.

    Raises
    ------
    FieldError
        A step takes no time.
    InfeasibleError
        Every job needs more workers than there are.
    """
    jobs = [_job(request, number) for number in range(len(request.jobs))]
    returned = _returned(request)
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
                name=job.name, workers=n, remaining_s=job.time_s(n) if n else None, least_remaining_s=job.remaining_s[0]
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
    jobs = [_job(request, number) for number in range(len(request.jobs))]
    return total_s(jobs, [job.workers for job in plan.jobs])


def _job(request: ClusterRequest, number: int) -> Job:
    form = request.jobs[number]
    if form.step is None:
        assert form.samples_per_s is not None
        rates = form.samples_per_s
    else:
        compute_s = cost_of(form.step.compute).latency_s
        if not compute_s:
            raise FieldError(f"{form.name}: a step of 0 s has no throughput", path="jobs")
        rates = [n * form.step.samples / (compute_s + request.exchange_s(number, n)) for n in form.workers]
    return Job(form.name, tuple(form.workers), tuple(form.remaining_samples / rate for rate in rates))


def _returned(request: ClusterRequest) -> ReclaimPlan | None:
    if not request.reclaim:
        return None
    servers = {loan.name: loan.running for loan in request.loans}
    workers = {job.name: job.running for job in request.jobs}
    for running in servers.values():
        for name, count in running.items():
            workers[name] += count
    choice = reclaim(
        servers,
        request.reclaim,
        workers,
        {job.name: job.workers[0] for job in request.jobs},
        {job.name: job.preemption_cost_s for job in request.jobs},
    )
    return ReclaimPlan(
        servers=list(choice.servers), preempted=list(choice.preempted), shrunk=list(choice.shrunk), cost_s=choice.cost_s
    )


def _explain(
    request: ClusterRequest, jobs: Sequence[Job], chosen: Sequence[int], capacity: int, borrowed: int
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
    ]
