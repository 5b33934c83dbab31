"""Comparison of the shipped model with the model before the tables of quantised products, experts and attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.report.known import title
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Results, not_measured

#: Largest allowed increase of a source's MAPE.
MOST = 0.005


@dataclass(frozen=True)
class Change:
    """MAPE of both models on the test rows of one source, on the devices that both models were trained on."""

    source: str
    devices: int
    n: int
    before: float
    after: float

    @property
    def increase(self) -> float:
        """After minus before, as a fraction."""
        return self.after - self.before


def device_errors(errors: Mapping[str, Any]) -> dict[tuple[str, str], tuple[int, float]]:
    """(rows, MAPE) of each source and device of an error table."""
    sums: dict[tuple[str, str], list[float]] = {}
    for group in errors["groups"]:
        total = sums.setdefault((group["source"], group["device"]), [0, 0.0])
        total[0] += group["n"]
        total[1] += group["n"] * group["mape"]
    return {key: (int(n), total / n) for key, (n, total) in sums.items()}


def changes(results: Results) -> list[Change]:
    """One change per source of the former model; empty without both models' errors, or if they are one model."""
    errors, former = results.get("model"), results.former
    if errors is None or former is None or results.model_id in former["model_ids"]:
        return []
    now = device_errors(errors)
    by_source: dict[str, list[tuple[int, float, int, float]]] = {}
    for entry in former["devices"]:
        key = (entry["source"], entry["device"])
        if key in now:
            by_source.setdefault(entry["source"], []).append((entry["n"], entry["mape"], *now[key]))
    found = []
    for source, rows in by_source.items():
        before = sum(n * mape for n, mape, _, _ in rows) / sum(n for n, _, _, _ in rows)
        count = sum(n for _, _, n, _ in rows)
        after = sum(n * mape for _, _, n, mape in rows) / count
        found.append(Change(source, len(rows), count, before, after))
    return found


def former(results: Results) -> str:
    """Table of the changes."""
    if results.get("model") is None:
        return not_measured("model")
    found = changes(results)
    if not found:
        return "*Not compared: the shipped model is the former model.*"
    rows = [
        [
            title(c.source),
            str(c.devices),
            f"{c.n:,}",
            percent(c.before),
            f"**{percent(c.after)}**",
            f"{100 * c.increase:+.1f}",
            "yes" if c.increase <= MOST else "no",
        ]
        for c in found
    ]
    header = ("source", "devices", "n", "former model", "shipped model", "change, points", "at most 0.5 points worse")
    return table(header, rows)
