"""The typed plan of a search result, with sentences that explain it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.plan.rl.dispatch import Dispatcher, MixDispatcher, PoolMix, TailSplit
from cdmpp.plan.rl.evaluate import SearchResult, evaluate
from cdmpp.plan.rl.lengths import SampledSteps
from cdmpp.plan.rl.measured import STAGES
from cdmpp.plan.rl.migration import simulate_migration
from cdmpp.plan.rl.pools import DecodeCurve, DecodeLine, PoolForm
from cdmpp.plan.rl.problem import PipelineSchedule, RlProblem, is_predicted, make_problem
from cdmpp.plan.rl.schema import (
    CostPart,
    CurvePart,
    DispatchPart,
    GenerationPart,
    GroupPart,
    HistogramPart,
    LengthsPart,
    MigrationPart,
    ObjectivePart,
    PipelinePart,
    PoolPart,
    RlPlan,
    RlRequest,
    SizesPart,
    SplitPart,
    StreamingPart,
    TrainingPart,
)
from cdmpp.plan.rl.sizes import MIXED, PoolSizes
from cdmpp.plan.rl.training import asynchronous_step
from cdmpp.predict.requests.pricing import Figure
from cdmpp.utils.units import format_latency

#: Bins of the length histogram; most points of the Pareto front that a plan lists.
BINS, MOST_FRONT = 32, 64


def plan_of(
    request: RlRequest,
    problem: RlProblem,
    result: SearchResult,
    schedules: Mapping[int, PipelineSchedule] | None = None,
) -> RlPlan:
    """The plan of a search result for a request with resolved costs.

    Raises FieldError: the lower bound of the price is 0."""
    sizes, sizing = result.sizes, problem.sizing
    bound = result.bound_s if problem.objective == "time" else result.bound_price
    if bound == 0:
        raise FieldError(
            "pools without a price can run the whole step, so that the lower bound of its price is 0",
            path="pools",
            hint='give every pool a price, or use "objective": "time"',
        )
    schedules = schedules or {}
    breakdown = _without_factors(problem, _breakdown(problem, result))
    split = split_part(result, problem.samples)
    plan = RlPlan(
        objective=ObjectivePart(name=problem.objective, value=sizes.value(problem.objective), lower_bound=bound),
        mode=sizing.mode,
        step_s=sizes.step_s,
        step_lower_s=None,
        step_upper_s=None,
        lower_bound_s=result.bound_s,
        price_per_step=sizes.price,
        breakdown=breakdown,
        factors=None if problem.factors is None else dict(zip(STAGES, problem.factors.values, strict=True)),
        generation=generation_part(problem, result),
        training=_training(request, problem, result, schedules),
        tail_split=split,
        dispatch=DispatchPart(rule="lpt", words=dispatch_rule(problem, result)),
        streaming=_streaming(problem, result),
        migration=migration_part(problem, result),
        elastic=result.elastic,
        pareto=[_front_sizes(problem, sizes) for sizes in _thinned(result.front)],
        lengths=_lengths(problem, result.steps),
        decode=[_curve(pool, request.kv.max_batch) for pool in request.pools if pool.decode is not None],
        draws=len(result.steps),
        sizes_tried=result.sizes_tried,
        complete=result.complete,
        left_out=result.left_out,
        baselines=_baselines(problem, result),
        explanation=explain(request, problem, result, split),
    )
    lower_s, upper_s = _interval(request, result, schedules)
    if lower_s is None or upper_s is None:
        return plan
    spread = problem.spread(plan.stages_s, plan.streaming is None)
    return plan.model_copy(update={"step_lower_s": lower_s / spread, "step_upper_s": upper_s * spread})


def _without_factors(problem: RlProblem, parts: list[CostPart]) -> list[CostPart]:
    """The costs with their seconds before the factors."""
    if problem.factors is None:
        return parts
    generation, inference, training, transfer = problem.factors.values
    by_name = {"generation": generation, "prefill": generation, "inference": inference, "training": training}
    for part in parts:
        if part.seconds is not None:
            part.predicted_s = part.seconds / by_name.get(part.name, transfer)
    return parts


def _breakdown(problem: RlProblem, result: SearchResult) -> list[CostPart]:
    """Costs of the step; those that the request does not have are named as not priced."""
    sizing, sizes, outcome = problem.sizing, result.sizes, result.outcome
    samples, shared = float(problem.samples), sizes.shared
    prefill_s = sum(
        sizing.pools[pool].generation_engine().prefill_s * units for pool, units in sizing.stage_of(sizes).units
    ) / max(sizing.stage_of(sizes).instances, 1)
    inference_s, training_s = mean(outcome.stage_s - outcome.generation_s), mean(outcome.training_s)
    cost = None if sizes.training is None else sizing.cost_of(sizes)
    if cost is not None:
        tokens = float(result.judge.tokens.mean())
        inferred = float(cost.inference_work_s(samples, tokens, float(sizes.training_units)))
        inference_s, training_s = inference_s + inferred, training_s - inferred
    by = "generation" if outcome.stage_s.mean() > outcome.generation_s.mean() else "training"
    # Name, seconds, and remarks where there are seconds and where there are none.
    prefill_s = prefill_s * samples / sizes.generation_units
    rows = [
        ("generation", mean(outcome.generation_s), "until the last sample ends", ""),
        ("prefill", prefill_s, "a part of generation", "the request gives no prefill"),
        ("inference", inference_s, f"passes of other models, on the {by} units", "the request gives no inference"),
    ]
    if cost is not None and sizes.training is not None:
        updates = math.ceil(samples / cost.run_samples) if cost.sized is not None else 1
        remark = f"{updates} updates of {math.ceil(samples / updates)} samples" if updates > 1 else "one update"
        weights_s = sizing.shared_s if shared else sizing.weights_s(sizing.stage_of(sizes), sizes.training)
        state = "to the host's memory and back"
        rows += [
            ("training", training_s, remark, remark),
            ("transfer of weights", weights_s, "to the generation instances", "the request gives no weights"),
            *([("training state", cost.swap_s(sizes.training_units), state, state)] if shared else []),
            ("start of the engines", 0.0, "", "once for a job, not in each step"),
            ("environments, data, checkpoints", 0.0, "", "not known to the planner"),
        ]
    return [CostPart(name=name, seconds=s or None, remark=given if s else none) for name, s, given, none in rows]


def _interval(
    request: RlRequest, result: SearchResult, schedules: Mapping[int, PipelineSchedule]
) -> tuple[float | None, float | None]:
    """Step time of the same plan with all predictions at their lower and at their upper bounds."""
    if not is_predicted(request) and not any(s.lower_s < s.upper_s for s in schedules.values()):
        return None, None
    sizes = result.sizes

    def step_s(figure: Figure) -> float:
        problem = make_problem(request, figure, schedules)
        sizing = problem.sizing
        if isinstance(sizes.split, PoolMix):
            dispatchers = {
                pool: Dispatcher(sizing.pools[pool].generation_engine(), result.steps) for pool in sizes.split.pools
            }
            return mean(evaluate(sizing, sizes, MixDispatcher(dispatchers)).step_s)
        dispatcher = Dispatcher(sizing.pools[sizes.generation].generation_engine(), result.steps)
        migration = None
        if result.migration_applied and result.migration is not None:
            threshold, remaining = result.migration.threshold, result.migration.remaining
            inference_s = sizing.generation_inference_s(sizes)
            migration = simulate_migration(dispatcher, sizes.split, threshold, remaining, problem.link, inference_s)
        return mean(evaluate(sizing, sizes, dispatcher, migration).step_s)

    bounds = step_s("lower_s"), step_s("upper_s")
    return min(*bounds, sizes.step_s), max(*bounds, sizes.step_s)


def _baselines(problem: RlProblem, result: SearchResult) -> dict[str, float]:
    """The objective of simpler plans with the same units."""
    time = problem.objective == "time"
    factor = 1.0 if time else problem.sizing.price_per_s(result.sizes)
    baselines = {name: mean(outcome.step_s) * factor for name, outcome in result.dispatches.items()}
    baselines["floor"] = result.longest_alone_s * factor
    if result.sizes.batches > 1:
        baselines["not_streamed"] = mean(result.unstreamed.step_s) * factor
    if result.migration_applied:
        baselines["not_migrated"] = mean(result.unmigrated.step_s) * factor
    others = {"colocated": result.colocated, "disaggregated": result.disaggregated, "one_pool": result.one_pool}
    return baselines | {name: pair[0 if time else 1] for name, pair in others.items() if pair is not None}


def _training(
    request: RlRequest, problem: RlProblem, result: SearchResult, schedules: Mapping[int, PipelineSchedule]
) -> TrainingPart | None:
    sizes = result.sizes
    if sizes.training is None:
        return None
    cost, pipeline = problem.sizing.cost_of(sizes), None
    if sizes.training in schedules:
        pipeline = PipelinePart(
            run_s=cost.run_s,
            samples=cost.run_samples,
            pipelines=int(cost.pipelines(float(sizes.training_units))),
            runs=int(cost.runs(float(problem.samples), float(sizes.training_units))),
            schedule=schedules[sizes.training].plan,
        )
    form = request.pools[sizes.training].training
    size = next((size for size in (form.sizes if form else None) or [] if size.units == sizes.training_units), None)
    return TrainingPart(
        layout=None if size is None else size.layout,
        memory_bytes=None if size is None else size.memory_bytes,
        shared=sizes.shared,
        pool=problem.sizing.pools[sizes.training].name,
        units=sizes.training_units,
        time_s=mean(result.outcome.training_s),
        idle_s=mean(result.outcome.idle_s),
        pipeline=pipeline,
    )


def _streaming(problem: RlProblem, result: SearchResult) -> StreamingPart | None:
    if result.sizes.training is None or result.sizes.shared:
        return None
    sizing, sizes, outcome = problem.sizing, result.sizes, result.outcome
    step_s, weights_s = outcome.step_s, sizing.weights_s(sizing.stage_of(sizes), result.sizes.training)
    exposed_s = weights_s
    if sizing.mode == "async":
        exposed_s = mean(step_s - asynchronous_step(outcome.stage_s, outcome.training_s, 0.0, sizing.staleness))
    return StreamingPart(
        mode=sizing.mode,
        batches=sizes.batches,
        samples_per_batch=problem.samples / sizes.batches,
        training_bubble=mean(outcome.idle_s / step_s),
        generation_bubble=mean(1 - outcome.stage_s / step_s),
        serial_s=mean(result.unstreamed.step_s),
        staleness=0 if sizing.mode == "sync" else sizing.staleness,
        weights_s=weights_s,
        weights_exposed_s=exposed_s,
    )


def _front_sizes(problem: RlProblem, sizes: PoolSizes) -> SizesPart:
    pools = problem.sizing.pools
    return SizesPart(
        generation_pool=problem.sizing.stage_name(sizes),
        generation_units=sizes.generation_units,
        training_pool=None if sizes.training is None else pools[sizes.training].name,
        training_units=sizes.training_units,
        shared=sizes.shared,
        tail_instances=sizes.split.tail,
        batches=sizes.batches,
        step_s=sizes.step_s,
        price=sizes.price,
    )


def _thinned(front: Sequence[PoolSizes]) -> list[PoolSizes]:
    """At most :data:`MOST_FRONT` of them, evenly spaced, with both ends."""
    if len(front) <= MOST_FRONT:
        return list(front)
    places = np.unique(np.linspace(0, len(front) - 1, MOST_FRONT).round().astype(int))
    return [front[place] for place in places]


def _lengths(problem: RlProblem, steps: SampledSteps) -> LengthsPart:
    lengths = steps.lengths
    tail, regular = lengths[:, : steps.tail_samples], lengths[:, steps.tail_samples :]
    border = np.sort(lengths, axis=1)[:, -steps.tail_samples]
    low, high = float(lengths.min()), float(lengths.max())
    edges = np.geomspace(low, max(high, low + 1), BINS + 1)
    edges[0], edges[-1] = low, max(high, low + 1)
    return LengthsPart(
        mean=float(lengths.mean()),
        longest=float(lengths.max(1).mean()),
        limit=problem.lengths.longest,
        tail_border=float(border.mean()),
        recall=float((tail >= border[:, None]).mean()),
        histogram=HistogramPart(
            edges=edges.tolist(),
            tail=np.histogram(tail, edges)[0].tolist(),
            regular=np.histogram(regular, edges)[0].tolist(),
        ),
    )


def _curve(pool: PoolForm, max_batch: int) -> CurvePart:
    assert pool.decode is not None
    sizes, costs = pool.decode.points()
    seconds, lower, upper = ([getattr(cost, name) for cost in costs] for name in ("latency_s", "lower_s", "upper_s"))
    if isinstance(pool.decode, DecodeLine):
        # Its points are far apart; show the range of batches in use.
        shown = np.unique(np.array([1, max_batch]))
        seconds = lower = upper = np.interp(shown, sizes, seconds).tolist()
        sizes = shown
    return CurvePart(
        pool=pool.name, batch=sizes.astype(int).tolist(), seconds_per_token=seconds, lower_s=lower, upper_s=upper
    )


def mean(values: Any) -> float:
    return float(np.mean(values))


def generation_part(problem: RlProblem, result: SearchResult) -> GenerationPart:
    sizes, judge, pools = result.sizes, result.judge, problem.sizing.pools
    parts: list[PoolPart] = []
    if isinstance(judge, MixDispatcher) and isinstance(sizes.split, PoolMix):
        parts = [
            PoolPart(
                pool=pools[pool].name,
                instances=units,
                samples=stop - start,
                first=start,
                time_s=judge.range_s(pool, units, start, stop),
            )
            for pool, units, start, stop in sizes.split.ranges()
        ]
    return GenerationPart(
        pool=problem.sizing.stage_name(sizes),
        parts=parts,
        inference_by=sizes.inference_by,
        instances=sizes.generation_units,
        time_s=mean(result.outcome.generation_s),
        stage_s=mean(result.outcome.stage_s),
        lower_bound_s=result.generation_bound_s,
        baselines_s={name: mean(outcome.generation_s) for name, outcome in result.dispatches.items()}
        | {"floor": result.longest_alone_s},
        preemptions=judge.preemptions(sizes.split),
    )


def split_part(result: SearchResult, samples: int) -> SplitPart:
    split, tail_samples, held_out = result.sizes.split, result.steps.tail_samples, result.judge
    if isinstance(held_out, MixDispatcher) or isinstance(split, PoolMix):
        return SplitPart(
            used=False,
            tail=GroupPart(samples=0, instances=0, batch=0),
            regular=GroupPart(samples=samples, instances=split.instances, batch=0),
            gain=0.0,
            best_gain=0.0,
            if_misses_any=None,
            reason="each pool has a range of the samples and no groups within it",
        )
    unsplit = TailSplit(0, split.instances)
    makespan = mean(held_out.makespans(unsplit))
    gain = 1 - mean(held_out.makespans(split)) / makespan
    best_gain = 1 - mean(held_out.makespans(result.best_split)) / makespan
    pessimistic, pessimistic_gain = held_out.pessimistic, None
    if split.tail and pessimistic is not None:
        pessimistic_gain = 1 - mean(pessimistic.makespans(split)) / mean(pessimistic.makespans(unsplit))
    if split.tail:
        reason = f"it gains {100 * gain:.1f} % on held-out steps"
    elif split.instances < 2:
        reason = "one instance cannot be split"
    elif not result.best_split.tail:
        reason = "the search ended before a split was tried"
    else:
        reason = (
            f"no split has a significant gain, with doubt of the ranker; the best one gains {100 * best_gain:.1f} % if "
            "the ranker is as stated"
        )

    def group(samples: int, instances: int) -> GroupPart:
        batch = 0 if instances == 0 else min(-(-samples // instances), held_out.engine.max_batch)
        return GroupPart(samples=samples, instances=instances, batch=batch)

    return SplitPart(
        used=split.tail > 0,
        tail=group(tail_samples if split.tail else 0, split.tail),
        regular=group(held_out.samples - tail_samples if split.tail else held_out.samples, split.regular),
        gain=gain,
        best_gain=best_gain,
        if_misses_any=pessimistic_gain,
        reason=reason,
    )


def dispatch_rule(problem: RlProblem, result: SearchResult) -> str:
    split, tail_samples, pools = result.sizes.split, result.steps.tail_samples, problem.sizing.pools
    order = "in the ranker's order, longest first"
    take = "an instance with room takes the next sample; if several have room, the one with the smallest batch does"
    if isinstance(split, PoolMix):
        ranges = ", ".join(f"{stop - start} for {pools[pool].name!r}" for pool, _, start, stop in split.ranges())
        return f"the samples {order}, are divided into ranges ({ranges}), each with one queue; {take}"
    if split.tail == 0:
        return f"all samples wait in one queue {order}; {take}"
    return (
        f"the {tail_samples} samples ranked longest wait in the queue of the tail instances, the others in that of "
        f"the regular instances, each {order}; {take}"
    )


def migration_part(problem: RlProblem, result: SearchResult) -> MigrationPart | None:
    migration = result.migration
    if migration is None:
        return None
    return MigrationPart(
        applied=result.migration_applied,
        threshold=migration.threshold,
        threshold_share=migration.threshold / problem.samples,
        remaining_instances=migration.remaining,
        at_s=migration.at_s,
        moved_samples=migration.moved,
        moved_bytes=migration.moved_bytes,
        generation_s=migration.generation_s,
        stage_s=migration.stage_s,
        without_s=mean(result.unmigrated.stage_s),
        freed_unit_s=migration.freed_s,
    )


def explain(request: RlRequest, problem: RlProblem, result: SearchResult, split: SplitPart) -> list[str]:
    """The explanation of a plan; ``request`` has resolved costs."""
    return [
        *_stages(problem, result),
        f"all times are simulated: means over {len(result.steps)} held-out steps, drawn from the lengths and not used "
        "by the search",
        *_assumed(request),
        *_split(result, split),
        *_programs(request, result, split),
        *_search(result),
    ]


def _assumed(request: RlRequest) -> Iterator[str]:
    curves = [pool.decode for pool in request.pools if pool.decode is not None]
    if not all(isinstance(curve, DecodeCurve) and curve.from_past is not None for curve in curves):
        yield (
            "assumed: a decode step takes the seconds of the decode curve at any length of the response, as if all "
            "samples had the past that the curve was made for"
        )


def _stages(problem: RlProblem, result: SearchResult) -> Iterator[str]:
    sizes, pools = result.sizes, problem.sizing.pools
    generation_s = float(result.outcome.generation_s.mean())
    if sizes.training is not None:
        stage_s, training_s = float(result.outcome.stage_s.mean()), float(result.outcome.training_s.mean())
        pool = problem.sizing.stage_name(sizes)
        if sizes.shared:
            yield (
                f"all {sizes.generation_units} units of {pool!r} generate, then train, which is better than separate "
                "units"
            )
        yield (
            f"{'generation' if stage_s >= training_s else 'training'} is the longer stage: generation takes "
            f"{format_latency(stage_s)} on {sizes.generation_units} units of {pool!r}, training "
            f"{format_latency(training_s)} on {sizes.training_units} units of {pools[sizes.training].name!r}"
        )
    share = result.longest_alone_s / generation_s
    yield (
        f"the longest sample alone takes {format_latency(result.longest_alone_s)}, {100 * share:.0f} % of the "
        f"generation's {format_latency(generation_s)}" + (": more instances hardly help" if share > 0.95 else "")
    )


def _split(result: SearchResult, split: SplitPart) -> Iterator[str]:
    yield f"tail split {'used' if split.used else 'not used'}: {split.reason}"
    if split.if_misses_any is not None and split.if_misses_any < -0.01:
        yield (
            "the plan assumes that the ranker misses only samples near the border of the longest; if it misses all "
            f"long samples equally often, generation takes {-100 * split.if_misses_any:.1f} % longer than without a "
            'split: set ranker.misses to "any" for such a ranker, or raise ranker.doubt if you are not sure'
        )
    guessed = result.dispatches.get("guesses")
    lead = 0.0 if guessed is None else 1.0 - float(guessed.step_s.mean()) / float(result.outcome.step_s.mean())
    if lead > 1e-3:
        yield (
            f"the baseline guesses is {100 * lead:.1f} % faster: it uses a guess of each length, the ranker only flags "
            "the longest"
        )


def _programs(request: RlRequest, result: SearchResult, split: SplitPart) -> Iterator[str]:
    if result.sizes.generation != MIXED:
        yield from _decoding(request.pools[result.sizes.generation], split)
    training = None if result.sizes.training is None else request.pools[result.sizes.training].training
    if training is not None and training.sample is not None:
        yield f"training of a sample: {training.sample.cost.largest()}"
    for name, cost in request.weights.predicted().items():
        yield f"weights, {name}: {format_latency(cost.latency_s)}: {cost.largest()}"


def _decoding(pool: PoolForm, split: SplitPart) -> Iterator[str]:
    """Programs of a decoding step at the batch of the tail."""
    if pool.decode is None:
        return
    sizes, costs = pool.decode.points()
    point = int(np.argmin(np.abs(sizes - (split.tail.batch or split.regular.batch))))
    if costs[point].parts:
        yield (
            f"a token at batch {int(sizes[point])} takes {format_latency(costs[point].latency_s)}: "
            f"{costs[point].largest(3)}"
        )
        if max(split.tail.batch, split.regular.batch) > sizes[-1]:
            yield f"beyond batch {int(sizes[-1])} the decode curve is proportional to the batch"


def _search(result: SearchResult) -> Iterator[str]:
    migration = result.migration
    if migration is not None:
        yield (
            f"at {migration.threshold} unfinished samples, after {format_latency(migration.at_s)}, "
            f"{migration.remaining} instances take over the rest, which frees {migration.freed_s:.3g} unit-seconds"
        )
    if not result.complete:
        yield f"the search ended after {result.sizes_tried} generation sizes, before all were simulated"
