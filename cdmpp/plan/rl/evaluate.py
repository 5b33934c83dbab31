"""Evaluation of given sizes on sampled steps: seconds of the stages, lower bounds, and the elastic table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from cdmpp.plan.rl.dispatch import AnyDispatcher, Dispatcher, MixDispatcher, TailSplit, never
from cdmpp.plan.rl.generation import Floats, Ints
from cdmpp.plan.rl.lengths import SampledSteps
from cdmpp.plan.rl.migration import Migration, inference_after
from cdmpp.plan.rl.schema import Action, ElasticPart
from cdmpp.plan.rl.sizes import MOST_COUNTS, GenerationStage, Objective, Pool, PoolSizes, SizingProblem, Stage, grid
from cdmpp.plan.rl.training import ReadyTimes, TrainingCost, asynchronous_step

#: Largest array (draws x generation sizes x training sizes); above it, means over the draws are compared.
MOST_CELLS = 2**20
#: Fewest blocks into which many sizes are divided; more of them for few pools.
FEWEST_BLOCKS = 64
#: Factors on the planned response lengths.
GROWTH = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
#: Steps to simulate per factor.
MOST_DRAWS = 8
#: A unit is added only if it saves this share of generation.
MIN_SAVING = 0.01


@dataclass(frozen=True)
class StepOutcome:
    """Seconds of each simulated step; all arrays are (draws,)."""

    generation_s: Floats  # until the last sample is generated
    stage_s: Floats  # until the inference of the last sample is done
    training_s: Floats  # work of training, without waiting; 0 without training
    idle_s: Floats  # waiting of training within the step
    step_s: Floats  # until the next step can start


def evaluate(
    problem: SizingProblem, sizes: PoolSizes, dispatcher: AnyDispatcher, migration: Migration | None = None
) -> StepOutcome:
    """Simulate steps with given sizes, split and number of batches; ``migration``: on the steps of ``dispatcher``."""
    if migration is not None:
        return _outcome(problem, sizes, dispatcher, migration.ends_s, migration.ready_s, sizes.batches)
    finish = dispatcher.finish_times(sizes.split)
    return _outcome(problem, sizes, dispatcher, finish.max(1), _ready(problem, sizes, finish), sizes.batches)


def evaluate_finish(
    problem: SizingProblem, sizes: PoolSizes, dispatcher: AnyDispatcher, finish_s: Floats
) -> StepOutcome:
    """Simulate the stages after a generation with finish times (draws, samples), with the best number of batches."""
    return _outcome(problem, sizes, dispatcher, finish_s.max(1), _ready(problem, sizes, finish_s), None)


def colocated(
    problem: SizingProblem, objective: Objective, dispatchers: dict[int, Dispatcher]
) -> tuple[float, float] | None:
    """Seconds and price of a step if all units of the best pool generate, then all train; None if none can."""
    steps: list[tuple[float, float]] = []
    for sizes in colocated_sizes(problem, dispatchers, fixed=False):
        seconds = float(evaluate(problem, sizes, dispatchers[sizes.generation]).step_s.mean())
        steps.append((seconds, seconds * problem.price_per_s(sizes)))
    return min(steps, key=lambda step: step[0 if objective == "time" else 1], default=None)


def colocated_sizes(problem: SizingProblem, pools: Iterable[int], fixed: bool = True) -> Iterator[PoolSizes]:
    """All units of each pool that can train, generating and then training; ``fixed``: with the fixed numbers only."""
    for index in pools:
        pool = problem.pools[index]
        wrong = fixed and any(n not in (None, pool.units) for n in (problem.generation_units, problem.training_units))
        if pool.training is not None and pool.training.can_train(np.array(pool.units)) and not wrong:
            unsplit = TailSplit(0, pool.units)
            yield PoolSizes(index, pool.units, index, pool.units, unsplit, 1, 0.0, 0.0, shared=True)


def _ready(problem: SizingProblem, sizes: PoolSizes, finish_s: Floats) -> Floats:
    return inference_after(finish_s, problem.generation_inference_s(sizes), sizes.generation_units)


def _outcome(
    problem: SizingProblem,
    sizes: PoolSizes,
    dispatcher: AnyDispatcher,
    ends_s: Floats,
    ready_s: Floats,
    batches: int | None,
) -> StepOutcome:
    stage = ready_s.max(1)
    zeros = np.zeros(len(stage))
    if sizes.training is None:
        return StepOutcome(ends_s, stage, zeros, zeros, stage)
    cost = problem.cost_of(sizes)
    whole = cost.whole_s(dispatcher.samples, dispatcher.tokens, float(sizes.training_units))
    if sizes.shared:
        swap_s = problem.shared_s + cost.swap_s(sizes.training_units)
        return StepOutcome(ends_s, stage, whole, zeros, stage + whole + swap_s)
    weights_s = problem.weights_s(problem.stage_of(sizes), sizes.training)
    if problem.mode == "async":
        step = asynchronous_step(stage, whole, weights_s, problem.staleness)
        return StepOutcome(ends_s, stage, whole, step - whole, step)
    ready = ReadyTimes.of(ready_s, dispatcher.steps.lengths, dispatcher.prompt_tokens)
    units = np.array([sizes.training_units])
    counts = ready.batch_counts()
    if batches is not None:
        counts = [min(batches, counts[-1])]
    trained = [ready.trained(cost, units, count) for count in counts]
    end, idle = min(trained, key=lambda times: float(times[0].mean()))
    return StepOutcome(ends_s, stage, whole, idle[:, 0], end[:, 0] + weights_s)


def lower_bounds(problem: SizingProblem, dispatchers: dict[int, Dispatcher]) -> tuple[float, float]:
    """Lower bounds of the mean step: seconds and price.

    The bounds combine the longest sample decoded alone, all tokens at the batch with the highest throughput, and
    training without waiting. ``dispatchers``: by index of the generation pool.
    """
    bounds = [bound for pool, dispatcher in dispatchers.items() for bound in _bounds(problem, pool, dispatcher)]
    if problem.mixes and len(dispatchers) > 1:
        bounds += _mix_bounds(problem, dispatchers)
    return min(seconds for seconds, _ in bounds), min(price for _, price in bounds)


def _blocks(sizes: Ints, pools: int, cost: TrainingCost | None) -> tuple[Ints, Ints]:
    """Smallest and largest number of each block of sizes: the numbers themselves, unless there are many.

    Costs by size do not fall, so that their sizes have no blocks.
    """
    if len(sizes) <= MOST_COUNTS or (cost is not None and cost.sized is not None):
        return sizes, sizes
    ends = grid(len(sizes), max(MOST_COUNTS // pools, FEWEST_BLOCKS))
    return sizes[np.concatenate([[0], ends[:-1]]).astype(np.int64)], sizes[ends - 1]


def _bounds(problem: SizingProblem, pool: int, dispatcher: Dispatcher) -> list[tuple[float, float]]:
    """Seconds and price with generation in one pool, for each way to train."""
    generation, samples = problem.pools[pool], dispatcher.samples
    # Of a block of sizes: the time of the largest, the price of the smallest.
    all_sizes = np.arange(generation.placement, generation.units + 1, generation.placement)
    if problem.generation_units is not None:
        all_sizes = np.array(problem.generation_sizes(pool), dtype=np.int64)
    fewest, units = _blocks(all_sizes, len(problem.pools), generation.training)
    if not len(units):
        return []
    counts = units.astype(np.float64)
    longest, work, tokens = dispatcher.longest_alone_s()[:, None], dispatcher.work_s()[:, None], dispatcher.tokens
    generated = np.maximum(longest, work / counts)
    inferred = np.maximum(
        generated + generation.inference_s / counts, (work + samples * generation.inference_s) / counts
    )
    generation_prices = fewest.astype(np.float64) * generation.price_per_hour / 3600
    bounds: list[tuple[float, float]] = []

    def add(means: Floats, prices_per_s: Floats) -> None:
        if means.size:
            bounds.append((float(means.min()), float((means * prices_per_s).min())))

    if not problem.trains:
        add(inferred.mean(0), generation_prices)
        return bounds
    if problem.layout != "separate" and generation.training is not None:
        fixed = problem.training_units
        fits = np.full(len(units), True) if fixed is None else (fewest <= fixed) & (fixed <= units)
        fits &= generation.training.can_train(units)
        whole = generation.training.whole_s(samples, tokens[:, None], counts)
        swap_s = np.array([generation.training.swap_s(count) for count in units[fits].tolist()])
        add((inferred + whole).mean(0)[fits] + problem.shared_s + swap_s, generation_prices[fits])
    ready_times: list[tuple[Stage, Floats]] = [("generation", inferred), ("training", generated)]
    for inference_by, ready in ready_times if problem.layout != "shared" else []:
        for training, trainer in enumerate(problem.pools):
            # Sizes beside the smallest generation stage; larger ones leave fewer units.
            smallest = GenerationStage(((pool, int(fewest[0])),), 0.0)
            cost = problem.training_cost(training, inference_by)
            all_sizes = problem.training_sizes(smallest, training, most=trainer.units)
            fewest_trainers, sizes = _blocks(all_sizes, len(problem.pools), cost)
            if cost is None or not len(sizes):
                continue
            whole = cost.whole_s(samples, tokens[:, None], sizes.astype(np.float64))
            steps = _mean_steps(problem, ready, whole, cost, problem.weights_s(smallest, training))
            fits = (fewest[:, None] + fewest_trainers <= trainer.units) | (training != pool)
            prices = generation_prices[:, None] + fewest_trainers * (trainer.price_per_hour / 3600)
            add(steps[fits], prices[fits])
    return bounds


def _mix_bounds(problem: SizingProblem, dispatchers: dict[int, Dispatcher]) -> list[tuple[float, float]]:
    """Seconds and price with generation in several pools: all units that training leaves generate."""
    mixed = MixDispatcher(dispatchers)
    pools, samples, tokens = problem.pools, mixed.samples, mixed.tokens
    decoded = mixed.steps.lengths.sum(1).astype(np.float64)
    speeds = {pool: dispatcher.engine.tokens_per_s() for pool, dispatcher in dispatchers.items()}
    longest = mixed.longest_alone_s()
    # Every token costs at least as much as on the pool that decodes it most cheaply.
    token_price = min(pools[pool].price_per_hour / 3600 / speed for pool, speed in speeds.items())
    generation_price = float((decoded * token_price).mean())
    all_speed = sum(pools[pool].units * speed for pool, speed in speeds.items())
    if not problem.trains:
        return [(float(np.maximum(longest, decoded / all_speed).mean()), generation_price)]
    bounds: list[tuple[float, float]] = []
    for training, trainer in enumerate(pools):
        cost = problem.training_cost(training, "generation")
        nothing = GenerationStage(((training, 0),), 0.0)
        all_sizes = problem.training_sizes(nothing, training, most=trainer.units)
        fewest, sizes = _blocks(all_sizes, len(pools), cost)
        if cost is None or not len(sizes):
            continue
        left = all_speed - fewest * speeds.get(training, 0.0)
        ready = np.maximum(longest[:, None], decoded[:, None] / np.maximum(left, 1e-300))
        whole = replace(cost, inference_s=0.0).whole_s(samples, tokens[:, None], sizes.astype(np.float64))
        weights_s = min(problem.weights_s(GenerationStage(((pool, 1),), 0.0), training) for pool in dispatchers)
        pairs = ((ready[:, [index]], whole[:, [index]]) for index in range(len(sizes)))
        steps = np.array([_mean_steps(problem, *pair, cost, weights_s)[0, 0] for pair in pairs])
        prices = generation_price + steps * fewest * (trainer.price_per_hour / 3600)
        bounds.append((float(steps.min()), float(prices.min())))
    return bounds


def _mean_steps(
    problem: SizingProblem, ready_s: Floats, whole_s: Floats, cost: TrainingCost, weights_s: float
) -> Floats:
    """Lower bound of the mean step over the draws, (generation sizes, training sizes).

    ``ready_s``, ``whole_s`` (draws, sizes): ends of generation, and training in one batch.
    """
    steps = _mean_of_longer(ready_s, whole_s)
    ready = ready_s.mean(0)[:, None]
    if problem.mode == "sync":
        last_batch = ready + cost.batch_overhead_s + cost.fixed_s
        return np.asarray(np.maximum(steps, last_batch) + weights_s)
    steps = np.maximum(steps, weights_s)
    if problem.staleness is not None:
        steps = np.maximum(steps, (ready + whole_s.mean(0) + weights_s) / (problem.staleness + 1))
    return steps


def _mean_of_longer(stage_s: Floats, whole_s: Floats) -> Floats:
    """Mean over the draws of the longer stage, (generation sizes, training sizes), of two (draws, sizes)."""
    if stage_s.size * whole_s.shape[1] > MOST_CELLS:
        # The maximum of the means is at most the mean of the maxima.
        stage_s, whole_s = stage_s.mean(0, keepdims=True), whole_s.mean(0, keepdims=True)
    return np.asarray(np.maximum(stage_s[:, :, None], whole_s[:, None, :]).mean(0))


def action_of(gap_s: float, saving_s: float, loss_s: float | None, min_saving_s: float = 0.0) -> Action:
    """Whether to add a unit to generation, to give one back, or to keep the units."""
    if gap_s >= saving_s >= min_saving_s and gap_s > 0:
        return "add"
    if loss_s is not None and -gap_s >= loss_s and gap_s < 0:
        return "give back"
    return "keep"


def elastic_table(
    pool: Pool,
    split: TailSplit,
    cost: TrainingCost,
    training_units: int,
    steps: SampledSteps,
    free_units: int,
    over: Callable[[], bool] = never,
) -> list[ElasticPart]:
    """When to move a unit to or from generation as responses grow longer.

    StreamRL (section 5) adds a unit to generation if the gap ``T_gen - T_train`` is at least the saving predicted for
    that unit. Here the saving must also be at least :data:`MIN_SAVING`: if the longest sample alone takes the time,
    another instance saves nothing. A unit is removed if training is behind by at least the predicted loss.

    With other units or lengths than planned, the tail keeps its share of the instances of ``split``, or there is no
    split if that is better. Lengths of ``steps`` are scaled, and truncated at the memory limit. ``over``: whether to
    end with the rows so far.
    """
    engine, units, first_steps = pool.generation_engine(), split.instances, steps.first(MOST_DRAWS)
    longest = engine.memory_tokens - engine.prompt_tokens

    def stage_s(dispatcher: Dispatcher, count: int) -> float:
        makespans = [dispatcher.makespans(TailSplit(0, count))]
        if split.tail and count > 1:
            tail = min(max(round(split.tail * count / units), 1), count - 1)
            makespans.append(dispatcher.makespans(TailSplit(tail, count - tail)))
        inference_s = pool.inference_s * dispatcher.samples / count
        return min(float(seconds.mean()) for seconds in makespans) + inference_s

    rows = []
    for growth in GROWTH:
        if over():
            break
        lengths = np.clip(np.rint(first_steps.lengths * growth), 1, longest).astype(np.int64)
        dispatcher = Dispatcher(engine, replace(first_steps, lengths=lengths))
        tokens = float(dispatcher.tokens.mean())
        generation = stage_s(dispatcher, units)
        training = float(cost.whole_s(dispatcher.samples, tokens, float(training_units)))
        # Simulated means of different dispatches are not exactly monotone.
        saving = max(generation - stage_s(dispatcher, units + pool.placement), 0.0)
        fewer = units - pool.placement
        loss = max(stage_s(dispatcher, fewer) - generation, 0.0) if fewer > 0 else None
        gap = generation - training
        row = ElasticPart(
            growth=growth,
            generation_s=generation,
            training_s=training,
            gap_s=gap,
            saving_s=saving,
            loss_s=loss,
            action=action_of(gap, saving, loss, MIN_SAVING * generation),
            free_units=free_units,
        )
        rows.append(row)
    return rows


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan, its baselines and its bounds, all on held-out steps."""

    sizes: PoolSizes  # ``step_s`` and ``price`` are means over the held-out steps
    outcome: StepOutcome
    migration: Migration | None
    migration_applied: bool  # whether ``outcome`` includes the migration
    # Baselines of the dispatch with the same units. In one pool: ``lpt`` (longest first, without split and migration),
    # ``random``, ``rule`` (StreamRL's split by quantiles), ``guesses`` (splits that trust guesses of lengths). In
    # several: ``random`` and ``proportional`` (samples in proportion to throughput).
    dispatches: dict[str, StepOutcome]
    # Baseline of a mix: seconds and price of the best plan that generates in one pool, without split and migration.
    one_pool: tuple[float, float] | None
    # Baseline of a plan whose units generate and then train: seconds and price of the best plan with separate units,
    # without migration.
    disaggregated: tuple[float, float] | None
    unstreamed: StepOutcome  # baseline: training after generation, in one batch
    unmigrated: StepOutcome  # baseline: the plan without migration
    # Baseline: seconds and price if all units of one pool generate and then train.
    colocated: tuple[float, float] | None
    best_split: TailSplit  # the best split into two groups, used or not; no split if the search ended before
    longest_alone_s: float  # decoding of the longest sample alone
    # Lower bounds of the step over all sizes.
    bound_s: float
    bound_price: float
    generation_bound_s: float  # lower bound of generation with these units
    front: list[PoolSizes]  # the Pareto front of time and price
    elastic: list[ElasticPart]  # empty without separate training and for a mix; shorter if the search ended before
    sizes_tried: int  # number of generation sizes that were simulated
    complete: bool  # whether all sizes were simulated
    left_out: dict[str, str]  # name of each pool whose memory is too small, and the reason
    judge: AnyDispatcher  # dispatcher of the units that generate, on the held-out steps

    @property
    def steps(self) -> SampledSteps:
        """The held-out steps."""
        return self.judge.steps
