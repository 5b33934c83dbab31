"""The request and the answer of the step emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.request import Explained, PriceRequest, Seconds, WholeNumber
from cdmpp.compose.request import OldRequest as Request
from cdmpp.emulator.forms import (
    MAX_CELLS,
    MAX_CLASSES,
    MAX_MICRO_BATCHES,
    MAX_STAGES,
    OrderForm,
    StageForm,
    asked_of_stages,
    priced,
)
from cdmpp.emulator.orders import Orders, ScheduleName
from cdmpp.emulator.report import report
from cdmpp.errors import FieldError
from cdmpp.prediction import Prediction

MAX_REPLICAS = 256
MicroBatches = (
    Annotated[int, Field(ge=1, le=MAX_MICRO_BATCHES), WholeNumber]
    | Annotated[
        list[Annotated[int, Field(ge=0, lt=MAX_CLASSES), WholeNumber]],
        Field(min_length=1, max_length=MAX_MICRO_BATCHES),
    ]
)
Ranks = Annotated[int, Field(ge=1, le=MAX_STAGES), WholeNumber]


class SimulateRequest(Request):
    """One training step of a pipeline: how long it takes and what it holds, under a given schedule."""

    stages: Annotated[
        list[StageForm], Field(min_length=1, max_length=MAX_STAGES, description="In the order of the forward pass.")
    ]
    micro_batches: Annotated[MicroBatches, Field(description="How many; or the class of each.")]
    replicas: Annotated[
        list[MicroBatches],
        Field(
            default_factory=list,
            max_length=MAX_REPLICAS,
            description="Further data-parallel copies of the pipeline, by their micro-batches; equal "
            "ones are simulated once.",
        ),
    ]
    gradient_sync_s: Annotated[
        Seconds, Field(description="Seconds that all copies need after the slowest: gradients are summed.")
    ] = 0.0
    schedule: Annotated[
        ScheduleName | OrderForm, Field(description="A published schedule, or the order of every rank.")
    ] = "1f1b"
    ranks: Annotated[
        Ranks | None,
        Field(
            description="null: one per stage, divided by virtual_stages. Stage s is on rank s modulo ranks; "
            "an explicit order says it itself."
        ),
    ] = None
    virtual_stages: Annotated[Ranks | None, Field(description="Stages on each rank; null: as many as fit.")] = None
    transfer_s: Annotated[
        Seconds | Annotated[list[Seconds], Field(max_length=MAX_STAGES - 1)],
        Field(
            description="Seconds from one stage to the next, and for the gradient back, where they are on "
            "different ranks; or one such figure for each place between stages."
        ),
    ] = 0.0
    memory_bytes: Annotated[float | None, Field(gt=0, le=1e18, description="What a rank may hold; null: anything.")] = (
        None
    )
    host_bandwidth_bytes_per_s: Annotated[
        float | None, Field(gt=0, le=1e15, description="Of each rank, for stages that are offloaded.")
    ] = None
    timeline: Annotated[bool, Field(description="Whether the answer has every pass.")] = True
    reuse: Annotated[
        bool, Field(description="false: simulate everything anew. Only `cache` in the answer differs.")
    ] = True

    answer_model: ClassVar[type[BaseModel]]

    def price_requests(self) -> list[PriceRequest]:
        """The programs of all stages."""
        return asked_of_stages(self.stages)

    def solve(self, prices: Sequence[Prediction], watch: SearchControl) -> dict[str, Any]:
        """See :class:`SimulateAnswer`."""
        self._check()
        stages = priced(self.stages, iter(prices))
        schedule: ScheduleName | Orders = self.schedule if isinstance(self.schedule, str) else self.schedule.passes()
        return report(
            stages,
            self.class_of_each[0],
            schedule,
            self.ranks_used,
            self.transfer_s,
            self.host_bandwidth_bytes_per_s or float("inf"),
            self.memory_bytes,
            replicas=self.class_of_each[1:],
            gradient_sync_s=self.gradient_sync_s,
            reuse=self.reuse,
            timeline=self.timeline,
        )

    @property
    def class_of_each(self) -> list[tuple[int, ...]]:
        """Classes of the micro-batches, of this pipeline and of each further copy."""
        return [
            (0,) * given if isinstance(given, int) else tuple(given) for given in (self.micro_batches, *self.replicas)
        ]

    @property
    def ranks_used(self) -> int:
        """Ranks, from whatever of the fields says it."""
        if isinstance(self.schedule, OrderForm):
            return len(self.schedule.order)
        return self.ranks or max(len(self.stages) // (self.virtual_stages or 1), 1)

    def _check(self) -> None:
        """Raise :class:`FieldError` where fields contradict each other."""
        stages, classes = len(self.stages), max(map(max, self.class_of_each))
        cells = [stages * len(one) for one in set(self.class_of_each)]
        if max(cells) > MAX_CELLS or sum(cells) > 4 * MAX_CELLS:
            raise FieldError(
                f"micro_batches: up to {max(cells) // stages} in {stages} stages are {max(cells):,} passes, "
                f"and with all unlike copies {sum(cells):,}",
                path="micro_batches",
                hint=f"at most {MAX_CELLS:,}, and {4 * MAX_CELLS:,} with all copies",
            )
        if isinstance(self.schedule, OrderForm) and len({len(one) for one in self.class_of_each}) > 1:
            raise FieldError(
                "replicas: an order is one of as many micro-batches", path="replicas", hint="name a schedule"
            )
        if self.ranks is not None and self.ranks != self.ranks_used:
            raise FieldError(f"ranks: {self.ranks}, but the order is one of {self.ranks_used} ranks", path="ranks")
        if self.virtual_stages is not None and self.virtual_stages * self.ranks_used != stages:
            raise FieldError(
                f"virtual_stages: {self.virtual_stages} on each of {self.ranks_used} ranks are not the {stages} stages",
                path="virtual_stages",
            )
        if isinstance(self.transfer_s, list) and len(self.transfer_s) != stages - 1:
            raise FieldError(
                f"transfer_s: {len(self.transfer_s)} figures for {stages - 1} places between stages", path="transfer_s"
            )
        for s, stage in enumerate(self.stages):
            if stage.memory == "offload" and self.host_bandwidth_bytes_per_s is None:
                raise FieldError(
                    f"host_bandwidth_bytes_per_s: missing, and stage {s} is offloaded",
                    path="host_bandwidth_bytes_per_s",
                )
            if classes > len(stage.classes):
                raise FieldError(
                    f"stages.{s}.classes: there are micro-batches of class {classes}, and costs of "
                    f"classes 0 to {len(stage.classes)}",
                    path=f"stages.{s}.classes",
                )
            if len(stage.classes) != len(self.stages[0].classes):
                raise FieldError(
                    f"stages.{s}.classes: not as many as the {len(self.stages[0].classes)} of stage 0",
                    path=f"stages.{s}.classes",
                )


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TimelinePass(_Closed):
    """One pass."""

    rank: int
    stage: int
    kind: Annotated[Literal["F", "B", "W", "out", "in"], Field(alias="pass")]
    micro_batch: int
    start_s: float
    end_s: float


class RankUse(_Closed):
    """What a rank does and holds."""

    rank: int
    stages: list[int]
    busy_s: float
    bubble: Annotated[float, Field(description="Share of the step that it waits.")]
    peak_bytes: float


class CacheUse(_Closed):
    """What was found among the things simulated before: stages, structures, steps and stretches of them."""

    hits: int
    misses: int
    hit_rate: float


class Interval(_Closed):
    """The step with all predictions at their lower, and at their upper bounds."""

    lower_s: float
    upper_s: float


class SimulateAnswer(Explained):
    """Baselines, bound and gap are of ``makespan_s``."""

    schedule: Annotated[str, Field(description='Its name, or "order".')]
    makespan_s: float
    replicas_s: Annotated[list[float], Field(description="Makespans of the further copies.")]
    step_s: Annotated[float, Field(description="Of the slowest copy, with the gradients summed.")]
    lower_bound_s: Annotated[
        float,
        Field(
            description="No schedule of these stages on these ranks is shorter, also where weight gradients "
            "are put off."
        ),
    ]
    same_passes_bound_s: Annotated[
        float, Field(description="No other order of the passes that this schedule has is shorter.")
    ]
    interval: Annotated[Interval | None, Field(description="null: all costs are given.")]
    bubble: Annotated[float, Field(description="Share of all ranks' time that they wait.")]
    peak_bytes: Annotated[float, Field(description="Of the rank that holds most.")]
    ranks: list[RankUse]
    baseline_peak_bytes: Annotated[
        dict[str, float], Field(description="Of the rank that holds most, under each baseline.")
    ]
    timeline: Annotated[list[TimelinePass] | None, Field(description="Rank after rank; null where it was not wanted.")]
    copies: Annotated[
        list[TimelinePass], Field(description="Activations on their way to the host (out) and back (in).")
    ]
    cache: CacheUse


SimulateRequest.answer_model = SimulateAnswer
