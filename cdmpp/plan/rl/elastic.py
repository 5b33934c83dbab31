"""Elastic table: when to move a unit to or from generation as responses grow longer.

StreamRL (section 5) adds a unit to generation if the gap ``T_gen - T_train`` is at least the saving predicted for
that unit. Here the saving must also be at least :data:`MIN_SAVING`: if the longest sample alone takes the time,
another instance saves nothing. A unit is removed if training is behind by at least the predicted loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cdmpp.plan.rl.costs import Pool, TrainingCost
from cdmpp.plan.rl.dispatch import Dispatcher, TailSplit, never
from cdmpp.plan.rl.lengths import SampledSteps
from cdmpp.plan.rl.plan_schema import Action, ElasticPart

#: Factors on the planned response lengths.
GROWTH = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
#: Steps to simulate per factor.
MOST_DRAWS = 8
#: A unit is added only if it saves this share of generation.
MIN_SAVING = 0.01


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
    """The table of a plan.

    Parameters
    ----------
    pool : Pool
        Generation pool.
    split : TailSplit
        Planned instances. With other units or lengths, the tail keeps its share of the instances, or there is no
        split if that is better.
    cost : TrainingCost
    training_units : int
    steps : SampledSteps
        Planned steps. Their lengths are scaled, and truncated at the memory limit.
    free_units : int
        Unused units of the pool.
    over : callable
        Whether to end with the rows so far.
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
        saving = max(generation - stage_s(dispatcher, units + 1), 0.0)
        loss = max(stage_s(dispatcher, units - 1) - generation, 0.0) if units > 1 else None
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
