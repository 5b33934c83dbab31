"""Picture of the README: an answer of ``cdmpp llm`` on several GPUs, and estimates against measured batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure

from cdmpp.llm import LLMEstimate, estimate

ROOT = Path(__file__).parents[1]
SERVING = ROOT / "benchmarks" / "results" / "serving_truth.json"
CONFIG = ROOT / "examples" / "llm" / "llama-3.1-8b.json"
#: GPUs of the left half, and their names in the picture.
DEVICES = {
    "b200": "B200",
    "h200": "H200",
    "mi300x": "MI300X",
    "h100-sxm": "H100 SXM",
    "a100-sxm4-80gb": "A100 80 GB",
    "rtx-pro-6000-server": "RTX PRO 6000",
    "rtx-4090": "RTX 4090",
    "l40s": "L40S",
    "a40": "A40",
}
WORKLOAD = {"batch": 8, "input": 1024, "output": 128}
#: Colours of the domain labels.
DOMAIN = {"in": "#1f6f8b", "near": "#d98324", "out": "#b23a48"}
#: Sources of the right half by their key in the result file, with their colours.
SOURCES = {
    "static batches": "static batches, 2024",
    "fixed concurrency": "per token, fixed concurrency",
    "single steps": "single steps",
    "mixed prompts": "mixed prompts",
}
COLORS = ("#5b5f97", "#d98324", "#8cb369", "#a23b72")


def overview(path: Path) -> None:
    """Draw the picture."""
    figure = plt.figure(figsize=(13, 5.2), constrained_layout=True)
    left, right = figure.subfigures(1, 2, width_ratios=(1.55, 1))
    _answer(left)
    _measured(right.subplots())
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _answer(part: SubFigure) -> None:
    answers = {name: estimate(CONFIG, device, **WORKLOAD) for device, name in DEVICES.items()}
    estimates = dict(sorted(answers.items(), key=lambda entry: entry[1].total.point))
    first, second = part.subplots(1, 2, sharey=True)
    _bars(first, estimates, "ttft", "time to first token")
    _bars(second, estimates, "tpot", "time per output token")
    first.set_yticks(range(len(estimates)), list(estimates))
    first.invert_yaxis()
    used = [label for label in DOMAIN if any(e.domain == label for e in estimates.values())]
    handles = [plt.Line2D([], [], color=DOMAIN[label], marker="o", linewidth=5, alpha=0.7) for label in used]
    meaning = {"in": "in: training covered it", "near": "near: partly", "out": "out: a guess"}
    second.legend(handles, [meaning[label] for label in used], frameon=False, fontsize=9, loc="upper right")
    w = WORKLOAD
    part.suptitle(
        f"cdmpp llm llama-3.1-8b.json: {w['batch']} prompts of {w['input']:,} tokens, {w['output']} tokens each\n"
        "(one GPU, bfloat16; dots are predictions, bars are 80 % intervals)",
        fontsize=12,
    )


def _bars(axis: Axes, estimates: dict[str, LLMEstimate], figure: str, label: str) -> None:
    for row, value in enumerate(estimates.values()):
        answer = value.to_dict()
        point, low, high = (1e3 * answer[f"{figure}{end}_s"] for end in ("", "_lower", "_upper"))
        color = DOMAIN[value.domain]
        axis.plot([low, high], [row, row], color=color, linewidth=7, alpha=0.3, solid_capstyle="round")
        axis.plot([point], [row], "o", color=color, markersize=8)
        axis.annotate(
            f"{point:,.0f}" if point >= 100 else f"{point:.3g}",
            (high, row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axis.set(xlabel=f"{label} (ms)", xlim=(0, None))
    axis.margins(x=0.14)
    _plain(axis, "x")


def _measured(axis: Axes) -> None:
    result: dict[str, Any] = json.loads(SERVING.read_text(encoding="utf-8"))
    for (source, label), color in zip(SOURCES.items(), COLORS, strict=True):
        measured, predicted = np.array(result["points"][source]).T
        alpha = 0.25 if len(measured) > 300 else 0.6
        axis.scatter(
            measured, predicted, s=12, color=color, alpha=alpha, linewidths=0, label=f"{label} ({len(measured):,})"
        )
    ends = np.array([3e-3, 3e2])
    axis.plot(ends, ends, color="0.2", linewidth=1, zorder=1)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured", ylabel="predicted")
    ticks, labels = [1e-2, 1e-1, 1, 10, 100], ["10 ms", "100 ms", "1 s", "10 s", "100 s"]
    axis.set_xticks(ticks, labels)
    axis.set_yticks(ticks, labels)
    axis.minorticks_off()
    legend = axis.legend(frameon=False, fontsize=9, loc="upper left", markerscale=2, handletextpad=0.2)
    for handle in legend.legend_handles:
        handle.set_alpha(1)
    groups = result["groups"]
    devices, engines = (len({row[name] for row in groups}) for name in ("device", "engine"))
    axis.set_title(
        f"{sum(row['rows'] for row in groups):,} published measurements,\n{engines} engines on {devices} GPUs",
        fontsize=12,
    )
    _plain(axis, "both")


def _plain(axis: Axes, grid: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="0.93")
    axis.set_axisbelow(True)
