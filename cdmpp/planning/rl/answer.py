"""The RL plan's answer: what each field means."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.compose.request import Explained
from cdmpp.planning.rl.elastic import Action
from cdmpp.planning.rl.sizes import Objective, Stage
from cdmpp.planning.rl.streaming import Mode

Count = Annotated[int, Field(ge=0)]
Figure = Annotated[float, Field(ge=0)]


class Part(BaseModel):
    """Base of the answer's parts."""

    model_config = ConfigDict(extra="forbid")


class ObjectivePart(Part):
    """What was made small: seconds or price of a step."""

    name: Objective
    value: Figure
    lower_bound: Figure


class GenerationPart(Part):
    """The generation stage, mean seconds over the judged steps."""

    pool: str
    inference_by: Annotated[
        Stage, Field(description="Whose units run rewards, references and critics; generation without any.")
    ]
    instances: Count
    time_s: Annotated[Figure, Field(description="Until the last sample is generated.")]
    stage_s: Annotated[Figure, Field(description="Until its inference is done as well.")]
    lower_bound_s: Figure
    baselines_s: Annotated[
        dict[str, float],
        Field(
            description="Generation alone with these instances: random (taken in any order), lpt (longest "
            "first as the ranker has it, no split), rule (StreamRL's split, by quantiles), guesses (a split "
            "that trusts a guess of every length), floor (the longest sample alone)."
        ),
    ]
    preemptions: Annotated[Figure, Field(description="Samples that left for lack of memory, per step.")]


class TrainingPart(Part):
    """The training stage."""

    shared: Annotated[bool, Field(description="The units of generation train, after it.")]
    pool: str
    units: Count
    time_s: Annotated[Figure, Field(description="Work in one batch, without waiting.")]
    idle_s: Annotated[Figure, Field(description="Its waiting within the step.")]


class GroupPart(Part):
    """One group of samples and its instances."""

    samples: Count
    instances: Count
    batch: Annotated[Count, Field(description="Samples that an instance decodes at first.")]


class SplitPart(Part):
    """Whether the samples taken for long get instances of their own."""

    used: bool
    tail: GroupPart
    regular: GroupPart
    gain: Annotated[float, Field(description="Of generation over LPT without a split, on judged steps.")]
    best_gain: Annotated[float, Field(description="Of the best split into two groups, whether it is used or not.")]
    if_misses_any: Annotated[
        float | None,
        Field(description='The gain of the plan\'s split if the ranker misses any of the longest ("any").'),
    ]
    reason: str


class DispatchPart(Part):
    """Which sample goes where."""

    rule: Literal["lpt"]
    words: str


class StreamingPart(Part):
    """How finished samples go to training."""

    mode: Mode
    batches: Annotated[Count, Field(description="1: training begins when generation has ended.")]
    samples_per_batch: Figure
    training_bubble: Annotated[Figure, Field(description="Share of the step that training waits.")]
    generation_bubble: Annotated[Figure, Field(description="Share of the step that generation is done.")]
    serial_s: Annotated[Figure, Field(description="The step in one batch.")]


class MigrationPart(Part):
    """When few samples are left, they are gathered on few instances (RLHFuse)."""

    applied: Annotated[bool, Field(description="The step counts on it; false: an offer to free units for other work.")]
    threshold: Annotated[Count, Field(description="Unfinished samples, R_t.")]
    threshold_share: Figure
    remaining_instances: Annotated[Count, Field(description="That go on decoding, m.")]
    at_s: Figure
    moved_samples: Figure
    moved_bytes: Figure
    generation_s: Figure
    stage_s: Figure
    without_s: Annotated[Figure, Field(description="The stage without it.")]
    freed_unit_s: Annotated[Figure, Field(description="Unit-seconds free before generation ends.")]


class TriggerPart(Part):
    """One line of the elastic table."""

    growth: Annotated[Figure, Field(description="Of every response, over the lengths planned for.")]
    generation_s: Figure
    training_s: Figure
    gap_s: Annotated[float, Field(description="Generation less training.")]
    saving_s: Annotated[Figure, Field(description="What one more unit saves generation.")]
    loss_s: Annotated[Figure | None, Field(description="What one unit less costs; null: there is one.")]
    action: Annotated[
        Action,
        Field(
            description="add: gap_s >= saving_s, which is at least 1 % of generation; give back: "
            "-gap_s >= loss_s; keep: neither."
        ),
    ]
    free_units: Annotated[Count, Field(description="Left in the generation pool.")]


class SizesPart(Part):
    """Sizes that no others beat in both time and price."""

    generation_pool: str
    generation_units: Count
    training_pool: str | None
    training_units: Count
    shared: bool
    tail_instances: Count
    batches: Count
    step_s: Annotated[Figure, Field(description="On the steps that sizes are chosen on.")]
    price: Figure


class HistogramPart(Part):
    """Lengths of the judged steps, edges in tokens: those taken for long beside the others."""

    edges: list[float]
    tail: list[int]
    regular: list[int]


class LengthsPart(Part):
    """Lengths, in tokens."""

    mean: Figure
    longest: Annotated[Figure, Field(description="Of a step, on average.")]
    limit: Annotated[Count, Field(description="No sample is longer.")]
    tail_border: Annotated[Figure, Field(description="The longest `share` are at least so long.")]
    recall: Annotated[Figure, Field(description="Of the ranker, as simulated.")]
    histogram: HistogramPart


class CurvePart(Part):
    """The decode curve of a pool, seconds for a token of every sample."""

    pool: str
    batch: list[int]
    seconds_per_token: list[float]
    lower_s: list[float]
    upper_s: list[float]


class RlAnswer(Explained):
    """A plan of one RL step. All times are simulated, means over steps drawn from the lengths."""

    objective: ObjectivePart
    mode: Mode
    step_s: Figure
    step_lower_s: Annotated[
        Figure | None, Field(description="With every predicted cost at its lower bound; null: none predicted.")
    ]
    step_upper_s: Figure | None
    lower_bound_s: Annotated[Figure, Field(description="Of a step, over all sizes.")]
    price_per_step: Figure
    generation: GenerationPart
    training: TrainingPart | None
    tail_split: SplitPart
    dispatch: DispatchPart
    streaming: StreamingPart | None
    migration: Annotated[MigrationPart | None, Field(description="null: no threshold is worth it.")]
    elastic: list[TriggerPart]
    pareto: list[SizesPart]
    lengths: LengthsPart
    decode: list[CurvePart]
    draws: Annotated[Count, Field(description="Steps to choose on, and others to judge on.")]
    sizes_tried: Count
    complete: Annotated[bool, Field(description="Whether every size was tried.")]
    left_out: Annotated[dict[str, str], Field(description="Pools that cannot generate: their name, and why.")]
