"""How many units generate and how many train: every pair simulated, the rest thrown away.

StreamRL's allocation (section 5, algorithm 1): on one site every split of the units is tried; on two, the
faster stage's pool is made smaller until the stages take equally long. Both are the same search here: of the
sizes with the least step (or price), the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cdmpp.planning.rl.costs import Pool, TrainingCost
from cdmpp.planning.rl.dispatch import Dispatcher, Split
from cdmpp.planning.rl.generation import Floats, Ints
from cdmpp.planning.rl.migration import inference_after
from cdmpp.planning.rl.streaming import Mode, Ready, step_times

Objective = Literal["time", "cost"]
Stage = Literal["generation", "training"]
Layout = Literal["any", "separate", "shared"]


@dataclass(frozen=True)
class Sizes:
    """Units of the two stages, and the step that they make on average.

    Attributes
    ----------
    generation, generation_units
        Number of the pool, and units of it.
    training, training_units
        The same; None and 0 where nothing is trained.
    split : Split
        Of the generation instances.
    batches : int
        Into how many the step is cut for training.
    step_s : float
    price : float
        Of a step.
    shared : bool
        The same units generate and then train: nothing overlaps, and no unit waits for the other stage.
    inference_by : {"generation", "training"}
        Whose units run the inference of rewards, references and critics.
    """

    generation: int
    generation_units: int
    training: int | None
    training_units: int
    split: Split
    batches: int
    step_s: float
    price: float
    shared: bool = False
    inference_by: Stage = "generation"

    @property
    def units(self) -> int:
        """Of both stages together."""
        return self.generation_units + (0 if self.shared else self.training_units)

    def value(self, objective: Objective) -> float:
        """What is to be small."""
        return self.step_s if objective == "time" else self.price


@dataclass(frozen=True)
class Terms:
    """What sizes are searched under.

    Attributes
    ----------
    pools : tuple of Pool
    mode : {"sync", "async"}
    same_site_s, cross_site_s, shared_s : float
        Transfer of the weights from training to generation: within a site, between sites, and where the same
        units do both.
    layout : {"any", "separate", "shared"}
        Whether units may, or must, generate and then train.
    generation_units, training_units : int or None
        Sizes that are given, not searched.
    """

    pools: tuple[Pool, ...]
    mode: Mode
    same_site_s: float = 0.0
    cross_site_s: float = 0.0
    shared_s: float = 0.0
    layout: Layout = "any"
    generation_units: int | None = None
    training_units: int | None = None

    @property
    def trains(self) -> bool:
        """Whether there is a training stage."""
        return any(pool.training is not None for pool in self.pools)

    def weights_s(self, generation: int, training: int) -> float:
        """Transfer of the weights between two pools."""
        same = self.pools[generation].site == self.pools[training].site
        return self.same_site_s if same else self.cross_site_s

    def rate(self, generation: int, units: int, training: int | None, other: Ints | int) -> Floats:
        """Price of a second with so many units of both."""
        each = 0.0 if training is None else self.pools[training].price_per_hour
        rate: Floats = (
            units * self.pools[generation].price_per_hour + np.asarray(other, dtype=np.float64) * each
        ) / 3600
        return rate

    def rate_of(self, sizes: Sizes) -> float:
        """Price of a second with these sizes."""
        training = None if sizes.shared else sizes.training
        return float(self.rate(sizes.generation, sizes.generation_units, training, sizes.training_units))

    def training_cost(self, pool: int, inference_by: Stage) -> TrainingCost | None:
        """Of a pool, inference included where training's units run it; None where it does not train."""
        cost, each_s = self.pools[pool].training, self.pools[pool].inference_s
        if cost is None or inference_by == "generation" or each_s == 0:
            return cost
        return replace(cost, inference_s=each_s)

    def generation_sizes(self, pool: int) -> list[int]:
        """Units to try, coarse to fine: whatever ends the search, they lie all over the range."""
        most = self.pools[pool].units
        if self.generation_units is not None:
            return [self.generation_units] if self.generation_units <= most else []
        return list(coarse_to_fine(most))

    def training_sizes(self, generation: int, units: int, training: int) -> Ints:
        """Units of a training pool that are left beside a generation stage."""
        most = self.pools[training].units - (units if training == generation else 0)
        if self.training_units is not None:
            given = [self.training_units] if self.training_units <= most else []
            return np.array(given, dtype=np.int64)
        return np.arange(1, most + 1, dtype=np.int64)


