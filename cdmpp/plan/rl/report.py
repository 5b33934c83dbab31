"""The typed plan of a search result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.plan.rl.dispatch import Dispatcher
from cdmpp.plan.rl.evaluate import evaluate
from cdmpp.plan.rl.explanation import explain
from cdmpp.plan.rl.lengths import SampledSteps
from cdmpp.plan.rl.migration import simulate_migration
from cdmpp.plan.rl.mixture import MixDispatcher, PoolMix
from cdmpp.plan.rl.pipeline import PipelineSchedule
from cdmpp.plan.rl.plan_schema import (
    CurvePart,
    DispatchPart,
    HistogramPart,
    LengthsPart,
    ObjectivePart,
    PipelinePart,
    RlPlan,
    SizesPart,
    StreamingPart,
    TrainingPart,
)
from cdmpp.plan.rl.pool_schema import DecodeLine, PoolForm
from cdmpp.plan.rl.problem import CostFigure, RlProblem, make_problem, pool_costs
from cdmpp.plan.rl.report_generation import dispatch_rule, generation_part, mean, migration_part, split_part
from cdmpp.plan.rl.schema import RlRequest
from cdmpp.plan.rl.search_result import SearchResult
from cdmpp.plan.rl.sizes import PoolSizes
from cdmpp.plan.rl.streaming import asynchronous_step

#: Bins of the length histogram; most points of the Pareto front that a plan lists.
BINS, MOST_FRONT = 32, 64


def plan_of(
    request: RlRequest,
    problem: RlProblem,
    result: SearchResult,
    schedules: Mapping[int, PipelineSchedule] | None = None,
) -> RlPlan:
    """The plan of a search result.

    Parameters
    ----------
    request : RlRequest
        With resolved costs.
    problem : RlProblem
        Made from the request.
    result : SearchResult
    schedules : mapping of int to PipelineSchedule, optional
        Schedules of the pools that train by pipelines, by index.

    Raises
    ------
    FieldError
        The lower bound of the price is 0.
    """
    sizes, sizing = result.sizes, problem.sizing
    bound = result.bound_s if problem.objective == "time" else result.bound_price
    if bound == 0:
        raise FieldError(
            "pools without a price can run the whole step, so that the lower bound of its price is 0",
            path="pools",
            hint='give every pool a price, or use "objective": "time"',
        )
    schedules = schedules or {}
    lower_s, upper_s = _interval(request, result, schedules)
    split = split_part(result, problem.samples)
    return RlPlan(
        objective=ObjectivePart(name=problem.objective, value=sizes.value(problem.objective), lower_bound=bound),
        mode=sizing.mode,
        step_s=sizes.step_s,
        step_lower_s=lower_s,
        step_upper_s=upper_s,
        lower_bound_s=result.bound_s,
        price_per_step=sizes.price,
        generation=generation_part(problem, result),
        training=_training(problem, result, schedules),
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


def _interval(
    request: RlRequest, result: SearchResult, schedules: Mapping[int, PipelineSchedule]
) -> tuple[float | None, float | None]:
    """Step time of the same plan with all predictions at their lower and at their upper bounds."""
    predicted = any(cost.parts for pool in request.pools for cost in pool_costs(pool))
    predicted = predicted or bool(request.weights.predicted())
    if not predicted and not any(schedule.predicted for schedule in schedules.values()):
        return None, None
    sizes = result.sizes

    def step_s(figure: CostFigure) -> float:
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
    if result.colocated is not None:
        baselines["colocated"] = result.colocated[0 if time else 1]
    if result.one_pool is not None:
        baselines["one_pool"] = result.one_pool[0 if time else 1]
    return baselines


def _training(
    problem: RlProblem, result: SearchResult, schedules: Mapping[int, PipelineSchedule]
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
    return TrainingPart(
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
