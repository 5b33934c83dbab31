"""A **synthetic** trace of jobs, run to its end under a policy: what an allocation is worth over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.plan.cluster.allocate import Allocation, Job

Policy = Callable[[Sequence[Job], int], Allocation]
_DONE = 1e-9


@dataclass(frozen=True)
class Arrival:
    """A job and the second at which it comes; its times are those of the whole job."""

    at_s: float
    job: Job


def synthetic_trace(jobs: int, seed: int, mean_gap_s: float, mean_work_s: float) -> list[Arrival]:
    """Poisson arrivals, exponential work, times that fall as workers^-e (e in 0.6 to 1): made up."""
    random = np.random.default_rng(seed)
    at, out = 0.0, []
    for i in range(jobs):
        at += float(random.exponential(mean_gap_s))
        work, exponent = float(random.exponential(mean_work_s)) + 1.0, float(random.uniform(0.6, 1.0))
        first = int(random.choice([1, 2, 4]))
        counts = tuple(first * k for k in range(1, 5))
        out.append(Arrival(at, Job(f"job-{i}", counts, tuple(work * (first / n) ** exponent for n in counts))))
    return out


def mean_completion_s(arrivals: Sequence[Arrival], capacity: int, policy: Policy) -> float:
    """Mean seconds from arrival to end, workers being given anew at every arrival and end.

    Raises
    ------
    ValueError
        A job needs more workers than there are: it would never end.
    """
    if any(arrival.job.workers[0] > capacity for arrival in arrivals):
        raise ValueError("a job needs more workers than the cluster has")
    coming = sorted(arrivals, key=lambda arrival: arrival.at_s)
    left: dict[int, float] = {}  # share of the job that is not done
    now, next_in, spent = 0.0, 0, 0.0
    while left or next_in < len(coming):
        running = sorted(left)
        jobs = [_shortened(coming[i].job, left[i]) for i in running]
        chosen = policy(jobs, capacity)
        ends = [job.time_s(n) if n else np.inf for job, n in zip(jobs, chosen, strict=True)]
        arrives = coming[next_in].at_s - now if next_in < len(coming) else np.inf
        step = min([arrives, *ends])
        now += step
        for i, end in zip(running, ends, strict=True):
            left[i] -= left[i] * step / end
            if left[i] <= _DONE:
                del left[i]
                spent += now - coming[i].at_s
        if arrives <= step:
            left[next_in] = 1.0
            next_in += 1
    return spent / len(coming)


def _shortened(job: Job, share: float) -> Job:
    return Job(job.name, job.workers, tuple(share * seconds for seconds in job.remaining_s))
