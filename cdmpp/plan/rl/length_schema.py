"""Parts of the RL request: response lengths and the length ranker."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.rl.lengths import LengthDistribution, LengthRanker, Misses
from cdmpp.predict.requests.request import Closed, WholeNumber

MAX_TOKENS = 10_000_000
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), WholeNumber]
Level = Annotated[str, Field(pattern=r"^(0(\.[0-9]{1,9})?|1(\.0{1,9})?)$", max_length=11)]


class ObservedLengths(Closed):
    """Lengths of past responses, in tokens; steps are drawn from them with replacement."""

    samples: Annotated[list[Tokens], Field(min_length=1)]
    max_tokens: Annotated[Tokens | None, Field(description="Responses are truncated at this length.")] = None

    def distribution(self, samples_per_step: int) -> LengthDistribution:
        """The distribution of lengths."""
        return LengthDistribution.of_samples(self.samples, self.max_tokens)


class QuantileLengths(Closed):
    """Quantiles of the lengths: level as text ("0.9") to tokens.

    The distribution is log-normal between two levels; "0" and "1" are the shortest and longest response of a step.
    """

    quantiles: Annotated[
        dict[Level, Annotated[float, Field(ge=1, le=MAX_TOKENS)]],
        Field(min_length=2, max_length=64, json_schema_extra={"additionalProperties": False}),
    ]
    max_tokens: Annotated[
        Tokens | None,
        Field(
            description='Responses are truncated at this length. Without it and without level "1", the distribution '
            "ends at the longest response expected in a step."
        ),
    ] = None

    def distribution(self, samples_per_step: int) -> LengthDistribution:
        """The distribution of lengths."""
        levels = {float(level): tokens for level, tokens in self.quantiles.items()}
        return LengthDistribution.of_quantiles(levels, samples_per_step, self.max_tokens)


class RankerForm(Closed):
    """Quality of the length ranker, which flags long responses before generation."""

    recall: Annotated[
        float,
        Field(gt=0, le=1, description="Share of the longest samples that the ranker flags; at least `share` (chance)."),
    ] = 0.87
    share: Annotated[float, Field(gt=0, lt=1, description="Share of samples that are flagged as long.")] = 0.2
    misses: Annotated[
        Misses,
        Field(
            description="near: missed samples lie near the border, as by a log-normal error of predicted "
            "lengths; any: each of the longest is missed with equal chance."
        ),
    ] = "near"
    doubt: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description='Probability that "near" is wrong and misses are "any": the recall does not determine which '
            "samples are missed, and a split loses much if the very longest are. A split is chosen by its mean gain "
            "over both.",
        ),
    ] = 0.1

    def ranker(self) -> LengthRanker:
        """The simulated ranker.

        Raises
        ------
        FieldError
            Its recall is below chance.
        """
        if self.recall < self.share:
            raise FieldError(
                f"ranker.recall: {self.recall:g} is below ranker.share = {self.share:g}, the recall of a random order",
                path="ranker.recall",
                hint="give a recall of at least the share",
            )
        return LengthRanker(self.recall, self.share, self.misses)
