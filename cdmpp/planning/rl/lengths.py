"""Lengths of responses: a distribution, draws from it, and a ranker that errs as much as it is said to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.planning.rl.generation import Floats, Ints

Misses = Literal["any", "near"]


@dataclass(frozen=True)
class Lengths:
    """A distribution of response lengths, in tokens, at least 1.

    Attributes
    ----------
    samples : int64 array or None
        Observed lengths, drawn with replacement.
    scores, logs : float64 arrays
        Else: normal scores of the known quantiles and the logarithms of their lengths; a line between two
        (exact for a log-normal distribution), continued beyond the outermost.
    longest : int
        No sample is longer.
    """

    samples: Ints | None
    scores: Floats
    logs: Floats
    longest: int

    @classmethod
    def of_samples(cls, samples: Sequence[int], longest: int | None = None) -> Lengths:
        """From observed lengths; ``longest`` cuts them, as a limit of tokens does."""
        values = np.asarray(samples, dtype=np.int64)
        if len(values) == 0:
            raise FieldError("no lengths", path="lengths.samples", hint="give the lengths of some past responses")
        most = int(values.max()) if longest is None else min(int(values.max()), longest)
        return cls(np.minimum(np.maximum(values, 1), most), np.zeros(0), np.zeros(0), most)

    @classmethod
    def of_quantiles(
        cls, quantiles: Mapping[float, float], samples_per_step: int, longest: int | None = None
    ) -> Lengths:
        """From quantiles, at least two.

        Parameters
        ----------
        quantiles : mapping of level in [0, 1] to tokens
            Levels 0 and 1 are taken for the shortest and longest of a step: the levels 0.5 / samples and
            1 - 0.5 / samples.
        longest : int, optional
            The limit of tokens. Without it and without level 1, the line through the last two quantiles
            goes on to the level 1 - 0.5 / samples, and ends there.

        Raises
        ------
        FieldError
            Fewer than two levels, or lengths that fall.
        """
        edge = 0.5 / max(samples_per_step, 2)
        levels = sorted(quantiles)
        lengths = [float(quantiles[level]) for level in levels]
        if len(levels) < 2:
            raise FieldError("one quantile is no distribution", path="lengths.quantiles", hint="give two")
        if any(b < a for a, b in pairwise(lengths)):
            raise FieldError("lengths fall from one quantile to a higher one", path="lengths.quantiles")
        normal = NormalDist()
        scores = np.array([normal.inv_cdf(min(max(level, edge), 1 - edge)) for level in levels])
        logs = np.log(np.maximum(lengths, 1.0))
        keep = np.concatenate([np.diff(scores) > 0, [True]])
        found = cls(None, scores[keep], logs[keep], 2**62)
        top = float(np.exp(found._at(np.array([normal.inv_cdf(1 - edge)])))[0])
        ends = levels[-1] == 1
        most = lengths[-1] if ends else top if longest is None else float(longest)
        # Not above what a float of tokens can be.
        limit = int(min(max(np.ceil(most - 1e-6), 1), 1e9))
        return cls(None, found.scores, found.logs, limit if longest is None else min(longest, limit))

    def _at(self, scores: Floats) -> Floats:
        """Log lengths at normal scores."""
        inside = np.interp(scores, self.scores, self.logs)
        if len(self.scores) < 2:
            return inside
        slopes = np.diff(self.logs) / np.diff(self.scores)
        above, below = np.maximum(scores - self.scores[-1], 0), np.maximum(self.scores[0] - scores, 0)
        grown: Floats = inside + slopes[-1] * above - slopes[0] * below
        return grown

    def median(self) -> int:
        """The median length, rounded up."""
        if self.samples is not None:
            return int(np.ceil(np.median(self.samples)))
        middle = float(np.exp(min(self._at(np.zeros(1))[0], np.log(self.longest))))
        return max(int(np.ceil(middle)), 1)

    def draw(self, rng: np.random.Generator, samples: int) -> Ints:
        """``samples`` lengths."""
        if self.samples is not None:
            return rng.choice(self.samples, samples)
        logs = self._at(rng.standard_normal(samples))
        lengths = np.exp(np.minimum(logs, np.log(self.longest)))
        return np.clip(np.rint(lengths), 1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class Ranker:
    """What is known of lengths before generation: which prompts will be long, and how often that is wrong.

    Attributes
    ----------
    recall : float
        Share of the truly longest ``share`` that is among the ``share`` ranked highest; in [share, 1].
    share : float
        Of all samples, in (0, 1).
    misses : {"any", "near"}
        Which of the longest are missed: any of them with equal chance, and the order within the two groups
        says nothing (the least that a recall promises); or those near the border, as by a log-normal error
        of the predicted length, just large enough for the recall.
    """

    recall: float = 0.87
    share: float = 0.2
    misses: Misses = "any"

    def tail(self, samples: int) -> int:
        """How many are taken for long; at least one, never all."""
        return min(max(round(self.share * samples), 1), max(samples - 1, 1))

    def rank(self, lengths: Ints, rng: np.random.Generator, error: float | None = None) -> Ints:
        """Numbers of the samples, those taken for longest first, erring as described.

        Parameters
        ----------
        error : float, optional
            Standard deviation of the log length's error for ``near``; default: :meth:`error_of` the lengths.
        """
        if self.misses == "near":
            sigma = self.error_of(lengths) if error is None else error
            scores = np.log(lengths) + sigma * rng.standard_normal(len(lengths))
            return np.argsort(-scores, kind="stable").astype(np.int64)
        count = self.tail(len(lengths))
        # Equal lengths stand in any order.
        order = np.lexsort((rng.random(len(lengths)), -lengths))
        hit = round(self.recall * count)
        wrong = min(count - hit, len(lengths) - count)
        longest, rest = rng.permutation(order[:count]), rng.permutation(order[count:])
        flagged = np.concatenate([longest[: count - wrong], rest[:wrong]])
        others = np.concatenate([longest[count - wrong :], rest[wrong:]])
        return np.concatenate([rng.permutation(flagged), rng.permutation(others)]).astype(np.int64)

    def error_of(self, lengths: Ints) -> float:
        """Standard deviation of the log length's error that gives this recall on lengths like these."""
        logs = np.log(lengths)
        spread = float(logs.std())
        if self.recall >= 1 or spread == 0:
            return 0.0
        count = self.tail(len(lengths))
        rng = np.random.default_rng(len(lengths))
        noise = rng.standard_normal((max(2**15 // len(lengths), 1), len(lengths)))
        border = np.sort(logs)[-count]
        low, high = 0.0, 64.0
        for _ in range(30):
            middle = (low + high) / 2
            ranked = np.argsort(-(logs + middle * spread * noise), axis=1)[:, :count]
            if float((logs[ranked] >= border).mean()) > self.recall:
                low = middle
            else:
                high = middle
        return spread * (low + high) / 2


@dataclass(frozen=True)
class Drawn:
    """Steps drawn from a distribution, ranked.

    Attributes
    ----------
    lengths : int64 array, (draws, samples)
        Each row in the ranker's order: those taken for longest first.
    tail : int
        How many of each row are taken for long.
    shuffled : int64 array, (draws, samples)
        For each row an order that knows nothing.
    guesses : float64 array, (draws, samples)
        A guess of each length, off by a log-normal error: for the plan that trusts guesses.
    """

    lengths: Ints
    tail: int
    shuffled: Ints
    guesses: Floats

    def __len__(self) -> int:
        return len(self.lengths)

    def first(self, draws: int) -> Drawn:
        """The first of the steps."""
        return Drawn(self.lengths[:draws], self.tail, self.shuffled[:draws], self.guesses[:draws])


#: Standard deviation of the log-normal error of guessed lengths.
GUESS_ERROR = 0.5


def draw_steps(lengths: Lengths, ranker: Ranker, samples: int, draws: int, rng: Any) -> Drawn:
    """Draw steps and rank their samples.

    Parameters
    ----------
    lengths : Lengths
    ranker : Ranker
    samples : int
        Of each step.
    draws : int
        Steps.
    rng : seed or numpy Generator
    """
    rng = np.random.default_rng(rng)
    rows, orders, guesses = [], [], []
    error = None
    for _ in range(draws):
        row = lengths.draw(rng, samples)
        if error is None and ranker.misses == "near":
            error = ranker.error_of(row)
        row = row[ranker.rank(row, rng, error)]
        rows.append(row)
        orders.append(rng.permutation(samples))
        guesses.append(row * np.exp(GUESS_ERROR * rng.standard_normal(samples)))
    return Drawn(np.array(rows), ranker.tail(samples), np.array(orders), np.array(guesses))
