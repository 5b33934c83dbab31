"""The request and the answer of an allocation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.pricing import CostField
from cdmpp.compose.request import Closed, Explained, Name, PriceRequest, Seconds, WholeNumber
from cdmpp.compose.request import OldRequest as Request
from cdmpp.compose.transition import asked_of, cost_of
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.planning.cluster.allocate import Job, allocate, equal_share, greedy, least, most_saved, total_s
from cdmpp.planning.cluster.reclaim import reclaim
from cdmpp.prediction import Prediction

MAX_JOBS, MAX_OPTIONS, MAX_WORKERS, MAX_SERVERS = 256, 32, 4096, 16
Count = Annotated[int, Field(ge=1, le=MAX_WORKERS), WholeNumber]


class StepForm(Closed):
    """A data-parallel step: a worker's computation, then a ring all-reduce of the gradients."""

    compute: Annotated[CostField, Field(description="Seconds of one worker's step, or the programs of it.")]
    samples: Annotated[float, Field(gt=0, le=1e9, description="Samples of one worker's step.")]
    gradient_bytes: Annotated[float, Field(ge=0, le=1e15)]
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0, le=1e15)]
    alpha_s: Seconds = 0.0

    def samples_per_s(self, compute_s: float, workers: int) -> float:
        """Throughput: ring all-reduce takes 2(p-1)(alpha + n/(p x bandwidth))."""
        rounds = 2 * (workers - 1)
        reduced = self.gradient_bytes / (workers * self.bandwidth_bytes_per_s)
        return workers * self.samples / (compute_s + rounds * (self.alpha_s + reduced))


class JobForm(Closed):
    """An elastic job: exactly one of ``samples_per_s`` and ``step`` says how fast it is."""

    name: Name
    workers: Annotated[
        list[Count], Field(min_length=1, max_length=MAX_OPTIONS, description="Counts it can run with, growing.")
    ]
    remaining_samples: Annotated[float, Field(gt=0, le=1e15)]
    samples_per_s: Annotated[
        list[Annotated[float, Field(gt=0, le=1e12)]] | None,
        Field(min_length=1, max_length=MAX_OPTIONS, description="Throughput with each count."),
    ] = None
    step: StepForm | None = None
    running: Annotated[
        int,
        Field(ge=0, le=MAX_WORKERS, description="Workers on the cluster's own GPUs now (for reclaim)."),
        WholeNumber,
    ] = 0
    preemption_cost_s: Annotated[Seconds, Field(description="Seconds lost when it is preempted.")] = 0.0


class LoanForm(Closed):
    """An inference server that is lent: its GPUs, and how many of them do the work of one training GPU."""

    name: Name
    gpus: Annotated[int, Field(ge=1, le=1024), WholeNumber]
    gpus_per_worker: Annotated[int, Field(ge=1, le=64), WholeNumber] = 1
    running: Annotated[
        dict[Name, Count], Field(max_length=MAX_JOBS, description="Workers on it now, by job.", default_factory=dict)
    ]


