"""The request of a sweep (``SWEEP.toml``), its points with their figures, and the Pareto front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, FieldError
from cdmpp.llm import Goodput, LLMConfig, defaults, estimate, goodput
from cdmpp.llm.engines import load_engine
from cdmpp.llm.layout import DTYPES, WEIGHTS
from cdmpp.model.domain.score import Label
from cdmpp.plan.base.solve import read_request
from cdmpp.predict.interface import Predictor
from cdmpp.predict.requests.fields import Closed, Count, Name, PositiveSeconds
from cdmpp.utils.files import read_toml
from cdmpp.utils.units import format_latency

#: Figures of a point that a sweep can minimise.
Objective = Literal[
    "price_per_million_tokens",
    "price_per_hour",
    "tpot_s",
    "ttft_s",
    "total_s",
    "gpus",
    "goodput_price_per_million_tokens",
]
#: A larger product is refused.
MAX_POINTS = 100_000
_HINT = "docs/tables.md describes sweeps"
_Price = Annotated[float, Field(gt=0, le=1e9)]
_Values = Annotated[list[Count], Field(min_length=1)]
_ONE: Any = Field(default=[defaults.DEGREE])


class Goals(Closed):
    """Limits that a point must keep; those left out do not limit."""

    # Seconds to the first token, and per further token.
    ttft_s: PositiveSeconds | None = None
    tpot_s: PositiveSeconds | None = None
    # Price of all GPUs of a point, and of its output tokens.
    price_per_hour: _Price | None = None
    price_per_million_tokens: _Price | None = None
    gpus: Count | None = None
    # Whether the predictions or their upper bounds must keep the limits of seconds.
    figure: Literal["point", "upper"] = "point"


class SweepLoad(Closed):
    """Requests that arrive one by one, for the largest rate that keeps the goals of latency."""

    share: float = Field(defaults.SHARE, gt=0, le=1)  # share of the requests that keep them
    # Requests of each simulation; None: as :func:`cdmpp.llm.goodput` chooses.
    count: Annotated[int, Field(ge=20, le=20_000)] | None = None


class Sweep(Closed):
    """A product of settings of one model."""

    config: str = Field(min_length=1, max_length=4096)  # path of the model's ``config.json``
    devices: list[Name] = Field(min_length=1)  # known devices or specifications (.toml, .json)
    price_per_gpu_hour: dict[str, _Price]  # by device, in any currency
    tp: _Values = _ONE
    pp: _Values = _ONE
    ep: _Values = _ONE
    dp: list[Count] = Field(default=[])  # empty: ``max(1, ep // tp)`` (docs/llm.md)
    batch: _Values = Field(default=[defaults.BATCH])
    # Tokens of a prompt and of an answer.
    input: Count = defaults.INPUT
    output: Count = defaults.OUTPUT
    # ``dtype``, or ``dtype/weights`` with quantised weights.
    precisions: list[Name] = Field([defaults.DTYPE], min_length=1)
    kv_dtype: Name | None = None
    # Engine profiles, by name or file (.toml); empty: the current one of ``framework``.
    engines: list[Name] = Field(default=[])
    framework: Name | None = None
    cuda_graph: bool = defaults.CUDA_GRAPH
    goals: Goals = Goals()
    # Judges each point by requests that arrive one by one at its goodput, whatever its batch; the default of ``output``
    # is then that of :func:`cdmpp.llm.simulate`.
    load: SweepLoad | None = None
    # Two or more figures that the Pareto front minimises; the plot has the first two.
    objectives: list[Objective] = Field(["price_per_million_tokens", "tpot_s"], min_length=2)

    @model_validator(mode="before")
    @classmethod
    def _with_output(cls, value: Any) -> Any:
        """Requests under load have the default answer of a simulation."""
        loaded = isinstance(value, dict) and value.get("load") is not None
        return {"output": defaults.SERVED_OUTPUT, **value} if loaded else value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in (*self.devices, *self.price_per_gpu_hour):
            if name not in self.price_per_gpu_hour:
                raise PydanticCustomError("price", "price_per_gpu_hour has no price of {device}", {"device": name})
            if name not in self.devices:
                raise PydanticCustomError("price", "price_per_gpu_hour: {device} is not in devices", {"device": name})
        for field in ("devices", "tp", "pp", "ep", "dp", "batch", "precisions", "engines", "objectives"):
            values = getattr(self, field)
            if len(set(values)) < len(values):
                raise PydanticCustomError("repeated", "{field} repeats a value", {"field": field})
        for precision in self.precisions:
            dtype, slash, weights = precision.partition("/")
            if dtype not in DTYPES or (slash and weights not in WEIGHTS):
                message = "precisions: {precision} is not DTYPE or DTYPE/WEIGHTS (DTYPE: {dtypes}; WEIGHTS: {w})"
                known = {"precision": precision, "dtypes": ", ".join(DTYPES), "w": ", ".join(WEIGHTS)}
                raise PydanticCustomError("precision", message, known)
        if self.load is not None and self.goals.ttft_s is None and self.goals.tpot_s is None:
            raise PydanticCustomError("load", "load needs goals.ttft_s or goals.tpot_s")
        if self.load is None and "goodput_price_per_million_tokens" in self.objectives:
            raise PydanticCustomError("load", "objectives: goodput_price_per_million_tokens needs load")
        if self.size > MAX_POINTS:
            message = "the product has {size} points; at most {most} are evaluated"
            raise PydanticCustomError("too_large", message, {"size": self.size, "most": MAX_POINTS})
        return self

    @property
    def size(self) -> int:
        """Points of the product."""
        named = (self.devices, self.precisions, self.engines or [""])
        degrees = (self.tp, self.pp, self.ep, self.dp or [1], self.batch)
        return prod(map(len, named)) * prod(map(len, degrees))


def read_sweep(path: Path) -> Sweep:
    """Read a sweep; the paths in it are relative to its folder.

    Raises DataError: the file cannot be read, or is not TOML.
    Raises FieldError: a field is missing, unknown or wrong, or engine and framework contradict.
    """
    value = read_toml(path, _HINT)
    try:
        sweep = read_request(Sweep, value)
    except FieldError as error:
        raise FieldError(f"{path}: {error.message}", path=error.path, hint=_HINT) from None
    folder = path.absolute().parent

    def located(name: str) -> str:
        return str(folder / name) if name.lower().endswith((".json", ".toml")) else name

    prices = {located(name): price for name, price in sweep.price_per_gpu_hour.items()}
    devices = [located(name) for name in sweep.devices]
    engines = [located(name) for name in sweep.engines]
    for engine in engines or (None,):
        load_engine(engine, sweep.framework)
    update = {"devices": devices, "price_per_gpu_hour": prices, "engines": engines}
    return sweep.model_copy(update={"config": str(folder / sweep.config), **update})


@dataclass(frozen=True)
class SweepResult:
    """A point with its figures, or the reason why it has none."""

    device: str
    tp: int
    pp: int
    ep: int
    dp: int | None
    batch: int
    dtype: str
    weights: str | None
    engine: str | None
    status: Literal["met", "missed", "infeasible"]  # whether it meets the goals; an infeasible point has no figures
    reason: str | None = None  # the missed goals, or why the point is infeasible
    pareto: bool = False  # no other point that meets the goals is better in one objective and as good in the others
    gpus: int | None = None
    # Seconds; ``tpot_s`` is None for a single output token. With ``load``: what its share of the requests keeps at the
    # goodput.
    ttft_s: float | None = None
    ttft_upper_s: float | None = None
    tpot_s: float | None = None
    tpot_upper_s: float | None = None
    total_s: float | None = None
    throughput_tokens_per_s: float | None = None
    # Of all GPUs; of output tokens, while the GPUs serve one batch after the other, or with ``load`` at the goodput
    # (None where it is 0).
    price_per_hour: float | None = None
    price_per_million_tokens: float | None = None
    memory_bytes: float | None = None  # of the fullest GPU: with a batch, or with ``load`` with all requests in flight
    # Largest rate that keeps the goals of latency, and rate beyond which the queue grows (:func:`cdmpp.llm.goodput`).
    # None without ``load``. With it, no figure depends on ``batch``.
    goodput_requests_per_s: float | None = None
    saturation_requests_per_s: float | None = None
    goodput_price_per_million_tokens: float | None = None  # ``price_per_million_tokens`` with ``load``
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
    front = set(
        pareto_front(
            [
                tuple(float(getattr(r, name) or 0.0) for name in objectives) if r.status == "met" else None
                for r in results
            ]
        )
    )
    return [replace(result, pareto=position in front) for position, result in enumerate(results)]


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
    """One combination of settings."""

    device: DeviceSpec
    price_per_gpu_hour: float
    tp: int
    pp: int
    ep: int
    dp: int | None
    batch: int
    precision: str  # ``dtype`` or ``dtype/weights``
    engine: str | None  # engine profile


def sweep_points(sweep: Sweep, devices: dict[str, DeviceSpec]) -> Iterator[SweepPoint]:
    """The product of a sweep's settings, batches innermost. ``devices``: specifications of ``sweep.devices``."""
    layouts = product(sweep.tp, sweep.pp, sweep.ep, sweep.dp or (None,))
    for name, engine, precision, layout, batch in product(
        sweep.devices, sweep.engines or (None,), sweep.precisions, list(layouts), sweep.batch
    ):
        yield SweepPoint(devices[name], sweep.price_per_gpu_hour[name], *layout, batch, precision, engine)


