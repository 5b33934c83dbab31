"""Plan of a multimodal pipeline."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdmpp.plan.multimodal.memory import Knob
from cdmpp.predict.requests.render import Table
from cdmpp.predict.requests.request import Interval, Plan, Row
from cdmpp.utils.units import format_latency, format_si

Pass = Literal["F", "B"]


class SubBatches(Row):
    """Sub-micro-batches of a module."""

    rule_size: Annotated[int, Field(description="Smallest size with the efficiency of the request.")]
    size: Annotated[int, Field(description="Largest sub-micro-batch of the plan.")]
    count: int
    items: Annotated[list[int], Field(description="Items of each sub-micro-batch.")]
    efficiency: Annotated[float, Field(description="Items per second, as a share of the best size's.")]


class LayoutEntry(Row):
    """Layers of a module on a rank; the entries of a module are in the order of its layers."""

    module: str
    segment: int
    rank: int
    first_layer: int
    layers: int


class RankMemory(Row):
    """Peak memory of a rank, and what is done with its activations."""

    rank: int
    peak_bytes: float
    knobs: Annotated[
        dict[str, list[Knob]], Field(description="By module, for each of its layout entries on this rank.")
    ]


class Entry(Row):
    """One pass of a sub-micro-batch through a segment's layers on a rank."""

    module: str
    segment: int
    pass_: Annotated[Pass, Field(alias="pass")]
    micro_batch: int
    start_s: float
    end_s: float


class StepPlan(Row):
    """Plan of one step."""

    batch: dict[str, int]
    makespan_s: float
    lower_bound_s: float
    searched_lower_bound_s: float
    gap: float
    baselines: dict[str, float]
    interval: Annotated[
        Interval | None, Field(description="Makespan of the same order at the bounds of all predictions.")
    ]
    sub_batches: dict[str, SubBatches]
    layout: list[LayoutEntry]
    memory: list[RankMemory]
    order: Annotated[list[list[Entry]], Field(description="Passes of each rank, in order.")]
    bubble: Annotated[float, Field(description="Share of the ranks' time without work.")]

    def tables(self) -> list[Table]:
        """Sub-micro-batches, and the memory of each rank."""
        cuts = [
            (name, str(self.batch[name]), str(cut.count), str(cut.size), str(cut.rule_size), f"{cut.efficiency:.0%}")
            for name, cut in self.sub_batches.items()
        ]
        header = ("module", "items", "sub-micro-batches", "largest", "rule's size", "of peak efficiency")
        tables = [Table(header, cuts, right=(1, 2, 3, 4, 5))]
        if any(rank.peak_bytes for rank in self.memory):
            ranks = []
            for rank in self.memory:
                changed = [f"{name}: {' '.join(knobs)}" for name, knobs in rank.knobs.items() if set(knobs) != {"keep"}]
                ranks.append((str(rank.rank), format_si(rank.peak_bytes, "B"), ", ".join(changed)))
            tables.append(Table(("rank", "peak memory", "knobs other than keep"), ranks, right=(0, 1)))
        return tables


class CacheSummary(Row):
    """Schedules that the search computed (misses) and looked up (hits)."""

    hits: int
    misses: int
    hit_rate: float


class MultimodalPlan(Plan):
    """Plan of the step, or with "batches" of each step; figures in seconds and bytes."""

    makespan_s: Annotated[float, Field(description="Sum of all steps.")]
    lower_bound_s: Annotated[
        float, Field(description="Lower bound of every plan that the request allows: all cuts, counts and orders.")
    ]
    searched_lower_bound_s: Annotated[
        float, Field(description="Lower bound of all orders on the placements and sub-micro-batches that were tried.")
    ]
    interval: Annotated[Interval | None, Field(description="null where all costs are given.")]
    batch: dict[str, int] | None
    sub_batches: dict[str, SubBatches] | None
    layout: list[LayoutEntry]
    memory: list[RankMemory] | None
    order: list[list[Entry]] | None
    bubble: Annotated[float, Field(description="Share of the ranks' time without work.")]
    plans: Annotated[list[StepPlan] | None, Field(description="With batches: one for each step, on the same layout.")]
    cache: CacheSummary
    steps: Annotated[int, Field(description="Orders that the search evaluated.")]
    complete: Annotated[
        bool, Field(description="No plan that the request allows is shorter: the bound is met, or all were tried.")
    ]

    def step_plans(self) -> list[StepPlan]:
        """Plans of the steps; the plan itself where there is one step.

        Raises
        ------
        ValidationError
            A plan without ``plans`` lacks batch, sub_batches, memory or order.
        """
        if self.plans is not None:
            return self.plans
        return [StepPlan.model_validate({name: getattr(self, name) for name in StepPlan.model_fields})]

    def tables(self) -> list[Table]:
        """Makespan and baselines, sub-micro-batches and memory of each step, and the layout."""
        summary = (
            f"makespan {format_latency(self.makespan_s)}, lower bound {format_latency(self.lower_bound_s)} "
            f"(gap {100 * self.gap:.2f} %), of the variants searched {format_latency(self.searched_lower_bound_s)}, "
            f"bubble {100 * self.bubble:.1f} %"
        )
        baselines = [
            (name, format_latency(seconds), f"{seconds / self.makespan_s:.3f} x")
            for name, seconds in self.baselines.items()
        ]
        tables = [Table.lines(summary), Table(("baseline", "makespan", "ratio"), baselines, right=(1, 2))]
        for number, step in enumerate(self.step_plans()):
            if self.plans is not None:
                gap = f"gap {100 * step.gap:.2f} %"
                tables.append(Table.lines(f"step {number}: {format_latency(step.makespan_s)}, {gap}"))
            tables += step.tables()
        searched = f"{self.steps:,} orders evaluated, {100 * self.cache.hit_rate:.0f} % of them from the cache"
        done = "; no plan of this request is shorter" if self.complete else ""
        return [*tables, self._layout_table(), Table.lines(searched + done, *self.explanation)]

    def _layout_table(self) -> Table:
        rows = []
        for rank in range(1 + max(entry.rank for entry in self.layout)):
            layers = [
                f"{entry.module}.{entry.segment} {entry.first_layer}-{entry.first_layer + entry.layers - 1}"
                for entry in self.layout
                if entry.rank == rank and entry.layers
            ]
            rows.append((str(rank), "; ".join(layers)))
        return Table(("rank", "layers by module.segment"), rows, right=(0,))
