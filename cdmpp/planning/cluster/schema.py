"""Request and plan of cluster allocation."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import Field, model_validator

from cdmpp.compose.pricing import CostField
from cdmpp.compose.render import Table
from cdmpp.compose.request import (
    MAX_COUNT,
    Bytes,
    Closed,
    Count,
    Name,
    Plan,
    Request,
    Row,
    Seconds,
    WholeNumber,
    exactly_one,
)
from cdmpp.errors import FieldError
from cdmpp.units import format_latency


class StepForm(Closed):
    """A data-parallel step: the computation of one worker, then a ring all-reduce of the gradients."""

    compute: Annotated[CostField, Field(description="Seconds of one worker's step, or its programs.")]
    samples: Annotated[float, Field(gt=0, le=1e9, description="Samples in one worker's step.")]
    gradient_bytes: Bytes
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0, le=1e15)]
    alpha_s: Seconds = 0.0

    def samples_per_s(self, compute_s: float, workers: int) -> float:
        """Throughput: ring all-reduce takes 2(p-1)(alpha + n/(p x bandwidth))."""
        rounds = 2 * (workers - 1)
        reduced = self.gradient_bytes / (workers * self.bandwidth_bytes_per_s)
        return workers * self.samples / (compute_s + rounds * (self.alpha_s + reduced))


class JobForm(Closed):
    """An elastic job. Its speed is given by exactly one of ``samples_per_s`` and ``step``."""

    name: Name
    workers: Annotated[list[Count], Field(min_length=1, description="Possible counts, growing.")]
    remaining_samples: Annotated[float, Field(gt=0, le=1e15)]
    samples_per_s: Annotated[
        list[Annotated[float, Field(gt=0, le=1e12)]] | None,
        Field(min_length=1, description="Throughput with each count."),
    ] = None
    step: StepForm | None = None
    running: Annotated[
        int, Field(ge=0, le=MAX_COUNT, description="Workers on the cluster's own GPUs now (for reclaim)."), WholeNumber
    ] = 0
    preemption_cost_s: Annotated[Seconds, Field(description="Seconds lost when it is preempted.")] = 0.0

    @model_validator(mode="after")
    def _speed(self) -> Self:
        return exactly_one(self, "samples_per_s", "step")


class LoanForm(Closed):
    """An inference server that is lent to the cluster."""

    name: Name
    gpus: Annotated[int, Field(ge=1, le=1024), WholeNumber]
    gpus_per_worker: Annotated[
        int, Field(ge=1, le=64, description="GPUs of this server that replace one training GPU."), WholeNumber
    ] = 1
    running: Annotated[dict[Name, Count], Field(description="Workers on it now, by job.", default_factory=dict)]


class JobPlan(Row):
    """Workers of one job: 0, and no remaining time, for a job that waits."""

    name: str
    workers: int
    remaining_s: float | None
    least_remaining_s: Annotated[float, Field(description="With its smallest possible count.")]


class ReclaimPlan(Row):
    """Servers to return, and the jobs that are affected."""

    servers: list[str]
    preempted: list[str]
    shrunk: list[str]
    cost_s: float


class ClusterPlan(Plan):
    """Baselines, bound and gap refer to ``total_remaining_s``, the sum over the running jobs."""

    objective_field = "total_remaining_s"

    total_remaining_s: float
    mean_remaining_s: float
    workers: Annotated[int, Field(description="Available workers, lent ones included.")]
    jobs: list[JobPlan]
    reclaimed: ReclaimPlan | None
    lower_bound_s: float

    def tables(self) -> list[Table]:
        """Returned servers, workers and times by job, baselines."""
        back = self.reclaimed
        jobs = [
            (job.name, str(job.workers), "waits" if job.remaining_s is None else format_latency(job.remaining_s))
            for job in self.jobs
        ]
        return [
            Table.lines(
                ""
                if back is None
                else f"return {', '.join(back.servers)}: preempts {', '.join(back.preempted) or 'no job'}",
                f"sum of remaining times {format_latency(self.total_remaining_s)}, "
                f"{100 * self.gap:.2f} % above the lower bound",
            ),
            Table(("job", "workers", "remaining time"), jobs, right=(1, 2)),
            self.baseline_table(),
            Table.lines(*self.explanation),
        ]


class ClusterRequest(Request[ClusterPlan]):
    """Workers for each job, on the cluster's own GPUs and on lent inference servers."""

    gpus: Annotated[int, Field(ge=0, le=MAX_COUNT), WholeNumber]
    jobs: Annotated[list[JobForm], Field(min_length=1)]
    loans: Annotated[list[LoanForm], Field(default_factory=list)]
    reclaim: Annotated[
        int, Field(ge=0, le=MAX_COUNT, description="Number of lent servers that must be returned first."), WholeNumber
    ] = 0

    def sizes(self) -> dict[str, int]:
        """Workers, jobs, counts of a job, and sets of servers to return."""
        return {
            "gpus": self.gpus + sum(loan.gpus for loan in self.loans),
            "jobs": len(self.jobs),
            "counts": max(len(job.workers) for job in self.jobs),
            "server_sets": math.comb(len(self.loans), min(self.reclaim, len(self.loans))),
        }

    def check(self) -> None:
        """Raise FieldError where names are not unique or unknown, or lists contradict each other."""
        names = [job.name for job in self.jobs]
        for i, job in enumerate(self.jobs):
            if names.index(job.name) != i:
                raise FieldError(f"jobs.{i}.name: {job.name!r} occurs twice", path=f"jobs.{i}.name")
            if any(b <= a for a, b in zip(job.workers, job.workers[1:], strict=False)):
                raise FieldError(f"jobs.{i}.workers: counts must grow", path=f"jobs.{i}.workers")
            if job.samples_per_s is not None and len(job.samples_per_s) != len(job.workers):
                raise FieldError(
                    f"jobs.{i}.samples_per_s: {len(job.samples_per_s)} values for {len(job.workers)} counts",
                    path=f"jobs.{i}.samples_per_s",
                )
        servers = [loan.name for loan in self.loans]
        for i, loan in enumerate(self.loans):
            if servers.index(loan.name) != i:
                raise FieldError(f"loans.{i}.name: {loan.name!r} occurs twice", path=f"loans.{i}.name")
            for job_name in loan.running:
                if job_name not in names:
                    raise FieldError(f"loans.{i}.running: no job is called {job_name!r}", path=f"loans.{i}.running")
        if self.reclaim > len(self.loans):
            raise FieldError(
                f"reclaim: {self.reclaim} of {len(self.loans)} lent servers",
                path="reclaim",
                hint="list the servers under loans",
            )
