"""Lower bounds of a step over all sizes: what no dispatch and no pools beat."""

from __future__ import annotations

import numpy as np

from cdmpp.planning.rl.dispatch import Dispatcher
from cdmpp.planning.rl.generation import Floats
from cdmpp.planning.rl.sizes import Stage, Terms

#: Draws times sizes of one stage times sizes of the other; beyond, means over the draws are compared.
MOST_CELLS = 2**20


def lower_bounds(terms: Terms, dispatchers: dict[int, Dispatcher]) -> tuple[float, float]:
    """No sizes and no dispatch make a mean step shorter, or cheaper, than these: seconds and price.

    Over all sizes: the longest sample decoded alone, the tokens at the best batch on all instances, training
    without waiting.
    """
    found = [bound for pool, dispatcher in dispatchers.items() for bound in _bounds(terms, pool, dispatcher)]
    return min(seconds for seconds, _ in found), min(price for _, price in found)


def _bounds(terms: Terms, pool: int, dispatcher: Dispatcher) -> list[tuple[float, float]]:
    """Least seconds and least price with generation by one pool, for each way to train."""
    place, samples = terms.pools[pool], dispatcher.samples
    units = np.array(sorted(terms.generation_sizes(pool)), dtype=np.int64)
    if not len(units):
        return []
    many = units.astype(np.float64)
    floor, work, tokens = dispatcher.floor()[:, None], dispatcher.work_s()[:, None], dispatcher.tokens
    alone = np.maximum(floor, work / many)
    stage = np.maximum(alone + place.inference_s / many, (work + samples * place.inference_s) / many)
    own = many * place.price_per_hour / 3600
    found: list[tuple[float, float]] = []

    def add(means: Floats, rates: Floats) -> None:
        if means.size:
            found.append((float(means.min()), float((means * rates).min())))

    if not terms.trains:
        add(stage.mean(0), own)
        return found
    if terms.layout != "separate" and place.training is not None:
        fits = np.full(len(units), True) if terms.training_units is None else units == terms.training_units
        whole = place.training.whole_s(samples, tokens[:, None], many)
        add((stage + whole).mean(0)[fits] + terms.shared_s, own[fits])
    ways: list[tuple[Stage, Floats]] = [("generation", stage), ("training", alone)]
    for by, least in ways if terms.layout != "shared" else []:
        for other, trainer in enumerate(terms.pools):
            # Sizes that stand beside the smallest generation stage; larger ones leave fewer.
            sizes = terms.training_sizes(pool, int(units[0]), other)
            cost = terms.training_cost(other, by)
            if cost is None or not len(sizes):
                continue
            steps = _beside(least, cost.whole_s(samples, tokens[:, None], sizes.astype(np.float64)))
            if terms.mode == "sync":
                last = least.mean(0)[:, None] + cost.batch_overhead_s + cost.fixed_s
                steps = np.maximum(steps, last) + terms.weights_s(pool, other)
            else:
                steps = np.maximum(steps, terms.weights_s(pool, other))
            fits = units[:, None] + sizes <= trainer.units if other == pool else np.full(steps.shape, True)
            rates = own[:, None] + sizes * (trainer.price_per_hour / 3600)
            add(steps[fits], rates[fits])
    return found


def _beside(stage_s: Floats, whole_s: Floats) -> Floats:
    """The longer of both stages on average, (generation sizes, training sizes).

    Parameters
    ----------
    stage_s, whole_s : float64 arrays, (draws, sizes)
    """
    if stage_s.size * whole_s.shape[1] > MOST_CELLS:
        # The mean of the longer ones is at least the longer of the means.
        stage_s, whole_s = stage_s.mean(0, keepdims=True), whole_s.mean(0, keepdims=True)
    longer: Floats = np.maximum(stage_s[:, :, None], whole_s[:, None, :]).mean(0)
    return longer
