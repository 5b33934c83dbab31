"""Generated parts of docs/model_card.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.report.known import title
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Results, not_measured, of_study

#: A group of rows counts as a known failure from this error and number of test rows on.
FAILURE, ENOUGH = 0.25, 50


def model(results: Results) -> str:
    """Facts of the shipped model: size, devices, rows, cost of training."""
    if not results.manifest:
        return not_measured("model")
    manifest, run = results.manifest, results.manifest["train"]
    rows = run["steps"] * manifest["config"]["optimiser"]["batch_rows"]
    facts = {
        "identifier": f"`{results.model_id}`",
        "parameters": f"{run['parameters']:,}",
        "devices": f"{sum(map(bool, manifest['devices']))}",
        "training rows": f"{run['train_rows']:,}",
        "rows seen in the last run": f"{rows:,} in {run['steps']:,} steps, {run['train_seconds'] / 60:,.0f} minutes, "
        f"{rows / run['train_seconds']:,.0f} rows a second",
        "started from": f"`{start}`" if (start := manifest["config"]["optimiser"]["start_from"]) else "random weights",
        "factors of the intervals": ", ".join(f"{k} {v:.2f}" for k, v in sorted(manifest["calibration"].items())),
    }
    return table(("", "the shipped model"), ([name, text] for name, text in facts.items()), left=2)


def sources(results: Results) -> str:
    """Rows and errors of each source."""
    errors = results.get("model")
    if errors is None or not results.manifest:
        return not_measured("model")
    rows = (
        [title(name), f"{count:,}", *_cells(errors["by_source"].get(name))]
        for name, count in sorted(results.manifest["data"]["sources"].items(), key=lambda item: title(item[0]).lower())
    )
    return table(("source", "rows", "test rows", "MAPE", "inside the 80 % interval"), rows)


@of_study("model")
def devices(results: Results, errors: dict[str, Any]) -> str:
    """Error of each device over all its sources."""
    return _totals(errors, "device", "device")


@of_study("model")
def operators(results: Results, errors: dict[str, Any]) -> str:
    """Error of each operator over all sources and devices; sources have their own names of operators."""
    return _totals(errors, "op", "operator")


@of_study("model")
def failures(results: Results, errors: dict[str, Any]) -> str:
    """Groups of test rows with large errors, the largest first."""
    large = [g for g in errors["groups"] if g["mape"] > FAILURE and g["n"] >= ENOUGH]
    rows = (
        [title(g["source"]), g["device"], g["op"], *_cells(g)] for g in sorted(large, key=lambda g: -float(g["mape"]))
    )
    return table(("source", "device", "operator", "test rows", "MAPE", "inside the 80 % interval"), rows, left=3)


def _totals(errors: Mapping[str, Any], key: str, header: str) -> str:
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in errors["groups"]:
        groups.setdefault(entry[key], []).append(entry)
    rows = ([name, *_cells(_total(entries))] for name, entries in sorted(groups.items()))
    return table((header, "test rows", "MAPE", "inside the 80 % interval"), rows)


def _total(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    entries = list(entries)
    n = sum(entry["n"] for entry in entries)
    return {"n": n, **{name: sum(e["n"] * e[name] for e in entries) / n for name in ("mape", "coverage")}}


def _cells(entry: Mapping[str, Any] | None) -> list[str]:
    if entry is None:
        return ["-", "-", "-"]
    return [f"{entry['n']:,}", f"**{percent(entry['mape'])}**", percent(entry["coverage"])]