def evaluate_point(sweep: Sweep, config: LLMConfig, predictor: Predictor, point: SweepPoint) -> SweepResult:
    """Estimate a point and compare it with the goals; a point that is impossible has the reason."""
    dtype, _, weights = point.precision.partition("/")
    layout = {name: getattr(point, name) for name in ("tp", "pp", "ep", "dp")}
    types: dict[str, Any] = {"dtype": dtype, "weights": weights or None}
    engine = load_engine(point.engine, sweep.framework).name
    result = SweepResult(
        device=point.device.name, batch=point.batch, engine=engine, status="infeasible", **layout, **types
    )
    shared = ("input", "output", "kv_dtype", "framework", "cuda_graph")
    options: dict[str, Any] = {**layout, **types, **{name: getattr(sweep, name) for name in shared}}
    options |= {"engine": point.engine, "predictor": predictor}
    limit, batch = None, point.batch
    try:
        if sweep.load is not None:
            limit = _goodput(sweep, config, replace(point, batch=defaults.BATCH), options)
            batch = _in_flight(limit)
        answer = estimate(config, point.device, batch=batch, **options)
    except CdmppError as error:
        return replace(result, reason=error.message)
    tokens_per_s = answer.tokens / answer.total.point
    result = replace(
        result,
        dp=answer.settings.dp,
        gpus=answer.gpus,
        ttft_s=answer.ttft.point,
        ttft_upper_s=answer.ttft.upper,
        tpot_s=None if answer.tpot is None else answer.tpot.point,
        tpot_upper_s=None if answer.tpot is None else answer.tpot.upper,
        total_s=answer.total.point,
        memory_bytes=answer.memory.total,
        domain=answer.domain,
        domain_reason=answer.domain_reason,
        model_id=answer.model_id,
    )
    if limit is not None:
        tokens_per_s = limit.requests_per_s * sweep.output
        result = _under_load(result, limit)
    per_hour = answer.gpus * point.price_per_gpu_hour
    per_million = per_hour / _HOUR_S / tokens_per_s * _MILLION if tokens_per_s else None
    result = replace(
        result,
        throughput_tokens_per_s=tokens_per_s,
        price_per_hour=per_hour,
        price_per_million_tokens=per_million,
        goodput_price_per_million_tokens=None if limit is None else per_million,
    )
    # The goodput keeps the goals of latency by itself.
    missed = _missed(sweep.goals, result, latencies=limit is None)
    if limit is not None and not limit.requests_per_s:
        missed.insert(0, "the goals are missed without any load")
    return replace(result, status="missed" if missed else "met", reason="; ".join(missed) or None)


