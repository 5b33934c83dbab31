"""Pools of units, sizes of both stages, and the problem that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

import numpy as np

from cdmpp.plan.rl.dispatch import Groups, PoolMix
from cdmpp.plan.rl.generation import Floats, GenerationEngine, Ints
from cdmpp.plan.rl.training import Mode, TrainingCost

Objective = Literal["time", "cost"]
Stage = Literal["generation", "training"]
Layout = Literal["any", "separate", "shared"]
#: Index of the generation pool of sizes with a PoolMix.
MIXED = -1
#: Numbers of training units that are tried at first; all, if there are at most so many.
MOST_COUNTS = 512


@dataclass(frozen=True)
class Pool:
    """Equal units at one site."""

    name: str
    units: int  # number of units; one unit is a generation instance or a data-parallel training unit
    price_per_hour: float = 0.0  # price of one unit
    site: str = ""  # transfers of weights between sites take ``cross_site_s``
    engine: GenerationEngine | None = None  # None if the pool does not generate
    training: TrainingCost | None = None  # None if the pool does not train
    inference_s: float = 0.0  # seconds of one unit for the reward, reference and critic values of one sample
    placement: int = 1  # units that fill whole nodes: both stages have multiples of it

    def generation_engine(self) -> GenerationEngine:
        """The engine of a pool that generates."""
        assert self.engine is not None, f"pool {self.name!r} does not generate"
        return self.engine


@dataclass(frozen=True)
class PoolSizes:
    """Units of both stages, and the mean step that they give."""

    # Index of the generation pool, and its units. With a :class:`PoolMix` as ``split``: :data:`MIXED`, and all its
    # units.
    generation: int
    generation_units: int
    # Index of the training pool, and its units; None and 0 without training.
    training: int | None
    training_units: int
    split: Groups  # groups of the generation instances
    batches: int  # number of batches in which samples are streamed to training
    step_s: float  # seconds of a step
    price: float  # price of a step
    shared: bool = False  # the same units generate and then train (colocated): nothing overlaps
    inference_by: Stage = "generation"  # stage whose units run the reward, reference and critic models

    @property
    def units(self) -> int:
        """Units of both stages."""
        return self.generation_units + (0 if self.shared else self.training_units)

    def value(self, objective: Objective) -> float:
        """The value to minimise."""
        return self.step_s if objective == "time" else self.price


@dataclass(frozen=True)
class GenerationStage:
    """The units that generate."""

    units: tuple[tuple[int, int], ...]  # index and units of each pool
    inference_s: float  # seconds of one instance for the inference of a sample; for a mix, of one average instance

    @property
    def instances(self) -> int:
        """Units of all pools."""
        return sum(units for _, units in self.units)

    def of_pool(self, pool: int) -> int:
        """Units of one pool."""
        return sum(units for index, units in self.units if index == pool)


@dataclass(frozen=True)
class SizingProblem:
    """Pools and constraints of the search for sizes."""

    pools: tuple[Pool, ...]
    mode: Mode
    # Seconds to transfer the weights from training to generation: within a site, between sites, and if the same units
    # run both stages.
    same_site_s: float = 0.0
    cross_site_s: float = 0.0
    shared_s: float = 0.0
    layout: Layout = "any"  # whether both stages run on separate units, on shared units, or on either
    # Fixed sizes; None: searched.
    generation_units: int | None = None
    training_units: int | None = None
    staleness: int | None = None  # of :func:`cdmpp.plan.rl.training.asynchronous_step`
    # Seconds by site of training, site of generation and instances; replaces ``same_site_s`` and ``cross_site_s``.
    transfer: Callable[[str, str, int], float] | None = None
    mix: bool = False  # whether several pools may generate at once
    transfer_factor: float = 1.0  # on the seconds of transfers between separate units

    @property
    def trains(self) -> bool:
        """Whether there is a training stage."""
        return any(pool.training is not None for pool in self.pools)

    @property
    def mixes(self) -> bool:
        """Whether sizes may be mixes: units that generate in a mix do not train."""
        return self.mix and not (self.trains and self.layout == "shared")

    def stage(self, generation: int, groups: Groups) -> GenerationStage:
        """The units that generate, by index of the pool and groups of its instances."""
        if isinstance(groups, PoolMix):
            units = tuple(zip(groups.pools, groups.units, strict=True))
            seconds = [self.pools[pool].inference_s for pool, _ in units]
            if 0.0 in seconds:
                return GenerationStage(units, 0.0)
            rate = sum(count / inference_s for (_, count), inference_s in zip(units, seconds, strict=True))
            return GenerationStage(units, groups.instances / rate)
        return GenerationStage(((generation, groups.instances),), self.pools[generation].inference_s)

    def stage_of(self, sizes: PoolSizes) -> GenerationStage:
        """The units that generate."""
        return self.stage(sizes.generation, sizes.split)

    def stage_name(self, sizes: PoolSizes) -> str:
        """Names of the pools that generate."""
        return " + ".join(self.pools[pool].name for pool, _ in self.stage_of(sizes).units)

    def weights_s(self, stage: GenerationStage, training: int) -> float:
        """Seconds to transfer the weights to all units that generate; transfers to several pools overlap."""
        source = self.pools[training].site
        slowest = max(self._transfer_s(source, self.pools[pool].site, units) for pool, units in stage.units if units)
        return self.transfer_factor * slowest

    def _transfer_s(self, source: str, target: str, instances: int) -> float:
        if self.transfer is not None:
            return self.transfer(source, target, instances)
        return self.same_site_s if source == target else self.cross_site_s

    def prices_per_s(self, stage: GenerationStage, training: int | None, training_units: Ints | int) -> Floats:
        """Price of a second, by number of training units."""
        training_price = 0.0 if training is None else self.pools[training].price_per_hour
        generation_price = sum(units * self.pools[pool].price_per_hour for pool, units in stage.units)
        return (generation_price + np.asarray(training_units, dtype=np.float64) * training_price) / 3600

    def price_per_s(self, sizes: PoolSizes) -> float:
        """Price of a second with these sizes."""
        training = None if sizes.shared else sizes.training
        return float(self.prices_per_s(self.stage_of(sizes), training, sizes.training_units))

    def training_cost(self, pool: int, inference_by: Stage) -> TrainingCost | None:
        """Training cost of a pool, with inference if its units run it; None if it does not train."""
        cost, inference_s = self.pools[pool].training, self.pools[pool].inference_s
        if cost is None or inference_by == "generation" or inference_s == 0:
            return cost
        return replace(cost, inference_s=inference_s)

    def cost_of(self, sizes: PoolSizes) -> TrainingCost:
        """Training cost of sizes that have a training stage."""
        cost = None if sizes.training is None else self.training_cost(sizes.training, sizes.inference_by)
        if cost is None:
            raise ValueError("the sizes have no training stage")
        return cost

    def generation_inference_s(self, sizes: PoolSizes) -> float:
        """Seconds of one generation unit per sample's inference; 0 if training units run it."""
        return self.stage_of(sizes).inference_s if sizes.inference_by == "generation" else 0.0

    def generation_sizes(self, pool: int) -> list[int]:
        """Numbers of generation units to try, coarse to fine: an early end of the search covers the whole range."""
        max_units, placement = self.pools[pool].units, self.pools[pool].placement
        if self.generation_units is not None:
            return [self.generation_units] if self.generation_units <= max_units else []
        return [placement * count for count in coarse_to_fine(max_units // placement)] if max_units >= placement else []

    def training_sizes(
        self, stage: GenerationStage, training: int, near: int | None = None, most: int = MOST_COUNTS
    ) -> Ints:
        """Numbers of training units to try beside a generation stage: all, or about ``most`` of many.

        ``near``: all numbers around this one that the grid leaves out.
        """
        pool = self.pools[training]
        max_units = pool.units - stage.of_pool(training)
        cost = pool.training
        if cost is None:
            return np.zeros(0, dtype=np.int64)
        if self.training_units is not None:
            fixed = np.array([self.training_units] if self.training_units <= max_units else [], dtype=np.int64)
            return np.asarray(fixed[cost.can_train(fixed)])
        step = lcm(cost.run_units, pool.placement)
        counts = grid(max_units // step, most)
        if near is not None and len(counts):
            at = int(np.searchsorted(counts, near // step))
            low, high = counts[max(at - 1, 0)], counts[min(at + 1, len(counts) - 1)]
            counts = np.arange(low, high + 1, dtype=np.int64)
        sizes: Ints = counts * step
        return np.asarray(sizes[cost.can_train(sizes)])


def grid(highest: int, count: int = MOST_COUNTS) -> Ints:
    """The numbers 1 to ``highest``; of many, about ``count``: all small ones, then in equal ratios."""
    if highest <= count:
        return np.arange(1, highest + 1, dtype=np.int64)
    dense = count // 4
    ratios = np.geomspace(dense, highest, count - dense + 1).round().astype(np.int64)
    return np.unique(np.concatenate([np.arange(1, dense + 1, dtype=np.int64), ratios]))


def coarse_to_fine(highest: int) -> Iterator[int]:
    """The numbers 1 to ``highest``: the ends, then repeatedly the middles of the remaining ranges."""
    yield highest
    if highest > 1:
        yield 1
    ranges = [(1, highest)]
    while ranges:
        halves = []
        for low, high in ranges:
            middle = (low + high) // 2
            if low < middle < high:
                yield middle
                halves += [(low, middle), (middle, high)]
        ranges = halves
