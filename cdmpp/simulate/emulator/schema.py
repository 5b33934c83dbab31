"""Request and plan of the step emulator, with its stages and orders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cdmpp.errors import FieldError
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.memory import memory_limit
from cdmpp.predict.requests.pricing import Cost, PredictedCost, cost_of
from cdmpp.predict.requests.request import (
    MAX_COUNT,
    Bytes,
    Closed,
    Count,
    DeviceForm,
    Interval,
    Plan,
    PositiveBytes,
    Request,
    Row,
    Seconds,
    WholeNumber,
    at_most_one,
    exactly_one,
    instead_of,
)
from cdmpp.simulate.emulator.orders import Pass, PassKind, ScheduleName
from cdmpp.simulate.emulator.stages import Memory
from cdmpp.utils.units import format_latency, format_si

StageNumber = Annotated[int, Field(ge=0, lt=MAX_COUNT), WholeNumber]
MicroBatch = Annotated[int, Field(ge=0, lt=MAX_COUNT), WholeNumber]


class PassForm(Closed):
    """Costs of one micro-batch in one stage: each pass in seconds or by programs."""

    forward_s: Seconds | None = None
    forward: PredictedCost | None = Field(None, description="Predicted, instead of forward_s.")
    backward_s: Seconds | None = Field(None, description="Whole backward pass, weight gradients included.")
    backward: PredictedCost | None = Field(None, description="Predicted, instead of backward_s.")
    weight_s: Seconds | None = Field(
        None,
        description="Weight gradients, a part of the backward pass: a separate pass (W) where the schedule "
        "delays it. Default, without `weight`: half of the backward pass.",
    )
    weight: PredictedCost | None = Field(None, description="Predicted, instead of weight_s.")
    activation_bytes: Bytes = Field(0.0, description="Kept from the forward pass for the backward pass.")
    boundary_bytes: Bytes = Field(
        0.0, description="Input of the stage, which is kept where activations are recomputed."
    )

    @model_validator(mode="after")
    def _costs(self) -> Self:
        exactly_one(self, "forward_s", "forward")
        exactly_one(self, "backward_s", "backward")
        return at_most_one(self, "weight_s", "weight")


class StageForm(PassForm):
    """A stage of the pipeline."""

    weight_bytes: Bytes = Field(
        0.0, description="Weights, gradients and optimizer states, which are kept all the time."
    )
    memory: Memory = Field(
        "keep",
        description="Activations between forward and backward pass: kept; dropped except for the input of the "
        "stage, and recomputed before the backward pass; or copied to the host and back.",
    )
    classes: list[PassForm] = Field(
        default_factory=list,
        description="Costs of micro-batches of class 1, 2, ...; class 0 has the costs of the stage itself.",
    )

    @property
    def devices(self) -> list[DeviceForm]:
        """Devices that price the stage."""
        forms = (form for passes in (self, *self.classes) for form in (passes.forward, passes.backward, passes.weight))
        return [form.device for form in forms if form is not None]

    def passes(self, number: int) -> list[tuple[str, PassForm]]:
        """Paths and costs of all classes of stage ``number``."""
        path = f"stages.{number}"
        return [(path, self), *((f"{path}.classes.{c}", form) for c, form in enumerate(self.classes))]


class PassStep(Closed):
    """One pass in an order."""

    stage: StageNumber
    kind: PassKind = Field(
        alias="pass", description="Forward; backward; weight gradients, where they are a separate pass."
    )
    micro_batch: MicroBatch


class OrderForm(Closed):
    """The passes of each rank, in order. Where there is a W, its B computes only the gradients of the inputs."""

    order: list[list[PassStep]] = Field(min_length=1)

    def passes(self) -> list[list[Pass]]:
        """The passes of each rank."""
        return [[Pass(step.kind, step.stage, step.micro_batch) for step in row] for row in self.order]


MicroBatches = Count | Annotated[list[Annotated[int, Field(ge=0, lt=MAX_COUNT), WholeNumber]], Field(min_length=1)]


class TimelinePass(Row):
    """One pass, or one copy to or from the host."""

    rank: int
    stage: int
    kind: Literal["F", "B", "W", "out", "in"] = Field(alias="pass")
    micro_batch: int
    start_s: float
    end_s: float


class RankUse(Row):
    """Time and memory of one rank."""

    rank: int
    stages: list[int]
    busy_s: float
    bubble: float = Field(description="Share of the step in which it waits.")
    peak_bytes: float


class CacheUse(Row):
    """Lookups of earlier simulations: stages, structures, steps and stretches of steps."""

    hits: int
    misses: int
    hit_rate: float


class SimulatePlan(Plan):
    """Baselines, bound and gap refer to ``makespan_s``."""

    bounded = "schedules"

    schedule: str = Field(description='Its name, or "order".')
    makespan_s: float
    replicas_s: list[float] = Field(description="Makespans of the further copies.")
    step_s: float = Field(description="Slowest copy, with the sum of the gradients.")
    lower_bound_s: float = Field(
        description="Lower bound of all schedules of these stages on these ranks, delayed weight gradients included."
    )
    same_passes_bound_s: float = Field(description="Lower bound of all orders of the passes of this schedule.")
    interval: Interval | None = Field(description="null: all costs are given.")
    bubble: float = Field(description="Share of the time of all ranks in which they wait.")
    peak_bytes: float = Field(description="Largest over the ranks.")
    ranks: list[RankUse]
    baseline_peak_bytes: dict[str, float] = Field(description="Largest over the ranks, under each baseline.")
    timeline: list[TimelinePass] | None = Field(
        description="Rank after rank; null where the request has timeline: false."
    )
    copies: list[TimelinePass] = Field(description="Copies of activations to the host (out) and back (in).")
    cache: CacheUse

    def headline(self) -> str:
        """Step, bubble and memory of the schedule; the step of all copies with the sum of the gradients."""
        memory = f", up to {format_si(self.peak_bytes, 'B')} on a rank" if self.peak_bytes else ""
        copies = ""
        if self.step_s > self.makespan_s:
            copies = f"; {format_latency(self.step_s)} with {len(self.replicas_s)} further copies and their gradients"
        step = f"{self.schedule}: {format_latency(self.makespan_s)} a step, {100 * self.bubble:.1f} % bubble"
        return step + memory + copies

    def tables(self) -> list[Table]:
        """The ranks and the baselines."""
        columns: dict[str, Callable[[RankUse], str]] = {
            "rank": lambda use: str(use.rank),
            "stages": lambda use: " ".join(map(str, use.stages)),
            "busy": lambda use: format_latency(use.busy_s),
            "bubble": lambda use: f"{100 * use.bubble:.1f} %",
            "peak memory": lambda use: format_si(use.peak_bytes, "B"),
        }
        baselines = [
            (name, format_latency(seconds), format_si(peak, "B") if peak is not None else "")
            for name, seconds in sorted(self.baselines.items(), key=lambda item: item[1])
            for peak in [self.baseline_peak_bytes.get(name)]
        ]
        return [
            Table.of(self.ranks, columns, right=(0, 2, 3, 4)),
            Table(("baseline", "step", "peak memory"), baselines, right=(1, 2)),
            Table.lines(*self.explanation[1:]),
        ]


class SimulateRequest(Request[SimulatePlan]):
    """One training step of a pipeline under a given schedule: time, bubbles and memory."""

    stages: list[StageForm] = Field(min_length=1, description="In the order of the forward pass.")
    micro_batches: MicroBatches = Field(description="Their number; or the class of each.")
    replicas: list[MicroBatches] = Field(
        default_factory=list,
        description="Further data-parallel copies of the pipeline, by their micro-batches. Equal copies are "
        "simulated once.",
    )
    gradient_sync_s: Seconds = Field(
        0.0, description="Seconds that all copies need after the slowest one has ended, to sum the gradients."
    )
    gradient_sync: PredictedCost | None = Field(
        None, description="Predicted, instead of gradient_sync_s: such as an all-reduce."
    )
    schedule: ScheduleName | OrderForm = Field("1f1b", description="A published schedule, or the order of every rank.")
    ranks: Count | None = Field(
        None,
        description="null: number of stages divided by virtual_stages. Stage s is on rank s modulo ranks, "
        "unless the order places it elsewhere.",
    )
    virtual_stages: Count | None = Field(None, description="Stages on each rank; null: as many as fit.")
    transfer_s: Seconds | list[Seconds] = Field(
        0.0,
        description="Seconds from one stage to the next, and for the gradient back, where they are on "
        "different ranks; or one value for each pair of neighbours.",
    )
    transfer: PredictedCost | Annotated[list[PredictedCost], Field(min_length=1)] | None = Field(
        None, description="Predicted, instead of transfer_s: such as a send_recv."
    )
    memory_bytes: PositiveBytes | None = Field(
        None, description="Memory limit of a rank; null: that of the device of its stages."
    )
    host_bandwidth_bytes_per_s: float | None = Field(
        None, gt=0, le=1e15, description="Bandwidth of each rank, for stages that are offloaded."
    )
    timeline: bool = Field(True, description="Whether the plan lists every pass.")
    reuse: bool = Field(True, description="false: look up no earlier simulation. Only `cache` in the plan differs.")

    @model_validator(mode="after")
    def _costs(self) -> Self:
        instead_of(self, "transfer", "transfer_s")
        return instead_of(self, "gradient_sync", "gradient_sync_s")

    def transfer_costs(self) -> Cost | list[Cost]:
        """Cost of a transfer to the next stage, or of each; the request must be resolved."""
        if isinstance(self.transfer, list):
            return [cost_of(field) for field in self.transfer]
        if self.transfer is None and isinstance(self.transfer_s, list):
            return [Cost.given(seconds) for seconds in self.transfer_s]
        return cost_of(self.transfer, None if isinstance(self.transfer_s, list) else self.transfer_s)

    @property
    def class_of_each(self) -> list[tuple[int, ...]]:
        """Classes of the micro-batches: of this pipeline, then of each further copy."""
        return [
            (0,) * given if isinstance(given, int) else tuple(given) for given in (self.micro_batches, *self.replicas)
        ]

    @property
    def ranks_used(self) -> int:
        """Number of ranks, from the order, ``ranks`` or ``virtual_stages``."""
        if isinstance(self.schedule, OrderForm):
            return len(self.schedule.order)
        return self.ranks or max(len(self.stages) // (self.virtual_stages or 1), 1)

    def memory_limit(self, stages: Iterable[int]) -> float:
        """Memory limit of a rank with these stages, in bytes."""
        devices = (device for stage in stages for device in self.stages[stage].devices)
        return memory_limit(self.memory_bytes, devices, self.ignore_memory)

    def sizes(self) -> dict[str, int]:
        """Stages, passes of one copy and of all copies, classes and copies."""
        copies = [given if isinstance(given, int) else len(given) for given in (self.micro_batches, *self.replicas)]
        stages = len(self.stages)
        return {
            "stages": stages,
            "passes": stages * max(copies),
            "passes_of_all_copies": stages * sum(copies),
            "classes": 1 + max(len(stage.classes) for stage in self.stages),
            "copies": len(copies),
        }

    def check(self) -> None:
        """Raise FieldError where fields contradict each other."""
        stages, classes = len(self.stages), max(map(max, self.class_of_each))
        if isinstance(self.schedule, OrderForm) and len({len(copy) for copy in self.class_of_each}) > 1:
            raise FieldError.at(
                "replicas", "an explicit order needs copies with equal numbers of micro-batches", hint="name a schedule"
            )
        if self.ranks is not None and self.ranks != self.ranks_used:
            raise FieldError.at("ranks", f"{self.ranks}, but the order has {self.ranks_used} ranks")
        if self.virtual_stages is not None and self.virtual_stages * self.ranks_used != stages:
            raise FieldError.at(
                "virtual_stages",
                f"{self.virtual_stages} on each of {self.ranks_used} ranks do not give {stages} stages",
            )
        for name in ("transfer_s", "transfer"):
            given = getattr(self, name)
            if isinstance(given, list) and len(given) != stages - 1:
                raise FieldError.at(name, f"{len(given)} values for {stages - 1} pairs of neighbouring stages")
        for s, stage in enumerate(self.stages):
            if stage.memory == "offload" and self.host_bandwidth_bytes_per_s is None:
                raise FieldError.at("host_bandwidth_bytes_per_s", f"missing, and stage {s} is offloaded")
            if classes > len(stage.classes):
                raise FieldError.at(
                    f"stages.{s}.classes",
                    f"there are micro-batches of class {classes}, and costs of classes 0 to {len(stage.classes)}",
                )
            if len(stage.classes) != len(self.stages[0].classes):
                raise FieldError.at(
                    f"stages.{s}.classes", f"{len(stage.classes)}, but stage 0 has {len(self.stages[0].classes)}"
                )
