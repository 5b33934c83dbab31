"""Request and plan of cluster allocation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, model_validator

from cdmpp.errors import FieldError
from cdmpp.plan.base.solve import check_unique
from cdmpp.plan.cluster.training import TrainingJobForm
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.collective_forms import CollectiveOptions
from cdmpp.predict.requests.pricing import CostField, collect, fill
from cdmpp.predict.requests.request import (
    MAX_COUNT,
    Bytes,
    Closed,
    Count,
    DeviceForm,
    Name,
    Plan,
    PriceRequest,
    Request,
    Row,
    Seconds,
    WholeNumber,
    exactly_one,
    instead_of,
)
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Protocol
from cdmpp.utils.units import format_latency


class AllReduceForm(CollectiveOptions):
    """A predicted all-reduce of the gradients between workers on devices of one kind."""

    device: DeviceForm
    protocol: Protocol = DEFAULT_PROTOCOL


class StepForm(Closed):
    """A data-parallel step: the computation of one worker, then an all-reduce of the gradients.

    The all-reduce is a ring over links of ``bandwidth_bytes_per_s``, or predicted for each count of workers.
    """

    compute: CostField = Field(description="Seconds of one worker's step, or its programs.")
    samples: float = Field(gt=0, le=1e9, description="Samples in one worker's step.")
    gradient_bytes: Bytes
    bandwidth_bytes_per_s: float | None = Field(None, gt=0, le=1e15)
    alpha_s: Seconds = 0.0
    all_reduce: AllReduceForm | None = Field(
        None, description="Predicted, instead of bandwidth_bytes_per_s and alpha_s."
    )

    @model_validator(mode="after")
    def _exchange(self) -> Self:
        instead_of(self, "all_reduce", "alpha_s")
        return exactly_one(self, "bandwidth_bytes_per_s", "all_reduce")

    def ring_s(self, workers: int) -> float:
        """Ring all-reduce: 2(p-1)(alpha + n/(p x bandwidth))."""
        assert self.bandwidth_bytes_per_s is not None
        reduced = self.gradient_bytes / (workers * self.bandwidth_bytes_per_s)
        return 2 * (workers - 1) * (self.alpha_s + reduced)


class JobForm(Closed):
    """An elastic job. Its speed is given by exactly one of ``samples_per_s``, ``step`` and ``training``."""

    name: Name
    workers: list[Count] = Field(min_length=1, description="Possible counts, growing.")
    remaining_samples: float = Field(gt=0, le=1e15)
    samples_per_s: list[Annotated[float, Field(gt=0, le=1e12)]] | None = Field(
        None, min_length=1, description="Throughput with each count."
    )
    step: StepForm | None = None
    training: TrainingJobForm | None = Field(
        None, description="A language model: each count of workers has the fastest layout that fits the memory."
    )
    running: Annotated[
        int, Field(ge=0, le=MAX_COUNT, description="Workers on the cluster's own GPUs now (for reclaim)."), WholeNumber
    ] = 0
    preemption_cost_s: Seconds = Field(0.0, description="Seconds lost when it is preempted.")

    @model_validator(mode="after")
    def _speed(self) -> Self:
        return exactly_one(self, "samples_per_s", "step", "training")


class LoanForm(Closed):
    """An inference server that is lent to the cluster."""

    name: Name
    gpus: Annotated[int, Field(ge=1, le=1024), WholeNumber]
    gpus_per_worker: Annotated[
        int, Field(ge=1, le=64, description="GPUs of this server that replace one training GPU."), WholeNumber
    ] = 1
    running: dict[Name, Count] = Field(description="Workers on it now, by job.", default_factory=dict)


class JobPlan(Row):
    """Workers of one job: 0, and no remaining time, for a job that waits."""

    name: str
    workers: int
    remaining_s: float | None
    least_remaining_s: float = Field(description="With its smallest possible count.")
    layout: str | None = Field(None, description="Of a language model that trains.")


class ReclaimPlan(Row):
    """Servers to return, and the jobs that are affected."""

    servers: list[str]
    preempted: list[str]
    shrunk: list[str]
    cost_s: float


class ClusterPlan(Plan):
    """Baselines, bound and gap refer to ``total_remaining_s``, the sum over the running jobs."""

    objective_field = "total_remaining_s"
    bounded = "numbers of workers of the jobs that run"

    total_remaining_s: float
    mean_remaining_s: float
    workers: int = Field(description="Available workers, lent ones included.")
    jobs: list[JobPlan]
    reclaimed: ReclaimPlan | None
    lower_bound_s: float

    @property
    def choice(self) -> Any:
        """Workers of the jobs."""
        return [job.workers for job in self.jobs]

    def headline(self) -> str:
        """The sum of the remaining times, and how many jobs it leaves out."""
        waiting = sum(not job.workers for job in self.jobs)
        waits = f" of the jobs that run; {waiting} of {len(self.jobs)} wait{'s' * (waiting == 1)}" if waiting else ""
        return f"sum of remaining times {format_latency(self.total_remaining_s)}{waits}"

    def tables(self) -> list[Table]:
        """Returned servers, workers and times by job, baselines."""
        back = self.reclaimed
        columns: dict[str, Callable[[JobPlan], str]] = {
            "job": lambda job: job.name,
            "workers": lambda job: str(job.workers),
            "remaining time": lambda job: "waits" if job.remaining_s is None else format_latency(job.remaining_s),
            "layout": lambda job: job.layout or "",
        }
        preempted = f"preempts {', '.join(back.preempted) or 'no job'}" if back else ""
        return [
            Table.lines(f"return {', '.join(back.servers)}: {preempted}" if back else ""),
            Table.of(self.jobs, columns, right=(1, 2)),
            self.baseline_table(),
            Table.lines(*self.explanation[1:]),
        ]


class ClusterRequest(Request[ClusterPlan]):
    """Workers for each job, on the cluster's own GPUs and on lent inference servers."""

    gpus: Annotated[int, Field(ge=0, le=MAX_COUNT), WholeNumber]
    jobs: list[JobForm] = Field(min_length=1)
    loans: list[LoanForm] = Field(default_factory=list)
    reclaim: Annotated[
        int, Field(ge=0, le=MAX_COUNT, description="Number of lent servers that must be returned first."), WholeNumber
    ] = 0

    #: Predicted seconds of the all-reduces, by job and count of workers.
    _all_reduce_s: dict[tuple[int, int], float] = PrivateAttr(default_factory=dict)

    def unchecked_memory(self) -> list[str]:
        """Jobs without training have no bytes."""
        names = [job.name for job in self.jobs if job.training is None]
        return [f"{', '.join(names)}: no weights and activations"] if names else []

    def sizes(self) -> dict[str, int]:
        """Workers, jobs, counts of a job, and sets of servers to return."""
        return {
            "gpus": self.gpus + sum(loan.gpus for loan in self.loans),
            "jobs": len(self.jobs),
            "counts": max(len(job.workers) for job in self.jobs),
            "layout_searches": sum(len(job.workers) for job in self.jobs if job.training is not None),
            "server_sets": math.comb(len(self.loans), min(self.reclaim, len(self.loans))),
        }

    @model_validator(mode="after")
    def _of_jobs(self) -> Self:
        for job in self.jobs:
            if job.training is not None:
                job.training._counts, job.training._ignore_memory = tuple(job.workers), self.ignore_memory
        return self

    def price_requests(self) -> list[PriceRequest]:
        """The programs of the steps, then the all-reduces of each job with each count of workers."""
        self.check()
        return collect(self) + [request for _, request in self._all_reduces()]

    def with_prices(self, prices: Sequence[Prediction]) -> Self:
        """A copy with the predicted seconds of all steps and all-reduces."""
        keys = [key for key, _ in self._all_reduces()]
        steps = len(prices) - len(keys)
        filled = fill(self, prices[:steps])
        if filled is self:
            filled = self.model_copy()
        seconds = [float(price.latency_s or 0.0) for price in prices[steps:]]
        filled._all_reduce_s = dict(zip(keys, seconds, strict=True))
        return filled

    def used_prices(self, plan: ClusterPlan, prices: Sequence[Prediction]) -> list[Prediction]:
        """Without those of layouts that no job has."""
        used = [p for r, p in zip(self.price_requests(), prices, strict=True) if not r.path.endswith(".training")]
        for job, row in zip(self.with_prices(prices).jobs, plan.jobs, strict=True):
            used += job.training.used(row.workers, row.layout) if job.training is not None and row.layout else []
        return used or list(prices)  # no job that runs needs one: the others were predicted all the same

    def exchange_s(self, number: int, workers: int) -> float:
        """Seconds of the all-reduce of a job that has a step; the request must be resolved."""
        step = self.jobs[number].step
        assert step is not None
        return step.ring_s(workers) if step.all_reduce is None else self._all_reduce_s.get((number, workers), 0.0)

    def _all_reduces(self) -> list[tuple[tuple[int, int], PriceRequest]]:
        """Job and count of workers of each predicted all-reduce; one worker and no gradients need none."""
        out = []
        for number, job in enumerate(self.jobs):
            form = None if job.step is None or not job.step.gradient_bytes else job.step.all_reduce
            for workers in job.workers if form is not None else ():
                if form is None or job.step is None or workers == 1:
                    continue
                program = form.fields("all_reduce", job.step.gradient_bytes, workers)
                path = f"jobs.{number}.step.all_reduce"
                out.append(((number, workers), PriceRequest(path, program, form.device, protocol=form.protocol)))
        return out

    def check(self) -> None:
        """Raise FieldError where names are not unique or unknown, or lists contradict each other."""
        names = [job.name for job in self.jobs]
        check_unique(names, "jobs")
        for i, job in enumerate(self.jobs):
            if any(b <= a for a, b in zip(job.workers, job.workers[1:], strict=False)):
                raise FieldError.at(f"jobs.{i}.workers", "counts must grow")
            if job.samples_per_s is not None and len(job.samples_per_s) != len(job.workers):
                raise FieldError.at(
                    f"jobs.{i}.samples_per_s", f"{len(job.samples_per_s)} values for {len(job.workers)} counts"
                )
        check_unique([loan.name for loan in self.loans], "loans")
        for i, loan in enumerate(self.loans):
            for job_name in loan.running:
                if job_name not in names:
                    raise FieldError.at(f"loans.{i}.running", f"no job is called {job_name!r}")
        if self.reclaim > len(self.loans):
            raise FieldError.at(
                "reclaim", f"{self.reclaim} of {len(self.loans)} lent servers", hint="list the servers under loans"
            )
