"""Reports on brute-forced GPU schedules with one GPU left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.report.markdown import folded, number, percent, table
from benchmarks.report.results import Results, not_measured

#: Method of the report whose figures are goals.
OURS = "cdmpp"
_HEADER = ("tau within a kernel", "top-1 score", "top-5 score", "MAPE")


def left_out(results: Results) -> str:
    """Every method without and with measurements, and our figures for each left-out GPU and kernel."""
    result = results.get("gpu_schedules")
    if result is None:
        return not_measured("gpu_schedules")
    rows = [
        [method, count, *_cells(found)] for method, counts in result["means"].items() for count, found in counts.items()
    ]
    means = table(("method", "measurements", *_HEADER), rows)
    cells = [
        [device, kernel, count, f"{found['n']:,}", *_cells(found)]
        for device, entry in result["devices"].items()
        for count, by_kernel in entry["methods"][OURS].items()
        for kernel, found in by_kernel.items()
    ]
    each = table(("GPU left out", "kernel", "measurements", "configurations", *_HEADER), cells, left=2)
    kernels = result["kernels"]
    thin = result.get("thin")
    sample = f" A seeded sample of {thin:,} configurations of each kernel." if thin else ""
    dropped = {
        f"{name}: {reason} ({count:,})" for name, k in kernels.items() for reason, count in k["left_out"].items()
    }
    without = f" Configurations that no program expresses: {'; '.join(sorted(dropped))}." if dropped else ""
    twins = "; ".join(" and ".join(pair) for pair in result["twins"])
    return (
        f"`{result['command']}`: {len(result['devices'])} GPUs, {len(kernels)} kernels, "
        f"{sum(k['configurations'] for k in kernels.values()):,} programs.{sample}{without} "
        f"Means over GPUs and kernels. GPUs of similar design: {twins}.\n\n{means}\n\n"
        + folded("By GPU and kernel", each)
    )


def _cells(found: Mapping[str, Any]) -> list[str]:
    return [number(found["tau"]), f"**{number(found['top1'])}**", number(found["top5"]), percent(found["mape"])]


def mean_score(results: Results, measurements: int) -> float | None:
    """Our mean top-1 score after so many measurements; None where the study was not run."""
    result = results.get("gpu_schedules")
    if result is None:
        return None
    score: float | None = result["means"][OURS].get(str(measurements), {}).get("top1")
    return score
