"""Markdown tables of error figures, shared by the accuracy benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def percent(value: float | None) -> str:
    """A fraction for people."""
    return "-" if value is None else f"{100 * value:.1f} %"


def error_rows(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """One row per entry: the model's figures beside the baselines' on the same rows."""
    lines = [
        "| rows | n | MAPE | median | within 10 % | within 20 % | Kendall tau | 80 % interval covers "
        "| XGBoost MAPE | roofline MAPE |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, m in entries.items():
        tau = "-" if m["kendall_tau"] is None else f"{m['kendall_tau']:.3f}"
        trees = percent(m["baselines"].get("xgboost", {}).get("mape"))
        lines.append(
            f"| {name} | {m['n']:,} | **{percent(m['mape'])}** | {percent(m['median_ape'])} "
            f"| {percent(m['within_10'])} "
            f"| {percent(m['within_20'])} | {tau} | {percent(m['coverage'])} | {trees} "
            f"| {percent(m['baselines']['roofline']['mape'])} |"
        )
    return "\n".join(lines)
