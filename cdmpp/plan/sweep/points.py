"""Points of a sweep, their figures, and the Pareto front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, Literal

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError
from cdmpp.model.domain.score import Label
from cdmpp.plan.sweep.request import Goals, Sweep
from cdmpp.predict.engines import load_engine
from cdmpp.predict.interface import Predictor
from cdmpp.predict.llm import Goodput, LLMConfig, LLMEstimate, estimate, goodput
from cdmpp.utils.units import format_latency


@dataclass(frozen=True)
class SweepResult:
    """A point with its figures, or the reason why it has none.

    Attributes
    ----------
    status : {"met", "missed", "infeasible"}
        Whether it meets the goals; an infeasible point has no figures.
    reason : str or None
        The missed goals, or why the point is infeasible.
    pareto : bool
        No other point that meets the goals is better in one objective and as good in the others.
    ttft_s, ttft_upper_s, tpot_s, tpot_upper_s, total_s : float or None
        Seconds; ``tpot_s`` is None for a single output token.
    price_per_hour, price_per_million_tokens : float or None
        Of all GPUs; of output tokens, while the GPUs serve one batch after the other.
    memory_bytes : float or None
        Of the fullest GPU.
    goodput_requests_per_s, saturation_requests_per_s : float or None
        Largest rate that keeps the goals of latency, and rate beyond which the queue grows (:func:`cdmpp.llm.goodput`);
        they do not depend on ``batch``. None without ``load``.
    goodput_price_per_million_tokens : float or None
        Of output tokens at the goodput; None where it is 0.
    """

    device: str
    tp: int
    pp: int
    ep: int
    dp: int | None
    batch: int
    dtype: str
    weights: str | None
    engine: str | None
    status: Literal["met", "missed", "infeasible"]
    reason: str | None = None
    pareto: bool = False
    gpus: int | None = None
    ttft_s: float | None = None
    ttft_upper_s: float | None = None
    tpot_s: float | None = None
    tpot_upper_s: float | None = None
    total_s: float | None = None
    throughput_tokens_per_s: float | None = None
    price_per_hour: float | None = None
    price_per_million_tokens: float | None = None
    memory_bytes: float | None = None
    goodput_requests_per_s: float | None = None
    saturation_requests_per_s: float | None = None
    goodput_price_per_million_tokens: float | None = None
    domain: Label | None = None
    model_id: str | None = None
    domain_reason: str | None = None

    @property
    def layout(self) -> str:
        """Degrees of parallelism as text."""
        further = {"pp": self.pp, "ep": self.ep, "dp": self.dp or 1}
        return f"tp {self.tp}" + "".join(f", {name} {degree}" for name, degree in further.items() if degree > 1)

    @property
    def precision(self) -> str:
        """Element types as text."""
        return self.dtype if self.weights is None else f"{self.dtype}/{self.weights}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


COLUMNS = tuple(field.name for field in fields(SweepResult))


def with_front(results: Sequence[SweepResult], objectives: Sequence[str]) -> list[SweepResult]:
    """The results in their order, with :attr:`SweepResult.pareto`."""
    front = set(pareto_front([_figures(result, objectives) for result in results]))
    return [replace(result, pareto=position in front) for position, result in enumerate(results)]


def _figures(result: SweepResult, objectives: Sequence[str]) -> tuple[float, ...] | None:
    if result.status != "met":
        return None
    values = [getattr(result, name) for name in objectives]
    return tuple(0.0 if value is None else float(value) for value in values)


def pareto_front(points: Sequence[tuple[float, ...] | None]) -> list[int]:
    """Positions of the points that no other dominates; all objectives are minimised, None is no point.

    A point dominates another if it is nowhere larger and somewhere smaller; equal points are all on the front.

    Examples
    --------
    >>> pareto_front([(1, 3), (2, 2), (3, 3), None, (2, 2)])
    [0, 1, 4]
    """
    # Sorted, a point can only be dominated by an earlier one, and then also by one of the front.
    order = sorted((point, position) for position, point in enumerate(points) if point is not None)
    front: list[tuple[tuple[float, ...], int]] = []
    for point, position in order:
        dominated = (other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other, _ in front)
        if not any(dominated):
            front.append((point, position))
    return sorted(position for _, position in front)


_HOUR_S, _MILLION = 3600.0, 1e6
#: Goodputs found so far, of one process.
_LIMITS: dict[tuple[Any, ...], Goodput] = {}
_MOST_LIMITS = 1000


@dataclass(frozen=True)
class SweepPoint:
    """One combination of settings.

    Attributes
    ----------
    device : DeviceSpec
    price_per_gpu_hour : float
    precision : str
        ``dtype`` or ``dtype/weights``.
    engine : str or None
        Engine profile.
    """

    device: DeviceSpec
    price_per_gpu_hour: float
    tp: int
    pp: int
    ep: int
    dp: int | None
    batch: int
    precision: str
    engine: str | None


def sweep_points(sweep: Sweep, devices: dict[str, DeviceSpec]) -> Iterator[SweepPoint]:
    """The product of a sweep's settings, batches innermost.

    Parameters
    ----------
    devices : dict of str to DeviceSpec
        Specifications of ``sweep.devices``.
    """
    layouts = product(sweep.tp, sweep.pp, sweep.ep, sweep.dp or (None,))
    for name, engine, precision, layout, batch in product(
        sweep.devices, sweep.engines or (None,), sweep.precisions, list(layouts), sweep.batch
    ):
        yield SweepPoint(devices[name], sweep.price_per_gpu_hour[name], *layout, batch, precision, engine)


def evaluate_point(sweep: Sweep, config: LLMConfig, predictor: Predictor, point: SweepPoint) -> SweepResult:
    """Estimate a point and compare it with the goals; a point that is impossible has the reason."""
    dtype, _, weights = point.precision.partition("/")
    result = SweepResult(
        point.device.name,
        point.tp,
        point.pp,
        point.ep,
        point.dp,
        point.batch,
        dtype,
        weights or None,
        load_engine(point.engine, sweep.framework).name,
        "infeasible",
    )
    try:
        answer = estimate(
            config,
            point.device,
            tp=point.tp,
            pp=point.pp,
            ep=point.ep,
            dp=point.dp,
            batch=point.batch,
            input=sweep.input,
            output=sweep.output,
            dtype=dtype,
            weights=weights or None,
            kv_dtype=sweep.kv_dtype,
            engine=point.engine,
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
    limit = None
    if sweep.load is not None:
        limit = _goodput(sweep, config, predictor, replace(point, batch=1))
        if not limit.requests_per_s:
            missed.append("the goals are missed without any load")
        else:
            tokens_per_s = limit.requests_per_s * sweep.output
            result = replace(result, goodput_price_per_million_tokens=per_hour / _HOUR_S / tokens_per_s * _MILLION)
    return replace(
        result,
        goodput_requests_per_s=None if limit is None else limit.requests_per_s,
        saturation_requests_per_s=None if limit is None else limit.saturation_requests_per_s,
        dp=answer.settings.dp,
        status="missed" if missed else "met",
        reason="; ".join(missed) or None,
        gpus=answer.gpus,
        ttft_s=answer.prefill.point,
        ttft_upper_s=answer.prefill.upper,
        tpot_s=None if answer.tpot is None else answer.tpot.point,
        tpot_upper_s=None if answer.tpot is None else answer.tpot.upper,
        total_s=answer.total.point,
        throughput_tokens_per_s=answer.tokens / answer.total.point,
        price_per_hour=per_hour,
        price_per_million_tokens=per_million,
        memory_bytes=answer.memory.total,
        domain=answer.domain,
        domain_reason=answer.domain_reason,
        model_id=answer.model_id,
    )


def _goodput(sweep: Sweep, config: LLMConfig, predictor: Predictor, point: SweepPoint) -> Goodput:
    """The largest rates of a point; points that differ in their batch alone share them."""
    key = (id(sweep), id(config), id(predictor), point)
    if key not in _LIMITS:
        if len(_LIMITS) >= _MOST_LIMITS:
            _LIMITS.clear()
        assert sweep.load is not None
        dtype, _, weights = point.precision.partition("/")
        _LIMITS[key] = goodput(
            config,
            point.device,
            ttft_s=sweep.goals.ttft_s,
            tpot_s=sweep.goals.tpot_s,
            share=sweep.load.share,
            count=sweep.load.count,
            engine=load_engine(point.engine, sweep.framework),
            tp=point.tp,
            pp=point.pp,
            ep=point.ep,
            dp=point.dp,
            dtype=dtype,
            weights=weights or None,
            kv_dtype=sweep.kv_dtype,
            input=sweep.input,
            output=sweep.output,
            predictor=predictor,
        )
    return _LIMITS[key]


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
