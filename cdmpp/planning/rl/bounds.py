"""Lower bounds of the step time and of its price over all sizes and dispatches."""

from __future__ import annotations

import numpy as np

from cdmpp.planning.rl.dispatch import Dispatcher
from cdmpp.planning.rl.engine import Floats
from cdmpp.planning.rl.sizes import SizingProblem, Stage

#: Largest array (draws x generation sizes x training sizes); above it, means over the draws are compared.
MOST_CELLS = 2**20


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
    return min(seconds for seconds, _ in bounds), min(price for _, price in bounds)


def _bounds(problem: SizingProblem, pool: int, dispatcher: Dispatcher) -> list[tuple[float, float]]:
    """Seconds and price with generation in one pool, for each way to train."""
    generation, samples = problem.pools[pool], dispatcher.samples
    units = np.array(sorted(problem.generation_sizes(pool)), dtype=np.int64)
    if not len(units):
        return []
    counts = units.astype(np.float64)
    longest, work, tokens = dispatcher.longest_alone_s()[:, None], dispatcher.work_s()[:, None], dispatcher.tokens
    generated = np.maximum(longest, work / counts)
    inferred = np.maximum(
        generated + generation.inference_s / counts, (work + samples * generation.inference_s) / counts
    )
    generation_prices = counts * generation.price_per_hour / 3600
    bounds: list[tuple[float, float]] = []

    def add(means: Floats, prices_per_s: Floats) -> None:
        if means.size:
            bounds.append((float(means.min()), float((means * prices_per_s).min())))

    if not problem.trains:
        add(inferred.mean(0), generation_prices)
        return bounds
    if problem.layout != "separate" and generation.training is not None:
        fits = np.full(len(units), True) if problem.training_units is None else units == problem.training_units
        whole = generation.training.whole_s(samples, tokens[:, None], counts)
        add((inferred + whole).mean(0)[fits] + problem.shared_s, generation_prices[fits])
    ready_times: list[tuple[Stage, Floats]] = [("generation", inferred), ("training", generated)]
    for inference_by, ready in ready_times if problem.layout != "shared" else []:
        for training, trainer in enumerate(problem.pools):
            # Sizes beside the smallest generation stage; larger ones leave fewer units.
            sizes = problem.training_sizes(pool, int(units[0]), training)
            cost = problem.training_cost(training, inference_by)
            if cost is None or not len(sizes):
                continue
            steps = _mean_of_longer(ready, cost.whole_s(samples, tokens[:, None], sizes.astype(np.float64)))
            weights_s = problem.weights_s(pool, training)
            if problem.mode == "sync":
                last_batch = ready.mean(0)[:, None] + cost.batch_overhead_s + cost.fixed_s
                steps = np.maximum(steps, last_batch) + weights_s
            else:
                steps = np.maximum(steps, weights_s)
            fits = units[:, None] + sizes <= trainer.units if training == pool else np.full(steps.shape, True)
            prices = generation_prices[:, None] + sizes * (trainer.price_per_hour / 3600)
            add(steps[fits], prices[fits])
    return bounds


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
