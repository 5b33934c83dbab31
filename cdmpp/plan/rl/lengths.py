"""Response lengths: their forms in the request, a simulated length ranker, and steps sampled from both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.rl.generation import Floats, Ints
from cdmpp.predict.requests.request import Closed, WholeNumber

Misses = Literal["any", "near"]
#: Standard deviation of the log-normal error of guessed lengths.
GUESS_ERROR = 0.5
MAX_TOKENS = 10_000_000
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), WholeNumber]
Level = Annotated[str, Field(pattern=r"^(0(\.[0-9]{1,9})?|1(\.0{1,9})?)$", max_length=11)]


@dataclass(frozen=True)
class LengthDistribution:
    """Distribution of response lengths in tokens, at least 1."""

    # Observed lengths, drawn with replacement. None: ``scores`` and ``logs`` describe the distribution.
    samples: Ints | None
    # Normal scores of the given quantiles and the logarithms of their lengths. They are interpolated linearly (exact
    # for a log-normal distribution) and extrapolated beyond the outermost.
    scores: Floats
    logs: Floats
    longest: int  # maximum length

    @classmethod
    def of_samples(cls, samples: Sequence[int], longest: int | None = None) -> LengthDistribution:
        """Distribution of observed lengths, truncated at ``longest``."""
        values = np.asarray(samples, dtype=np.int64)
        if len(values) == 0:
            raise FieldError("no lengths", path="lengths.samples", hint="give the lengths of some past responses")
        limit = int(values.max()) if longest is None else min(int(values.max()), longest)
        return cls(np.minimum(np.maximum(values, 1), limit), np.zeros(0), np.zeros(0), limit)

    @classmethod
    def of_quantiles(
        cls, quantiles: Mapping[float, float], samples_per_step: int, longest: int | None = None
    ) -> LengthDistribution:
        """Distribution through at least two quantiles.

        ``quantiles``: levels 0 and 1 are the shortest and longest response of a step: they stand for 0.5 / samples and
        1 - 0.5 / samples.
        ``longest``: limit of tokens. Without it and without level 1, the distribution ends at level 1 - 0.5 / samples
        of the extrapolation.
        Raises FieldError: fewer than two levels, or lengths that fall.
        """
        edge = 0.5 / max(samples_per_step, 2)
        levels = sorted(quantiles)
        lengths = [float(quantiles[level]) for level in levels]
        path = "lengths.quantiles"
        if len(levels) < 2:
            raise FieldError("one quantile does not define a distribution", path=path, hint="give at least two")
        if any(b < a for a, b in pairwise(lengths)):
            hint = "give lengths that grow with the level"
            raise FieldError("lengths fall from one quantile to a higher one", path=path, hint=hint)
        normal = NormalDist()
        scores = np.array([normal.inv_cdf(min(max(level, edge), 1 - edge)) for level in levels])
        logs = np.log(np.maximum(lengths, 1.0))
        distinct = np.concatenate([np.diff(scores) > 0, [True]])
        unlimited = cls(None, scores[distinct], logs[distinct], 2**62)
        top = float(np.exp(unlimited._log_lengths(np.array([normal.inv_cdf(1 - edge)])))[0])
        has_top = levels[-1] == 1
        max_length = lengths[-1] if has_top else top if longest is None else float(longest)
        # Limited to what the conversion to an integer can represent.
        limit = int(min(max(np.ceil(max_length - 1e-6), 1), 1e9))
        return cls(None, unlimited.scores, unlimited.logs, limit if longest is None else min(longest, limit))

    def _log_lengths(self, scores: Floats) -> Floats:
        """Log lengths at normal scores."""
        inside = np.interp(scores, self.scores, self.logs)
        if len(self.scores) < 2:
            return inside
        slopes = np.diff(self.logs) / np.diff(self.scores)
        above, below = np.maximum(scores - self.scores[-1], 0), np.maximum(self.scores[0] - scores, 0)
        return np.asarray(inside + slopes[-1] * above - slopes[0] * below)

    def median(self) -> int:
        """The median length, rounded up."""
        if self.samples is not None:
            return int(np.ceil(np.median(self.samples)))
        middle = float(np.exp(min(self._log_lengths(np.zeros(1))[0], np.log(self.longest))))
        return max(int(np.ceil(middle)), 1)

    def draw(self, rng: np.random.Generator, samples: int) -> Ints:
        """Draw ``samples`` lengths."""
        if self.samples is not None:
            return rng.choice(self.samples, samples)
        logs = self._log_lengths(rng.standard_normal(samples))
        lengths = np.exp(np.minimum(logs, np.log(self.longest)))
        return np.clip(np.rint(lengths), 1, self.longest).astype(np.int64)


class RankerForm(Closed):
    """Quality of the length ranker, which flags long responses before generation.

    With misses "any" the order within the flagged and the other samples is random: the weakest ranker of this recall.
    """

    recall: float = Field(
        0.87, gt=0, le=1, description="Share of the longest samples that the ranker flags; at least `share` (chance)."
    )
    share: float = Field(0.2, gt=0, lt=1, description="Share of samples that are flagged as long.")
    misses: Misses = Field(
        "near",
        description="near: missed samples lie near the border, as by a log-normal error of predicted "
        "lengths; any: each of the longest is missed with equal chance.",
    )
    doubt: float = Field(
        0.1,
        ge=0,
        le=1,
        description='Probability that "near" is wrong and misses are "any": the recall does not determine which '
        "samples are missed, and a split loses much if the very longest are. A split is chosen by its mean gain "
        "over both.",
    )

    def check(self) -> None:
        """Raise FieldError for a recall below chance."""
        if self.recall < self.share:
            raise FieldError.at(
                "ranker.recall",
                f"{self.recall:g} is below ranker.share = {self.share:g}, the recall of a random order",
                hint="give a recall of at least the share",
            )

    def tail_samples(self, samples: int) -> int:
        """Number of flagged samples: at least one, never all."""
        return min(max(round(self.share * samples), 1), max(samples - 1, 1))

    def rank(self, lengths: Ints, rng: np.random.Generator, error: float | None = None) -> Ints:
        """Indices of the samples in the ranker's order, longest prediction first.

        ``error``: standard deviation of the log length's error for "near". Default: :meth:`error_of` the lengths.
        """
        if self.misses == "near":
            sigma = self.error_of(lengths) if error is None else error
            scores = np.log(lengths) + sigma * rng.standard_normal(len(lengths))
            return np.argsort(-scores, kind="stable").astype(np.int64)
        count = self.tail_samples(len(lengths))
        # Equal lengths are ordered at random.
        order = np.lexsort((rng.random(len(lengths)), -lengths))
        hits = round(self.recall * count)
        missed = min(count - hits, len(lengths) - count)
        longest, rest = rng.permutation(order[:count]), rng.permutation(order[count:])
        flagged = np.concatenate([longest[: count - missed], rest[:missed]])
        others = np.concatenate([longest[count - missed :], rest[missed:]])
        return np.concatenate([rng.permutation(flagged), rng.permutation(others)]).astype(np.int64)

    def error_of(self, lengths: Ints) -> float:
        """Standard deviation of the log length's error that gives this recall on such lengths."""
        logs = np.log(lengths)
        spread = float(logs.std())
        if self.recall >= 1 or spread == 0:
            return 0.0
        count = self.tail_samples(len(lengths))
        rng = np.random.default_rng(len(lengths))
        noise = rng.standard_normal((max(2**15 // len(lengths), 1), len(lengths)))
        border = np.sort(logs)[-count]
        low, high = 0.0, 64.0
        for _ in range(30):
            middle = (low + high) / 2
            ranked = np.argpartition(-(logs + middle * spread * noise), count - 1, axis=1)[:, :count]
            if float((logs[ranked] >= border).mean()) > self.recall:
                low = middle
            else:
                high = middle
        return spread * (low + high) / 2


@dataclass(frozen=True)
class SampledSteps:
    """Steps sampled from a length distribution, each in the ranker's order."""

    lengths: Ints  # (draws, samples): lengths, longest prediction first
    tail_samples: int  # number of samples of each row that are flagged as long; they come first
    shuffled: Ints  # (draws, samples): a random order of each row
    # (draws, samples): a prediction of each length with a log-normal error, for the baseline that trusts such
    # predictions.
    guesses: Floats

    def __len__(self) -> int:
        return len(self.lengths)

    def first(self, draws: int) -> SampledSteps:
        """The first steps."""
        return SampledSteps(self.lengths[:draws], self.tail_samples, self.shuffled[:draws], self.guesses[:draws])


def draw_steps(
    distribution: LengthDistribution, ranker: RankerForm, samples: int, draws: int, rng: Any
) -> SampledSteps:
    """Draw steps of so many samples each, and rank their samples."""
    rng = np.random.default_rng(rng)
    rows, orders, guesses = [], [], []
    error = None
    for _ in range(draws):
        row = distribution.draw(rng, samples)
        if error is None and ranker.misses == "near":
            error = ranker.error_of(row)
        row = row[ranker.rank(row, rng, error)]
        rows.append(row)
        orders.append(rng.permutation(samples))
        guesses.append(row * np.exp(GUESS_ERROR * rng.standard_normal(samples)))
    return SampledSteps(np.array(rows), ranker.tail_samples(samples), np.array(orders), np.array(guesses))


class ObservedLengths(Closed):
    """Lengths of past responses, in tokens; steps are drawn from them with replacement."""

    samples: list[Tokens] = Field(min_length=1)
    max_tokens: Tokens | None = Field(None, description="Responses are truncated at this length.")

    def distribution(self, samples_per_step: int) -> LengthDistribution:
        """The distribution of lengths."""
        return LengthDistribution.of_samples(self.samples, self.max_tokens)


class QuantileLengths(Closed):
    """Quantiles of the lengths: level as text ("0.9") to tokens.

    The distribution is log-normal between two levels; "0" and "1" are the shortest and longest response of a step.
    """

    quantiles: dict[Level, Annotated[float, Field(ge=1, le=MAX_TOKENS)]] = Field(
        min_length=2, max_length=64, json_schema_extra={"additionalProperties": False}
    )
    max_tokens: Tokens | None = Field(
        None,
        description='Responses are truncated at this length. Without it and without level "1", the distribution '
        "ends at the longest response expected in a step.",
    )

    def distribution(self, samples_per_step: int) -> LengthDistribution:
        """The distribution of lengths."""
        levels = {float(level): tokens for level, tokens in self.quantiles.items()}
        return LengthDistribution.of_quantiles(levels, samples_per_step, self.max_tokens)
