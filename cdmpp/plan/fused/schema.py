"""Request and plan of fused pipelines: ``{"models": [...]}`` of ``cdmpp plan pipeline``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cdmpp.errors import FieldError
from cdmpp.plan.base.passes import Executable, Execution
from cdmpp.plan.fused.problem import FusedProblem, Model
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.memory import UNLIMITED_BYTES, check_fits, memory_limit
from cdmpp.predict.requests.pricing import Cost, Figure, PredictedCost, cost_of
from cdmpp.predict.requests.request import (
    Budget,
    Bytes,
    Closed,
    Count,
    Interval,
    MaxSteps,
    Plan,
    PositiveBytes,
    PositiveSeconds,
    Request,
    Row,
    Seconds,
    Seed,
    exactly_one,
    instead_of,
)
from cdmpp.utils.units import format_latency

MAX_ACTIVATION = 1e12
#: Largest ratio between two costs of one request: below it, sums of costs lose none of them to rounding.
MAX_RATIO = 1e9
#: Cost of a model's forward pass, backward pass and transfer.
Costs = tuple[Cost, Cost, Cost]


class ModelForm(Closed):
    """One model. Each of its two costs is given in seconds, or predicted from the programs of one stage."""

    stages: Count = Field(
        description="Number of equal stages; divides the ranks, which the model's replicas fill side by side."
    )
    micro_batches: Count = Field(description="Number of micro-batches of each replica.")
    forward_s: PositiveSeconds | None = Field(None, description="Seconds of a stage for one micro-batch.")
    backward_s: PositiveSeconds | None = None
    forward: PredictedCost | None = Field(
        None, description="Instead of forward_s: the programs of a stage's forward pass."
    )
    backward: PredictedCost | None = None
    transfer_s: Seconds = Field(
        0.0, description="Seconds from one stage to the next for a micro-batch, and for the gradient back."
    )
    transfer: PredictedCost | None = Field(None, description="Predicted, instead of transfer_s: such as a send_recv.")
    direction: Literal["down", "up"] = Field(
        "down", description="Stage 0 of replica 0 is on rank 0 (down) or on the last rank (up)."
    )
    activation: float = Field(
        1.0, gt=0, le=MAX_ACTIVATION, description="Memory that a stage holds for a micro-batch, in any unit."
    )
    activation_bytes: Annotated[float, Field(gt=0, le=MAX_ACTIVATION)] | None = Field(
        None, description="The same in bytes."
    )
    weight_bytes: Bytes = Field(0.0, description="Weights, gradients and optimizer states of a stage.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        exactly_one(self, "forward_s", "forward")
        if self.activation_bytes is not None and "activation" in self.model_fields_set:
            raise ValueError("give either activation_bytes or activation")
        instead_of(self, "transfer", "transfer_s")
        return exactly_one(self, "backward_s", "backward")

    def costs(self) -> Costs:
        """Forward and backward cost of a stage, and that of a transfer; the request must be resolved."""
        pairs = ((self.forward, self.forward_s), (self.backward, self.backward_s), (self.transfer, self.transfer_s))
        forward, backward, transfer = (cost_of(predicted, seconds) for predicted, seconds in pairs)
        return forward, backward, transfer


class StageCost(Row):
    """Seconds of one stage of a model for one micro-batch."""

    forward_s: float
    backward_s: float
    transfer_s: float = Field(0.0, exclude_if=lambda seconds: seconds == 0)


class FusedPass(Row):
    """One pass of a micro-batch on a rank; rank, model and copy determine its stage."""

    model: int = Field(description="Index of the model in the request.")
    copy_: int = Field(alias="copy", description="Index of the model's replica.")
    pass_: Literal["F", "B"] = Field(alias="pass")
    micro_batch: int
    start_s: float
    end_s: float


class FusedPlan(Plan):
    """A fused schedule; baselines, bound and gap refer to ``makespan_s``."""

    makespan_s: float
    lower_bound_s: float
    peak_activations: float = Field(
        description="Peak memory of all ranks; held from a forward pass's start to its backward pass's end."
    )
    rank_peak_activations: list[float] = Field(description="Peak memory of each rank.")
    interval: Interval | None = Field(description="Makespan of the same order; null where all costs are given.")
    costs: list[StageCost] = Field(description="Costs of each model.")
    steps: int = Field(description="Schedules that the search evaluated.")
    order: list[list[FusedPass]] = Field(description="Passes of each rank, in order.")
    execution: Execution | None = Field(
        None, description="With executable.", exclude_if=lambda execution: execution is None
    )

    def sequence(self) -> list[int] | None:
        """Models in the order in which every rank runs them, one after the other; None where passes are mixed."""
        rows = [[model for model, _ in groupby(step.model for step in row)] for row in self.order]
        return rows[0] if all(row == rows[0] for row in rows) and len({*rows[0]}) == len(rows[0]) else None

    def tables(self) -> list[Table]:
        """Baselines, and the work and memory of each rank."""
        baselines = [
            (name, format_latency(seconds), f"{seconds / self.makespan_s:.2f} x")
            for name, seconds in self.baselines.items()
        ]
        ranks = []
        for rank, (row, peak) in enumerate(zip(self.order, self.rank_peak_activations, strict=True)):
            busy = sum(step.end_s - step.start_s for step in row) / self.makespan_s
            first = " ".join(f"{step.pass_}{step.micro_batch}.{step.model}" for step in row[:8])
            ranks.append((str(rank), f"{100 * busy:.1f} %", f"{peak:g}", first + (" ..." if len(row) > 8 else "")))
        return [
            Table(("baseline", "makespan", "ratio"), baselines, right=(1, 2)),
            Table.lines(f"peak activations of a rank {self.peak_activations:g}"),
            Table(("rank", "busy", "activations", "first passes"), ranks, right=(0, 1, 2)),
            Table.lines("F0.1: forward pass of micro-batch 0 of model 1", *self.explanation[1:]),
        ]


class FusedRequest(Request[FusedPlan]):
    """A schedule of one or more models that train at once on the same ranks (RLHFuse's fused pipelines)."""

    models: list[ModelForm] = Field(min_length=1)
    ranks: Count
    max_activations: Annotated[float, Field(gt=0, le=MAX_ACTIVATION)] | None = Field(
        None, description="Memory limit of each rank, in the unit of `activation`."
    )
    memory_bytes: PositiveBytes | None = Field(
        None,
        description="Memory of a rank, where all models have activation_bytes; null: that of the device of their "
        "costs.",
    )
    executable: Executable = False
    budget_s: Budget = 1.0
    seed: Seed = 0
    max_steps: MaxSteps = None

    def sizes(self) -> dict[str, int]:
        """Ranks, models and passes."""
        passes = sum(2 * model.micro_batches * self.ranks for model in self.models)
        return {"ranks": self.ranks, "models": len(self.models), "passes": passes}

    def check(self) -> None:
        """Raise FieldError or InfeasibleError for a request that is wrong whatever its programs cost."""
        in_bytes = [model.activation_bytes is not None for model in self.models]
        needing = "memory_bytes" if self.memory_bytes is not None else "activation_bytes"
        if not all(in_bytes) and (any(in_bytes) or self.memory_bytes is not None):
            path = f"models.{in_bytes.index(False)}.activation_bytes"
            raise FieldError.at(
                path, f"missing, and the request has {needing}", hint="give it for all models or for none"
            )
        self._problem([(1.0, 1.0, 0.0)] * len(self.models))

    @property
    def _limit_bytes(self) -> float:
        """Memory of a rank."""
        costs = [cost for model in self.models for cost in (model.forward, model.backward) if cost is not None]
        return memory_limit(self.memory_bytes, [cost.device for cost in costs], self.ignore_memory)

    def unchecked_memory(self) -> list[str]:
        """What is missing to compare a rank with its device."""
        if self.models[0].activation_bytes is None:
            kept = "" if self.max_activations is None else "; max_activations is kept"
            return [f"the models have no activation_bytes{kept}"]
        known = self._limit_bytes < UNLIMITED_BYTES
        return [] if known else ["no cost names a device of known capacity (memory_bytes)"]

    def costs(self) -> list[Costs]:
        """Forward and backward cost of a stage of each model, and that of a transfer; the request must be resolved."""
        return [model.costs() for model in self.models]

    def problem(self, figure: Figure = "latency_s") -> FusedProblem:
        """The scheduling problem with one figure of the costs; the request must be resolved."""
        return self._problem([tuple(getattr(cost, figure) for cost in costs) for costs in self.costs()])

    def _problem(self, seconds: Sequence[tuple[float, ...]]) -> FusedProblem:
        models = tuple(
            Model(form.stages, form.micro_batches, f, b, form.direction, form.activation_bytes or form.activation, sent)
            for form, (f, b, sent) in zip(self.models, seconds, strict=True)
        )
        return FusedProblem(self.ranks, models, self._max_activations())

    def _max_activations(self) -> float | None:
        """Limit of a rank's activations: the given one, and what the weights leave of its memory.

        Raises InfeasibleError: the weights and one micro-batch do not fit.
        """
        if self.ignore_memory:
            return None
        sizes = [model.activation_bytes for model in self.models if model.activation_bytes is not None]
        limit, weights = self._limit_bytes, sum(model.weight_bytes for model in self.models)
        if not sizes or limit == UNLIMITED_BYTES:
            return self.max_activations
        check_fits(
            "a rank (weights of all models, and one micro-batch)",
            weights + max(sizes),
            limit,
            path="models",
            fits="use more stages, smaller micro-batches, or devices with more memory",
        )
        return min(limit - weights, self.max_activations or UNLIMITED_BYTES)
