"""Predictions and totals as HTML and Arrow tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cdmpp.model.domain.calibration import DEFAULT_INTERVAL, interval_levels
from cdmpp.predict.rendering.arrow import Column, arrow_table
from cdmpp.predict.rendering.html import html_table
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from cdmpp.predict.prediction import Prediction
    from cdmpp.predict.prediction_total import PredictionTotal


def interval_text(lower_s: float | None, upper_s: float | None) -> str:
    """Bounds in seconds as text; empty where there are none."""
    if lower_s is None or upper_s is None:
        return ""
    return f"{format_latency(lower_s)} – {format_latency(upper_s)}"


def share_text(share: float) -> str:
    """A fraction as per cent with one decimal."""
    return f"{100 * share:.1f} %"


def predictions_html(predictions: Sequence[Prediction]) -> str:
    """One row per prediction: program, device, latency, interval and domain, or the error."""
    rows, notes = [], []
    for p in predictions:
        if p.latency_s is None:
            message = "" if p.error is None else p.error.message
            rows.append((p.name, p.device, "error", message, ""))
            continue
        rows.append(
            (p.name, p.device, format_latency(p.latency_s), interval_text(p.lower_s, p.upper_s), p.domain or "")
        )
        notes += [f"{p.name} on {p.device}: {p.domain_reason}"] if p.domain_reason else []
    header = ("program", "device", "latency", "interval", "domain")
    return html_table(header, rows, right=(2,), caption=_settings(predictions), notes=list(dict.fromkeys(notes))[:10])


def _settings(predictions: Sequence[Prediction]) -> str:
    """The options that all predictions share."""

    def shared(values: set[Any], text: str) -> list[str]:
        [value] = values if len(values) == 1 else [None]
        return [text.format(value)] if value else []

    levels = {tuple(p.quantiles) for p in predictions if p.quantiles}
    ends = interval_levels(tuple(map(float, min(levels)))) if len(levels) == 1 else DEFAULT_INTERVAL
    parts = shared({p.protocol for p in predictions}, "protocol {}")
    parts += shared({p.framework for p in predictions}, "framework {}")
    parts += [f"interval {100 * min(ends):g} % – {100 * max(ends):g} %"] if levels else []
    parts += shared({p.model_id for p in predictions}, "model {}")
    return ", ".join(parts)


def predictions_arrow(predictions: Sequence[Prediction]) -> Any:
    """A ``pyarrow.Table`` with one row per prediction; figures are null where there is an error."""

    def of(name: str) -> list[Any]:
        return [getattr(p, name) for p in predictions]

    def of_error(name: str) -> list[Any]:
        return [None if p.error is None else getattr(p.error, name) for p in predictions]

    columns = {name: Column("string", of(name)) for name in _TEXTS}
    columns |= {name: Column("float64", of(name), "s") for name in ("latency_s", "lower_s", "upper_s")}
    columns["quantiles"] = Column("levels", [list(p.quantiles.items()) for p in predictions], "s")
    columns["domain"] = Column("string", of("domain"))
    columns["domain_score"] = Column("float64", of("domain_score"))
    columns["roofline_s"] = Column("float64", of("roofline_s"), "s")
    columns["domain_reason"] = Column("string", of("domain_reason"))
    columns["error_code"] = Column("string", of_error("code"))
    columns["error"] = Column("string", of_error("message"))
    columns["error_hint"] = Column("string", of_error("hint"))
    return arrow_table(columns)


_TEXTS = ("name", "program_hash", "device", "backend", "protocol", "framework", "model_id")


def total_html(total: PredictionTotal) -> str:
    """One row: latency, interval, domain and launches."""
    return html_table(
        ("total", "interval", "domain", "time by domain", "launches", "programs", "not predicted"),
        [total_cells(total)],
        right=(0, 4, 5, 6),
    )


def total_cells(total: PredictionTotal) -> tuple[str, ...]:
    """Latency ("at least" for a lower bound), interval, domain, shares, launches, programs, launches not predicted."""
    bound = "at least " if total.lower_bound else ""
    latency = "" if total.latency_s is None else bound + format_latency(total.latency_s)
    counts = (f"{total.launches:,}", f"{total.programs:,}", f"{total.failed:,}")
    return (latency, interval_text(total.lower_s, total.upper_s), total.domain or "", total.domain_text(), *counts)


def total_columns(totals: Sequence[PredictionTotal]) -> dict[str, Column]:
    """Columns of an Arrow table with one row per total."""

    def of(name: str) -> list[Any]:
        return [getattr(total, name) for total in totals]

    columns = {name: Column("float64", of(name), "s") for name in ("latency_s", "lower_s", "upper_s")}
    columns["domain"] = Column("string", of("domain"))
    for label in ("in", "near", "out"):
        shares = [None if t.domain_shares is None else dict(t.domain_shares)[label] for t in totals]
        columns[f"share_{label}"] = Column("float64", shares)
    columns |= {name: Column("int64", of(name)) for name in ("programs", "launches", "failed")}
    return columns | {"lower_bound": Column("bool", of("lower_bound"))}
