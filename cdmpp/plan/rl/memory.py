"""Memory of RL plans: units that hold the training state, and tokens that a generation instance holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from cdmpp.errors import InfeasibleError
from cdmpp.plan.base.batch_curve import BatchCurve, LanguageModelForm
from cdmpp.plan.rl.engine import UNLIMITED
from cdmpp.plan.rl.pool_schema import DecodeForm, KvForm, PoolForm
from cdmpp.predict.llm.memory import TRAINING_BYTES, parameter_count
from cdmpp.predict.llm.read import read_config
from cdmpp.predict.requests.memory import does_not_fit, memory_limit


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
    model = _any_model(pool, pools)
    needed, unit_bytes = training_bytes(pool, model), _unit_bytes(pool, model, ignore)
    return 1 if needed is None or unit_bytes == inf else max(1, ceil(needed / unit_bytes))


def unchecked_training(pool: PoolForm, pools: Sequence[PoolForm]) -> str | None:
    """Why the training state was not compared with the units of a pool; None where it was."""
    model = _any_model(pool, pools)
    missing = []
    if _unit_bytes(pool, model, ignore=False) == inf:
        missing.append("no device of known capacity")
    if training_bytes(pool, model) is None:
        missing.append("no state_bytes")
    return f"training on {pool.name!r} has {' and '.join(missing)}" if missing else None


def _any_model(pool: PoolForm, pools: Sequence[PoolForm]) -> LanguageModelForm | None:
    """The language model that a pool, or else another one, generates with."""
    models = (_language_model(other.decode) for other in (pool, *pools))
    return next((form for form in models if form is not None), None)


def _unit_bytes(pool: PoolForm, model: LanguageModelForm | None, ignore: bool) -> float:
    own = pool.decode.device if isinstance(pool.decode, BatchCurve) else None
    devices = 1 if model is None else model.layout.gpus
    return devices * memory_limit(None, [pool.device or own], ignore)


def check_training(pools: Sequence[PoolForm], fixed: int | None, ignore: bool) -> None:
    """Raise InfeasibleError where no pool has enough units to hold the training, or the fixed number is too small."""
    trainers = [pool for pool in pools if pool.training is not None]
    least = {pool.name: least_training_units(pool, pools, ignore) for pool in trainers}
    units = {pool.name: pool.units if fixed is None else fixed for pool in trainers}
    if not trainers or any(least[pool.name] <= units[pool.name] for pool in trainers):
        return
    nearest = min(trainers, key=lambda pool: least[pool.name] / units[pool.name])
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
    """Memory of one generation instance.

    Attributes
    ----------
    pool : str
    devices : int
        Devices of the instance.
    limit : float
        Bytes of all its devices; infinite where no limit is known.
    weights, token_bytes : float or None
        Bytes of the weights, and of the keys and values of one token; None where the request does not tell.
    cache : float or None
        Bytes that the request gives to the cache.
    """

    pool: str
    devices: int
    limit: float
    weights: float | None
    token_bytes: float | None
    cache: float | None

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
        missing = []
        if self.limit == inf:
            missing.append("no device of known capacity")
        if self.weights is None:
            missing.append("no weight bytes (weights.transfer)")
        if self.token_bytes is None:
            missing.append("no cache bytes (kv.bytes_per_token)")
        return f"generation on {self.pool!r} has {' and '.join(missing)}" if missing else None

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

    Parameters
    ----------
    weight_bytes : float or None
        One copy of the weights, for a pool whose decode curve is no language model.
    tokens : int
        Tokens of the longest sample. A cache with a window is as large per token as at this length.
    """
    model = _language_model(pool.decode)
    device = pool.decode.device if isinstance(pool.decode, BatchCurve) else None
    devices, token_bytes = 1, kv.bytes_per_token
    if model is not None:
        devices = model.layout.gpus
        weights, cache = model.memory(tokens)
        weight_bytes = devices * weights
        token_bytes = token_bytes or devices * cache / (model.layout.replicas * tokens)
    limit = devices * memory_limit(None, [device or pool.device], ignore)
    return InstanceMemory(pool.name, devices, limit, weight_bytes, token_bytes, None if ignore else pool.memory_bytes)
