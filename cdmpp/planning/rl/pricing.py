"""From a request's pools and predicted prices to the pools of a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.compose.pricing import BatchCurve, Cost, CostField
from cdmpp.compose.request import DeviceForm, PriceRequest
from cdmpp.compose.transition import asked_of, cost_of
from cdmpp.errors import FieldError
from cdmpp.planning.rl.costs import Pool, TrainingCost, token_table
from cdmpp.planning.rl.forms import DecodeForm, KvForm, PoolForm, TrainingForm
from cdmpp.planning.rl.generation import UNLIMITED, Engine, Floats
from cdmpp.prediction import Prediction


@dataclass(frozen=True)
class Stages:
    """A pool's costs as the request has them, its own before the request's, with their paths.

    ``decode`` and ``training`` are None where the pool has no such stage.
    """

    pool: PoolForm
    decode: tuple[str, DecodeForm] | None
    prefill: tuple[str, CostField]
    inference: tuple[str, CostField]
    training: tuple[str, TrainingForm] | None
    memory_bytes: float | None

    def price_requests(self) -> list[PriceRequest]:
        """Programs to price, in the order in which :meth:`priced` takes them."""
        found: list[PriceRequest] = []
        if self.decode is not None:
            path, decode = self.decode
            if isinstance(decode, BatchCurve):
                found += decode.price_requests(path)
            found += asked_of(self.prefill[1], self.prefill[0])
        found += asked_of(self.inference[1], self.inference[0])
        if self.training is not None and self.training[1].sample is not None:
            found += self.training[1].sample.price_requests(f"{self.training[0]}.sample")
        return found

    def priced(self, prices: Iterator[Prediction]) -> PricedPool:
        """The pool with its prices."""
        curve: tuple[Floats, list[Cost]] | None = None
        prefill = Cost.given(0.0)
        if self.decode is not None:
            decode = self.decode[1]
            if isinstance(decode, BatchCurve):
                curve = decode.with_prices(prices).points()
            else:
                # A line: its two ends say all of it, up to the largest batch of any request.
                sizes = np.array([1.0, 2.0**14])
                curve = sizes, [Cost.given(decode.a_s + decode.b_s * size) for size in sizes.tolist()]
            prefill = cost_of(self.prefill[1], prices)
        inference = cost_of(self.inference[1], prices)
        sample = None
        if self.training is not None and self.training[1].sample is not None:
            sample = self.training[1].sample.with_prices(prices).cost
        return PricedPool(self, curve, prefill, inference, sample)


@dataclass(frozen=True)
class PricedPool:
    """A pool of a request whose costs are known.

    Attributes
    ----------
    stages : Stages
    curve : (sizes, costs) or None
        Points of ``PTL(batch)``.
    prefill, inference : Cost
    sample : Cost or None
        Predicted training of one sample.
    """

    stages: Stages
    curve: tuple[Floats, list[Cost]] | None
    prefill: Cost
    inference: Cost
    sample: Cost | None

    @property
    def predicted(self) -> bool:
        """Whether any of its costs is."""
        costs = [self.prefill, self.inference, *([] if self.curve is None else self.curve[1])]
        return self.sample is not None or any(cost.parts for cost in costs)

    def pool(self, kv: KvForm, prompt_tokens: int, reserve: int, samples: int, figure: str) -> Pool:
        """For the search, with every cost's ``latency_s``, ``lower_s`` or ``upper_s``."""
        form = self.stages.pool
        engine, training = None, None
        if self.curve is not None:
            sizes, costs = self.curve
            seconds = np.array([getattr(cost, figure) for cost in costs])
            engine = Engine(
                token_table(sizes, seconds, kv.max_batch),
                memory_tokens(self.stages.memory_bytes, kv),
                prompt_tokens,
                getattr(self.prefill, figure),
                reserve,
            )
        if self.stages.training is not None:
            given = self.stages.training[1]
            each = 0.0 if self.sample is None else getattr(self.sample, figure)
            training = TrainingCost(
                each + (given.seconds_per_sample or 0.0) + (given.step_s or 0.0) / samples,
                given.seconds_per_token or 0.0,
                given.fixed_s,
                given.efficiency,
                given.batch_overhead_s,
            )
        return Pool(
            form.name, form.units, form.price_per_hour, form.site, engine, training, getattr(self.inference, figure)
        )


def memory_tokens(memory_bytes: float | None, kv: KvForm) -> int:
    """Tokens whose keys and values fit."""
    if memory_bytes is None or kv.bytes_per_token is None:
        return UNLIMITED
    return int(min(memory_bytes // kv.bytes_per_token, UNLIMITED))


def stages_of(
    pools: Sequence[PoolForm],
    decode: DecodeForm | None,
    prefill: CostField,
    inference: CostField,
    training: TrainingForm | None,
    kv: KvForm,
) -> list[Stages]:
    """Every pool with the costs that hold for it.

    Raises
    ------
    FieldError
        A stage lacks its cost, or a name stands twice.
    """
    found: list[Stages] = []
    names: set[str] = set()
    for number, pool in enumerate(pools):
        here = f"pools.{number}"
        if pool.name in names:
            raise FieldError(f"{here}.name: {pool.name!r} stands twice", path=f"{here}.name")
        names.add(pool.name)
        if pool.memory_bytes is not None and kv.bytes_per_token is None:
            raise FieldError(
                f"{here}.memory_bytes: needs kv.bytes_per_token",
                path="kv.bytes_per_token",
                hint="give the bytes of one token's keys and values",
            )
        found.append(
            Stages(
                pool,
                _decode(pool, here, decode) if "generation" in pool.stages else None,
                ("prefill", prefill) if pool.prefill is None else (f"{here}.prefill", pool.prefill),
                ("inference", inference) if pool.inference is None else (f"{here}.inference", pool.inference),
                _training(pool, here, training) if "training" in pool.stages else None,
                kv.memory_bytes if pool.memory_bytes is None else pool.memory_bytes,
            )
        )
    wanted = training is not None or any(pool.training is not None for pool in pools)
    if wanted and not any(each.training is not None for each in found):
        raise FieldError(
            "training has a cost, but no pool trains", path="pools", hint='name "training" among its stages'
        )
    if not any(each.decode is not None for each in found):
        raise FieldError("no pool generates", path="pools", hint='name "generation" among its stages')
    return found


def _decode(pool: PoolForm, here: str, common: DecodeForm | None) -> tuple[str, DecodeForm]:
    decode, path = (common, "decode") if pool.decode is None else (pool.decode, f"{here}.decode")
    if decode is None:
        raise FieldError(
            f"{here}.decode: pool {pool.name!r} generates, and its decode curve is not given",
            path=f"{here}.decode",
            hint="give one to the pool or to the request, or leave generation out of the pool's stages",
        )
    if isinstance(decode, BatchCurve) and decode.programs is not None and decode.device is None:
        device: DeviceForm | None = pool.device
        if device is None:
            raise FieldError(
                f"{here}.device: programs need a device",
                path=f"{here}.device",
                hint="name one for the pool, or with the programs",
            )
        decode = decode.model_copy(update={"device": device})
    return path, decode


def _training(pool: PoolForm, here: str, common: TrainingForm | None) -> tuple[str, TrainingForm] | None:
    if pool.training is not None:
        return f"{here}.training", pool.training
    return None if common is None else ("training", common)
