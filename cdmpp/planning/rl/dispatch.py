"""Which instance gets which samples: all alike, or the tail on instances of its own.

StreamRL (arXiv:2504.15930, section 5, algorithm 2) gives the samples that its ranker takes for long N_l of
the instances, where smaller batches decode faster, and takes N_l by a quantile of the lengths. Here N_l is
chosen by simulating steps that are drawn from the distribution and ranked with the stated recall: what a
prediction says of single samples is not trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from cdmpp.planning.rl.generation import Engine, Floats, Ints, Queues, generate
from cdmpp.planning.rl.lengths import Drawn

#: A split must gain so much on average, be no worse in more than this share of the steps (by more than the
#: margin), and its mean gain be so many standard errors from nothing.
LEAST_GAIN, MARGIN, LOSERS, ERRORS = 1e-3, 0.005, 0.05, 2.0


@dataclass(frozen=True)
class Split:
    """Instances by group.

    Attributes
    ----------
    tail : int
        Instances of the samples taken for long; 0: no split, every instance gets of all.
    regular : int
        The other instances.
    """

    tail: int
    regular: int

    @property
    def instances(self) -> int:
        """Together."""
        return self.tail + self.regular

    def queues(self, samples: int, tail_samples: int) -> Queues:
        """Samples in the ranker's order, one queue for each group: LPT as far as the ranker knows."""
        if self.tail == 0:
            return Queues.shared(samples, self.regular)
        order = np.arange(samples, dtype=np.int64)
        return Queues.of([order[:tail_samples], order[tail_samples:]], [self.tail, self.regular])


