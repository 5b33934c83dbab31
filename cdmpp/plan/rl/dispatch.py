"""Dispatch of samples to generation instances: one group, separate instances for the long tail, or several pools.

StreamRL (arXiv:2504.15930, section 5, algorithm 2) gives the samples that its ranker flags as long N_l instances of
their own, where smaller batches decode faster, and computes N_l from a quantile of the lengths. Here N_l is chosen by
simulation: steps are drawn from the length distribution and ranked with the given recall. No prediction of a single
length is used.

Several unlike pools may generate at once. Each pool gets a range of the ranker's order, and its instances take samples
from one queue. So the longest samples may go to the pool that decodes fastest, and the others to slower pools. The
sizes of the ranges are chosen by simulation: pools that are next to each other in the order exchange samples until both
end at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations_with_replacement, pairwise, permutations
from math import comb

import numpy as np

from cdmpp.plan.rl.generation import Floats, GenerationEngine, Ints, SampleQueues, generate
from cdmpp.plan.rl.lengths import SampledSteps

#: A split is accepted if its mean gain is at least LEAST_GAIN and at least STANDARD_ERRORS standard errors, and if at
#: most the share MOST_LOSERS of the steps become longer by more than LOSER_MARGIN.
LEAST_GAIN, LOSER_MARGIN, MOST_LOSERS, STANDARD_ERRORS = 1e-3, 0.005, 0.05, 2.0
#: Simulations of whole steps that a dispatcher keeps.
MOST_KEPT = 4
#: Most pools of which all orders are tried; of more, by decoding speed in both directions.
MOST_ORDERED = 3
#: Rounds in which neighbours exchange samples, and how far from the balance of two pools sizes are tried.
MOST_ROUNDS, REACH = 8, 2
#: Halvings of the time within which three or more pools take what they can.
HALVINGS = 16
#: Samples of two neighbours of which all divisions are tried, and number of divisions of all pools that are all tried.
ALL_BORDERS, ALL_DIVISIONS = 32, 128


def never() -> bool:
    """Default stop condition: the search is never interrupted."""
    return False


@dataclass(frozen=True)
class TailSplit:
    """Number of instances of each group."""

    tail: int  # instances for the samples flagged as long; 0: no split, all instances serve all samples
    regular: int  # the other instances

    @property
    def instances(self) -> int:
        """Instances of both groups."""
        return self.tail + self.regular

    def queues(self, samples: int, tail_samples: int) -> SampleQueues:
        """One queue per group, in the ranker's order (LPT if the ranker is right)."""
        if self.tail == 0:
            return SampleQueues.shared(samples, self.regular)
        order = np.arange(samples, dtype=np.int64)
        return SampleQueues.of([order[:tail_samples], order[tail_samples:]], [self.tail, self.regular])


