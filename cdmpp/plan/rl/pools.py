"""Parts of the RL request about pools: units, decoding, training costs, and the memory that both stages need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.llm.forms import LanguageModelForm
from cdmpp.llm.memory import TRAINING_BYTES, parameter_count
from cdmpp.llm.read import read_config
from cdmpp.plan.base.batch_curve import BatchCurve
from cdmpp.plan.fused.schema import FusedRequest
from cdmpp.plan.rl.generation import UNLIMITED, Floats
from cdmpp.plan.rl.sizes import Stage
from cdmpp.plan.rl.training import SizedCosts
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.memory import does_not_fit, memory_limit
from cdmpp.predict.requests.pricing import Cost, CostField, PredictedCost
from cdmpp.predict.requests.request import (
    Closed,
    Count,
    DeviceForm,
    Interval,
    Name,
    PositiveBytes,
    PositiveSeconds,
    PriceRequest,
    Seconds,
    WholeNumber,
    exactly_one,
)


def within(error: FieldError, path: str) -> FieldError:
    """The error of a nested request, with the path of its field in the outer request."""
    path = f"{path}.{error.path}".rstrip(".")
    return type(error)(f"{path}: {error.message.removeprefix(error.path + ': ')}", hint=error.hint, path=path)


class PipelineAnswer(Closed):
    """The answer of ``cdmpp plan pipeline``. Fields that are not listed here are ignored."""

    model_config = ConfigDict(extra="ignore")

    makespan_s: PositiveSeconds
    interval: Interval | None = Field(None, description="With all predictions at their bounds.")


class PipelineForm(Closed):
    """Training by a pipeline schedule, such as RLHFuse's fused pipelines of actor and critic.

    Each run of the schedule trains on ``samples`` samples. The samples of a step, or of a streamed batch, are divided
    between the pipelines; each runs its schedule as often as it takes. Either ``request`` or ``answer``.
    """

    request: FusedRequest | None = Field(
        None, description="The schedule is searched, within its own budget_s and at most a quarter of this request's."
    )
    answer: PipelineAnswer | None = None
    samples: Count = Field(description="Samples of one run: those of all its micro-batches.")
    units: Count = Field(
        1, description="Units of the pool that one pipeline occupies: its ranks, if a unit is one device."
    )

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        return exactly_one(self, "request", "answer")

    def schedule_request(self, ignore_memory: bool) -> FusedRequest | None:
        """The request, without memory limits where the outer request ignores them."""
        if self.request is None or not ignore_memory:
            return self.request
        return self.request.model_copy(update={"ignore_memory": True})


class SizedTraining(Closed):
    """Training on a number of units, with the layout for this number."""

    units: Count
    token_s: PositiveSeconds = Field(description="Of each token of prompt and response, on these units.")
    update_s: Seconds = Field(0.0, description="Of an update besides its tokens: bubble, optimizer.")
    inference_s: Seconds = Field(0.0, description="Of the forward passes of other models over a token.")
    swap_s: Seconds = Field(
        0.0, description="Moving weights and optimizer states out of the devices and back, if the units generate."
    )
    lower: float = Field(1.0, gt=0, le=1, description="Lower end of the 80 % interval, as a factor.")
    upper: float = Field(1.0, ge=1, le=1e3)
    memory_bytes: PositiveBytes | None = Field(None, description="Needed on the fullest device.")
    layout: dict[str, int | str] | None = Field(
        None, max_length=20, description="Degrees and micro-batch of the training step (docs/training-steps.md)."
    )
    domain: Literal["in", "near", "out"] | None = None


class TrainingForm(Closed):
    """Cost of training on one unit; the given costs are added. At least one of the first seven."""

    step_s: PositiveSeconds | None = Field(None, description="For all samples of a step.")
    seconds_per_sample: PositiveSeconds | None = None
    seconds_per_token: PositiveSeconds | None = Field(None, description="For each token of prompt and response.")
    sample: PredictedCost | None = Field(None, description="Predicted, for each sample.")
    pipeline: PipelineForm | None = Field(None, description="Training by a pipeline schedule.")
    curve: BatchCurve | None = Field(
        None,
        description='Steps of a language model by sequences: {"llm": {"config", "phase": "train", "input", ...}}. '
        "Between its first and last batch, each token of prompt and response costs the same; the rest is once per "
        "step.",
    )
    sizes: list[SizedTraining] | None = Field(
        None, min_length=1, max_length=512, description="By number of units; other numbers do not train."
    )
    mini_batch: Count | None = Field(None, description="With `sizes`: samples of an update. Default: those of a step.")
    curve_units: Count = Field(1, description="Units on which the steps of `curve` run.")
    fixed_s: Seconds = Field(0.0, description="Once per step, for any number of units: optimizer.")
    efficiency: float = Field(
        1.0, gt=0.5, le=1, description="Share of the ideal speed-up that remains at each doubling of units."
    )
    batch_overhead_s: Seconds = Field(0.0, description="Added for each batch of a streamed step.")
    state_bytes: PositiveBytes | None = Field(
        None,
        description="Weights, gradients and optimizer states of the whole model, divided among the devices that "
        "train. Default: 18 bytes for each weight of the language model that `decode` names.",
    )

    @model_validator(mode="after")
    def _some(self) -> Self:
        given = (self.step_s, self.seconds_per_sample, self.seconds_per_token, self.sample, self.pipeline, self.curve)
        if all(cost is None for cost in (*given, self.sizes)):
            raise ValueError("give step_s, seconds_per_sample, seconds_per_token, sample, pipeline, curve or sizes")
        curve, units = self.curve, [size.units for size in self.sizes or []]
        if self.sizes is not None and any(cost is not None for cost in given):
            raise ValueError("sizes: give no other cost of training beside it")
        if units != sorted(set(units)):
            raise ValueError("sizes: units must grow")
        if curve is not None and (curve.llm is None or curve.llm.phase != "train" or len(curve.batch) < 2):
            raise ValueError('curve: give two or more batch sizes and "llm" with "phase": "train"')
        return self

    def sized(self, figure: str, limit: float) -> SizedCosts | None:
        """Costs by size, without sizes whose devices need more than ``limit`` bytes; None without ``sizes``."""
        if self.sizes is None:
            return None
        sizes = [size for size in self.sizes if (size.memory_bytes or 0.0) <= limit]
        factor = np.array([getattr(size, figure.removesuffix("_s"), 1.0) for size in sizes])

        def seconds(name: str) -> Floats:
            return np.asarray(factor * np.array([getattr(size, name) for size in sizes]))

        units = np.array([size.units for size in sizes], dtype=np.int64)
        return SizedCosts(units, *map(seconds, ("token_s", "update_s", "inference_s", "swap_s")))

    def of_curve(self, figure: str) -> tuple[float, float]:
        """Seconds of a token on one unit, and those once per step, of the priced curve; 0 without one."""
        if self.curve is None:
            return 0.0, 0.0
        assert self.curve.llm is not None
        sizes, costs = self.curve.points()
        first, last = (float(getattr(cost, figure)) for cost in (costs[0], costs[-1]))
        sample_s = max(0.0, last - first) / float(sizes[-1] - sizes[0])
        return sample_s / self.curve.llm.input * self.curve_units, max(0.0, first - sample_s * float(sizes[0]))


class DecodeLine(Closed):
    """Seconds of one decoding step: ``a_s + b_s * batch``."""

    a_s: PositiveSeconds
    b_s: Seconds = 0.0

    def points(self) -> tuple[np.ndarray, list[Cost]]:
        """Batch sizes and costs at both ends of the line, beyond the largest batch of any request."""
        sizes = np.array([1.0, 2.0**14])
        return sizes, [Cost.given(self.a_s + self.b_s * size) for size in sizes.tolist()]


class DecodeCurve(BatchCurve):
    """Decode curve; that of a language model may depend on the cached tokens."""

    from_past: Annotated[
        int | None,
        Field(
            ge=0,
            description="With `llm`: the curve is predicted behind so few cached tokens, too, and a step costs by the "
            "cached tokens of its batch. Default: every step costs as behind `past_len` tokens.",
        ),
        WholeNumber,
    ] = None

    _early: BatchCurve | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _of_llm(self) -> Self:
        if self.from_past is not None and (self.llm is None or self.from_past >= self.llm.past_len):
            raise ValueError("from_past needs llm with a larger past_len")
        return self

    def _at_start(self) -> BatchCurve | None:
        """The curve behind ``from_past`` tokens."""
        if self.from_past is None or self.llm is None:
            return None
        fields = {name: getattr(self, name) for name in BatchCurve.model_fields}
        return BatchCurve.model_construct(**fields | {"llm": self.llm.model_copy(update={"past_len": self.from_past})})

    def program_count(self) -> int:
        """Number of programs to price, at all batch sizes."""
        early = self._at_start()
        return super().program_count() + (0 if early is None else early.program_count())

    def price_requests(self, path: str) -> list[PriceRequest]:
        """Programs of the curve, then of that behind few tokens."""
        early = self._at_start()
        return super().price_requests(path) + ([] if early is None else early.price_requests(path))

    def with_prices(self, prices: Iterator[Prediction]) -> Self:
        """A copy with its costs."""
        filled = super().with_prices(prices)
        early = self._at_start()
        filled._early = None if early is None else early.with_prices(prices)
        return filled

    def by_cached(self, figure: str) -> tuple[Floats, Floats, Floats]:
        """Batch sizes, seconds of a step with an empty cache, and seconds for each cached token of a sample."""
        sizes, costs = self.points()
        late = np.array([getattr(cost, figure) for cost in costs])
        if self._early is None or self.llm is None or self.from_past is None:
            return sizes, late, np.zeros(len(sizes))
        early = np.array([getattr(cost, figure) for cost in self._early.points()[1]])
        slope = np.maximum(late - early, 0.0) / (self.llm.past_len - self.from_past)
        return sizes, np.maximum(late - slope * self.llm.past_len, 0.1 * late), slope


DecodeForm = DecodeLine | DecodeCurve


class KvForm(Closed):
    """Limits of the batch of one instance: KV-cache memory and number of samples."""

    bytes_per_token: PositiveBytes | None = Field(
        None, description="Keys and values of one token. Default: those of the language model of `decode`."
    )
    memory_bytes: PositiveBytes | None = Field(
        None, description="KV-cache memory of one instance. Default: what the weights leave of its devices, if known."
    )
    max_batch: Count = 256

    @model_validator(mode="after")
    def _both(self) -> Self:
        if self.memory_bytes is not None and self.bytes_per_token is None:
            raise ValueError("memory_bytes needs bytes_per_token")
        return self


class PoolForm(Closed):
    """Equal units at one site: each is a generation instance or a data-parallel training unit.

    Costs that a pool does not have are those of the request.
    """

    name: Name
    units: Count
    price_per_hour: float = Field(0.0, ge=0, le=1e9, description="Of one unit.")
    site: str = Field("", max_length=200)
    stages: list[Stage] = Field(
        ["generation", "training"], min_length=1, max_length=2, json_schema_extra={"uniqueItems": True}
    )
    device: DeviceForm | None = Field(None, description="For decode programs that name none.")
    decode: DecodeForm | None = Field(None, description="Replaces the request's.")
    prefill: CostField | None = Field(None, description="Replaces the request's.")
    inference: CostField | None = Field(None, description="Replaces the request's.")
    training: TrainingForm | None = Field(None, description="Replaces the request's.")
    memory_bytes: PositiveBytes | None = Field(None, description="Replaces the request's.")
    placement: Count = Field(1, description="Units that fill whole nodes: both stages have multiples of it.")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.stages)) != len(self.stages):
            raise ValueError("a stage is named twice")
        return self


def _language_model(decode: DecodeForm | None) -> LanguageModelForm | None:
    return decode.llm if isinstance(decode, BatchCurve) else None


def training_bytes(pool: PoolForm, model: LanguageModelForm | None) -> float | None:
    """Bytes of the whole training state; None where the request does not say which model is trained."""
    if pool.training is not None and pool.training.state_bytes is not None:
        return pool.training.state_bytes
    return None if model is None else float(TRAINING_BYTES * parameter_count(read_config(model.config)))


def least_training_units(pool: PoolForm, pools: Sequence[PoolForm], ignore: bool) -> int:
    """Fewest units of a pool with all its costs whose memory holds the training; 1 where memory is not known.

    A unit has as many devices as an instance of the language model that the pool, or else another pool, generates with.
    Activations are not counted.
    """
    if pool.training is not None and pool.training.sizes is not None:
        return 1  # Each size has its own memory.
    model = _any_model(pool, pools)
    needed, unit_bytes = training_bytes(pool, model), _unit_bytes(pool, model, ignore)
    return 1 if needed is None or unit_bytes == inf else max(1, ceil(needed / unit_bytes))


def unchecked_training(pool: PoolForm, pools: Sequence[PoolForm]) -> str | None:
    """Why the training state was not compared with the units of a pool; None where it was."""
    model, sizes = _any_model(pool, pools), None if pool.training is None else pool.training.sizes
    if sizes is not None:
        unknown = any(size.memory_bytes is None for size in sizes)
        return f"training.sizes of {pool.name!r} have no memory_bytes" if unknown else None
    return _lacks(
        f"training on {pool.name!r}",
        {
            "no device of known capacity": _unit_bytes(pool, model, ignore=False) == inf,
            "no state_bytes": training_bytes(pool, model) is None,
        },
    )


def _lacks(what: str, missing: dict[str, bool]) -> str | None:
    """A sentence on what is missing; None where nothing is."""
    named = " and ".join(name for name, lacks in missing.items() if lacks)
    return f"{what} has {named}" if named else None


def _any_model(pool: PoolForm, pools: Sequence[PoolForm]) -> LanguageModelForm | None:
    """The language model that a pool, or else another one, generates with."""
    models = (_language_model(other.decode) for other in (pool, *pools))
    return next((form for form in models if form is not None), None)


def _unit_bytes(pool: PoolForm, model: LanguageModelForm | None, ignore: bool) -> float:
    device = pool.decode.device if isinstance(pool.decode, BatchCurve) else None
    devices = 1 if model is None else model.layout.gpus
    return devices * memory_limit(None, [pool.device or device], ignore)


def check_training(pools: Sequence[PoolForm], fixed: int | None, ignore: bool) -> None:
    """Raise InfeasibleError where no pool has enough units to hold the training, or the fixed number is too small."""
    trainers = [pool for pool in pools if pool.training is not None]
    least = {pool.name: least_training_units(pool, pools, ignore) for pool in trainers}
    units = {pool.name: pool.units if fixed is None else fixed for pool in trainers}
    nearest = min(trainers, key=lambda pool: least[pool.name] / units[pool.name], default=None)
    if nearest is None or least[nearest.name] <= units[nearest.name]:
        return
    model = _any_model(nearest, pools)
    needed, limit = training_bytes(nearest, model), _unit_bytes(nearest, model, ignore)
    assert needed is not None
    count, devices = units[nearest.name], 1 if model is None else model.layout.gpus
    raise does_not_fit(
        f"training on {count} units of pool {nearest.name!r} ({count * devices} devices, weights, gradients and "
        "optimizer states)",
        needed / (count * devices),
        limit / devices,
        path="training_units" if fixed is not None else "pools",
        fits=f"{least[nearest.name]} units of {nearest.name!r} hold it",
    )


@dataclass(frozen=True)
class InstanceMemory:
    """Memory of one generation instance."""

    pool: str
    devices: int  # devices of the instance
    limit: float  # bytes of all its devices; infinite where no limit is known
    # Bytes of the weights, and of the keys and values of one token; None where the request does not tell.
    weights: float | None
    token_bytes: float | None
    cache: float | None  # bytes that the request gives to the cache

    def needed(self, tokens: int) -> float:
        """Bytes of the weights, and of the cache or at least ``tokens`` in it."""
        return (self.weights or 0.0) + max(self.cache or 0.0, tokens * (self.token_bytes or 0.0))

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit; none where the weights and the given cache do not."""
        if self.needed(0) > self.limit:
            return 0
        room = self.limit - (self.weights or 0.0) if self.cache is None else self.cache
        if self.token_bytes is None or room == inf:
            return UNLIMITED
        return int(min(room // self.token_bytes, UNLIMITED))

    def unchecked(self) -> str | None:
        """Why the memory was not compared with the device, or not all of it; None where it was."""
        missing = {
            "no device of known capacity": self.limit == inf,
            "no weight bytes (weights.transfer)": self.weights is None,
            "no cache bytes (kv.bytes_per_token)": self.token_bytes is None,
        }
        return _lacks(f"generation on {self.pool!r}", missing)

    def error(self, tokens: int) -> InfeasibleError:
        """The error of an instance that does not hold a sample of so many tokens."""
        needed = self.needed(tokens)
        count = ceil(needed / (self.limit / self.devices))
        return does_not_fit(
            f"a generation instance of pool {self.pool!r} ({self.devices} devices; weights, and the cache of the "
            "request or of the longest sample)",
            needed,
            self.limit,
            path="pools",
            fits=f"{count} or more such devices in an instance (tp, pp) can hold it, or devices with more memory",
        )


def instance_memory(
    pool: PoolForm, kv: KvForm, weight_bytes: float | None, tokens: int, ignore: bool
) -> InstanceMemory:
    """Memory of an instance of a generating pool with all its costs.

    ``weight_bytes``: one copy of the weights, for a pool whose decode curve is no language model.
    ``tokens``: tokens of the longest sample. A cache with a window is as large per token as at this length.
    """
    model = _language_model(pool.decode)
    device = pool.decode.device if isinstance(pool.decode, BatchCurve) else None
    devices, token_bytes = 1, kv.bytes_per_token
    if model is not None:
        devices = model.layout.gpus
        weights, cache = model.memory(tokens)
        weight_bytes = devices * weights
        token_bytes = token_bytes or devices * cache / (model.layout.dp * tokens)
    limit = devices * memory_limit(None, [device or pool.device], ignore)
    return InstanceMemory(pool.name, devices, limit, weight_bytes, token_bytes, None if ignore else pool.memory_bytes)