def _in_flight(limit: Goodput) -> int:
    """Requests in flight at the goodput (Little's law); one where there is none."""
    if limit.result is None:
        return 1
    return max(1, min(limit.slots, round(limit.requests_per_s * float(limit.result.latency_s.mean()))))


def _under_load(result: SweepResult, limit: Goodput) -> SweepResult:
    """The point with the latencies that the share of the requests keeps at the goodput."""
    result = replace(
        result, goodput_requests_per_s=limit.requests_per_s, saturation_requests_per_s=limit.saturation_requests_per_s
    )
    served = limit.result
    if served is None:
        return result
    ttft_s, total_s = (served.percentile(name, 100 * limit.share) for name in ("ttft_s", "latency_s"))
    tpot_s = served.percentile("tpot_s", 100 * limit.share) if len(served.measured("tpot_s")) else None
    ttft_upper_s = served.relative_upper * ttft_s
    tpot_upper_s = None if tpot_s is None else served.relative_upper * tpot_s
    result = replace(result, ttft_s=ttft_s, ttft_upper_s=ttft_upper_s, total_s=total_s)
    return replace(result, tpot_s=tpot_s, tpot_upper_s=tpot_upper_s)


def _goodput(sweep: Sweep, config: LLMConfig, point: SweepPoint, options: dict[str, Any]) -> Goodput:
    """The largest rates of a point; points that differ in their batch alone share them."""
    key = (id(sweep), id(config), id(options["predictor"]), point)
    if key not in _LIMITS:
        if len(_LIMITS) >= _MOST_LIMITS:
            _LIMITS.clear()
        assert sweep.load is not None
        goals = {"ttft_s": sweep.goals.ttft_s, "tpot_s": sweep.goals.tpot_s}

        def limit(factor: float) -> Goodput:
            scaled: dict[str, Any] = {name: None if goal is None else goal / factor for name, goal in goals.items()}
            return goodput(config, point.device, share=load.share, count=load.count, **scaled, **options)

        load = sweep.load
        rates = limit(1.0)
        if sweep.goals.figure == "upper" and rates.result is not None:
            rates = limit(rates.result.relative_upper)
        _LIMITS[key] = rates
    return _LIMITS[key]


def _missed(goals: Goals, result: SweepResult, *, latencies: bool) -> list[str]:
    """The goals that a point does not meet, in words."""
    reasons = []
    for name in ("ttft", "tpot") if latencies else ():
        limit_s = getattr(goals, f"{name}_s")
        seconds = getattr(result, f"{name}_upper_s" if goals.figure == "upper" else f"{name}_s")
        if limit_s is not None and seconds is not None and seconds > limit_s:
            reasons.append(f"{name} {format_latency(seconds)} > {format_latency(limit_s)}")
    for name, limit, value in (
        ("price per hour", goals.price_per_hour, result.price_per_hour),
        ("price per million tokens", goals.price_per_million_tokens, result.price_per_million_tokens),
        ("gpus", goals.gpus, result.gpus),
    ):
        if limit is not None and value is not None and value > limit:
            reasons.append(f"{name} {value:.4g} > {limit:g}")
    return reasons
