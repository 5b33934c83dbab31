"""Figures from the error table of the shipped model, and the picture of the README (``make figures``).

- ``docs/overview.png``: :mod:`benchmarks.overview`.
- ``docs/architecture.svg``: :mod:`benchmarks.architecture`.
- ``docs/predicted_vs_measured.png``: a sample of held-out rows, one panel per source.
- ``docs/error_by_device.png``: MAPE by device on held-out shapes.
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

from benchmarks.architecture import picture
from benchmarks.overview import overview
from benchmarks.report.known import title

#: Sources in the order of their panels.
SOURCES = (
    *("neusight", "aiconfigurator_gemm", "aiconfigurator_attention", "vidur", "miopen", "deepbench", "cdmpp_collect"),
    *("ansor", "metaschedule", "aiconfigurator_gemm_quantised", "aiconfigurator_moe", "aiconfigurator_mla"),
    *("pipeweave_moe", "pipeweave_gemm_fp8", "tensile_gemm", "aiter_gemm", "aiter_moe", "llmservingsim_layers"),
    *("llmservingsim_attention", "frontier", "infersim", "liger", "cudnn_attention", "cudnn_norms"),
)
OURS = "#1f6f8b"


def _sources(errors: dict[str, Any]) -> list[str]:
    """Sources of the sample, in the order of :data:`SOURCES`."""
    present = set(errors["sample"]["source"])
    return [source for source in SOURCES if source in present]


def predicted_vs_measured(errors: dict[str, Any], path: Path) -> None:
    """Predicted against measured latency, one panel per source, with y = x and the 20 % band."""
    sample = {k: np.array(v) for k, v in errors["sample"].items()}
    shown = _sources(errors)
    columns = 3 if len(shown) <= 6 else 4 if len(shown) <= 12 else 5
    size = (3.6 * columns, 3.7 * -(-len(shown) // columns))
    figure, axes = plt.subplots(-(-len(shown) // columns), columns, figsize=size, constrained_layout=True)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, source in zip(axes.flat, shown, strict=False):
        rows = sample["source"] == source
        measured, predicted = sample["measured_s"][rows] * 1e6, sample["predicted_s"][rows] * 1e6
        ends = np.array([min(measured.min(), predicted.min()), max(measured.max(), predicted.max())])
        axis.fill_between(ends, ends * 0.8, ends * 1.2, color="0.88", label="within 20 %")
        axis.plot(ends, ends, color="0.3", linewidth=1, label="predicted = measured")
        axis.scatter(measured, predicted, s=5, alpha=0.5, color=OURS, edgecolors="none")
        m = errors["by_source"][source]
        axis.set(xscale="log", yscale="log", xlabel="measured (µs)", ylabel="predicted (µs)")
        name = title(source).replace(" (", "\n(")
        axis.set_title(f"{name}\nMAPE {100 * m['mape']:.1f} %, median {100 * m['median_ape']:.1f} %", fontsize=10)
    axes.flat[0].legend(loc="upper left", fontsize=8, frameon=False)
    figure.suptitle("Held-out shapes on known devices: at most 700 rows per source")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def error_by_device(errors: dict[str, Any], path: Path) -> None:
    """MAPE per device over all its test rows, with XGBoost and the roofline."""
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
    shown = (("cdmpp", OURS), ("XGBoost", "#e0a458"), ("roofline", "0.6"))
    for column, (label, color) in enumerate(shown):
        axis.scatter([100 * row[column] for row in table], y, label=label, color=color, s=28, zorder=3)
    axis.set_yticks(y, [row[3] for row in table])
    axis.set(xscale="log", xlabel="mean absolute percentage error on held-out shapes (%)")
    ticks = [2, 5, 10, 20, 50, 100]
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.grid(axis="x", color="0.9", zorder=0)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="models/base", help="model folder (default: models/base)")
    parser.add_argument("--out", default="docs", help="folder of the figures (default: docs)")
    options = parser.parse_args()
    errors = json.loads((Path(options.model) / "errors.json").read_text(encoding="utf-8"))
    folder = Path(options.out)
    folder.mkdir(exist_ok=True)
    overview(folder / "overview.png")
    print(folder / "overview.png")
    (folder / "architecture.svg").write_text(picture(), encoding="utf-8")
    print(folder / "architecture.svg")
    for draw in (predicted_vs_measured, error_by_device):
        path = folder / f"{draw.__name__}.png"
        draw(errors, path)
        print(path)


if __name__ == "__main__":
    main()
