"""Report on collectives: held-out sizes, devices left out, and few measurements of a new link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.report.known import BASELINES
from benchmarks.report.markdown import folded, percent, table
from benchmarks.report.results import Results, not_measured, of_study

#: Baselines of the study, in the order of their columns.
NAMES = ("xgboost", "roofline")
_HEADER = tuple(f"{BASELINES[name]}, MAPE" for name in NAMES)


def _baselines(entry: Mapping[str, Any] | None) -> list[str]:
    return [percent((entry or {}).get(name)) for name in NAMES]


@of_study("collectives")
def sizes(results: Results, metrics: dict[str, Any]) -> str:
    """Table of held-out sizes by operator, and by operator and device."""
    study = results.get("collective_baselines") or {}
    rows = [
        [name, f"{m['rows']:,}", f"**{percent(m['error'])}**", *_baselines(study.get("by_operator", {}).get(name))]
        for name, m in metrics["by_operator"].items()
    ]
    total = f"**{percent(metrics['test_error'])}** (median {percent(metrics['test_median'])})"
    rows.append(["all", f"{metrics['test_rows']:,}", total, *_baselines(study.get("test"))])
    blocks = [table(("operator", "n", "MAPE", *_HEADER), rows)]
    cells = [
        [*key.split("|"), f"{m['rows']:,}", f"**{percent(m['error'])}**"]
        for key, m in metrics["by_operator_and_device"].items()
    ]
    blocks.append(folded("Every operator and device", table(("operator", "device", "n", "MAPE"), cells, left=2)))
    return _with_command(blocks, study)


@of_study("collectives")
def left_out(results: Results, metrics: dict[str, Any]) -> str:
    """Table of devices left out one at a time, and of groups of similar devices left out together."""
    study = results.get("collective_baselines") or {}
    known = study.get("left_out", {})
    rows = [
        [name, f"{m['rows']:,}", f"**{percent(m['error'])}**", percent(m["adapted"]), *_baselines(known.get(name))]
        for name, m in metrics["left_out"].items()
    ]
    total = [f"**{percent(metrics['left_out_error'])}**", percent(metrics["adapted_error"])]
    rows.append(["**all rows**", "", *total, *_baselines(study.get("left_out_all"))])
    header = ("device left out", "n", "MAPE", "after 8 measurements of each link", *_HEADER)
    groups = [
        [", ".join(m["devices"]), f"{m['rows']:,}", f"**{percent(m['error'])}**"]
        for m in metrics["left_out_groups"].values()
    ]
    groups.append(["**all rows**", "", f"**{percent(metrics['left_out_groups_error'])}**"])
    blocks = [table(header, rows), table(("devices left out together", "n", "MAPE"), groups)]
    return _with_command(blocks, study)


def _with_command(blocks: list[str], study: Mapping[str, Any]) -> str:
    return "\n\n".join(blocks if study else [*blocks, not_measured("collective_baselines")])
