"""The planning problem that the search works on, built from a request with resolved costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.plan.base.batch_curve import interpolate
from cdmpp.plan.fused.schema import FusedPlan, FusedRequest, ModelForm
from cdmpp.plan.rl.dispatch import Dispatcher, TailSplit
from cdmpp.plan.rl.generation import Floats, GenerationEngine
from cdmpp.plan.rl.lengths import LengthDistribution, RankerForm, SampledSteps, draw_steps
from cdmpp.plan.rl.measured import MeasuredStep, StageFactors
from cdmpp.plan.rl.migration import MigrationLink
from cdmpp.plan.rl.pools import DecodeCurve, PipelineForm, PoolForm, TrainingForm, least_training_units, within
from cdmpp.plan.rl.schema import RlRequest
from cdmpp.plan.rl.sizes import Objective, Pool, SizingProblem
from cdmpp.plan.rl.training import TrainingCost
from cdmpp.plan.rl.weights import WEIGHT_COSTS
from cdmpp.predict.curves.points import monotone_fit
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.memory import memory_limit
from cdmpp.predict.requests.pricing import Figure, cost_of

#: Path of a schedule's request in the request, or in a pool with a training cost of its own.
REQUEST_PATH = "training.pipeline.request"
#: Largest share of the remaining budget for one schedule.
MOST_SHARE = 0.25
#: Steps that are simulated for a measured step.
MEASURED_DRAWS = 2
#: Samples move without cost.
FREE_LINK = MigrationLink(0.0, 1.0)


@dataclass(frozen=True)
class PipelineSchedule:
    """Time of one run of a schedule."""

    # Makespan, with the predictions and with their bounds.
    latency_s: float
    lower_s: float
    upper_s: float
    plan: FusedPlan | None = None  # the schedule; None if the request gives its answer only


def compile_pipelines(costs: Sequence[TrainingForm | None]) -> None:
    """Compile the search for schedules before the budget begins, if one of the costs needs it."""
    if any(cost is not None and cost.pipeline is not None and cost.pipeline.request is not None for cost in costs):
        model = ModelForm(stages=1, micro_batches=1, forward_s=1.0, backward_s=1.0)
        FusedRequest(models=[model], ranks=1, max_steps=1).solve(SearchControl())


def schedules(
    costs: Sequence[TrainingForm | None], control: SearchControl, ignore_memory: bool = False
) -> dict[int, PipelineSchedule]:
    """Schedules of the costs that have pipelines, by index; equal pipelines are searched once.

    Raises FieldError or InfeasibleError: a schedule cannot be made.
    """
    forms = {index: cost.pipeline for index, cost in enumerate(costs) if cost is not None and cost.pipeline is not None}
    by_index: dict[int, PipelineSchedule] = {}
    for index, form in forms.items():
        known = next((schedule for other, schedule in by_index.items() if forms[other] == form), None)
        by_index[index] = known or _schedule(form, control, ignore_memory)
    return by_index


def _schedule(form: PipelineForm, control: SearchControl, ignore_memory: bool) -> PipelineSchedule:
    plan, request = None, form.schedule_request(ignore_memory)
    if request is not None:
        try:
            plan = request.solve(control.part(min(request.budget_s, MOST_SHARE * control.left_s)))
        except FieldError as error:
            raise within(error, REQUEST_PATH) from None
    answer = plan or form.answer
    assert answer is not None
    seconds, interval = answer.makespan_s, answer.interval
    lower_s, upper_s = (seconds, seconds) if interval is None else (interval.lower_s, interval.upper_s)
    return PipelineSchedule(seconds, min(lower_s, seconds), max(upper_s, seconds), plan)


def cached_table(sizes: Floats, slopes: Floats, max_batch: int) -> Floats:
    """Seconds that each cached token of a batch adds to a step, at batch sizes 0 (unused), 1, ..., ``max_batch``.

    ``slopes``: seconds for each cached token of every sample, at some batch sizes.
    """
    batches = np.arange(max_batch + 1)
    return np.asarray(interpolate(sizes, slopes, batches) / np.maximum(batches, 1), dtype=np.float64)


def token_table(sizes: Floats, seconds: Floats, max_batch: int) -> Floats:
    """The decode curve at batch sizes 0 (unused), 1, ..., ``max_batch``.

    ``sizes``, ``seconds``: points of the curve, in order of growing size. Seconds that fall are replaced by a monotone
    fit, as in ``/curve``: a larger batch is not faster. The curve is linear between the points, constant below the
    first, and proportional to the batch beyond the last.
    """
    logs = np.log(np.maximum(seconds, 1e-15))
    fitted = monotone_fit(logs, [0])
    smooth = np.where(fitted == logs, np.maximum(seconds, 1e-15), np.exp(fitted))
    return np.asarray(interpolate(sizes, smooth, np.arange(max_batch + 1)), dtype=np.float64)


@dataclass(frozen=True)
class RlProblem:
    """One step of reinforcement learning to plan."""

    lengths: LengthDistribution
    ranker: RankerForm
    samples: int  # samples of a step
    sizing: SizingProblem
    link: MigrationLink = FREE_LINK
    objective: Objective = "time"
    slack: float = 0.0  # share by which a step may be longer than the shortest if it is cheaper
    most_step_s: float | None = None  # upper limit of the mean step
    draws: int = 16  # number of search steps, and of held-out steps
    seed: int = 0
    doubt: float = 0.0  # probability that a ranker with "near" misses has "any" misses instead
    factors: StageFactors | None = None  # of measured steps; part of all seconds already

    def spread(self, stages: Sequence[float], shared: bool) -> float:
        """Factor from a step to the upper end of its interval, for the uncertainty of the factors of the stages."""
        if self.factors is None:
            return 1.0
        staleness = 0 if self.sizing.mode == "sync" else self.sizing.staleness
        return self.factors.spread(np.array(stages), shared, staleness)

    def steps(self, held_out: bool, pessimistic: bool = False) -> SampledSteps:
        """Steps of the search or held-out ones; ``pessimistic``: the ranker misses any of the longest samples."""
        seed = np.random.SeedSequence(self.seed).spawn(4)[held_out + 2 * pessimistic]
        ranker = self.ranker.model_copy(update={"misses": "any"}) if pessimistic else self.ranker
        return draw_steps(self.lengths, ranker, self.samples, self.draws, seed)

    def dispatchers(self, engines: Mapping[int, GenerationEngine], held_out: bool) -> dict[int, Dispatcher]:
        """Dispatchers of pools on the same sampled steps, and on those of a pessimistic ranker unless it is one."""
        steps = self.steps(held_out)
        pessimistic = None if self.ranker.misses == "any" else self.steps(held_out, pessimistic=True)
        doubt = 0.0 if pessimistic is None else self.doubt
        return {index: Dispatcher(engine, steps, pessimistic, doubt) for index, engine in engines.items()}


def make_problem(
    request: RlRequest, figure: Figure = "latency_s", schedules: Mapping[int, PipelineSchedule] | None = None
) -> RlProblem:
    """The problem of a request with resolved costs; ``schedules``: of the pools that train by pipelines, by index."""
    schedules = schedules or {}
    lengths = request.lengths.distribution(request.samples_per_step)
    weights = request.weights
    same_site_s, cross_site_s, shared_s = (float(getattr(weights.cost(name), figure)) for name in WEIGHT_COSTS)
    sizing = SizingProblem(
        tuple(_pool(request, pool, lengths, figure, schedules.get(index)) for index, pool in enumerate(request.pools)),
        request.effective_mode,
        same_site_s,
        cross_site_s,
        shared_s,
        request.layout,
        request.generation_units,
        request.training_units,
        request.staleness if request.effective_mode == "async" else None,
        None if weights.transfer is None else partial(weights.transfer.seconds, figure=figure),
        request.mix_pools,
    )
    problem = RlProblem(
        lengths,
        request.ranker,
        request.samples_per_step,
        sizing,
        MigrationLink(request.kv.bytes_per_token or 0.0, request.link_bytes_per_s),
        request.objective,
        request.slack,
        request.most_step_s,
        request.draw_count(),
        request.seed,
        request.ranker.doubt,
    )
    if request.measured is None:
        return problem
    staleness = 0 if sizing.mode == "sync" else sizing.staleness
    predicted = [stages_s(problem, step, f"measured.{i}") for i, step in enumerate(request.measured)]
    factors = StageFactors.fit(request.measured, predicted, staleness) if predicted else StageFactors.prior()
    return replace(problem, sizing=_scaled(sizing, factors), factors=factors)


def stages_s(problem: RlProblem, step: MeasuredStep, path: str) -> Floats:
    """Predicted seconds of generation, inference, training and transfer with the sizes of a measured step."""
    if step.predicted is not None:
        return step.predicted.array()
    sizing = problem.sizing
    generation = next(i for i, pool in enumerate(sizing.pools) if pool.engine is not None)
    trainer = next((i for i, pool in enumerate(sizing.pools) if pool.training is not None), generation)
    pool, cost = sizing.pools[generation], sizing.pools[trainer].training
    dispatcher = Dispatcher(pool.generation_engine(), problem.steps(held_out=False).first(MEASURED_DRAWS))
    units, samples = step.training_units or step.generation_units, float(problem.samples)
    if cost is None or not cost.can_train(np.array(units)):
        raise FieldError.at(path, f"{units} units do not train", hint="give predicted beside the seconds")
    split = TailSplit(0, step.generation_units)
    tokens, shared = float(dispatcher.tokens.mean()), step.training_units is None
    trained_s, inferred_s = cost.whole_s(samples, tokens, units), cost.inference_work_s(samples, tokens, units)
    transfer_s = sizing.shared_s + cost.swap_s(units)
    if not shared:
        transfer_s = sizing.weights_s(sizing.stage(generation, split), trainer)
    inference_s = float(inferred_s) + samples * pool.inference_s / step.generation_units
    generation_s = float(dispatcher.makespans(split).mean())
    return np.array([generation_s, inference_s, float(trained_s - inferred_s), transfer_s])


def _scaled(sizing: SizingProblem, factors: StageFactors) -> SizingProblem:
    """The same pools with all seconds times the factor of their stage."""
    generation, inference, training, transfer = factors.values
    pools = []
    for pool in sizing.pools:
        engine, cost = pool.engine, pool.training
        if engine is not None:
            engine = replace(
                engine,
                seconds_per_token=generation * engine.seconds_per_token,
                seconds_per_cached=generation * engine.seconds_per_cached,
                prefill_s=generation * engine.prefill_s,
            )
        if cost is not None:
            names = ("per_sample_s", "per_token_s", "fixed_s", "batch_overhead_s", "run_s")
            seconds: dict[str, Any] = {name: training * getattr(cost, name) for name in names}
            sized = None if cost.sized is None else cost.sized.scaled(training, inference, transfer)
            cost = replace(cost, **seconds, inference_s=inference * cost.inference_s, sized=sized)
        pools.append(replace(pool, engine=engine, training=cost, inference_s=inference * pool.inference_s))
    return replace(sizing, pools=tuple(pools), shared_s=transfer * sizing.shared_s, transfer_factor=transfer)


def is_predicted(request: RlRequest) -> bool:
    """Whether any cost of a request with resolved costs is predicted."""
    costs = list(request.weights.predicted().values())
    for pool in request.pools:
        fields = [pool.prefill, pool.inference, None if pool.training is None else pool.training.sample]
        costs += [cost_of(field) for field in fields if field is not None]
        curves = [pool.decode, None if pool.training is None else pool.training.curve]
        costs += [cost for curve in curves if curve is not None for cost in curve.points()[1]]
    return any(cost.parts for cost in costs)


def _pool(
    request: RlRequest, form: PoolForm, lengths: LengthDistribution, figure: Figure, schedule: PipelineSchedule | None
) -> Pool:
    """A pool of the search. An entering sample needs free memory for a response of median length."""
    engine, training = None, None
    if form.decode is not None:
        sizes, costs = form.decode.points()
        seconds, slopes = np.array([getattr(cost, figure) for cost in costs]), np.zeros(len(sizes))
        if isinstance(form.decode, DecodeCurve):
            sizes, seconds, slopes = form.decode.by_cached(figure)
        engine = GenerationEngine(
            token_table(sizes, seconds, request.kv.max_batch),
            request.instance_memory(form, lengths.longest + request.prompt_tokens).tokens,
            request.prompt_tokens,
            getattr(cost_of(form.prefill), figure),
            lengths.median(),
            cached_table(sizes, slopes, request.kv.max_batch),
        )
    if form.training is not None:
        cost = form.training
        predicted_s = 0.0 if cost.sample is None else getattr(cost.sample.cost, figure)
        token_s, once_s = cost.of_curve(figure)
        training = TrainingCost(
            predicted_s + (cost.seconds_per_sample or 0.0) + (cost.step_s or 0.0) / request.samples_per_step,
            token_s + (cost.seconds_per_token or 0.0),
            once_s + cost.fixed_s,
            cost.efficiency,
            cost.batch_overhead_s,
            memory_units=least_training_units(form, request.pools, request.ignore_memory),
            run_samples=cost.mini_batch or request.samples_per_step,
            sized=cost.sized(figure, memory_limit(None, [form.device], request.ignore_memory)),
        )
        if cost.pipeline is not None:
            assert schedule is not None, "schedules of all pools are given"
            training = replace(
                training,
                run_s=getattr(schedule, figure),
                run_samples=cost.pipeline.samples,
                run_units=cost.pipeline.units,
            )
    inference_s = getattr(cost_of(form.inference), figure)
    return Pool(form.name, form.units, form.price_per_hour, form.site, engine, training, inference_s, form.placement)
