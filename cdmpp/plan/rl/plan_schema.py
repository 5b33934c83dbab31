"""Plan of one RL step: the answer of the RL planner."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdmpp.plan.fused.schema import FusedPlan
from cdmpp.plan.rl.sizes import Objective, Stage
from cdmpp.plan.rl.training import Mode
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.request import Plan, Row
from cdmpp.utils.units import format_latency, format_si

Action = Literal["add", "give back", "keep"]
Count = Annotated[int, Field(ge=0)]
Figure = Annotated[float, Field(ge=0)]


class ObjectivePart(Row):
    """The minimised value: seconds or price of a step."""

    name: Objective
    value: Figure
    lower_bound: Figure


class CostPart(Row):
    """One cost of a step."""

    name: str
    seconds: Annotated[Figure | None, Field(description="null: not priced.")]
    predicted_s: Annotated[
        Figure | None, Field(description="Before the factor of the stage; null: there is no factor.")
    ] = None
    remark: str = ""


class PoolPart(Row):
    """One of several pools that generate at once."""

    pool: str
    instances: Count
    samples: Count
    first: Annotated[Count, Field(description="Rank of its first sample; the sample ranked longest has rank 0.")]
    time_s: Annotated[Figure, Field(description="Until its last sample is generated.")]


class GenerationPart(Row):
    """The generation stage; seconds are means over the held-out steps."""

    pool: Annotated[str, Field(description='Of several pools: their names, joined by " + ".')]
    parts: Annotated[list[PoolPart], Field(description="Pools that generate at once; empty: one pool.")]
    inference_by: Annotated[
        Stage,
        Field(
            description="Stage whose units run the reward, reference and critic models; generation if there is no "
            "inference."
        ),
    ]
    instances: Count
    time_s: Annotated[Figure, Field(description="Until the last sample is generated.")]
    stage_s: Annotated[Figure, Field(description="Until the inference of the last sample is done.")]
    lower_bound_s: Figure
    baselines_s: Annotated[
        dict[str, float],
        Field(
            description="Generation alone with these instances: random (random order), lpt (longest first as ranked, "
            "no split), rule (StreamRL's split by quantiles), guesses (a split that trusts a guess of every length), "
            "floor (the longest sample alone)."
        ),
    ]
    preemptions: Annotated[Figure, Field(description="Preemptions for lack of memory, per step.")]


class PipelinePart(Row):
    """Training by a pipeline schedule."""

    run_s: Annotated[Figure, Field(description="One run of the schedule.")]
    samples: Annotated[Count, Field(description="Samples of one run.")]
    pipelines: Annotated[Count, Field(description="Pipelines side by side.")]
    runs: Annotated[Count, Field(description="Runs of each pipeline in a step, in one batch.")]
    schedule: Annotated[FusedPlan | None, Field(description="null: the request gives the answer of the schedule.")]


class TrainingPart(Row):
    """The training stage."""

    shared: Annotated[bool, Field(description="The generation units train, after generation.")]
    pool: str
    units: Count
    time_s: Annotated[Figure, Field(description="Work in one batch, without waiting.")]
    idle_s: Annotated[Figure, Field(description="Waiting within the step.")]
    pipeline: Annotated[PipelinePart | None, Field(description="null: training has no pipeline schedule.")]
    layout: Annotated[
        dict[str, int | str] | None, Field(description="Training step of these units; null: the request has none.")
    ] = None
    memory_bytes: Annotated[float | None, Field(description="Needed on the fullest device.")] = None


class GroupPart(Row):
    """One group of samples and its instances."""

    samples: Count
    instances: Count
    batch: Annotated[Count, Field(description="Initial batch of an instance.")]


class SplitPart(Row):
    """Whether samples flagged as long have separate instances."""

    used: bool
    tail: GroupPart
    regular: GroupPart
    gain: Annotated[float, Field(description="Reduction of generation compared with lpt, on held-out steps.")]
    best_gain: Annotated[float, Field(description="Gain of the best split into two groups, used or not.")]
    if_misses_any: Annotated[
        float | None, Field(description='Gain of the plan\'s split if the ranker misses any of the longest ("any").')
    ]
    reason: str


class DispatchPart(Row):
    """Order in which samples go to instances."""

    rule: Literal["lpt"]
    words: Annotated[str, Field(description="The rule as text.")]


class StreamingPart(Row):
    """How finished samples are streamed to training."""

    mode: Mode
    batches: Annotated[Count, Field(description="1: training starts after generation.")]
    samples_per_batch: Figure
    training_bubble: Annotated[Figure, Field(description="Share of the step in which training waits.")]
    generation_bubble: Annotated[Figure, Field(description="Share of the step in which generation is idle.")]
    serial_s: Annotated[Figure, Field(description="Seconds of the step in one batch.")]
    staleness: Annotated[
        Count | None,
        Field(description="Steps by which weights of generation may be behind; null: async without a limit."),
    ]
    weights_s: Annotated[Figure, Field(description="Transfer of the new weights to all generation instances.")]
    weights_exposed_s: Annotated[
        Figure, Field(description="Part of the step that the transfer adds: on the critical path, not overlapped.")
    ]


class MigrationPart(Row):
    """Unfinished samples are gathered on few instances when few are left (RLHFuse)."""

    applied: Annotated[
        bool,
        Field(description="The step includes the migration. false: it is optional and frees units for other work."),
    ]
    threshold: Annotated[Count, Field(description="Unfinished samples at the migration, R_t.")]
    threshold_share: Figure
    remaining_instances: Annotated[Count, Field(description="Instances that continue to decode, m.")]
    at_s: Figure
    moved_samples: Figure
    moved_bytes: Figure
    generation_s: Figure
    stage_s: Figure
    without_s: Annotated[Figure, Field(description="The stage without migration.")]
    freed_unit_s: Annotated[Figure, Field(description="Unit-seconds freed before generation ends.")]


class ElasticPart(Row):
    """One row of the elastic table."""

    growth: Annotated[Figure, Field(description="Factor on every response length.")]
    generation_s: Figure
    training_s: Figure
    gap_s: Annotated[float, Field(description="Generation minus training.")]
    saving_s: Annotated[Figure, Field(description="Reduction of generation by one more unit.")]
    loss_s: Annotated[
        Figure | None, Field(description="Increase of generation by one unit less; null: there is only one.")
    ]
    action: Annotated[
        Action,
        Field(
            description="add: gap_s >= saving_s, and saving_s is at least 1 % of generation; give back: "
            "-gap_s >= loss_s; keep: otherwise."
        ),
    ]
    free_units: Annotated[Count, Field(description="Unused units of the generation pool.")]


class SizesPart(Row):
    """Sizes that no other sizes beat in both time and price."""

    generation_pool: str
    generation_units: Count
    training_pool: str | None
    training_units: Count
    shared: bool
    tail_instances: Count
    batches: Count
    step_s: Annotated[Figure, Field(description="Mean over the search steps.")]
    price: Figure

    @property
    def units(self) -> int:
        """Units of both stages."""
        return self.generation_units + (0 if self.shared else self.training_units)


class HistogramPart(Row):
    """Histogram of the lengths: bin edges in tokens, counts of flagged and of other samples."""

    edges: list[float]
    tail: list[int]
    regular: list[int]


class LengthsPart(Row):
    """Lengths of the held-out steps, in tokens."""

    mean: Figure
    longest: Annotated[Figure, Field(description="Longest sample of a step, on average.")]
    limit: Annotated[Count, Field(description="Maximum length.")]
    tail_border: Annotated[Figure, Field(description="Minimum length of the longest `share` of samples.")]
    recall: Annotated[Figure, Field(description="Simulated recall of the ranker.")]
    histogram: HistogramPart


class CurvePart(Row):
    """Decode curve of a pool: seconds of one decoding step by batch size."""

    pool: str
    batch: list[int]
    seconds_per_token: list[float]
    lower_s: list[float]
    upper_s: list[float]


class RlPlan(Plan):
    """A plan of one RL step. All times are simulated: means over steps drawn from the lengths."""

    objective_field = "objective.value"
    bound_field = "objective.lower_bound"

    objective: ObjectivePart
    mode: Mode
    step_s: Figure
    step_lower_s: Annotated[
        Figure | None, Field(description="With all predictions at their lower bounds; null: nothing was predicted.")
    ]
    step_upper_s: Annotated[
        Figure | None, Field(description="With all predictions at their upper bounds; null: nothing was predicted.")
    ]
    lower_bound_s: Annotated[Figure, Field(description="Lower bound of a step over all sizes.")]
    price_per_step: Figure
    breakdown: list[CostPart] = Field(
        default_factory=list, description="Costs of the step; stages that run at the same time do not add up."
    )
    factors: Annotated[
        dict[str, float] | None,
        Field(description="On the predicted seconds of each stage, fitted to `measured`; null: not asked for."),
    ] = None
    generation: GenerationPart
    training: TrainingPart | None
    tail_split: SplitPart
    dispatch: DispatchPart
    streaming: StreamingPart | None
    migration: Annotated[MigrationPart | None, Field(description="null: no migration helps.")]
    elastic: list[ElasticPart]
    pareto: list[SizesPart]
    lengths: LengthsPart
    decode: list[CurvePart]
    draws: Annotated[Count, Field(description="Number of search steps, and of held-out steps.")]
    sizes_tried: Count
    complete: Annotated[bool, Field(description="Whether all sizes were simulated.")]
    left_out: Annotated[dict[str, str], Field(description="Pools that cannot generate: name to reason.")]

    @property
    def stages_s(self) -> tuple[float, float, float, float]:
        """Seconds of generation, inference, training and transfer."""
        by_name = {part.name: part.seconds or 0.0 for part in self.breakdown}
        names = ("generation", "inference", "training", "transfer of weights")
        generation, inference, training, transfer = (by_name.get(name, 0.0) for name in names)
        return generation, inference, training, transfer + by_name.get("training state", 0.0)

    @property
    def interval_figure(self) -> str:
        """The step, also where its price is minimised."""
        return "step_s"

    @property
    def ends(self) -> tuple[float, float] | None:
        """The step at the bounds of the predictions."""
        if self.step_lower_s is None or self.step_upper_s is None:
            return None
        return self.step_lower_s, self.step_upper_s

    def tables(self) -> list[Table]:
        """The step, its stages, the baselines, the elastic table and the explanation."""
        step = f"step {format_latency(self.step_s)} (simulated)"
        if self.step_lower_s is not None and self.step_upper_s is not None:
            step += f" [{format_latency(self.step_lower_s)} – {format_latency(self.step_upper_s)}]"
        if self.price_per_step:
            step += f", price {self.price_per_step:.4g}"
        if self.domain is not None:
            step += f"  {self.domain}"
        bound = (
            f"lower bound {format_latency(self.lower_bound_s)}; {self.objective.name} {100 * self.gap:.1f} % above its "
            "lower bound"
        )
        tables = [Table.lines(step, bound, *self._stage_lines()), self._cost_table(), self._baseline_table()]
        if self.elastic:
            tables.append(self._elastic_table())
        left_out = [f"pool {name!r} cannot generate: {reason}" for name, reason in self.left_out.items()]
        return [*tables, Table.lines(*self.explanation, *left_out)]

    def _stage_lines(self) -> list[str]:
        stage, training, migration = self.generation, self.training, self.migration
        name = f"pool {stage.pool!r}"
        if stage.parts:
            name = "pools " + ", ".join(repr(part.pool) for part in stage.parts)
        lines = [f"generation: {stage.instances} units of {name}, {format_latency(stage.stage_s)}"]
        lines += [
            f"  {part.pool!r}: {part.samples} samples from rank {part.first} on {part.instances} instances, "
            f"{format_latency(part.time_s)}"
            for part in stage.parts
        ]
        if self.tail_split.used:
            lines += [
                f"  {name}: {group.samples} samples on {group.instances} instances, batch {group.batch}"
                for name, group in (("tail", self.tail_split.tail), ("regular", self.tail_split.regular))
            ]
        if migration is not None:
            optional = "" if migration.applied else " (optional)"
            lines.append(
                f"  migration{optional}: at {migration.threshold} unfinished samples, {migration.remaining_instances} "
                f"instances continue, {format_si(migration.moved_bytes, 'B')} are moved"
            )
        if training is not None and self.streaming is None:
            lines.append(f"training: the same units, {format_latency(training.time_s)}")
        elif training is not None and self.streaming is not None:
            lines.append(
                f"training: {training.units} units of pool {training.pool!r}, {format_latency(training.time_s)}; "
                f"{self.mode}, {self.streaming.batches} batches, idle {format_latency(training.idle_s)}"
            )
            if self.streaming.weights_s:
                stale = "" if self.streaming.staleness is None else f"staleness {self.streaming.staleness}, "
                lines.append(
                    f"  weights: {stale}transfer {format_latency(self.streaming.weights_s)}, of which "
                    f"{format_latency(self.streaming.weights_exposed_s)} add to the step"
                )
        if training is not None and training.layout is not None:
            lines.append("  layout: " + ", ".join(f"{name} {value}" for name, value in training.layout.items()))
        if self.factors is not None:
            lines.append("factors: " + ", ".join(f"{name} {value:.2f}" for name, value in self.factors.items()))
        if training is not None and training.pipeline is not None:
            pipeline = training.pipeline
            lines.append(
                f"  pipelines: {pipeline.pipelines}, {pipeline.runs} runs of {pipeline.samples} samples and "
                f"{format_latency(pipeline.run_s)} each"
            )
        return lines

    def _cost_table(self) -> Table:
        def text(seconds: float | None) -> str:
            return "not priced" if seconds is None else format_latency(seconds)

        if self.factors is None:
            rows = [(part.name, text(part.seconds), part.remark) for part in self.breakdown]
            return Table(("cost", "time", ""), rows, right=(1,))
        scaled = [
            (part.name, "" if part.seconds is None else text(part.predicted_s), text(part.seconds), part.remark)
            for part in self.breakdown
        ]
        return Table(("cost", "predicted", "with factor", ""), scaled, right=(1, 2))

    def _baseline_table(self) -> Table:
        if self.objective.name == "time":
            return self.baseline_table()
        rows = [(name.replace("_", " "), f"{price:.4g}") for name, price in sorted(self.baselines.items(), key=_value)]
        return Table(("baseline", "price"), rows, right=(1,))

    def _elastic_table(self) -> Table:
        header = ("response length", "generation", "training", "saved by one more unit", "action")
        rows = [
            (
                f"{row.growth:g} x",
                format_latency(row.generation_s),
                format_latency(row.training_s),
                format_latency(row.saving_s),
                row.action,
            )
            for row in self.elastic
        ]
        return Table(header, rows, right=(0, 1, 2, 3))


def _value(item: tuple[str, float]) -> float:
    return item[1]
