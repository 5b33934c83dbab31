"""When to give generation a unit more, or take one away, as responses grow longer over training.

StreamRL (section 5): with the gap ``T_gen - T_train``, one unit is added once the gap is at least what the
unit is predicted to save; here also only if that is worth a unit, for where the longest sample alone takes
the time, another instance saves nothing. The other way round, one is given back once training is behind by
at least what its lack would cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cdmpp.planning.rl.costs import Pool, TrainingCost
from cdmpp.planning.rl.dispatch import Dispatcher, Split
from cdmpp.planning.rl.lengths import Drawn

#: How long responses become, over what was planned for.
GROWTH = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
#: Steps to simulate for each.
MOST_DRAWS = 8
#: A unit that saves less than this share of generation is not worth adding, whatever the gap.
WORTH = 0.01
Action = Literal["add", "give back", "keep"]


@dataclass(frozen=True)
class Trigger:
    """One line of the table, mean seconds of a step.

    Attributes
    ----------
    growth : float
        Of every response.
    generation_s, training_s : float
        Of the two stages with the planned units.
    gap_s : float
        Generation less training.
    saving_s : float
        What one more unit saves generation.
    loss_s : float or None
        What one unit less costs it; None where there is only one.
    action : {"add", "give back", "keep"}
    """

    growth: float
    generation_s: float
    training_s: float
    gap_s: float
    saving_s: float
    loss_s: float | None
    action: Action


def action_of(gap_s: float, saving_s: float, loss_s: float | None, worth_s: float = 0.0) -> Action:
    """Add a unit to generation, give one back, or neither.

    ``worth_s``: a unit that saves less is not added.
    """
    if gap_s >= saving_s >= worth_s and gap_s > 0:
        return "add"
    if loss_s is not None and -gap_s >= loss_s and gap_s < 0:
        return "give back"
    return "keep"


def triggers(pool: Pool, split: Split, cost: TrainingCost, training_units: int, drawn: Drawn) -> list[Trigger]:
    """The table for a plan.

    Parameters
    ----------
    pool : Pool
        Generates.
    split : Split
        Of the planned units; with one more or less, and with other lengths, the tail's part of them stays,
        or there is no split where that is better.
    cost : TrainingCost
        Of ``training_units``.
    drawn : Drawn
        Steps as planned for; their lengths are scaled, and cut where memory ends.
    """
    return [_line(pool, split, cost, training_units, drawn, growth) for growth in GROWTH]


def _line(pool: Pool, split: Split, cost: TrainingCost, training_units: int, drawn: Drawn, growth: float) -> Trigger:
    engine, units = pool.generates(), split.instances
    room = engine.memory_tokens - engine.prompt_tokens
    few = drawn.first(MOST_DRAWS)
    lengths = np.clip(np.rint(few.lengths * growth), 1, room).astype(np.int64)
    dispatcher = Dispatcher(engine, replace(few, lengths=lengths))
    samples = dispatcher.samples

    def stage(count: int) -> float:
        ends = [dispatcher.ends(Split(0, count))]
        if split.tail and count > 1:
            tail = min(max(round(split.tail * count / units), 1), count - 1)
            ends.append(dispatcher.ends(Split(tail, count - tail)))
        return min(float(each.mean()) for each in ends) + pool.inference_s * samples / count

    now = stage(units)
    tokens = float(dispatcher.tokens.mean())
    training = float(cost.whole_s(samples, tokens, float(training_units)))
    # Simulated means of different dispatches may differ by a hair in the wrong direction.
    saving = max(now - stage(units + 1), 0.0)
    loss = max(stage(units - 1) - now, 0.0) if units > 1 else None
    gap = now - training
    return Trigger(growth, now, training, gap, saving, loss, action_of(gap, saving, loss, WORTH * now))