class Dispatcher:
    """Makespans of dispatches on drawn steps, each simulated once.

    Parameters
    ----------
    engine : Engine
    drawn : Drawn
    rough : Drawn, optional
        The same kind of steps, ranked by a ranker that misses any of the longest: what is feared.
    doubt : float
        Chance that the ranker is such a one. A split is chosen for what it gains on average over both.
    """

    def __init__(self, engine: Engine, drawn: Drawn, rough: Drawn | None = None, doubt: float = 0.0) -> None:
        self.engine, self.drawn, self.doubt = engine, drawn, doubt
        self.rough = None if rough is None else Dispatcher(engine, rough)
        self._ends: dict[tuple[str, int], Floats] = {}

    @property
    def samples(self) -> int:
        """Of a step."""
        return int(self.drawn.lengths.shape[1])

    @cached_property
    def tokens(self) -> Floats:
        """Of prompts and responses of each step, (draws,)."""
        tokens: Floats = (self.drawn.lengths + self.engine.prompt_tokens).sum(1).astype(np.float64)
        return tokens

    def finish(self, split: Split) -> Floats:
        """When each sample ends, (draws, samples)."""
        queues = split.queues(self.samples, self.drawn.tail)
        return np.array([generate(self.engine, row, queues).finish_s for row in self.drawn.lengths])

    def ends(self, split: Split) -> Floats:
        """When generation ends, (draws,)."""
        if split.tail == 0:
            return self._group("all", split.regular, self.drawn.lengths)
        return np.maximum(self._tail(split.tail), self._regular(split.regular))

    def random_finish(self, instances: int) -> Floats:
        """As :meth:`finish`, taken in an order that knows nothing of lengths: a baseline."""
        queues = Queues.shared(self.samples, instances)
        finish = np.empty(self.drawn.lengths.shape)
        for place, (row, order) in enumerate(zip(self.drawn.lengths, self.drawn.shuffled, strict=True)):
            finish[place, order] = generate(self.engine, row[order], queues).finish_s
        return finish

    def best(self, instances: int) -> Split:
        """The split of so many instances with the least mean, or none where its gain is not real."""
        whole = Split(0, instances)
        if instances < 2 or self.samples < 2:
            return whole
        found = self.best_split(instances)
        gain = self.gains(found)
        error = float(gain.std(ddof=1)) / len(gain) ** 0.5 if len(gain) > 1 else 0.0
        losers = (1 - self.ends(found) / self.ends(whole) < -MARGIN).mean()
        real = gain.mean() > max(LEAST_GAIN, ERRORS * error) and losers <= LOSERS
        return found if real else whole

    def gains(self, split: Split) -> Floats:
        """Share by which a split ends each step sooner than none, doubt counted in, (draws,)."""
        whole = Split(0, split.instances)
        gain: Floats = 1 - self.ends(split) / self.ends(whole)
        if self.rough is None or self.doubt == 0:
            return gain
        rough: Floats = 1 - self.rough.ends(split) / self.rough.ends(whole)
        both: Floats = gain + self.doubt * (rough - gain)
        return both

    def best_split(self, instances: int) -> Split:
        """The split into two groups that gains most on average, whether it gains or not."""
        # More instances for the tail: it ends sooner and the others later, so the best is where they cross;
        # doubt moves it to fewer.
        low, high = 1, instances - 1
        while low < high:
            middle = (low + high) // 2
            if self._tail(middle).mean() > self._regular(instances - middle).mean():
                low = middle + 1
            else:
                high = middle
        means: dict[int, float] = {}

        def try_near(middle: int, reach: int) -> int:
            for count in range(max(middle - reach, 1), min(middle + reach, instances - 1) + 1):
                if count not in means:
                    means[count] = -float(self.gains(Split(count, instances - count)).mean())
            return min(means, key=lambda count: (means[count], count))

        best = try_near(low, 3)
        if self.rough is not None and self.doubt > 0:
            for coarse in np.unique(np.linspace(1, low, 9).astype(int)).tolist():
                best = try_near(coarse, 0)
            best = try_near(best, 2)
        return Split(best, instances - best)

    def by_rule(self, instances: int, combine: Literal["max", "sum"] = "max") -> Split:
        """StreamRL's own rule (algorithm 2), by quantiles instead of simulation: a baseline.

        An instance with M samples and batch B takes ``PTL(B) * L * ceil(M / B)``, with L the 90th percentile
        of the lengths for the tail and the median for the others. The algorithm adds the two groups' times
        up ("sum"); they run beside each other, so "max" is what a step takes.
        """
        if instances < 2 or self.samples < 2:
            return Split(0, instances)
        median, high = np.quantile(self.drawn.lengths, [0.5, 0.9])

        def seconds(samples: int, instances: int, length: float) -> float:
            each = -(-samples // instances)
            batch = min(each, self.engine.batch)
            return float(self.engine.seconds_per_token[batch] * length * -(-each // batch))

        def both(tail: int) -> tuple[float, int]:
            long = seconds(self.drawn.tail, tail, high)
            rest = seconds(self.samples - self.drawn.tail, instances - tail, median)
            return (max(long, rest) if combine == "max" else long + rest), tail

        tail = min(range(1, instances), key=both)
        return Split(tail, instances - tail)

    def guessed_finish(self, instances: int) -> Floats:
        """As :meth:`finish`, with splits that trust a guess of every length: a baseline.

        Each step is grouped and ordered by the guesses, and its split is the best for them; then the true
        lengths are generated.
        """
        finish = np.empty(self.drawn.lengths.shape)
        for place, (row, guess) in enumerate(zip(self.drawn.lengths, self.drawn.guesses, strict=True)):
            order = np.argsort(-guess, kind="stable")
            guessed = np.clip(np.rint(guess[order]), 1, self._longest).astype(np.int64)
            one = Drawn(guessed[None], self.drawn.tail, order[None], guess[None])
            inner = Dispatcher(self.engine, one)
            whole = Split(0, instances)
            chosen = whole
            if instances > 1 and self.samples > 1:
                found = inner.best_split(instances)
                chosen = found if inner.ends(found)[0] < inner.ends(whole)[0] else whole
            queues = chosen.queues(self.samples, self.drawn.tail)
            finish[place, order] = generate(self.engine, row[order], queues).finish_s
        return finish

    def floor(self) -> Floats:
        """No dispatch ends sooner than its longest sample alone, (draws,)."""
        engine = self.engine
        longest = self._longest_each.astype(np.float64)
        least: Floats = longest * engine.seconds_per_token[1:].min() + engine.prefill_s
        return least

    def bound(self, instances: int) -> Floats:
        """No dispatch over so many instances ends sooner, (draws,): the floor, and the work."""
        bound: Floats = np.maximum(self.floor(), self.work_s() / instances)
        return bound

    def work_s(self) -> Floats:
        """Unit-seconds that the tokens of each step take at the best batch, (draws,)."""
        work: Floats = self.drawn.lengths.sum(1) / self.engine.tokens_per_s() + self.samples * self.engine.prefill_s
        return work

    @cached_property
    def _longest_each(self) -> Ints:
        longest: Ints = self.drawn.lengths.max(1)
        return longest

    @cached_property
    def _longest(self) -> int:
        # A guess is cut where the memory ends, as a limit of tokens would.
        return min(int(self.engine.memory_tokens) - self.engine.prompt_tokens, 2**31)

    def _tail(self, instances: int) -> Floats:
        return self._group("tail", instances, self.drawn.lengths[:, : self.drawn.tail])

    def _regular(self, instances: int) -> Floats:
        return self._group("regular", instances, self.drawn.lengths[:, self.drawn.tail :])

    def _group(self, name: str, instances: int, lengths: Ints) -> Floats:
        key = (name, instances)
        if key not in self._ends:
            queues = Queues.shared(lengths.shape[1], instances)
            rows = np.ascontiguousarray(lengths)
            self._ends[key] = np.array([generate(self.engine, row, queues).end_s for row in rows])
        return self._ends[key]
