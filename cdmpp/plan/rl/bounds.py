"""Lower bounds of the step time and of its price over all sizes, divisions and dispatches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cdmpp.plan.rl.costs import TrainingCost
from cdmpp.plan.rl.dispatch import Dispatcher
from cdmpp.plan.rl.engine import Floats, Ints
from cdmpp.plan.rl.mixture import MixDispatcher
from cdmpp.plan.rl.sizes import MOST_COUNTS, GenerationStage, SizingProblem, Stage, grid

#: Largest array (draws x generation sizes x training sizes); above it, means over the draws are compared.
MOST_CELLS = 2**20
#: Fewest blocks into which many sizes are divided; more of them for few pools.
FEWEST_BLOCKS = 64


def lower_bounds(problem: SizingProblem, dispatchers: dict[int, Dispatcher]) -> tuple[float, float]:
    """Lower bounds of the mean step: seconds and price.

    The bounds combine the longest sample decoded alone, all tokens at the batch with the highest throughput, and
    training without waiting.

    Parameters
    ----------
    problem : SizingProblem
    dispatchers : dict of int to Dispatcher
        By index of the generation pool.
    """
    bounds = [bound for pool, dispatcher in dispatchers.items() for bound in _bounds(problem, pool, dispatcher)]
    if problem.mixes and len(dispatchers) > 1:
        bounds += _mix_bounds(problem, dispatchers)
    return min(seconds for seconds, _ in bounds), min(price for _, price in bounds)


def _blocks(sizes: Ints, pools: int) -> tuple[Ints, Ints]:
    """Smallest and largest number of each block of sizes: the numbers themselves, unless there are many."""
    if len(sizes) <= MOST_COUNTS:
        return sizes, sizes
    ends = grid(len(sizes), max(MOST_COUNTS // pools, FEWEST_BLOCKS))
    return sizes[np.concatenate([[0], ends[:-1]]).astype(np.int64)], sizes[ends - 1]


def _bounds(problem: SizingProblem, pool: int, dispatcher: Dispatcher) -> list[tuple[float, float]]:
    """Seconds and price with generation in one pool, for each way to train."""
    generation, samples = problem.pools[pool], dispatcher.samples
    # Of a block of sizes: the time of the largest, the price of the smallest.
    fewest, units = _blocks(_generation_sizes(problem, pool), len(problem.pools))
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
        fits &= units >= generation.training.least_units
        whole = generation.training.whole_s(samples, tokens[:, None], counts)
        add((inferred + whole).mean(0)[fits] + problem.shared_s, generation_prices[fits])
    ready_times: list[tuple[Stage, Floats]] = [("generation", inferred), ("training", generated)]
    for inference_by, ready in ready_times if problem.layout != "shared" else []:
        for training, trainer in enumerate(problem.pools):
            # Sizes beside the smallest generation stage; larger ones leave fewer units.
            smallest = GenerationStage(((pool, int(fewest[0])),), 0.0)
            fewest_trainers, sizes = _blocks(_all_training_sizes(problem, smallest, training), len(problem.pools))
            cost = problem.training_cost(training, inference_by)
            if cost is None or not len(sizes):
                continue
            whole = cost.whole_s(samples, tokens[:, None], sizes.astype(np.float64))
            steps = _mean_steps(problem, ready, whole, cost, problem.weights_s(smallest, training))
            fits = (
                fewest[:, None] + fewest_trainers <= trainer.units if training == pool else np.full(steps.shape, True)
            )
            prices = generation_prices[:, None] + fewest_trainers * (trainer.price_per_hour / 3600)
            add(steps[fits], prices[fits])
    return bounds


def _generation_sizes(problem: SizingProblem, pool: int) -> Ints:
    most, fixed = problem.pools[pool].units, problem.generation_units
    if fixed is not None:
        return np.array([fixed] if fixed <= most else [], dtype=np.int64)
    return np.arange(1, most + 1, dtype=np.int64)


def _all_training_sizes(problem: SizingProblem, stage: GenerationStage, training: int) -> Ints:
    pool = problem.pools[training]
    if problem.training_units is not None:
        return problem.training_sizes(stage, training)
    step = 1 if pool.training is None else pool.training.run_units
    least = step if pool.training is None else pool.training.least_units
    return np.arange(least, pool.units - stage.of_pool(training) + 1, step, dtype=np.int64)


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
        fewest, sizes = _blocks(_all_training_sizes(problem, nothing, training), len(pools))
        if cost is None or not len(sizes):
            continue
        left = all_speed - fewest * speeds.get(training, 0.0)
        ready = np.maximum(longest[:, None], decoded[:, None] / np.maximum(left, 1e-300))
        whole = replace(cost, inference_s=0.0).whole_s(samples, tokens[:, None], sizes.astype(np.float64))
        weights_s = min(problem.weights_s(GenerationStage(((pool, 1),), 0.0), training) for pool in dispatchers)
        steps = np.array(
            [
                _mean_steps(problem, ready[:, [index]], whole[:, [index]], cost, weights_s)[0, 0]
                for index in range(len(sizes))
            ]
        )
        prices = generation_price + steps * fewest * (trainer.price_per_hour / 3600)
        bounds.append((float(steps.min()), float(prices.min())))
    return bounds


def _mean_steps(
    problem: SizingProblem, ready_s: Floats, whole_s: Floats, cost: TrainingCost, weights_s: float
) -> Floats:
    """Lower bound of the mean step over the draws, (generation sizes, training sizes).

    Parameters
    ----------
    ready_s, whole_s : float64 arrays, (draws, sizes)
        Ends of generation, and training in one batch.
    cost : TrainingCost
    weights_s : float
    """
    steps = _mean_of_longer(ready_s, whole_s)
    ready = ready_s.mean(0)[:, None]
    if problem.mode == "sync":
        last_batch = ready + cost.batch_overhead_s + cost.fixed_s
        streamed: Floats = np.maximum(steps, last_batch) + weights_s
        return streamed
    steps = np.maximum(steps, weights_s)
    if problem.staleness is not None:
        steps = np.maximum(steps, (ready + whole_s.mean(0) + weights_s) / (problem.staleness + 1))
    return steps


def _mean_of_longer(stage_s: Floats, whole_s: Floats) -> Floats:
    """Mean over the draws of the longer stage, (generation sizes, training sizes).

    Parameters
    ----------
    stage_s, whole_s : float64 arrays, (draws, sizes)
    """
    if stage_s.size * whole_s.shape[1] > MOST_CELLS:
        # The maximum of the means is at most the mean of the maxima.
        stage_s, whole_s = stage_s.mean(0, keepdims=True), whole_s.mean(0, keepdims=True)
    longer: Floats = np.maximum(stage_s[:, :, None], whole_s[:, None, :]).mean(0)
    return longer
