"""Simulation of the stages of a step with given sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cdmpp.plan.rl.dispatch import Dispatcher, TailSplit
from cdmpp.plan.rl.engine import Floats
from cdmpp.plan.rl.migration import Migration, inference_after
from cdmpp.plan.rl.sizes import AnyDispatcher, Objective, PoolSizes, SizingProblem, finish_times
from cdmpp.plan.rl.streaming import ReadyTimes, asynchronous_step


@dataclass(frozen=True)
class StepOutcome:
    """Seconds of each simulated step; all arrays are (draws,).

    Attributes
    ----------
    generation_s : float64 array
        Until the last sample is generated.
    stage_s : float64 array
        Until the inference of the last sample is done.
    training_s : float64 array
        Work of training, without waiting; 0 without training.
    idle_s : float64 array
        Waiting of training within the step.
    step_s : float64 array
        Until the next step can start.
    """

    generation_s: Floats
    stage_s: Floats
    training_s: Floats
    idle_s: Floats
    step_s: Floats


def evaluate(
    problem: SizingProblem, sizes: PoolSizes, dispatcher: AnyDispatcher, migration: Migration | None = None
) -> StepOutcome:
    """Simulate steps with given sizes, split and number of batches.

    Parameters
    ----------
    problem : SizingProblem
    sizes : PoolSizes
    dispatcher : Dispatcher or MixDispatcher
        Dispatcher of the generation units on the steps.
    migration : Migration, optional
        On the same steps.
    """
    if migration is not None:
        return _outcome(problem, sizes, dispatcher, migration.ends_s, migration.ready_s, sizes.batches)
    finish = finish_times(dispatcher, sizes.split)
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
    for index, dispatcher in dispatchers.items():
        pool = problem.pools[index]
        if pool.training is None or pool.units < pool.training.least_units:
            continue
        unsplit = TailSplit(0, pool.units)
        sizes = PoolSizes(index, pool.units, index, pool.units, unsplit, 1, 0.0, 0.0, shared=True)
        seconds = float(evaluate(problem, sizes, dispatcher).step_s.mean())
        steps.append((seconds, seconds * problem.price_per_s(sizes)))
    return min(steps, key=lambda step: step[0 if objective == "time" else 1], default=None)


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
        return StepOutcome(ends_s, stage, whole, zeros, stage + whole + problem.shared_s)
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
