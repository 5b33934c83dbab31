"""Parts of the RL plan's request."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cdmpp.compose.pricing import BatchCurve, CostField, PredictedCost
from cdmpp.compose.request import Closed, DeviceForm, Name, PositiveSeconds, Seconds, WholeNumber

MAX_SAMPLES, MAX_TOKENS, MAX_UNITS, MAX_BATCH, MAX_OBSERVED = 65_536, 10_000_000, 512, 8192, 100_000
#: Samples simulated in one pass over the draws: a second of plain Python, a tenth of it compiled.
MAX_SIMULATED = 2**17
#: Most samples that an instance decodes at a time, where nothing else is said.
DEFAULT_BATCH = 256
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), WholeNumber]
Units = Annotated[int, Field(ge=1, le=MAX_UNITS), WholeNumber]
Bytes = Annotated[float, Field(gt=0, le=1e18)]
Level = Annotated[str, Field(pattern=r"^(0(\.[0-9]{1,9})?|1(\.0{1,9})?)$", max_length=11)]
Stage = Literal["generation", "training"]


class ObservedLengths(Closed):
    """Lengths of past responses, in tokens; steps are drawn from them with replacement."""

    samples: Annotated[list[Tokens], Field(min_length=1, max_length=MAX_OBSERVED)]
    max_tokens: Annotated[Tokens | None, Field(description="Responses are cut there.")] = None


class QuantileLengths(Closed):
    """Quantiles of the lengths: level as text ("0.9") to tokens.

    The distribution is log-normal between two levels; "0" and "1" are the shortest and longest of a step.
    """

    quantiles: Annotated[
        dict[Level, Annotated[float, Field(ge=1, le=MAX_TOKENS)]],
        Field(min_length=2, max_length=64, json_schema_extra={"additionalProperties": False}),
    ]
    max_tokens: Annotated[
        Tokens | None,
        Field(
            description='Responses are cut there. Without it and without level "1", the longest that a step '
            "is expected to hold ends the distribution."
        ),
    ] = None


class RankerForm(Closed):
    """What is known of lengths before generation."""

    recall: Annotated[
        float, Field(gt=0, le=1, description="Share of the longest that the ranker finds; at least `share` (chance).")
    ] = 0.87
    share: Annotated[float, Field(gt=0, lt=1, description="Share of samples taken for long.")] = 0.2
    misses: Annotated[
        Literal["near", "any"],
        Field(
            description="near: what is missed lies near the border, as by a log-normal error of predicted "
            "lengths; any: each of the longest is missed with equal chance."
        ),
    ] = "near"
    doubt: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Chance that the misses are not near after all: a recall does not say which are "
            "missed, and a split loses much if the very longest are. A split is chosen for its mean gain "
            "over both.",
        ),
    ] = 0.1


class DecodeLine(Closed):
    """Seconds for one token of every sample: ``a_s + b_s * batch``."""

    a_s: PositiveSeconds
    b_s: Seconds = 0.0


DecodeForm = DecodeLine | BatchCurve


class KvForm(Closed):
    """What limits the batch of an instance."""

    bytes_per_token: Annotated[Bytes | None, Field(description="Keys and values of one token.")] = None
    memory_bytes: Annotated[Bytes | None, Field(description="For keys and values, on one instance.")] = None
    max_batch: Annotated[int, Field(ge=1, le=MAX_BATCH), WholeNumber] = DEFAULT_BATCH

    @model_validator(mode="after")
    def _both(self) -> KvForm:
        if self.memory_bytes is not None and self.bytes_per_token is None:
            raise ValueError("memory_bytes needs bytes_per_token")
        return self


class TrainingForm(Closed):
    """Cost of training on one unit; what is given is added up. At least one of the first four."""

    step_s: Annotated[PositiveSeconds | None, Field(description="For all samples of a step.")] = None
    seconds_per_sample: PositiveSeconds | None = None
    seconds_per_token: Annotated[
        PositiveSeconds | None, Field(description="For each token of prompt and response.")
    ] = None
    sample: Annotated[PredictedCost | None, Field(description="Predicted, for each sample.")] = None
    fixed_s: Annotated[Seconds, Field(description="Once in a step, whatever the units: optimizer.")] = 0.0
    efficiency: Annotated[
        float, Field(gt=0.5, le=1, description="Share of the ideal speed-up that each doubling leaves.")
    ] = 1.0
    batch_overhead_s: Annotated[Seconds, Field(description="Added by each batch of a streamed step.")] = 0.0

    @model_validator(mode="after")
    def _some(self) -> TrainingForm:
        if (self.step_s or self.seconds_per_sample or self.seconds_per_token or self.sample) is None:
            raise ValueError("give step_s, seconds_per_sample, seconds_per_token or sample")
        return self


class WeightsForm(Closed):
    """Transfer of the new weights from training to generation."""

    same_site_s: Seconds = 0.0
    cross_site_s: Seconds = 0.0
    shared_s: Annotated[Seconds, Field(description="Where the same units generate and train.")] = 0.0


class PoolForm(Closed):
    """Equal units at one site: each an instance of generation, or a data-parallel unit of training."""

    name: Name
    units: Units
    price_per_hour: Annotated[float, Field(ge=0, le=1e9, description="Of one unit.")] = 0.0
    site: Annotated[str, Field(max_length=200)] = ""
    stages: Annotated[list[Stage], Field(min_length=1, max_length=2, json_schema_extra={"uniqueItems": True})] = Field(
        default=["generation", "training"]
    )
    device: Annotated[DeviceForm | None, Field(description="For decode programs that name none.")] = None
    decode: Annotated[DecodeForm | None, Field(description="Instead of the request's.")] = None
    prefill: Annotated[CostField | None, Field(description="Instead of the request's.")] = None
    inference: Annotated[CostField | None, Field(description="Instead of the request's.")] = None
    training: Annotated[TrainingForm | None, Field(description="Instead of the request's.")] = None
    memory_bytes: Annotated[Bytes | None, Field(description="Instead of the request's.")] = None

    @model_validator(mode="after")
    def _distinct(self) -> PoolForm:
        if len(set(self.stages)) != len(self.stages):
            raise ValueError("a stage stands twice")
        return self
