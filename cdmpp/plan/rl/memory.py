"""Memory of training in RL plans: the fewest units that hold weights, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from cdmpp.plan.base.batch_curve import BatchCurve
from cdmpp.plan.base.language_model import LanguageModelForm
from cdmpp.plan.rl.pool_schema import DecodeForm, PoolForm
from cdmpp.predict.llm.memory import TRAINING_BYTES
from cdmpp.predict.llm.parameters import parameter_count
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
    models = [_language_model(other.decode) for other in (pool, *pools)]
    model = next((form for form in models if form is not None), None)
    needed, unit_bytes = training_bytes(pool, model), _unit_bytes(pool, model, ignore)
    return 1 if needed is None or unit_bytes == inf else max(1, ceil(needed / unit_bytes))


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
    models = [_language_model(other.decode) for other in (nearest, *pools)]
    model = next((form for form in models if form is not None), None)
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
