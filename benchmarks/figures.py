"""Figures from the error table of the shipped model, and the picture of the README (``make figures``).

- ``docs/overview.png``: predicted latency of one operator by batch size on five GPUs, and predicted against
  measured latency of held-out shapes.
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
from matplotlib.axes import Axes

from benchmarks.report.known import title

#: Sources in the order of their panels.
SOURCES = (
    "neusight",
    "aiconfigurator_gemm",
    "aiconfigurator_attention",
    "vidur",
    "miopen",
    "deepbench",
    "cdmpp_collect",
    "aiconfigurator_gemm_quantised",
    "aiconfigurator_moe",
    "aiconfigurator_mla",
    "pipeweave_moe",
    "pipeweave_gemm_fp8",
    "tensile_gemm",
    "aiter_gemm",
    "aiter_moe",
    "llmservingsim_layers",
    "llmservingsim_attention",
    "frontier",
    "infersim",
)
OURS = "#1f6f8b"
#: GPUs of the overview, fastest last, and their colours.
DEVICES = {
    "t4": "#f4a259",
    "v100-pcie-32gb": "#8cb369",
    "a100-pcie-40gb": "#2e86ab",
    "h100-sxm": "#5b5f97",
    "b200": "#a23b72",
}
#: A linear layer of a 7-billion-parameter transformer; the batch is its first dimension.
OPERATOR = "linear:m={batch},n=11008,k=4096,dtype=float16"
BATCHES = tuple(2**i for i in range(14))


def overview(errors: dict[str, Any], path: Path) -> None:
    """Picture of the README: what is predicted, and how close it is."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 5.4), width_ratios=(1.25, 1), constrained_layout={"w_pad": 0.12}
    )
    _latency_by_batch(left)
    _cloud(errors, right)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="0.93")
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _latency_by_batch(axis: Axes) -> None:
    from cdmpp import LatencyPredictor

    predictor = LatencyPredictor.load()
    programs = [OPERATOR.format(batch=batch) for batch in BATCHES]
    for device, color in DEVICES.items():
        predictions = predictor.predict(programs, device)
        latency, low, high = (
            1e6 * np.array([getattr(p, name) for p in predictions]) for name in ("latency_s", "lower_s", "upper_s")
        )
        axis.fill_between(BATCHES, low, high, color=color, alpha=0.18, linewidth=0)
        axis.plot(BATCHES, latency, color=color, linewidth=2.2)
        axis.annotate(
            device.partition("-")[0].upper(),
            (BATCHES[-1], latency[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            color=color,
            weight="bold",
            va="center",
        )
    axis.set(xscale="log", yscale="log", xlim=(BATCHES[0], BATCHES[-1] * 1.1), ylim=(1e1, 3e4))
    axis.set_xticks(BATCHES[::3], [f"{batch:,}" for batch in BATCHES[::3]])
    axis.set_yticks([10, 100, 1000, 10_000], ["10 µs", "100 µs", "1 ms", "10 ms"])
    axis.minorticks_off()
    axis.set_xlabel("tokens in the batch")
    axis.set_title("Predicted latency of a linear layer of a 7B transformer\n(lines; bands are 80 % intervals)")


def _sources(errors: dict[str, Any]) -> list[str]:
    """Sources of the sample, in the order of :data:`SOURCES`."""
    present = set(errors["sample"]["source"])
    return [source for source in SOURCES if source in present]


def _cloud(errors: dict[str, Any], axis: Axes) -> None:
    sample = {key: np.array(values) for key, values in errors["sample"].items()}
    shown = _sources(errors)
    colors = plt.get_cmap("tab10" if len(shown) <= 10 else "tab20").colors
    for source, color in zip(shown, colors, strict=False):
        rows = sample["source"] == source
        measured, predicted = 1e6 * sample["measured_s"][rows], 1e6 * sample["predicted_s"][rows]
        name = title(source).partition(" (")[0]
        axis.scatter(measured, predicted, s=9, alpha=0.45, color=color, edgecolors="none", label=name)
    ends = np.array([0.05, 5e6])
    axis.plot(ends, ends, color="0.2", linewidth=1, zorder=1)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured latency", ylabel="predicted latency")
    ticks, labels = [1, 1e3, 1e6], ["1 µs", "1 ms", "1 s"]
    axis.set_xticks(ticks, labels)
    axis.set_yticks(ticks, labels)
    axis.minorticks_off()
    size, space = (8, 0.3) if len(shown) <= 10 else (6, 0.15)
    axis.legend(frameon=False, fontsize=size, loc="upper left", markerscale=2, labelspacing=space)
    n = len(sample["source"])
    axis.set_title(f"Predicted against measured, {n:,} measurements\nof shapes that were held out of training")


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
    """Draw the three figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="models/base", help="model folder (default: models/base)")
    parser.add_argument("--out", default="docs", help="folder of the figures (default: docs)")
    options = parser.parse_args()
    errors = json.loads((Path(options.model) / "errors.json").read_text(encoding="utf-8"))
    folder = Path(options.out)
    folder.mkdir(exist_ok=True)
    for draw in (overview, predicted_vs_measured, error_by_device):
        path = folder / f"{draw.__name__}.png"
        draw(errors, path)
        print(path)


if __name__ == "__main__":
    main()
