"""The typed plan of a search result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.planning.rl.dispatch import Dispatcher, TailSplit
from cdmpp.planning.rl.evaluate import evaluate
from cdmpp.planning.rl.explanation import explain
from cdmpp.planning.rl.generation import generate
from cdmpp.planning.rl.lengths import SampledSteps
from cdmpp.planning.rl.migration import simulate_migration
from cdmpp.planning.rl.plan_schema import (
    CurvePart,
    DispatchPart,
    GenerationPart,
    GroupPart,
    HistogramPart,
    LengthsPart,
    MigrationPart,
    ObjectivePart,
    RlPlan,
    SizesPart,
    SplitPart,
    StreamingPart,
    TrainingPart,
)
from cdmpp.planning.rl.problem import CostFigure, RlProblem, make_problem, pool_costs
from cdmpp.planning.rl.schema import DecodeLine, PoolForm, RlRequest
from cdmpp.planning.rl.search import SearchResult
from cdmpp.planning.rl.sizes import PoolSizes

#: Bins of the length histogram; most points of the Pareto front that a plan lists.
BINS, MOST_FRONT = 32, 64


def plan_of(request: RlRequest, problem: RlProblem, result: SearchResult) -> RlPlan:
    """The plan of a search result.

    Parameters
    ----------
    request : RlRequest
        With resolved costs.
    problem : RlProblem
        Made from the request.
    result : SearchResult

    Raises
    ------
    FieldError
        The lower bound of the price is 0.
    """
    sizes, sizing = result.sizes, problem.sizing
    pool = sizing.pools[sizes.generation]
    held_out = problem.dispatcher(pool.generation_engine(), result.steps, held_out=True)
    bound = result.bound_s if problem.objective == "time" else result.bound_price
    if bound == 0:
        raise FieldError(
            "pools without a price can run the whole step, so that the lower bound of its price is 0",
            path="pools",
            hint='give every pool a price, or use "objective": "time"',
        )
    lower_s, upper_s = _interval(request, result)
    split = _split(result, held_out)
    return RlPlan(
        objective=ObjectivePart(name=problem.objective, value=sizes.value(problem.objective), lower_bound=bound),
        mode=sizing.mode,
        step_s=sizes.step_s,
        step_lower_s=lower_s,
        step_upper_s=upper_s,
        lower_bound_s=result.bound_s,
        price_per_step=sizes.price,
        generation=_generation(result, pool.name, held_out),
        training=_training(problem, result),
        tail_split=split,
        dispatch=DispatchPart(rule="lpt", words=_dispatch_rule(sizes.split, result.steps.tail_samples)),
        streaming=_streaming(problem, result),
        migration=_migration(problem, result),
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


def _mean(values: Any) -> float:
    return float(np.mean(values))


def _interval(request: RlRequest, result: SearchResult) -> tuple[float | None, float | None]:
    """Step time of the same plan with all predictions at their lower and at their upper bounds."""
    if not any(cost.parts for pool in request.pools for cost in pool_costs(pool)):
        return None, None
    sizes = result.sizes

    def step_s(figure: CostFigure) -> float:
        problem = make_problem(request, figure)
        sizing = problem.sizing
        dispatcher = Dispatcher(sizing.pools[sizes.generation].generation_engine(), result.steps)
        migration = None
        if result.migration_applied and result.migration is not None:
            threshold, remaining = result.migration.threshold, result.migration.remaining
            inference_s = sizing.generation_inference_s(sizes)
            migration = simulate_migration(dispatcher, sizes.split, threshold, remaining, problem.link, inference_s)
        return _mean(evaluate(sizing, sizes, dispatcher, migration).step_s)

    bounds = step_s("lower_s"), step_s("upper_s")
    return min(*bounds, sizes.step_s), max(*bounds, sizes.step_s)


def _baselines(problem: RlProblem, result: SearchResult) -> dict[str, float]:
    """The objective of simpler plans with the same units."""
    factor = 1.0 if problem.objective == "time" else problem.sizing.price_per_s(result.sizes)
    baselines = {
        "random": _mean(result.random.step_s) * factor,
        "lpt": _mean(result.lpt.step_s) * factor,
        "rule": _mean(result.quantile_rule.step_s) * factor,
        "guesses": _mean(result.guessed.step_s) * factor,
        "floor": result.longest_alone_s * factor,
    }
    if result.sizes.batches > 1:
        baselines["not_streamed"] = _mean(result.unstreamed.step_s) * factor
    if result.migration_applied:
        baselines["not_migrated"] = _mean(result.unmigrated.step_s) * factor
    if result.colocated is not None:
        baselines["colocated"] = result.colocated[0 if problem.objective == "time" else 1]
    return baselines


def _generation(result: SearchResult, pool: str, held_out: Dispatcher) -> GenerationPart:
    queues = result.sizes.split.queues(held_out.samples, result.steps.tail_samples)
    preemptions = [generate(held_out.engine, row, queues).preemptions for row in result.steps.lengths]
    return GenerationPart(
        pool=pool,
        inference_by=result.sizes.inference_by,
        instances=result.sizes.generation_units,
        time_s=_mean(result.outcome.generation_s),
        stage_s=_mean(result.outcome.stage_s),
        lower_bound_s=result.generation_bound_s,
        baselines_s={
            "random": _mean(result.random.generation_s),
            "lpt": _mean(result.lpt.generation_s),
            "rule": _mean(result.quantile_rule.generation_s),
            "guesses": _mean(result.guessed.generation_s),
            "floor": result.longest_alone_s,
        },
        preemptions=_mean(preemptions),
    )


def _training(problem: RlProblem, result: SearchResult) -> TrainingPart | None:
    if result.sizes.training is None:
        return None
    return TrainingPart(
        shared=result.sizes.shared,
        pool=problem.sizing.pools[result.sizes.training].name,
        units=result.sizes.training_units,
        time_s=_mean(result.outcome.training_s),
        idle_s=_mean(result.outcome.idle_s),
    )


def _split(result: SearchResult, held_out: Dispatcher) -> SplitPart:
    split, tail_samples = result.sizes.split, result.steps.tail_samples
    unsplit = TailSplit(0, split.instances)
    makespan = _mean(held_out.makespans(unsplit))
    gain = 1 - _mean(held_out.makespans(split)) / makespan
    best_gain = 1 - _mean(held_out.makespans(result.best_split)) / makespan
    pessimistic, pessimistic_gain = held_out.pessimistic, None
    if split.tail and pessimistic is not None:
        pessimistic_gain = 1 - _mean(pessimistic.makespans(split)) / _mean(pessimistic.makespans(unsplit))
    if split.tail:
        reason = f"it gains {100 * gain:.1f} % on held-out steps"
    elif split.instances < 2:
        reason = "one instance cannot be split"
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


def _dispatch_rule(split: TailSplit, tail_samples: int) -> str:
    order = "in the ranker's order, longest first"
    take = "an instance with room takes the next sample; if several have room, the one with the smallest batch does"
    if split.tail == 0:
        return f"all samples wait in one queue {order}; {take}"
    return (
        f"the {tail_samples} samples ranked longest wait in the queue of the tail instances, the others in that of "
        f"the regular instances, each {order}; {take}"
    )


def _streaming(problem: RlProblem, result: SearchResult) -> StreamingPart | None:
    if result.sizes.training is None or result.sizes.shared:
        return None
    step_s = result.outcome.step_s
    return StreamingPart(
        mode=problem.sizing.mode,
        batches=result.sizes.batches,
        samples_per_batch=problem.samples / result.sizes.batches,
        training_bubble=_mean(result.outcome.idle_s / step_s),
        generation_bubble=_mean(1 - result.outcome.stage_s / step_s),
        serial_s=_mean(result.unstreamed.step_s),
    )


def _migration(problem: RlProblem, result: SearchResult) -> MigrationPart | None:
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
        without_s=_mean(result.unmigrated.stage_s),
        freed_unit_s=migration.freed_s,
    )


def _front_sizes(problem: RlProblem, sizes: PoolSizes) -> SizesPart:
    pools = problem.sizing.pools
    return SizesPart(
        generation_pool=pools[sizes.generation].name,
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
    seconds = [cost.latency_s for cost in costs]
    lower, upper = [cost.lower_s for cost in costs], [cost.upper_s for cost in costs]
    if isinstance(pool.decode, DecodeLine):
        # Its points are far apart; show the range of batches in use.
        shown = np.unique(np.array([1, max_batch]))
        seconds = lower = upper = np.interp(shown, sizes, seconds).tolist()
        sizes = shown
    return CurvePart(
        pool=pool.name, batch=sizes.astype(int).tolist(), seconds_per_token=seconds, lower_s=lower, upper_s=upper
    )