def coarse_to_fine(most: int) -> Iterator[int]:
    """1 to ``most``, each once: the ends, then middles of what lies between."""
    yield most
    if most > 1:
        yield 1
    spans = [(1, most)]
    while spans:
        halves = []
        for low, high in spans:
            middle = (low + high) // 2
            if low < middle < high:
                yield middle
                halves += [(low, middle), (middle, high)]
        spans = halves


class Front:
    """The sizes that no others beat in both time and price (or, where nothing has a price, units)."""

    def __init__(self, priced: bool) -> None:
        self._priced = priced
        self.found: list[Sizes] = []

    def _key(self, one: Sizes) -> tuple[float, float]:
        return one.step_s, one.price if self._priced else float(one.units)

    def add(self, more: list[Sizes]) -> None:
        """Take new ones in, and leave out who is beaten."""
        ordered = sorted(self.found + more, key=self._key)
        self.found, least = [], np.inf
        for one in ordered:
            if self._key(one)[1] < least:
                self.found.append(one)
                least = self._key(one)[1]


def steps_of(
    terms: Terms,
    pool: int,
    dispatcher: Dispatcher,
    split: Split,
    ready_s: Floats | None = None,
    only: Sizes | None = None,
) -> list[Sizes]:
    """Steps with one generation stage and every training stage beside it, or after it on the same units.

    Parameters
    ----------
    ready_s : float64 array, (draws, samples), optional
        When samples are ready, inference by generation's units included; default: inference after generation.
    only : Sizes, optional
        Sizes that are wanted; default: all.
    """
    place, units = terms.pools[pool], split.instances
    finish = dispatcher.finish(split) if ready_s is None else ready_s
    inferred = inference_after(finish, place.inference_s, units) if ready_s is None else ready_s
    if not terms.trains:
        seconds = float(inferred.max(1).mean())
        price = seconds * float(terms.rate(pool, units, None, 0))
        return [Sizes(pool, units, None, 0, split, 1, seconds, price)]
    found = []
    if place.training is not None and (only is None or only.shared):
        found = _shared(terms, pool, dispatcher, split, inferred)
    if terms.layout == "shared" or (only is not None and only.shared):
        return found
    ways: list[tuple[Stage, Floats]] = [("generation", inferred)]
    if any(each.inference_s for each in terms.pools):
        ways.append(("training", finish))
    for by, times in ways:
        if only is not None and by != only.inference_by:
            continue
        ready = Ready.of(times, dispatcher.drawn.lengths, dispatcher.engine.prompt_tokens)
        for other in range(len(terms.pools)):
            sizes = terms.training_sizes(pool, units, other)
            if only is not None:
                sizes = sizes[sizes == (only.training_units if only.training == other else 0)]
            cost = terms.training_cost(other, by)
            if cost is None or not len(sizes):
                continue
            steps = step_times(ready, cost, sizes, terms.mode, terms.weights_s(pool, other))
            means = steps.seconds.mean(0)
            prices = means * terms.rate(pool, units, other, sizes)
            found += [
                Sizes(pool, units, other, int(size), split, int(count), float(mean), float(price), False, by)
                for size, count, mean, price in zip(sizes, steps.batches, means, prices, strict=True)
            ]
    return found


def _shared(terms: Terms, pool: int, dispatcher: Dispatcher, split: Split, ready_s: Floats) -> list[Sizes]:
    units, cost = split.instances, terms.pools[pool].training
    given = terms.training_units
    if terms.layout == "separate" or cost is None or (given is not None and given != units):
        return []
    whole = cost.whole_s(dispatcher.samples, dispatcher.tokens, float(units))
    seconds = float((ready_s.max(1) + whole).mean()) + terms.shared_s
    price = seconds * float(terms.rate(pool, units, None, 0))
    return [Sizes(pool, units, pool, units, split, 1, seconds, price, shared=True)]


def with_step(sizes: Sizes, step_s: float, terms: Terms) -> Sizes:
    """The same sizes with another step, and its price."""
    return replace(sizes, step_s=step_s, price=step_s * terms.rate_of(sizes))
