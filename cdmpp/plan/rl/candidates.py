"""Candidate sizes with their simulated steps, and the Pareto front of time and price.

StreamRL's allocation (section 5, algorithm 1) tries every division of the units on one site. On two sites it shrinks
the pool of the faster stage until both stages take equally long. Both cases are one search here: all pairs are
simulated, and the cheapest of those with the shortest step (or the lowest price) is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cdmpp.plan.rl.engine import Floats
from cdmpp.plan.rl.migration import inference_after
from cdmpp.plan.rl.sizes import MIXED, AnyDispatcher, Groups, PoolSizes, SizingProblem, Stage, finish_times
from cdmpp.plan.rl.streaming import ReadyTimes, step_times


def pareto_front(candidates: Iterable[PoolSizes], priced: bool) -> list[PoolSizes]:
    """Candidates that no other beats in both step time and price (in units if ``priced`` is false), fastest first."""

    def key(sizes: PoolSizes) -> tuple[float, float]:
        return sizes.step_s, sizes.price if priced else float(sizes.units)

    front: list[PoolSizes] = []
    for sizes in sorted(candidates, key=key):
        if not front or key(sizes)[1] < key(front[-1])[1]:
            front.append(sizes)
    return front


def candidate_sizes(
    problem: SizingProblem,
    pool: int,
    dispatcher: AnyDispatcher,
    split: Groups,
    ready_s: Floats | None = None,
    only: PoolSizes | None = None,
    near: PoolSizes | None = None,
) -> list[PoolSizes]:
    """Steps of one generation stage with every training stage beside it, or after it on the same units.

    Parameters
    ----------
    ready_s : float64 array, (draws, samples), optional
        Time at which each sample is ready, with inference on the generation units. Default: inference starts after
        generation.
    only : PoolSizes, optional
        Evaluate only these sizes. Default: all.
    near : PoolSizes, optional
        Evaluate all numbers of training units around these, which a grid of many units leaves out.
    """
    stage = problem.stage(pool, split)
    finish = finish_times(dispatcher, split) if ready_s is None else ready_s
    inferred = inference_after(finish, stage.inference_s, stage.instances) if ready_s is None else ready_s
    if not problem.trains:
        seconds = float(inferred.max(1).mean())
        price = seconds * float(problem.prices_per_s(stage, None, 0))
        return [PoolSizes(pool, stage.instances, None, 0, split, 1, seconds, price)]
    candidates = []
    if pool != MIXED and near is None and (only is None or only.shared):
        candidates = _shared(problem, pool, dispatcher, split, inferred)
    if problem.layout == "shared" or (only is not None and only.shared):
        return candidates
    ready_times: list[tuple[Stage, Floats]] = [("generation", inferred)]
    if any(other.inference_s for other in problem.pools):
        ready_times.append(("training", finish))
    for inference_by, times in ready_times:
        if only is not None and inference_by != only.inference_by:
            continue
        ready = ReadyTimes.of(times, dispatcher.steps.lengths, dispatcher.prompt_tokens)
        for training in range(len(problem.pools)):
            if near is not None and (training, inference_by) != (near.training, near.inference_by):
                continue
            if only is not None:
                counts = np.array([only.training_units] if only.training == training else [], dtype=np.int64)
            else:
                counts = problem.training_sizes(stage, training, None if near is None else near.training_units)
            cost = problem.training_cost(training, inference_by)
            if cost is None or not len(counts):
                continue
            weights_s = problem.weights_s(stage, training)
            steps, batches = step_times(ready, cost, counts, problem.mode, weights_s, problem.staleness)
            means = steps.mean(0)
            prices = means * problem.prices_per_s(stage, training, counts)
            candidates += [
                PoolSizes(
                    pool,
                    stage.instances,
                    training,
                    int(count),
                    split,
                    int(cut),
                    float(mean),
                    float(price),
                    False,
                    inference_by,
                )
                for count, cut, mean, price in zip(counts, batches, means, prices, strict=True)
            ]
    return candidates


def _shared(
    problem: SizingProblem, pool: int, dispatcher: AnyDispatcher, split: Groups, ready_s: Floats
) -> list[PoolSizes]:
    units, cost, fixed = split.instances, problem.pools[pool].training, problem.training_units
    if problem.layout == "separate" or cost is None or (fixed is not None and fixed != units):
        return []
    if units < cost.least_units:
        return []
    whole = cost.whole_s(dispatcher.samples, dispatcher.tokens, float(units))
    seconds = float((ready_s.max(1) + whole).mean()) + problem.shared_s
    price = seconds * float(problem.prices_per_s(problem.stage(pool, split), None, 0))
    return [PoolSizes(pool, units, pool, units, split, 1, seconds, price, shared=True)]