class ClusterRequest(Request):
    """Workers for each job, on the cluster's GPUs and those that inference servers lend."""

    gpus: Annotated[int, Field(ge=0, le=MAX_WORKERS), WholeNumber]
    jobs: Annotated[list[JobForm], Field(min_length=1, max_length=MAX_JOBS)]
    loans: Annotated[list[LoanForm], Field(max_length=MAX_SERVERS, default_factory=list)]
    reclaim: Annotated[
        int, Field(ge=0, le=MAX_SERVERS, description="Lent servers that must be given back first."), WholeNumber
    ] = 0

    answer_model: ClassVar[type[BaseModel]]

    def price_requests(self) -> list[PriceRequest]:
        """Programs of the jobs' steps."""
        self._check()
        return [
            one
            for i, job in enumerate(self.jobs)
            if job.step is not None
            for one in asked_of(job.step.compute, f"jobs.{i}.step.compute")
        ]

    def _check(self) -> None:
        names = [job.name for job in self.jobs]
        for i, job in enumerate(self.jobs):
            if names.index(job.name) != i:
                raise FieldError(f"jobs.{i}.name: {job.name!r} is there twice", path=f"jobs.{i}.name")
            if any(b <= a for a, b in zip(job.workers, job.workers[1:], strict=False)):
                raise FieldError(f"jobs.{i}.workers: counts must grow", path=f"jobs.{i}.workers")
            if (job.samples_per_s is None) == (job.step is None):
                raise FieldError(f"jobs.{i}: give either samples_per_s or step", path=f"jobs.{i}")
            if job.samples_per_s is not None and len(job.samples_per_s) != len(job.workers):
                raise FieldError(
                    f"jobs.{i}.samples_per_s: {len(job.samples_per_s)} values for {len(job.workers)} counts",
                    path=f"jobs.{i}.samples_per_s",
                )
        lent = [loan.name for loan in self.loans]
        for i, loan in enumerate(self.loans):
            if lent.index(loan.name) != i:
                raise FieldError(f"loans.{i}.name: {loan.name!r} is there twice", path=f"loans.{i}.name")
            for job_name in loan.running:
                if job_name not in names:
                    raise FieldError(f"loans.{i}.running: no job is called {job_name!r}", path=f"loans.{i}.running")
        if self.reclaim > len(self.loans):
            raise FieldError(
                f"reclaim: {self.reclaim} of {len(self.loans)} lent servers",
                path="reclaim",
                hint="list the servers under loans",
            )

    def solve(self, prices: Sequence[Prediction], watch: SearchControl) -> dict[str, Any]:
        """See :class:`ClusterAnswer`."""
        self._check()
        left = iter(prices)
        jobs, why = [], []
        for form in self.jobs:
            job, largest = _job(form, left)
            jobs.append(job)
            if largest:
                why.append(f"{form.name}: a step is mostly {largest}")
        given_back = self._reclaimed()
        lent = [loan for loan in self.loans if given_back is None or loan.name not in given_back["servers"]]
        borrowed = sum(loan.gpus // loan.gpus_per_worker for loan in lent)
        capacity = self.gpus + borrowed
        first = least(jobs, capacity)
        if not any(first):
            smallest = min(job.workers[0] for job in jobs)
            raise InfeasibleError(
                f"gpus: {capacity} workers, and every job needs more",
                path="gpus",
                hint=f"{smallest} would do for the smallest job",
            )
        chosen = allocate(jobs, capacity)
        spare = capacity - sum(first)
        lowest = total_s(jobs, first) - most_saved(jobs, first, spare)
        total = total_s(jobs, chosen)
        policies = {
            "least_workers": first,
            "equal_share": equal_share(jobs, capacity),
            "greedy": greedy(jobs, capacity),
        }
        waiting = [job.name for job, n in zip(jobs, chosen, strict=True) if not n]
        running = [(job.time_s(n), job.name) for job, n in zip(jobs, chosen, strict=True) if n]
        explanation = [
            f"{sum(chosen)} of {capacity} workers are given; {borrowed} workers are lent",
            f"the longest job is {max(running)[1]}",
            *([f"waiting for workers: {', '.join(waiting)}"] if waiting else []),
            *why,
        ]
        return {
            "total_remaining_s": total,
            "mean_remaining_s": total / len(running),
            "workers": capacity,
            "jobs": [
                {
                    "name": job.name,
                    "workers": n,
                    "remaining_s": job.time_s(n) if n else None,
                    "least_remaining_s": job.remaining_s[0],
                }
                for job, n in zip(jobs, chosen, strict=True)
            ],
            "reclaimed": given_back,
            "baselines": {name: total_s(jobs, policy) for name, policy in policies.items()},
            "lower_bound_s": lowest,
            "gap": total / lowest - 1,
            "explanation": explanation,
        }

    def _reclaimed(self) -> dict[str, Any] | None:
        if not self.reclaim:
            return None
        servers = {loan.name: loan.running for loan in self.loans}
        workers = {job.name: job.running for job in self.jobs}
        for running in servers.values():
            for name, count in running.items():
                workers[name] += count
        found = reclaim(
            servers,
            self.reclaim,
            workers,
            {job.name: job.workers[0] for job in self.jobs},
            {job.name: job.preemption_cost_s for job in self.jobs},
        )
        return {
            "servers": list(found.servers),
            "preempted": list(found.preempted),
            "shrunk": list(found.shrunk),
            "cost_s": found.cost_s,
        }


class JobAnswer(BaseModel):
    """One job: 0 workers and no time for one that waits."""

    model_config = ConfigDict(extra="forbid")

    name: str
    workers: int
    remaining_s: float | None
    least_remaining_s: Annotated[float, Field(description="With the fewest workers it needs.")]


class ReclaimAnswer(BaseModel):
    """Servers to give back, and what that ends."""

    model_config = ConfigDict(extra="forbid")

    servers: list[str]
    preempted: list[str]
    shrunk: list[str]
    cost_s: float


class ClusterAnswer(Explained):
    """Baselines, bound and gap are of ``total_remaining_s``, the sum over the jobs that run."""

    total_remaining_s: float
    mean_remaining_s: float
    workers: Annotated[int, Field(description="Workers there are, lent ones included.")]
    jobs: list[JobAnswer]
    reclaimed: ReclaimAnswer | None
    lower_bound_s: float


ClusterRequest.answer_model = ClusterAnswer


def _job(form: JobForm, prices: Iterator[Prediction]) -> tuple[Job, str]:
    """The job, and the programs that make most of its step where they were predicted."""
    largest = ""
    if form.step is not None:
        cost = cost_of(form.step.compute, prices)
        largest = cost.largest()
        rates = [form.step.samples_per_s(cost.latency_s, n) if cost.latency_s else None for n in form.workers]
        if any(rate is None for rate in rates):
            raise FieldError(f"{form.name}: a step of 0 s has no throughput", path="jobs")
    else:
        assert form.samples_per_s is not None
        rates = list(form.samples_per_s)
    seconds = tuple(form.remaining_samples / rate for rate in rates if rate is not None)
    return Job(form.name, tuple(form.workers), seconds), largest
