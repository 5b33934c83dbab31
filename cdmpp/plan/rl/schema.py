"""Request and plan of the RL planner: ``POST /rl/plan``, ``cdmpp plan rl``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.base.batch_curve import BatchCurve
from cdmpp.plan.fused.schema import FusedPlan, FusedRequest
from cdmpp.plan.rl.lengths import MAX_TOKENS, ObservedLengths, QuantileLengths, RankerForm
from cdmpp.plan.rl.measured import MeasuredStep
from cdmpp.plan.rl.pools import (
    DecodeForm,
    InstanceMemory,
    KvForm,
    PipelineForm,
    PoolForm,
    TrainingForm,
    check_training,
    instance_memory,
    unchecked_training,
    within,
)
from cdmpp.plan.rl.sizes import Layout, Objective, Stage
from cdmpp.plan.rl.training import Mode
from cdmpp.plan.rl.weights import WeightsForm
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.pricing import CostField, PredictedCost, Priced, collect, fill
from cdmpp.predict.requests.request import (
    MAX_COUNT,
    Budget,
    Closed,
    Count,
    MaxSteps,
    Plan,
    PositiveBytes,
    PositiveSeconds,
    PriceRequest,
    Request,
    Row,
    Seed,
    WholeNumber,
)
from cdmpp.utils.units import format_latency, format_si

Action = Literal["add", "give back", "keep"]


class ObjectivePart(Row):
    """The minimised value: seconds or price of a step."""

    name: Objective
    value: NonNegativeFloat
    lower_bound: NonNegativeFloat


class CostPart(Row):
    """One cost of a step."""

    name: str
    seconds: NonNegativeFloat | None = Field(description="null: not priced.")
    predicted_s: NonNegativeFloat | None = Field(
        None, description="Before the factor of the stage; null: there is no factor."
    )
    remark: str = ""


class PoolPart(Row):
    """One of several pools that generate at once."""

    pool: str
    instances: NonNegativeInt
    samples: NonNegativeInt
    first: NonNegativeInt = Field(description="Rank of its first sample; the sample ranked longest has rank 0.")
    time_s: NonNegativeFloat = Field(description="Until its last sample is generated.")


class GenerationPart(Row):
    """The generation stage; seconds are means over the held-out steps."""

    pool: str = Field(description='Of several pools: their names, joined by " + ".')
    parts: list[PoolPart] = Field(description="Pools that generate at once; empty: one pool.")
    inference_by: Stage = Field(
        description="Stage whose units run the reward, reference and critic models; generation if there is no "
        "inference."
    )
    instances: NonNegativeInt
    time_s: NonNegativeFloat = Field(description="Until the last sample is generated.")
    stage_s: NonNegativeFloat = Field(description="Until the inference of the last sample is done.")
    lower_bound_s: NonNegativeFloat
    baselines_s: dict[str, float] = Field(
        description="Generation alone with these instances: random (random order), lpt (longest first as ranked, "
        "no split), rule (StreamRL's split by quantiles), guesses (a split that trusts a guess of every length), "
        "floor (the longest sample alone)."
    )
    preemptions: NonNegativeFloat = Field(description="Preemptions for lack of memory, per step.")


class PipelinePart(Row):
    """Training by a pipeline schedule."""

    run_s: NonNegativeFloat = Field(description="One run of the schedule.")
    samples: NonNegativeInt = Field(description="Samples of one run.")
    pipelines: NonNegativeInt = Field(description="Pipelines side by side.")
    runs: NonNegativeInt = Field(description="Runs of each pipeline in a step, in one batch.")
    schedule: FusedPlan | None = Field(description="null: the request gives the answer of the schedule.")


class TrainingPart(Row):
    """The training stage."""

    shared: bool = Field(description="The generation units train, after generation.")
    pool: str
    units: NonNegativeInt
    time_s: NonNegativeFloat = Field(description="Work in one batch, without waiting.")
    idle_s: NonNegativeFloat = Field(description="Waiting within the step.")
    pipeline: PipelinePart | None = Field(description="null: training has no pipeline schedule.")
    layout: dict[str, int | str] | None = Field(
        None, description="Training step of these units; null: the request has none."
    )
    memory_bytes: float | None = Field(None, description="Needed on the fullest device.")


class GroupPart(Row):
    """One group of samples and its instances."""

    samples: NonNegativeInt
    instances: NonNegativeInt
    batch: NonNegativeInt = Field(description="Initial batch of an instance.")


class SplitPart(Row):
    """Whether samples flagged as long have separate instances."""

    used: bool
    tail: GroupPart
    regular: GroupPart
    gain: float = Field(description="Reduction of generation compared with lpt, on held-out steps.")
    best_gain: float = Field(description="Gain of the best split into two groups, used or not.")
    if_misses_any: float | None = Field(
        description='Gain of the plan\'s split if the ranker misses any of the longest ("any").'
    )
    reason: str


class DispatchPart(Row):
    """Order in which samples go to instances."""

    rule: Literal["lpt"]
    words: str = Field(description="The rule as text.")


class StreamingPart(Row):
    """How finished samples are streamed to training."""

    mode: Mode
    batches: NonNegativeInt = Field(description="1: training starts after generation.")
    samples_per_batch: NonNegativeFloat
    training_bubble: NonNegativeFloat = Field(description="Share of the step in which training waits.")
    generation_bubble: NonNegativeFloat = Field(description="Share of the step in which generation is idle.")
    serial_s: NonNegativeFloat = Field(description="Seconds of the step in one batch.")
    staleness: NonNegativeInt | None = Field(
        description="Steps by which weights of generation may be behind; null: async without a limit."
    )
    weights_s: NonNegativeFloat = Field(description="Transfer of the new weights to all generation instances.")
    weights_exposed_s: NonNegativeFloat = Field(
        description="Part of the step that the transfer adds: on the critical path, not overlapped."
    )


class MigrationPart(Row):
    """Unfinished samples are gathered on few instances when few are left (RLHFuse)."""

    applied: bool = Field(
        description="The step includes the migration. false: it is optional and frees units for other work."
    )
    threshold: NonNegativeInt = Field(description="Unfinished samples at the migration, R_t.")
    threshold_share: NonNegativeFloat
    remaining_instances: NonNegativeInt = Field(description="Instances that continue to decode, m.")
    at_s: NonNegativeFloat
    moved_samples: NonNegativeFloat
    moved_bytes: NonNegativeFloat
    generation_s: NonNegativeFloat
    stage_s: NonNegativeFloat
    without_s: NonNegativeFloat = Field(description="The stage without migration.")
    freed_unit_s: NonNegativeFloat = Field(description="Unit-seconds freed before generation ends.")


class ElasticPart(Row):
    """One row of the elastic table."""

    growth: NonNegativeFloat = Field(description="Factor on every response length.")
    generation_s: NonNegativeFloat
    training_s: NonNegativeFloat
    gap_s: float = Field(description="Generation minus training.")
    saving_s: NonNegativeFloat = Field(description="Reduction of generation by one more unit.")
    loss_s: NonNegativeFloat | None = Field(
        description="Increase of generation by one unit less; null: there is only one."
    )
    action: Action = Field(
        description="add: gap_s >= saving_s, and saving_s is at least 1 % of generation; give back: "
        "-gap_s >= loss_s; keep: otherwise."
    )
    free_units: NonNegativeInt = Field(description="Unused units of the generation pool.")


class SizesPart(Row):
    """Sizes that no other sizes beat in both time and price."""

    generation_pool: str
    generation_units: NonNegativeInt
    training_pool: str | None
    training_units: NonNegativeInt
    shared: bool
    tail_instances: NonNegativeInt
    batches: NonNegativeInt
    step_s: NonNegativeFloat = Field(description="Mean over the search steps.")
    price: NonNegativeFloat

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

    mean: NonNegativeFloat
    longest: NonNegativeFloat = Field(description="Longest sample of a step, on average.")
    limit: NonNegativeInt = Field(description="Maximum length.")
    tail_border: NonNegativeFloat = Field(description="Minimum length of the longest `share` of samples.")
    recall: NonNegativeFloat = Field(description="Simulated recall of the ranker.")
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
    step_s: NonNegativeFloat
    step_lower_s: NonNegativeFloat | None = Field(
        description="With all predictions at their lower bounds; null: nothing was predicted."
    )
    step_upper_s: NonNegativeFloat | None = Field(
        description="With all predictions at their upper bounds; null: nothing was predicted."
    )
    lower_bound_s: NonNegativeFloat = Field(description="Lower bound of a step over all sizes.")
    price_per_step: NonNegativeFloat
    breakdown: list[CostPart] = Field(
        default_factory=list, description="Costs of the step; stages that run at the same time do not add up."
    )
    factors: dict[str, float] | None = Field(
        None, description="On the predicted seconds of each stage, fitted to `measured`; null: not asked for."
    )
    generation: GenerationPart
    training: TrainingPart | None
    tail_split: SplitPart
    dispatch: DispatchPart
    streaming: StreamingPart | None
    migration: MigrationPart | None = Field(description="null: no migration helps.")
    elastic: list[ElasticPart]
    pareto: list[SizesPart]
    lengths: LengthsPart
    decode: list[CurvePart]
    draws: NonNegativeInt = Field(description="Number of search steps, and of held-out steps.")
    sizes_tried: NonNegativeInt
    complete: bool = Field(description="Whether all sizes were simulated.")
    left_out: dict[str, str] = Field(description="Pools that cannot generate: name to reason.")

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

    def headline(self) -> str:
        """The step, its price, and who generates and trains."""
        price = f", price {self.price_per_step:.4g}" if self.price_per_step else ""
        training = self.training
        trains = "" if training is None else f", {training.units} train" if self.streaming else ", the same train"
        step = f"step {format_latency(self.step_s)} (simulated){price}"
        return f"{step}: {self.generation.instances} units generate{trains}"

    @property
    def in_seconds(self) -> bool:
        """Not where the price is minimised."""
        return self.objective.name == "time"

    def simple_plans(self) -> dict[str, float]:
        """Without the limit, and without the plan that guesses each length."""
        return {name: value for name, value in self.baselines.items() if name not in ("floor", "guesses")}

    def tables(self) -> list[Table]:
        """The stages, the baselines, the elastic table and the explanation."""
        tables = [Table.lines(*self._stage_lines()), self._cost_table(), self._baseline_table()]
        if self.elastic:
            tables.append(self._elastic_table())
        left_out = [f"pool {name!r} cannot generate: {reason}" for name, reason in self.left_out.items()]
        return [*tables, Table.lines(*self.explanation[1:], *left_out)]

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
        prices = sorted(self.baselines.items(), key=itemgetter(1))
        return Table(("baseline", "price"), [(name.replace("_", " "), f"{p:.4g}") for name, p in prices], right=(1,))

    def _elastic_table(self) -> Table:
        columns: dict[str, Callable[[ElasticPart], str]] = {
            "response length": lambda row: f"{row.growth:g} x",
            "generation": lambda row: format_latency(row.generation_s),
            "training": lambda row: format_latency(row.training_s),
            "saved by one more unit": lambda row: format_latency(row.saving_s),
            "action": lambda row: row.action,
        }
        return Table.of(self.elastic, columns, right=(0, 1, 2, 3))


#: Default product of draws and samples: a tenth of a second compiled, a second in plain Python.
SIMULATED = 2**17
#: Default number of draws: the first for small steps, down to the second for large ones.
MOST_DRAWS, LEAST_DRAWS = 16, 2
MAX_STALENESS = 1000
#: Costs that a pool inherits from the request, in the order in which they are priced.
COST_FIELDS = ("decode", "prefill", "inference", "training")
V = TypeVar("V")


class _Pools(Closed):
    """Pools alone: prices are filled in without a walk through all observed lengths."""

    pools: list[PoolForm]


class RlRequest(Request[RlPlan]):
    """Plan one step of reinforcement learning: generation, inference, training.

    A unit of a pool is one generation instance or one data-parallel training unit. Costs of the request hold for
    every pool that has none of its own. Without ``training``, generation alone is planned.
    """

    lengths: ObservedLengths | QuantileLengths
    samples_per_step: Count
    ranker: RankerForm = RankerForm()
    prompt_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), WholeNumber] = 0
    pools: list[PoolForm] = Field(min_length=1)
    decode: DecodeForm | None = Field(None, description="Decode curve: seconds of one decoding step by batch size.")
    prefill: CostField = Field(0.0, description="Of one prompt; it stalls its instance.")
    inference: CostField = Field(
        0.0,
        description="Reward, reference and critic of one sample on one unit. It runs on the generation units, after "
        "generation or on instances that are free before its end, or on the training units; the better is chosen.",
    )
    kv: KvForm = KvForm()
    training: TrainingForm | None = None
    weights: WeightsForm = WeightsForm()
    link_bytes_per_s: PositiveBytes = Field(25e9, description="Bandwidth into one instance, for samples that migrate.")
    mode: Mode = Field(
        "sync",
        description="sync: training uses the samples of this step, streamed; async: those of the previous step "
        "(one-step off-policy).",
    )
    staleness: Annotated[int, Field(ge=0, le=MAX_STALENESS), WholeNumber] | None = Field(
        None,
        description="k: step i is generated with the weights of the training of step i - 1 - k or later. 0: "
        "sync; 1 or more: async, with transfer and both stages of a step within k + 1 steps. null: as mode says; "
        "async then never waits for weights, as with 2.",
    )
    measured: list[MeasuredStep] | None = Field(
        None,
        max_length=1000,
        description="Measured steps: a factor on the seconds of each stage is fitted to them. An empty list: the "
        "interval of the step has the spread of such factors. null: it has not.",
    )
    mix_pools: bool = Field(
        False, description="Several pools may generate at once; the samples of a step are divided between them."
    )
    layout: Layout = Field(
        "any",
        description="separate: different units generate and train (disaggregated); shared: the same units "
        "generate, then train (colocated); any: the better is chosen.",
    )
    objective: Objective = Field("time", description="Minimise the seconds of a step, or its price.")
    slack: float = Field(
        0.0, ge=0, le=1, description="A step may be longer than the shortest by this share if it is cheaper."
    )
    most_step_s: PositiveSeconds | None = Field(None, description="Upper limit of a step.")
    generation_units: Count | None = Field(None, description="Fixed instead of searched.")
    training_units: Count | None = Field(None, description="Fixed instead of searched.")
    draws: Annotated[int, Field(ge=2, le=MAX_COUNT), WholeNumber] | None = Field(
        None, description=f"Steps to simulate. Default: {MOST_DRAWS}, fewer for large steps."
    )
    budget_s: Budget = 1.0
    max_steps: MaxSteps = None
    seed: Seed = 0

    def check(self) -> None:
        """Raise FieldError or InfeasibleError if parts of the request contradict each other."""
        if self.objective == "cost" and not any(pool.price_per_hour for pool in self.pools):
            raise FieldError(
                "no pool has a price", path="pools.0.price_per_hour", hint='give prices, or use "objective": "time"'
            )
        pools = self.with_pool_costs().pools
        wanted = self.training is not None or any(pool.training is not None for pool in self.pools)
        if wanted and not any(pool.training is not None for pool in pools):
            raise FieldError(
                "training has a cost, but no pool trains", path="pools", hint='add "training" to the stages of a pool'
            )
        if self.mix_pools and any(pool.placement > 1 for pool in pools):
            raise FieldError.at("mix_pools", "not with a placement", hint="leave one of them out")
        generating = [pool for pool in pools if pool.decode is not None]
        if not generating:
            raise FieldError("no pool generates", path="pools", hint='add "generation" to the stages of a pool')
        self._check_memory(generating)
        check_training(pools, self.training_units, self.ignore_memory)
        self._check_mode()
        training = {pool.name: pool.site for pool in pools if pool.training is not None}
        separate = training if self.layout != "shared" else {}
        self.weights.check(separate, {pool.name: pool.site for pool in generating})
        for index, (given, pool) in enumerate(zip(self.pools, pools, strict=True)):
            if pool.training is not None and pool.training.pipeline is not None:
                path = "training.pipeline" if given.training is None else f"pools.{index}.training.pipeline"
                _check_pipeline(pool, pool.training.pipeline, path, self.ignore_memory)
        self.ranker.check()

    def sizes(self) -> dict[str, int]:
        """Units, pools, samples, batch, given lengths, programs to price, and pipeline schedules to search."""
        return {
            "units": max(pool.units for pool in self.pools),
            "pools": len(self.pools),
            "samples": self.samples_per_step,
            "simulated_samples": self.draw_count() * self.samples_per_step,
            "batch": self.kv.max_batch,
            "lengths": len(self.lengths.samples) if isinstance(self.lengths, ObservedLengths) else 0,
            "programs": _programs(self) + sum(map(_programs, self.pools)) + self.weights.programs(),
            **{
                f"pipeline_{name}": max((pipeline.sizes()[name] for pipeline in self._pipelines()), default=0)
                for name in ("ranks", "models", "passes")
            },
        }

    def _pipelines(self) -> list[FusedRequest]:
        """Schedules that are searched."""
        costs = [cost for cost in (self.training, *(pool.training for pool in self.pools)) if cost is not None]
        pipelines = [cost.pipeline.request for cost in costs if cost.pipeline is not None]
        return [request for request in pipelines if request is not None]

    @property
    def effective_mode(self) -> Mode:
        """The mode, or that of the staleness if it is given."""
        if self.staleness is None:
            return self.mode
        return "async" if self.staleness else "sync"

    def with_pool_costs(self) -> Self:
        """A copy in which each pool has all costs of its stages, its own or the request's, and the request has none.

        Raises FieldError: a generating pool has no decode curve, or a pool's name is not unique.
        """
        pools = [self._with_costs(index) for index in range(len(self.pools))]
        return self.model_copy(
            update={"pools": pools, "decode": None, "prefill": 0.0, "inference": 0.0, "training": None}
        )

    def price_requests(self) -> list[PriceRequest]:
        """Programs of the pools, pool by pool, then of the weights; paths name the field of the pool or request."""
        self.check()
        programs: list[PriceRequest] = []
        for index, (given, pool) in enumerate(zip(self.pools, self.with_pool_costs().pools, strict=True)):
            for name in COST_FIELDS:
                path = name if getattr(given, name) is None else f"pools.{index}.{name}"
                cost = getattr(pool, name)
                if isinstance(cost, TrainingForm):
                    programs += [replace(program, path=f"{path}.{program.path}") for program in collect(cost)]
                elif isinstance(cost, Priced):
                    programs += cost.price_requests(path)
        return programs + self._weights_requests()

    def with_prices(self, prices: Sequence[Prediction]) -> Self:
        """A copy with resolved costs in the pools (:meth:`with_pool_costs`)."""
        resolved = self.with_pool_costs()
        first = len(prices) - len(self._weights_requests())
        pools = fill(_Pools.model_construct(pools=resolved.pools), prices[:first]).pools
        return resolved.model_copy(update={"pools": pools, "weights": fill(self.weights, prices[first:])})

    def _weights_requests(self) -> list[PriceRequest]:
        return [replace(program, path=f"weights.{program.path}") for program in collect(self.weights)]

    @property
    def _longest_sample(self) -> int:
        """Tokens of the longest sample with its prompt."""
        return self.lengths.distribution(self.samples_per_step).longest + self.prompt_tokens

    def instance_memory(self, pool: PoolForm, tokens: int) -> InstanceMemory:
        """Memory of an instance of a pool that generates and has all its costs; ``tokens``: of the longest sample."""
        transfer = self.weights.transfer
        weight_bytes = None if transfer is None else transfer.bytes
        return instance_memory(pool, self.kv, weight_bytes, tokens, self.ignore_memory)

    def unchecked_memory(self) -> list[str]:
        """What is missing to compare generation or training with the devices."""
        pools, tokens = self.with_pool_costs().pools, self._longest_sample
        reasons = [self.instance_memory(pool, tokens).unchecked() for pool in pools if pool.decode is not None]
        reasons += [unchecked_training(pool, pools) for pool in pools if pool.training is not None]
        reasons += [f"training.pipeline: {text}" for form in self._pipelines() for text in form.unchecked_memory()]
        return [reason for reason in reasons if reason is not None]

    def draw_count(self) -> int:
        """Number of steps to simulate."""
        if self.draws is not None:
            return self.draws
        return min(max(SIMULATED // self.samples_per_step, LEAST_DRAWS), MOST_DRAWS)

    def _check_mode(self) -> None:
        """Raise FieldError if mode and staleness contradict each other."""
        if "mode" in self.model_fields_set and self.effective_mode != self.mode:
            raise FieldError.at(
                "staleness",
                f"{self.staleness} is {self.effective_mode}, but mode is {self.mode}",
                hint="omit mode: a staleness of 0 is sync, of 1 or more async",
            )

    def _with_costs(self, index: int) -> PoolForm:
        pool, path = self.pools[index], f"pools.{index}"
        if any(other.name == pool.name for other in self.pools[:index]):
            raise FieldError.at(f"{path}.name", f"{pool.name!r} is used twice", hint="give each pool its own name")
        if pool.memory_bytes is not None and self.kv.bytes_per_token is None:
            raise FieldError(
                f"{path}.memory_bytes: needs kv.bytes_per_token",
                path="kv.bytes_per_token",
                hint="give the bytes of one token's keys and values",
            )
        generates = "generation" in pool.stages
        costs = {
            "decode": self._decode_of(pool, path) if generates else None,
            "prefill": _own_or_common(pool.prefill, self.prefill) if generates else None,
            "inference": _own_or_common(pool.inference, self.inference),
            "training": _own_or_common(pool.training, self.training) if "training" in pool.stages else None,
            "memory_bytes": _own_or_common(pool.memory_bytes, self.kv.memory_bytes),
        }
        return pool.model_copy(update=costs)

    def _decode_of(self, pool: PoolForm, path: str) -> DecodeForm:
        decode = _own_or_common(pool.decode, self.decode)
        if decode is None:
            raise FieldError.at(
                f"{path}.decode",
                f"pool {pool.name!r} generates, but has no decode curve",
                hint='give "decode" to the pool or to the request, or remove "generation" from the pool\'s stages',
            )
        if isinstance(decode, BatchCurve) and decode.is_predicted and decode.device is None:
            if pool.device is None:
                raise FieldError.at(
                    f"{path}.device", "programs need a device", hint='give "device" to the pool or to "decode"'
                )
            decode = decode.model_copy(update={"device": pool.device})
        return decode

    def _check_memory(self, generating: Sequence[PoolForm]) -> None:
        """Raise InfeasibleError if the longest sample fits into the memory of no pool."""
        for index, pool in enumerate(self.pools):
            path = "decode" if pool.decode is None else f"pools.{index}.decode"
            decode = pool.decode or self.decode
            if isinstance(decode, BatchCurve) and decode.llm is not None:
                decode.llm.steps((1,), f"{path}.llm", decode.llm.framework)
        tokens = self._longest_sample
        memories = [self.instance_memory(pool, tokens) for pool in generating]
        if any(memory.tokens >= tokens for memory in memories):
            return
        nearest = min(memories, key=lambda memory: memory.needed(tokens) / memory.limit)
        if nearest.needed(tokens) > nearest.limit:
            raise nearest.error(tokens)
        least = min(tokens * (memory.token_bytes or 0.0) for memory in memories)
        raise InfeasibleError(
            f"no memory holds the longest sample ({tokens - self.prompt_tokens} tokens, and {self.prompt_tokens} of "
            f"its prompt); the smallest that does has {least:.0f} bytes",
            path="kv.memory_bytes" if self.kv.memory_bytes is not None else "pools.0.memory_bytes",
            hint="give that much KV-cache memory, or set lengths.max_tokens",
        )


def _own_or_common(pool_value: V | None, common: V) -> V:
    return common if pool_value is None else pool_value


def _programs(holder: RlRequest | PoolForm) -> int:
    """Programs of the costs that a pool or the request gives, at all batch sizes."""
    count = 0
    for name in COST_FIELDS:
        cost = getattr(holder, name)
        for part in (cost,) if not isinstance(cost, TrainingForm) else (cost.sample, cost.curve):
            if isinstance(part, PredictedCost):
                count += len(part.programs or (part.collective,))
            elif isinstance(part, BatchCurve):
                count += part.program_count()
    return count


def _check_pipeline(pool: PoolForm, pipeline: PipelineForm, path: str, ignore_memory: bool) -> None:
    """Raise FieldError or InfeasibleError if a schedule is wrong, or does not fit into its pool."""
    request = pipeline.schedule_request(ignore_memory)
    if request is not None:
        try:
            request.check()
        except FieldError as error:
            raise within(error, f"{path}.request") from None
    if pipeline.units > pool.units:
        raise FieldError.at(
            f"{path}.units",
            f"a pipeline of {pipeline.units} units does not fit into pool {pool.name!r} of {pool.units}",
            hint='give the pool more units, or remove "training" from its stages',
        )
