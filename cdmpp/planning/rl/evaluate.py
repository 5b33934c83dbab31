"""Steps of a plan, simulated: on drawn lengths, or on true ones in the order of a real ranker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cdmpp.planning.rl.costs import TrainingCost
from cdmpp.planning.rl.dispatch import Dispatcher, Split
from cdmpp.planning.rl.generation import Floats
from cdmpp.planning.rl.migration import Migration, inference_after
from cdmpp.planning.rl.sizes import Objective, Sizes, Terms
from cdmpp.planning.rl.streaming import Ready


@dataclass(frozen=True)
class Outcome:
    """Seconds of each simulated step, (draws,).

    Attributes
    ----------
    generation_s : until the last sample is generated.
    stage_s : until its inference is done.
    training_s : work of training, without waiting; 0 where nothing is trained.
    idle_s : training's waiting within the step.
    step_s : until the next may begin.
    """

    generation_s: Floats
    stage_s: Floats
    training_s: Floats
    idle_s: Floats
    step_s: Floats


def evaluate(terms: Terms, sizes: Sizes, judge: Dispatcher, migration: Migration | None = None) -> Outcome:
    """Simulate a plan on steps.

    Parameters
    ----------
    terms : Terms
    sizes : Sizes
    judge : Dispatcher
        Engine of the generation pool, and the steps.
    migration : Migration, optional
        On the same steps.
    """
    if migration is not None:
        return _outcome(terms, sizes, judge, migration.ends_s, migration.ready_s, sizes.batches)
    finish = judge.finish(sizes.split)
    return _outcome(terms, sizes, judge, finish.max(1), _ready(terms, sizes, finish), sizes.batches)


def evaluate_ends(terms: Terms, sizes: Sizes, judge: Dispatcher, finish_s: Floats) -> Outcome:
    """Simulate the stages behind a generation with these ends, (draws, samples).

    The step is cut into whatever number of batches is best on these steps.
    """
    return _outcome(terms, sizes, judge, finish_s.max(1), _ready(terms, sizes, finish_s), None)


def inference_of(terms: Terms, sizes: Sizes) -> float:
    """Seconds of one generation unit for one sample's inference; 0 where training's units run it."""
    return terms.pools[sizes.generation].inference_s if sizes.inference_by == "generation" else 0.0


def _ready(terms: Terms, sizes: Sizes, finish_s: Floats) -> Floats:
    return inference_after(finish_s, inference_of(terms, sizes), sizes.generation_units)


def _outcome(
    terms: Terms, sizes: Sizes, judge: Dispatcher, ends: Floats, ready_s: Floats, batches: int | None
) -> Outcome:
    stage = ready_s.max(1)
    nothing = np.zeros(len(stage))
    if sizes.training is None:
        return Outcome(ends, stage, nothing, nothing, stage)
    cost = trainer_of(terms, sizes)
    whole = cost.whole_s(judge.samples, judge.tokens, float(sizes.training_units))
    if sizes.shared:
        return Outcome(ends, stage, whole, nothing, stage + whole + terms.shared_s)
    weights = terms.weights_s(sizes.generation, sizes.training)
    if terms.mode == "async":
        step = np.maximum(np.maximum(stage, whole), weights)
        return Outcome(ends, stage, whole, step - whole, step)
    ready = Ready.of(ready_s, judge.drawn.lengths, judge.engine.prompt_tokens)
    units = np.array([sizes.training_units])
    choices = ready.choices() if batches is None else [min(batches, ready.choices()[-1])]
    tried = [ready.trained(cost, units, count) for count in choices]
    end, idle = min(tried, key=lambda each: float(each[0].mean()))
    return Outcome(ends, stage, whole, idle[:, 0], end[:, 0] + weights)


def trainer_of(terms: Terms, sizes: Sizes) -> TrainingCost:
    """The cost of a plan's training."""
    cost = None if sizes.training is None else terms.training_cost(sizes.training, sizes.inference_by)
    if cost is None:
        raise ValueError("nothing is trained")
    return cost


def colocated(terms: Terms, objective: Objective, judges: dict[int, Dispatcher]) -> tuple[float, float] | None:
    """All units of the best pool generate, then all train, with no overlap: seconds and price of a step."""
    found: list[tuple[float, float]] = []
    for number, judge in judges.items():
        pool = terms.pools[number]
        if pool.training is None:
            continue
        sizes = Sizes(number, pool.units, number, pool.units, Split(0, pool.units), 1, 0.0, 0.0, shared=True)
        seconds = float(evaluate(terms, sizes, judge).step_s.mean())
        found.append((seconds, seconds * terms.rate_of(sizes)))
    return min(found, key=lambda each: each[0 if objective == "time" else 1], default=None)
