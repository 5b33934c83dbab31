"""Report of a sweep: tables for the terminal, files and the plot."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import DataError, MissingDependencyError, install_hint
from cdmpp.plan.sweep.points import COLUMNS, Sweep, SweepResult
from cdmpp.predict.rendering import Table, out_reasons
from cdmpp.predict.requests.plot import PALE_GREY, colours_of, draw_legend, new_figure
from cdmpp.utils.units import format_latency
from cdmpp.utils.writing import check_output, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Infeasible points that the terminal shows.
_MOST = 20
_LABELS = {
    "price_per_million_tokens": "price per million output tokens",
    "price_per_hour": "price per hour",
    "tpot_s": "time per output token (ms)",
    "ttft_s": "time to first token (ms)",
    "total_s": "time of a batch (ms)",
    "gpus": "GPUs",
    "goodput_price_per_million_tokens": "price per million output tokens at the goodput",
}
_FORMATS = (".csv", ".parquet", ".json")


def tables(sweep: Sweep, results: Sequence[SweepResult]) -> list[Table]:
    """The Pareto front, counts, and the points that are infeasible, each with its reason."""
    front = sorted((r for r in results if r.pareto), key=lambda r: [getattr(r, o) or 0.0 for o in sweep.objectives])
    counts = {status: sum(r.status == status for r in results) for status in ("met", "missed", "infeasible")}
    out = []
    if front:
        columns: dict[str, Callable[[SweepResult], str]] = {
            "device": lambda r: r.device,
            "engine": lambda r: r.engine or "",
            "layout": lambda r: r.layout,
            "gpus": lambda r: str(r.gpus),
            "batch": lambda r: str(r.batch) if sweep.load is None else "any",
            "precision": lambda r: r.precision,
            "ttft": lambda r: _latency(r.ttft_s),
            "tpot": lambda r: _latency(r.tpot_s),
            "tokens/s": lambda r: f"{r.throughput_tokens_per_s:,.0f}",
            "price/h": lambda r: f"{r.price_per_hour:.2f}",
            "price/Mtok": lambda r: f"{r.price_per_million_tokens:.3f}",
        }
        if sweep.load is not None:
            columns["goodput/s"] = lambda r: f"{r.goodput_requests_per_s:.3g}"
            columns["saturation/s"] = lambda r: f"{r.saturation_requests_per_s:.3g}"
        right = (3, 4, *range(6, len(columns)))
        table = Table.of(front, columns | {"domain": lambda r: r.domain or ""}, right)
        out.append(replace(table, rows=list(dict.fromkeys(table.rows))))
    out.append(
        Table.lines(
            f"{len(front)} points are on the Pareto front of {' and '.join(sweep.objectives)}",
            f"{len(results)} points: {counts['met']} meet the goals, {counts['missed']} miss them, "
            f"{counts['infeasible']} are infeasible",
            *out_reasons((r.device, r) for r in front),
            *_nearest(results),
        )
    )
    infeasible = [r for r in results if r.status == "infeasible"]
    if infeasible:
        shown = [
            (r.device, r.engine or "", r.layout, str(r.batch), r.precision, r.reason or "") for r in infeasible[:_MOST]
        ]
        out.append(Table(("infeasible", "engine", "layout", "batch", "precision", "reason"), shown, right=(3,)))
    if len(infeasible) > _MOST:
        out.append(Table.lines(f"and {len(infeasible) - _MOST} more (--out FILE has all)"))
    return out


def _nearest(results: Sequence[SweepResult]) -> list[str]:
    """A line on the point of fewest missed goals, where no point meets all."""
    missed = [r for r in results if r.status == "missed"]
    if not missed or any(r.status == "met" for r in results):
        return []
    nearest = min(missed, key=lambda r: ((r.reason or "").count(";"), r.price_per_million_tokens or inf))
    return [
        f"no point meets the goals; the cheapest of those that miss fewest: {nearest.device}, {nearest.engine}, "
        f"{nearest.layout}, batch {nearest.batch}, {nearest.precision}: {nearest.reason}"
    ]


def check_out(path: Path | None) -> None:
    """Refuse a file that :func:`write_results` cannot write, before the sweep starts.

    Raises DataError: another extension, or a path that cannot be written.
    """
    if path is None:
        return
    if path.suffix.lower() not in _FORMATS:
        raise DataError(f"{path}: results are not written in this format", hint=f"one of: {', '.join(_FORMATS)}")
    check_output(path)


def write_results(path: Path, sweep: Sweep, results: Sequence[SweepResult]) -> None:
    """Write all points as CSV, Parquet or JSON by the extension; the file is replaced atomically."""
    with replacing(path) as aside:
        match path.suffix.lower():
            case ".csv":
                with aside.open("w", encoding="utf-8", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(result.to_dict() for result in results)
            case ".json":
                aside.write_text(json.dumps(to_json(sweep, results), indent=1, allow_nan=False), encoding="utf-8")
            case _:
                try:
                    import pyarrow as pa
                    import pyarrow.parquet as pq
                except ImportError:
                    raise MissingDependencyError("Parquet needs pyarrow", hint=install_hint("plan")) from None
                pq.write_table(pa.Table.from_pylist([result.to_dict() for result in results]), aside)


def to_json(sweep: Sweep, results: Sequence[SweepResult]) -> dict[str, Any]:
    """The sweep and its points as JSON values."""
    return {"sweep": sweep.model_dump(), "points": [result.to_dict() for result in results]}


def draw(sweep: Sweep, results: Sequence[SweepResult]) -> Figure:
    """Points that meet the goals over the first two objectives, with the Pareto front; grey points miss goals.

    Raises DataError: no point has figures.
    Raises MissingDependencyError: matplotlib is not installed.
    """
    across, up = sweep.objectives[1], sweep.objectives[0]
    factors = [1e3 if name.endswith("_s") else 1.0 for name in (across, up)]
    drawn = [r for r in results if getattr(r, across) is not None and getattr(r, up) is not None]
    if not drawn:
        raise DataError("no point has figures to draw", hint="see the reasons of the infeasible points")
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    colours = colours_of(list(dict.fromkeys(r.device for r in drawn)))

    def xy(points: Sequence[SweepResult]) -> tuple[list[float], list[float]]:
        return [factors[0] * getattr(r, across) for r in points], [factors[1] * getattr(r, up) for r in points]

    axes.scatter(*xy([r for r in drawn if r.status == "missed"]), s=10, color=PALE_GREY)
    for device, colour in colours.items():
        axes.scatter(*xy([r for r in drawn if r.status == "met" and r.device == device]), s=16, color=[colour])
    front = sorted((r for r in drawn if r.pareto), key=lambda r: (getattr(r, across), getattr(r, up)))
    axes.plot(*xy(front), color="black", linewidth=1, marker="o", markersize=6, fillstyle="none", label="Pareto front")
    limit = getattr(sweep.goals, across, None)
    if limit is not None:
        axes.axvline(factors[0] * limit, color="black", linewidth=1, linestyle="--", label="goal")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(_LABELS[across])
    axes.set_ylabel(_LABELS[up])
    draw_legend(figure, {**colours, "misses a goal": PALE_GREY})
    return figure


def _latency(seconds: float | None) -> str:
    return "-" if seconds is None else format_latency(seconds)
