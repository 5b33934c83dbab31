"""Points of a sweep and their evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError
from cdmpp.plan.sweep.request import Goals, Sweep
from cdmpp.plan.sweep.result import SweepResult
from cdmpp.predict.interface import Predictor
from cdmpp.predict.llm import LLMConfig, LLMEstimate, estimate
from cdmpp.utils.units import format_latency

_HOUR_S, _MILLION = 3600.0, 1e6


@dataclass(frozen=True)
class SweepPoint:
    """One combination of settings.

    Attributes
    ----------
    device : DeviceSpec
    price_per_gpu_hour : float
    precision : str
        ``dtype`` or ``dtype/weights``.
    """

    device: DeviceSpec
    price_per_gpu_hour: float
    tp: int
    pp: int
    ep: int
    batch: int
    precision: str


def sweep_points(sweep: Sweep, devices: dict[str, DeviceSpec]) -> Iterator[SweepPoint]:
    """The product of a sweep's settings, batches innermost.

    Parameters
    ----------
    devices : dict of str to DeviceSpec
        Specifications of ``sweep.devices``.
    """
    for name, precision, tp, pp, ep, batch in product(
        sweep.devices, sweep.precisions, sweep.tp, sweep.pp, sweep.ep, sweep.batch
    ):
        yield SweepPoint(devices[name], sweep.price_per_gpu_hour[name], tp, pp, ep, batch, precision)


def evaluate_point(sweep: Sweep, config: LLMConfig, predictor: Predictor, point: SweepPoint) -> SweepResult:
    """Estimate a point and compare it with the goals; a point that is impossible has the reason."""
    dtype, _, weights = point.precision.partition("/")
    result = SweepResult(
        point.device.name, point.tp, point.pp, point.ep, point.batch, dtype, weights or None, "infeasible"
    )
    try:
        answer = estimate(
            config,
            point.device,
            tp=point.tp,
            pp=point.pp,
            ep=point.ep,
            batch=point.batch,
            input=sweep.input,
            output=sweep.output,
            dtype=dtype,
            weights=weights or None,
            framework=sweep.framework,
            cuda_graph=sweep.cuda_graph,
            predictor=predictor,
        )
    except CdmppError as error:
        return replace(result, reason=error.message)
    tokens_per_s = answer.tokens / answer.total.point
    per_hour = answer.gpus * point.price_per_gpu_hour
    per_million = per_hour / _HOUR_S / tokens_per_s * _MILLION
    missed = _missed(sweep.goals, answer, per_hour, per_million)
    return replace(
        result,
        status="missed" if missed else "met",
        reason="; ".join(missed) or None,
        gpus=answer.gpus,
        ttft_s=answer.prefill.point,
        ttft_upper_s=answer.prefill.upper,
        tpot_s=None if answer.tpot is None else answer.tpot.point,
        tpot_upper_s=None if answer.tpot is None else answer.tpot.upper,
        total_s=answer.total.point,
        throughput_tokens_per_s=tokens_per_s,
        price_per_hour=per_hour,
        price_per_million_tokens=per_million,
        memory_bytes=answer.memory.total,
        domain=answer.domain,
        model_id=answer.model_id,
    )


def _missed(goals: Goals, answer: LLMEstimate, per_hour: float, per_million: float) -> list[str]:
    """The goals that an estimate does not meet, in words."""
    reasons = []
    for name, limit_s, duration in (("ttft", goals.ttft_s, answer.prefill), ("tpot", goals.tpot_s, answer.tpot)):
        if limit_s is None or duration is None:
            continue
        seconds = duration.upper if goals.figure == "upper" else duration.point
        if seconds > limit_s:
            reasons.append(f"{name} {format_latency(seconds)} > {format_latency(limit_s)}")
    for name, limit, value in (
        ("price per hour", goals.price_per_hour, per_hour),
        ("price per million tokens", goals.price_per_million_tokens, per_million),
        ("gpus", goals.gpus, float(answer.gpus)),
    ):
        if limit is not None and value > limit:
            reasons.append(f"{name} {value:.4g} > {limit:g}")
    return reasons
