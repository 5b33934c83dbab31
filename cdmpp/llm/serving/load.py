"""Served models under load: largest rates that keep goals, and curves of latency against throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.llm import defaults
from cdmpp.llm.config import ConfigLike
from cdmpp.llm.estimate_plan import resolved, resolved_device
from cdmpp.llm.serving.simulate import ServingPlan, ServingResult, resolved_pool, simulate
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Device
from cdmpp.predict.rendering import Rendered, Table, percent
from cdmpp.predict.requests.plot import colours_of, draw_legend, new_figure
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Rates are found to within this share.
PRECISION = 0.03
#: The lowest rate that is tried, as a share of the saturation rate.
LOWEST = 1e-3
#: Requests of each simulation: at least and at most, and so many times as run at once.
COUNT, MOST, TIMES = 400, 6000, 3


@dataclass(frozen=True)
class Goodput(Rendered):
    """Largest rates of a deployment."""

    # Largest rate at which ``share`` of the requests keep the goals; 0 where they are missed without any load.
    requests_per_s: float
    # Rate at which requests end while all wait from the start: beyond it the queue grows without end.
    saturation_requests_per_s: float
    share: float
    slots: int  # requests that run at once, at most
    # The goals, in seconds.
    ttft_s: float | None
    tpot_s: float | None
    result: ServingResult | None  # the requests at ``requests_per_s``; None where it is 0

    def tables(self) -> list[Table]:
        """The rates as a row."""
        return [goodput_table({"" if self.result is None else self.result.device: self})]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(replace(self, result=None)), "result": None if self.result is None else self.result.to_dict()}


def goodput_table(limits: Mapping[str, Goodput]) -> Table:
    """Largest rates that keep the goals, by device."""
    first = next(iter(limits.values()))
    goals = {"first token": first.ttft_s, "between tokens": first.tpot_s}
    wanted = " and ".join(f"{name} within {format_latency(goal)}" for name, goal in goals.items() if goal is not None)
    rows = []
    for name, limit in limits.items():
        tokens = "-" if limit.result is None else f"{limit.result.throughput_tokens_per_s:,.0f}"
        rows.append((name, f"{limit.requests_per_s:.3g}", f"{limit.saturation_requests_per_s:.3g}", tokens))
    title = f"goodput: largest rate at which {percent(first.share)} of the requests keep {wanted}"
    return Table(("device", "goodput, requests/s", "saturation, requests/s", "tokens/s"), rows, (1, 2, 3), title)


def goodput(
    config: ConfigLike,
    device: Device,
    *,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    share: float = defaults.SHARE,
    predictor: Predictor | None = None,
    **options: Any,
) -> Goodput:
    """Find the largest rate at which requests keep goals of latency (DistServe, OSDI '24).

    ``ttft_s``, ``tpot_s``: goals of a request in seconds, to its first token and between its tokens on average; one or
    both. ``share``: of the requests that keep both. Further arguments are those of :func:`cdmpp.llm.simulate`, but none
    of the load beside ``input`` and ``output``. Arrivals are Poisson's; ``count`` is by default three times the
    requests that run at once, from 400 to 6,000. ``predictor`` None: the shipped model. Raises the errors of
    :func:`cdmpp.llm.simulate`, and FieldError for a wrong goal or share.

    >>> goodput("examples/llm/llama-3.1-8b.json", "h100-sxm", ttft_s=1.0, tpot_s=0.03, output=256)
    ... # doctest: +SKIP
    """
    _check_goals(ttft_s, tpot_s, share)
    predictor, model, spec = resolved(predictor, config, device)
    options["prefill_pool"] = resolved_pool(options.get("prefill_pool"), lambda name: resolved_device(name, predictor))
    count = options.pop("count", None)
    if count is None:
        probe = ServingPlan(model, spec, rate=1.0, count=1, **{**options, "warmup": 0})
        count = min(MOST, max(COUNT, TIMES * probe.slots))
    plan = ServingPlan(model, spec, rate=1.0, count=count, **options)
    if tpot_s is not None and plan.longest_output == 1:
        raise FieldError.at("tpot_s", "no request has a second token", hint="a goal of ttft_s alone")
    tables = plan.tables(predictor.predict_queries(plan.queries))

    def at(rate: float) -> ServingResult:
        return plan.serve(predictor.model_id, tables, rate)

    def met(result: ServingResult) -> bool:
        return share_met(result, ttft_s, tpot_s) >= share

    together = at(inf)
    saturation = count / together.duration_s
    low, high = LOWEST * saturation, saturation
    if not met(at(low)):
        return Goodput(0.0, saturation, share, plan.slots, ttft_s, tpot_s, None)
    if met(at(high)):
        result = plan.bounded(predictor.model_id, tables, high)
        return Goodput(saturation, saturation, share, plan.slots, ttft_s, tpot_s, result)
    while high > low * (1 + PRECISION):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if met(at(middle)) else (low, middle)
    result = plan.bounded(predictor.model_id, tables, low)
    return Goodput(low, saturation, share, plan.slots, ttft_s, tpot_s, result)


def share_met(result: ServingResult, ttft_s: float | None, tpot_s: float | None) -> float:
    """Share of the requests after the warm-up that keep the goals; one token has no time between tokens."""
    kept = np.ones(len(result.ttft_s), dtype=bool)
    if ttft_s is not None:
        kept &= result.ttft_s <= ttft_s
    if tpot_s is not None:
        kept &= (result.latency_s - result.ttft_s) <= tpot_s * np.maximum(result.output - 1, 1)
    return float(kept[result.warmup :].mean())


def load_curve(
    config: ConfigLike, device: Device, concurrency: Sequence[int], **options: Any
) -> Iterator[ServingResult]:
    """Simulations with several numbers of requests in flight; ``options`` are those of :func:`cdmpp.llm.simulate`.

    A ``warmup`` counts up to the number in flight.
    """
    warmup = options.pop("warmup", None)
    for clients in concurrency:
        left_out = None if warmup is None else min(warmup, clients)
        yield simulate(config, device, concurrency=clients, warmup=left_out, **options)


def powers_to(maximum: int) -> list[int]:
    """1, 2, 4, ... and ``maximum``: numbers of requests in flight of a curve."""
    return sorted({maximum, *(1 << i for i in range(maximum.bit_length()))})


def _check_goals(ttft_s: Any, tpot_s: Any, share: Any) -> None:
    if ttft_s is None and tpot_s is None:
        raise FieldError("ttft_s, tpot_s: no goal", path="ttft_s", hint="give one or both, in seconds")
    for name, value, maximum in (("ttft_s", ttft_s, inf), ("tpot_s", tpot_s, inf), ("share", share, 1.0)):
        if value is None and name != "share":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= maximum or value == inf:
            raise FieldError.not_allowed(name, value, hint="a number above 0")


def draw_load(curves: Mapping[str, Sequence[ServingResult]], goals: Mapping[str, float | None] | None = None) -> Figure:
    """Time between tokens and time to the first one over the output tokens of a GPU; medians, and shaded up to 99 %.

    ``curves``: results by device, in order of the load. ``goals``: seconds of "ttft_s" and "tpot_s", as dashed lines.
    """
    figure = new_figure(8.0, 3.6)
    panels = figure.subplots(1, 2)
    colours = colours_of(list(curves))
    for axes, name, label, factor in (
        (panels[0], "tpot_s", "time between tokens (ms)", 1e3),
        (panels[1], "ttft_s", "time to the first token (s)", 1.0),
    ):
        for device, results in curves.items():
            shown = [r for r in results if len(r.measured(name))]
            across = [r.throughput_tokens_per_s / r.gpus for r in shown]
            middle, high = ([factor * r.percentile(name, q) for r in shown] for q in (50, 99))
            axes.plot(across, middle, color=colours[device], marker="o", markersize=3, linewidth=1.5)
            axes.fill_between(across, middle, high, color=colours[device], alpha=0.15, linewidth=0)
        goal = (goals or {}).get(name)
        if goal is not None:
            axes.axhline(factor * goal, color="black", linewidth=1, linestyle="--", label="goal")
        axes.set_xlabel("output tokens per second and GPU")
        axes.set_ylabel(label)
    panels[0].set_ylim(bottom=0)
    panels[1].set_yscale("log")
    draw_legend(figure, colours)
    return figure
