"""The pictures of the README, from the error table that ships with the model (``make figures``).

``docs/predicted_vs_measured.png``: a sample of test rows with the y = x line, one panel per source.
``docs/error_by_device.png``: MAPE by device on unseen shapes, and of the held-out devices.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

#: Sources in the order of their panels.
TITLES = {
    "neusight": "fp32 PyTorch operators (NeuSight)",
    "aiconfigurator_gemm": "bf16 GEMM (aiconfigurator)",
    "aiconfigurator_attention": "bf16 attention (aiconfigurator)",
    "miopen": "convolutions, AMD (MIOpen)",
    "vidur": "fp16 LLM layers (vidur)",
    "deepbench": "DeepBench, 2014-2018 devices",
    "cdmpp_collect": "scheduled programs, CPU (our own)",
}


def predicted_vs_measured(errors: dict[str, Any], path: Path) -> None:
    """One panel per source, log axes, the y = x line and the 20 % band."""
    sample = {k: np.array(v) for k, v in errors["sample"].items()}
    shown = [source for source in TITLES if source in errors["by_source"]]
    columns = 4 if len(shown) > 6 else 3
    size = (3.6 * columns, 3.7 * -(-len(shown) // columns))
    figure, axes = plt.subplots(-(-len(shown) // columns), columns, figsize=size, constrained_layout=True)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, source in zip(axes.flat, shown, strict=False):
        title = TITLES[source]
        rows = sample["source"] == source
        measured, predicted = sample["measured_s"][rows] * 1e6, sample["predicted_s"][rows] * 1e6
        ends = np.array([min(measured.min(), predicted.min()), max(measured.max(), predicted.max())])
        axis.fill_between(ends, ends * 0.8, ends * 1.2, color="0.88", label="within 20 %")
        axis.plot(ends, ends, color="0.3", linewidth=1, label="y = x")
        axis.scatter(measured, predicted, s=5, alpha=0.5, color="#1f6f8b", edgecolors="none")
        m = errors["by_source"][source]
        axis.set(xscale="log", yscale="log", xlabel="measured (µs)", ylabel="predicted (µs)")
        axis.set_title(f"{title}\nMAPE {m['mape']:.1%}, median {m['median_ape']:.1%}", fontsize=10)
    axes.flat[0].legend(loc="upper left", fontsize=8, frameon=False)
    figure.suptitle("Unseen shapes on known devices: a sample of the test part")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def error_by_device(errors: dict[str, Any], path: Path) -> None:
    """MAPE per device over all its test rows, beside XGBoost and the roofline."""
    devices: dict[str, list[dict[str, Any]]] = {}
    for group in errors["groups"]:
        devices.setdefault(group["device"], []).append(group)

    def mean(groups: list[dict[str, Any]], pick: Any) -> float:
        n = np.array([g["n"] for g in groups])
        return float((n * np.array([pick(g) for g in groups])).sum() / n.sum())

    table = sorted(
        (
            mean(g, lambda x: x["mape"]),
            mean(g, lambda x: x["baselines"]["xgboost"]["mape"]),
            mean(g, lambda x: x["baselines"]["roofline"]["mape"]),
            name,
        )
        for name, g in devices.items()
        if sum(x["n"] for x in g) >= 50
    )
    figure, axis = plt.subplots(figsize=(9, 0.28 * len(table) + 1.4), constrained_layout=True)
    y = np.arange(len(table))
    shown = (("cdmpp", "#1f6f8b"), ("XGBoost", "#e0a458"), ("roofline", "0.6"))
    for column, (label, color) in enumerate(shown):
        axis.scatter([100 * row[column] for row in table], y, label=label, color=color, s=28, zorder=3)
    axis.set_yticks(y, [row[3] for row in table])
    axis.set(xscale="log", xlabel="mean absolute percentage error on unseen shapes (%)")
    ticks = [2, 5, 10, 20, 50, 100]
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.grid(axis="x", color="0.9", zorder=0)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/base")
    parser.add_argument("--out", default="docs")
    options = parser.parse_args()
    errors = json.loads((Path(options.model) / "errors.json").read_text(encoding="utf-8"))
    Path(options.out).mkdir(exist_ok=True)
    predicted_vs_measured(errors, Path(options.out) / "predicted_vs_measured.png")
    error_by_device(errors, Path(options.out) / "error_by_device.png")
    print(f"{options.out}/predicted_vs_measured.png\n{options.out}/error_by_device.png")


if __name__ == "__main__":
    main()
