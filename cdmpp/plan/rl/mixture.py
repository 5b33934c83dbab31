"""Generation on several unlike pools at once: the samples of a step are divided between them.

Each pool gets a range of the ranker's order, and its instances take samples from one queue. So the longest samples
may go to the pool that decodes fastest, and the others to slower pools. The sizes of the ranges are
chosen by simulation: pools that are next to each other in the order exchange samples until both end at the same
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations_with_replacement, pairwise, permutations
from math import comb

import numpy as np

from cdmpp.plan.rl.dispatch import Dispatcher, never
from cdmpp.plan.rl.engine import Floats, SampleQueues
from cdmpp.plan.rl.generation import generate
from cdmpp.plan.rl.lengths import SampledSteps

#: Most pools of which all orders are tried; of more, by decoding speed in both directions.
MOST_ORDERED = 3
#: Rounds in which neighbours exchange samples, and how far from the balance of two pools sizes are tried.
MOST_ROUNDS, REACH = 8, 2
#: Halvings of the time within which three or more pools take what they can.
HALVINGS = 16
#: Samples of two neighbours of which all divisions are tried, and number of divisions of all pools that are all tried.
ALL_BORDERS, ALL_DIVISIONS = 32, 128


@dataclass(frozen=True)
class PoolMix:
    """Several pools that generate at once.

    Attributes
    ----------
    pools : tuple of int
        Indices of the pools, in the order of their ranges: the first has the samples ranked longest.
    units : tuple of int
        Instances of each pool.
    samples : tuple of int
        Samples of each pool.
    """

    pools: tuple[int, ...]
    units: tuple[int, ...]
    samples: tuple[int, ...]

    @property
    def instances(self) -> int:
        """Instances of all pools."""
        return sum(self.units)

    @property
    def tail(self) -> int:
        """Always 0; a mix has no tail group (see :class:`cdmpp.plan.rl.dispatch.TailSplit`)."""
        return 0

    def ranges(self) -> Iterator[tuple[int, int, int, int]]:
        """Pool, instances, and first and last sample (exclusive) of each range."""
        for (start, stop), pool, units in zip(
            pairwise(accumulate(self.samples, initial=0)), self.pools, self.units, strict=True
        ):
            yield pool, units, start, stop


class MixDispatcher:
    """Simulated times of mixes on sampled steps; the part of ``Dispatcher`` that sizes and outcomes need.

    Parameters
    ----------
    dispatchers : mapping of int to Dispatcher
        Dispatchers by index of the pool, all on the same steps.
    """

    def __init__(self, dispatchers: Mapping[int, Dispatcher]) -> None:
        self.dispatchers = dispatchers
        self._any = next(iter(dispatchers.values()))
        self._last: tuple[PoolMix, Floats, float] | None = None

    @property
    def steps(self) -> SampledSteps:
        """The steps."""
        return self._any.steps

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self._any.samples

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each prompt."""
        return self._any.prompt_tokens

    @cached_property
    def tokens(self) -> Floats:
        """Tokens of prompts and responses of each step, (draws,)."""
        return self._any.tokens

    def finish_times(self, mix: PoolMix) -> Floats:
        """Time at which each sample ends, (draws, samples)."""
        return self._simulate(mix)[1]

    def preemptions(self, mix: PoolMix) -> float:
        """Mean number of preemptions of a step."""
        return self._simulate(mix)[2]

    def _simulate(self, mix: PoolMix) -> tuple[PoolMix, Floats, float]:
        """Finish times and preemptions; those of the last mix are kept."""
        last = self._last
        if last is None or last[0] != mix:
            parts = [
                self.dispatchers[pool].simulate_range(start, stop, units)
                for pool, units, start, stop in mix.ranges()
                if stop > start
            ]
            finish = np.concatenate([finish for finish, _ in parts], axis=1)
            self._last = last = mix, finish, sum(preemptions for _, preemptions in parts)
        return last

    def random_finish_times(self, mix: PoolMix) -> Floats:
        """Baseline: :meth:`finish_times` with the same numbers of samples in random order."""
        finish = np.empty(self.steps.lengths.shape)
        for draw, (row, order) in enumerate(zip(self.steps.lengths, self.steps.shuffled, strict=True)):
            for pool, units, start, stop in mix.ranges():
                if stop > start:
                    samples = order[start:stop]
                    queues = SampleQueues.shared(stop - start, units)
                    finish[draw, samples] = generate(self.dispatchers[pool].engine, row[samples], queues).finish_s
        return finish

    def range_s(self, pool: int, units: int, start: int, stop: int) -> float:
        """Mean seconds of one pool for a range of samples."""
        if stop <= start:
            return 0.0
        return float(self.dispatchers[pool].range_makespans(start, stop, units).mean())

    def makespans(self, mix: PoolMix) -> Floats:
        """Time at which generation ends, (draws,)."""
        parts = [
            self.dispatchers[pool].range_makespans(start, stop, units)
            for pool, units, start, stop in mix.ranges()
            if stop > start
        ]
        longest: Floats = np.max(parts, axis=0)
        return longest

    def longest_alone_s(self) -> Floats:
        """Lower bound of any division: the longest sample alone on the fastest pool, (draws,)."""
        least: Floats = np.min([dispatcher.longest_alone_s() for dispatcher in self.dispatchers.values()], axis=0)
        return least

    def lower_bound_s(self, mix: PoolMix) -> Floats:
        """Lower bound for these instances, (draws,): the longest sample alone, or all tokens divided evenly."""
        pools = [(self.dispatchers[pool], units) for pool, units in zip(mix.pools, mix.units, strict=True)]
        longest = np.min([dispatcher.longest_alone_s() for dispatcher, _ in pools], axis=0)
        tokens_per_s = sum(units * dispatcher.engine.tokens_per_s() for dispatcher, units in pools)
        bound: Floats = np.maximum(longest, self.steps.lengths.sum(1) / tokens_per_s)
        return bound

    def proportional(self, pools: Sequence[int], units: Sequence[int]) -> PoolMix:
        """Samples in proportion to the highest throughput of each pool."""
        speeds = [
            count * self.dispatchers[pool].engine.tokens_per_s() for pool, count in zip(pools, units, strict=True)
        ]
        return PoolMix(tuple(pools), tuple(units), _rounded(speeds, self.samples))

    def divide(self, pools: Sequence[int], units: Sequence[int], over: Callable[[], bool] = never) -> PoolMix:
        """The division with the shortest mean generation.

        Parameters
        ----------
        pools, units : sequence of int
            Pools and their instances, at least one each.
        over : callable
            Whether to end the search with the best division so far.
        """
        count_of = dict(zip(pools, units, strict=True))
        by_speed = sorted(pools, key=lambda pool: float(self.dispatchers[pool].engine.seconds_per_token[1]))
        orders = list(permutations(by_speed)) if len(pools) <= MOST_ORDERED else [by_speed, by_speed[::-1]]
        best, least = self.proportional(pools, units), np.inf
        for order in orders:
            if over() and least < np.inf:
                break
            start = self.proportional(order, [count_of[pool] for pool in order])
            balanced = self._balanced(start if len(pools) == 2 else self._filled(start, over), over)
            try_all = comb(self.samples + len(pools) - 1, len(pools) - 1) <= ALL_DIVISIONS
            for mix in [balanced, *(self._all(start) if try_all else [])]:
                seconds = float(self.makespans(mix).mean())
                if seconds < least:
                    best, least = mix, seconds
                if over():
                    break
        return best

    def _all(self, mix: PoolMix) -> Iterator[PoolMix]:
        """All divisions with this order."""
        for borders in combinations_with_replacement(range(self.samples + 1), len(mix.pools) - 1):
            samples = tuple(stop - start for start, stop in pairwise((0, *borders, self.samples)))
            yield replace(mix, samples=samples)

    def _filled(self, mix: PoolMix, over: Callable[[], bool]) -> PoolMix:
        """The order's division with the least time within which each pool, one after the other, takes what it can."""
        low, high = 0.0, float(self.makespans(mix).mean())
        for _ in range(HALVINGS):
            if over():
                break
            middle = (low + high) / 2
            samples, start = [], 0
            for pool, units in zip(mix.pools, mix.units, strict=True):
                stop = self._last_within(middle, pool, units, start)
                samples.append(stop - start)
                start = stop
            if start == self.samples:
                mix, high = replace(mix, samples=tuple(samples)), middle
            else:
                low = middle
        return mix

    def _last_within(self, seconds: float, pool: int, units: int, start: int) -> int:
        """End of the longest range from ``start`` that a pool generates within a time."""
        low, high = start, self.samples
        while low < high:
            middle = (low + high + 1) // 2
            if self.range_s(pool, units, start, middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def _balanced(self, mix: PoolMix, over: Callable[[], bool]) -> PoolMix:
        """The order's division after neighbours have exchanged samples."""
        seconds = float(self.makespans(mix).mean())
        for _ in range(MOST_ROUNDS):
            before = seconds
            for index in range(len(mix.pools) - 1):
                if over():
                    return mix
                mix, seconds = self._exchanged(mix, seconds, index, over)
            if seconds >= before:
                break
        return mix

    def _exchanged(self, mix: PoolMix, seconds: float, index: int, over: Callable[[], bool]) -> tuple[PoolMix, float]:
        """The best division of the samples of two neighbours between them."""
        (first, units, start, _), (second, other_units, _, stop) = list(mix.ranges())[index : index + 2]
        low, high = start, stop
        while low < high and not over():
            middle = (low + high) // 2
            if self.range_s(first, units, start, middle) < self.range_s(second, other_units, middle, stop):
                low = middle + 1
            else:
                high = middle
        # The mean of the longer range is least near the balance of the means.
        near = range(max(low - REACH, start), min(low + REACH, stop) + 1)
        for border in range(start, stop + 1) if stop - start <= ALL_BORDERS else near:
            if over():
                break
            samples = list(mix.samples)
            samples[index], samples[index + 1] = border - start, stop - border
            other = replace(mix, samples=tuple(samples))
            other_s = float(self.makespans(other).mean())
            if other_s < seconds:
                mix, seconds = other, other_s
        return mix, seconds


def _rounded(shares: Sequence[float], whole: int) -> tuple[int, ...]:
    """Whole numbers in proportion to the shares that add up to ``whole``."""
    borders = np.rint(np.cumsum(shares) / np.sum(shares) * whole).astype(int)
    return tuple(int(count) for count in np.diff(borders, prepend=0))