class Dispatcher:
    """Simulated makespans of dispatches on sampled steps. Makespans are cached.

    ``pessimistic``: steps from a ranker that misses any of the longest samples with equal chance. ``doubt``:
    probability that the ranker is this one; gains of a split are means over both.
    """

    def __init__(
        self, engine: GenerationEngine, steps: SampledSteps, pessimistic: SampledSteps | None = None, doubt: float = 0.0
    ) -> None:
        self.engine, self.steps, self.doubt = engine, steps, doubt
        self.samples, self.prompt_tokens = int(steps.lengths.shape[1]), engine.prompt_tokens
        self.pessimistic = None if pessimistic is None else Dispatcher(engine, pessimistic)
        self._makespans: dict[tuple[str | tuple[int, int], int], Floats] = {}
        self._simulated: dict[TailSplit, tuple[Floats, float]] = {}

    @cached_property
    def tokens(self) -> Floats:
        """Tokens of prompts and responses of each step, (draws,)."""
        return np.asarray((self.steps.lengths + self.engine.prompt_tokens).sum(1).astype(np.float64))

    def finish_times(self, split: Groups) -> Floats:
        """Time at which each sample ends, (draws, samples)."""
        return self._simulate(split)[0]

    def preemptions(self, split: Groups) -> float:
        """Mean number of preemptions of a step."""
        return self._simulate(split)[1]

    def _simulate(self, split: Groups) -> tuple[Floats, float]:
        """Finish times and preemptions of whole steps; the last few splits are kept."""
        assert isinstance(split, TailSplit)
        kept = self._simulated.get(split)
        if kept is not None:
            return kept
        queues = split.queues(self.samples, self.steps.tail_samples)
        simulated = _generated(self.engine, self.steps.lengths, queues)
        for oldest in list(self._simulated)[: 1 - MOST_KEPT]:
            self._simulated.pop(oldest, None)
        self._simulated[split] = simulated
        if split.tail == 0:
            self._makespans["all", split.regular] = simulated[0].max(1)
        return simulated

    def makespans(self, split: TailSplit) -> Floats:
        """Time at which generation ends, (draws,)."""
        if split.tail == 0:
            return self._group("all", split.regular, self.steps.lengths)
        return np.maximum(self._tail(split.tail), self._regular(split.regular))

    def random_finish_times(self, instances: int) -> Floats:
        """Baseline: :meth:`finish_times` in random order."""
        queues = SampleQueues.shared(self.samples, instances)
        finish = np.empty(self.steps.lengths.shape)
        for draw, (row, order) in enumerate(zip(self.steps.lengths, self.steps.shuffled, strict=True)):
            finish[draw, order] = generate(self.engine, row[order], queues).finish_s
        return finish

    def choose_split(self, instances: int, over: Callable[[], bool] = never) -> TailSplit:
        """:meth:`best_split` if its gain is significant, else no split."""
        unsplit = TailSplit(0, instances)
        if instances < 2 or self.samples < 2:
            return unsplit
        split = self.best_split(instances, over)
        gain = self.gains(split)
        error = float(gain.std(ddof=1)) / len(gain) ** 0.5 if len(gain) > 1 else 0.0
        losers = (1 - self.makespans(split) / self.makespans(unsplit) < -LOSER_MARGIN).mean()
        significant = gain.mean() > max(LEAST_GAIN, STANDARD_ERRORS * error) and losers <= MOST_LOSERS
        return split if significant else unsplit

    def gains(self, split: TailSplit) -> Floats:
        """Relative reduction of each makespan by a split, with ``doubt`` taken into account, (draws,)."""
        unsplit = TailSplit(0, split.instances)
        gain: Floats = 1 - self.makespans(split) / self.makespans(unsplit)
        if self.pessimistic is None or self.doubt == 0:
            return gain
        pessimistic: Floats = 1 - self.pessimistic.makespans(split) / self.pessimistic.makespans(unsplit)
        return gain + self.doubt * (pessimistic - gain)

    def best_split(self, instances: int, over: Callable[[], bool] = never) -> TailSplit:
        """The split into two groups with the largest mean gain, which may be negative; if ``over``, the best so far."""
        # With more tail instances the tail ends sooner and the rest later: the best split is near the crossing.
        # Doubt moves it to fewer tail instances.
        low, high = 1, instances - 1
        while low < high and not over():
            middle = (low + high) // 2
            if self._tail(middle).mean() > self._regular(instances - middle).mean():
                low = middle + 1
            else:
                high = middle
        losses: dict[int, float] = {}

        def best_near(center: int, reach: int) -> int:
            for tail in range(max(center - reach, 1), min(center + reach, instances - 1) + 1):
                if tail not in losses and not (losses and over()):
                    losses[tail] = -float(self.gains(TailSplit(tail, instances - tail)).mean())
            return min(losses, key=lambda tail: (losses[tail], tail))

        best = best_near(low, 3)
        if self.pessimistic is not None and self.doubt > 0:
            for tail in np.unique(np.linspace(1, low, 9).astype(int)).tolist():
                best = best_near(tail, 0)
            best = best_near(best, 2)
        return TailSplit(best, instances - best)

    def quantile_rule_split(self, instances: int) -> TailSplit:
        """Baseline: StreamRL's rule (algorithm 2), computed from quantiles instead of by simulation.

        An instance with M samples and batch B takes ``PTL(B) * L * ceil(M / B)`` seconds. L is the 90th percentile
        of the lengths for the tail and the median for the others. The algorithm adds the times of both groups;
        they run in parallel, so the step takes their maximum.
        """
        if instances < 2 or self.samples < 2:
            return TailSplit(0, instances)
        median, high = np.quantile(self.steps.lengths, [0.5, 0.9])

        def seconds(samples: int, instances: Ints, length: float) -> Floats:
            samples_each = -(-samples // instances)
            batch = np.minimum(samples_each, self.engine.max_batch)
            return self.engine.usual_s(batch, length) * length * -(-samples_each // batch)

        tails = np.arange(1, instances)
        long = seconds(self.steps.tail_samples, tails, high)
        rest = seconds(self.samples - self.steps.tail_samples, instances - tails, median)
        tail = 1 + int(np.maximum(long, rest).argmin())
        return TailSplit(tail, instances - tail)

    def guessed_finish_times(self, instances: int, over: Callable[[], bool] = never) -> Floats | None:
        """Baseline: :meth:`finish_times` if a guess of each length is trusted.

        The guesses of each step determine its groups, order and best split; the true lengths are generated. None if
        the search is ``over`` before all splits are compared.
        """
        longest = min(self.engine.memory_tokens - self.engine.prompt_tokens, 2**31)
        finish = np.empty(self.steps.lengths.shape)
        for draw, (row, guess) in enumerate(zip(self.steps.lengths, self.steps.guesses, strict=True)):
            order = np.argsort(-guess, kind="stable")
            guessed = np.clip(np.rint(guess[order]), 1, longest).astype(np.int64)
            guessed_step = SampledSteps(guessed[None], self.steps.tail_samples, order[None], guess[None])
            dispatcher = Dispatcher(self.engine, guessed_step)
            split = unsplit = TailSplit(0, instances)
            if instances > 1 and self.samples > 1:
                best = dispatcher.best_split(instances, over)
                if over():
                    return None
                split = best if dispatcher.makespans(best)[0] < dispatcher.makespans(unsplit)[0] else unsplit
            queues = split.queues(self.samples, self.steps.tail_samples)
            finish[draw, order] = generate(self.engine, row[order], queues).finish_s
        return finish

    def longest_alone_s(self) -> Floats:
        """Lower bound of any dispatch: the longest sample, decoded alone, (draws,)."""
        longest = self.steps.lengths.max(1)
        least: Floats = longest * self.engine.seconds_per_token[1:].min() + self.engine.prefill_s
        return least + self.engine.cached_s(longest)

    def lower_bound_s(self, split: Groups) -> Floats:
        """Lower bound for these instances, (draws,): the longest sample alone, or the work divided evenly."""
        return np.asarray(np.maximum(self.longest_alone_s(), self.work_s() / split.instances))

    def work_s(self) -> Floats:
        """Unit-seconds for the tokens of each step at the batch with the highest throughput, (draws,)."""
        work: Floats = self.steps.lengths.sum(1) / self.engine.tokens_per_s() + self.samples * self.engine.prefill_s
        return np.asarray(work + self.engine.cached_s(self.steps.lengths).sum(1))

    def range_makespans(self, start: int, stop: int, instances: int) -> Floats:
        """Time at which instances end that generate only the samples ``start`` to ``stop`` of each step, (draws,)."""
        return self._group((start, stop), instances, self.steps.lengths[:, start:stop])

    def simulate_range(self, start: int, stop: int, instances: int) -> tuple[Floats, float]:
        """Time at which each of these samples ends, (draws, stop - start), and mean number of preemptions."""
        rows = np.ascontiguousarray(self.steps.lengths[:, start:stop])
        return _generated(self.engine, rows, SampleQueues.shared(stop - start, instances))

    def _tail(self, instances: int) -> Floats:
        return self._group("tail", instances, self.steps.lengths[:, : self.steps.tail_samples])

    def _regular(self, instances: int) -> Floats:
        return self._group("regular", instances, self.steps.lengths[:, self.steps.tail_samples :])

    def _group(self, name: str | tuple[int, int], instances: int, lengths: Ints) -> Floats:
        key = (name, instances)
        if key not in self._makespans:
            queues = SampleQueues.shared(lengths.shape[1], instances)
            rows = np.ascontiguousarray(lengths)
            self._makespans[key] = np.array([generate(self.engine, row, queues).end_s for row in rows])
        return self._makespans[key]


def _generated(engine: GenerationEngine, rows: Ints, queues: SampleQueues) -> tuple[Floats, float]:
    """Time at which each sample of each row ends, and mean number of preemptions of a row."""
    results = [generate(engine, row, queues) for row in rows]
    return np.array([result.finish_s for result in results]), float(np.mean([result.preemptions for result in results]))


@dataclass(frozen=True)
class PoolMix:
    """Several pools that generate at once."""

    # Indices of the pools, in the order of their ranges: the first has the samples ranked longest.
    pools: tuple[int, ...]
    units: tuple[int, ...]  # instances of each pool
    samples: tuple[int, ...]  # samples of each pool

    @property
    def instances(self) -> int:
        """Instances of all pools."""
        return sum(self.units)

    @property
    def tail(self) -> int:
        """Always 0; a mix has no tail group (see :class:`TailSplit`)."""
        return 0

    def ranges(self) -> Iterator[tuple[int, int, int, int]]:
        """Pool, instances, and first and last sample (exclusive) of each range."""
        borders = pairwise(accumulate(self.samples, initial=0))
        for (start, stop), pool, units in zip(borders, self.pools, self.units, strict=True):
            yield pool, units, start, stop

    def used_ranges(self) -> list[tuple[int, int, int, int]]:
        """As :meth:`ranges`, without empty ones."""
        return [(pool, units, start, stop) for pool, units, start, stop in self.ranges() if stop > start]


class MixDispatcher:
    """Simulated times of mixes on sampled steps; the part of ``Dispatcher`` that sizes and outcomes need.

    ``dispatchers``: by index of the pool, all on the same steps.
    """

    def __init__(self, dispatchers: Mapping[int, Dispatcher]) -> None:
        self.dispatchers = dispatchers
        first = next(iter(dispatchers.values()))
        self.steps, self.samples = first.steps, first.samples
        self.prompt_tokens, self.tokens = first.prompt_tokens, first.tokens
        self._last: tuple[Groups, Floats, float] | None = None

    def finish_times(self, mix: Groups) -> Floats:
        """Time at which each sample ends, (draws, samples)."""
        return self._simulate(mix)[1]

    def preemptions(self, mix: Groups) -> float:
        """Mean number of preemptions of a step."""
        return self._simulate(mix)[2]

    def _simulate(self, mix: Groups) -> tuple[Groups, Floats, float]:
        """Finish times and preemptions; those of the last mix are kept."""
        assert isinstance(mix, PoolMix)
        if self._last is None or self._last[0] != mix:
            parts = [self.dispatchers[p].simulate_range(start, stop, n) for p, n, start, stop in mix.used_ranges()]
            finish = np.concatenate([finish for finish, _ in parts], axis=1)
            self._last = mix, finish, sum(preemptions for _, preemptions in parts)
        return self._last

    def random_finish_times(self, mix: PoolMix) -> Floats:
        """Baseline: :meth:`finish_times` with the same numbers of samples in random order."""
        finish = np.empty(self.steps.lengths.shape)
        for draw, (row, order) in enumerate(zip(self.steps.lengths, self.steps.shuffled, strict=True)):
            for pool, units, start, stop in mix.used_ranges():
                samples, queues = order[start:stop], SampleQueues.shared(stop - start, units)
                finish[draw, samples] = generate(self.dispatchers[pool].engine, row[samples], queues).finish_s
        return finish

    def range_s(self, pool: int, units: int, start: int, stop: int) -> float:
        """Mean seconds of one pool for a range of samples."""
        if stop <= start:
            return 0.0
        return float(self.dispatchers[pool].range_makespans(start, stop, units).mean())

    def makespans(self, mix: PoolMix) -> Floats:
        """Time at which generation ends, (draws,)."""
        parts = [self.dispatchers[p].range_makespans(start, stop, n) for p, n, start, stop in mix.used_ranges()]
        return np.asarray(np.max(parts, axis=0))

    def longest_alone_s(self) -> Floats:
        """Lower bound of any division: the longest sample alone on the fastest pool, (draws,)."""
        return np.asarray(np.min([dispatcher.longest_alone_s() for dispatcher in self.dispatchers.values()], axis=0))

    def lower_bound_s(self, mix: Groups) -> Floats:
        """Lower bound for these instances, (draws,): the longest sample alone, or all tokens divided evenly."""
        assert isinstance(mix, PoolMix)
        pools = [(self.dispatchers[pool], units) for pool, units in zip(mix.pools, mix.units, strict=True)]
        longest = np.min([dispatcher.longest_alone_s() for dispatcher, _ in pools], axis=0)
        tokens_per_s = sum(units * dispatcher.engine.tokens_per_s() for dispatcher, units in pools)
        return np.asarray(np.maximum(longest, self.steps.lengths.sum(1) / tokens_per_s))

    def proportional(self, pools: Sequence[int], units: Sequence[int]) -> PoolMix:
        """Samples in proportion to the highest throughput of each pool."""
        speeds = [n * self.dispatchers[pool].engine.tokens_per_s() for pool, n in zip(pools, units, strict=True)]
        borders = np.rint(np.cumsum(speeds) / np.sum(speeds) * self.samples).astype(int)
        return PoolMix(tuple(pools), tuple(units), tuple(np.diff(borders, prepend=0).tolist()))

    def divide(self, pools: Sequence[int], units: Sequence[int], over: Callable[[], bool] = never) -> PoolMix:
        """The division with the shortest mean generation, each pool with units; if ``over``, the best so far."""
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


#: Groups of the instances that generate, and the simulator of their steps.
Groups = TailSplit | PoolMix
AnyDispatcher = Dispatcher | MixDispatcher
