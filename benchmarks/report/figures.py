"""Figures of docs/accuracy.md from the result files. A study that was not run has no figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.figures import OURS, error_by_device, predicted_vs_measured
from benchmarks.report.known import title
from benchmarks.report.results import Results
from benchmarks.report.unseen import HEADLINES, KS, adapted_figures, figure_of, tables_of

#: One colour per method or sampler, the same in every figure.
TREES, ROOF = "#e0a458", "0.6"
SAMPLERS = {"kmeans": OURS, "variance": "#7a4fa3", "random": "0.55"}
_SAMPLER_NAMES = {
    "kmeans": "chosen by k-means",
    "variance": "chosen by variance reduction",
    "random": "chosen at random",
}
#: Promised shares of the intervals that are shown, in per cent.
INTERVALS = {50: "#8cb369", 80: OURS, 90: "#a23b72"}
_DPI = 110
#: Ticks in per cent: over several decades, and within one.
_TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_FINE_TICKS = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50)


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw every figure whose results exist, and return the paths."""
    errors, shapes, devices = (results.get(name) for name in ("model", "shapes", "devices"))
    made: list[Path] = []

    def save(name: str, make: Callable[[Path], None]) -> None:
        make(folder / name)
        made.append(folder / name)

    if errors is not None:
        save("predicted_vs_measured.png", lambda path: predicted_vs_measured(errors, path))
        save("error_by_device.png", lambda path: error_by_device(errors, path))
        save("error_by_operator.png", lambda path: error_by_operator(errors, path))
    if devices is not None:
        save("error_by_k.png", lambda path: error_by_k(devices, path))
    if shapes is not None or devices is not None:
        save("interval_coverage.png", lambda path: interval_coverage(shapes, devices, path))
    return made


def error_by_operator(errors: Mapping[str, Any], path: Path) -> None:
    """MAPE by source and operator over all test rows of known devices, with the baselines."""
    names = ("model", "xgboost", "roofline")
    sums: dict[tuple[str, str], list[float]] = {}
    for group in errors["groups"]:
        row = sums.setdefault((group["source"], group["op"]), [0.0] * (len(names) + 1))
        row[0] += group["n"]
        values = [group["mape"], *(group["baselines"].get(b, {}).get("mape", np.nan) for b in names[1:])]
        for i, value in enumerate(values):
            row[i + 1] += group["n"] * value
    table = {key: [v / row[0] for v in row[1:]] for key, row in sums.items() if row[0] >= 30}
    keys = sorted(table, key=lambda key: (key[0], table[key][0]))
    sources = sorted({source for source, _ in keys})
    blocks = [(title(source), [operator for of, operator in keys if of == source]) for source in sources]
    figure, axis, y = _named_rows(blocks, gap=1.6, width=9, line=0.21, rest=1.2)
    columns = np.array([table[key] for key in keys])
    for i, (label, color) in enumerate((("cdmpp", OURS), ("XGBoost", TREES), ("roofline", ROOF))):
        axis.scatter(100 * columns[:, i], y, color=color, s=26, label=label, zorder=4 - i)
    _error_axis(axis, "x", _TICKS)
    axis.set_xlabel("mean absolute percentage error on held-out shapes of known devices (%)")
    figure.legend(frameon=False, loc="outside upper center", ncols=3, fontsize=9)
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def error_by_k(devices: Mapping[str, Any], path: Path) -> None:
    """Error on each left-out device by number of measurements, one line per sampler."""
    panels = [(source, entry) for source in HEADLINES for _, entry in tables_of(devices, source)]
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(3.0 * columns, 2.35 * rows + 0.7),
        sharex=True,
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    for axis, (source, entry) in zip(axes.flat, panels, strict=False):
        zero = figure_of(source, entry["specification"])
        ceilings = figure_of(source, entry["ceilings"])
        assert zero is not None
        for sampler, color in SAMPLERS.items():
            by_k = {k: adapted_figures(source, entry, k, sampler) for k in KS}
            by_k = {k: values for k, values in by_k.items() if values}
            if not by_k:
                continue
            x = [0, *(KS.index(k) + 1 for k in by_k)]
            axis.plot(
                x,
                [100 * zero, *(100 * mean(v) for v in by_k.values())],
                color=color,
                linewidth=1.6,
                label=f"measurements chosen {_SAMPLER_NAMES[sampler]}",
                zorder=4 if sampler == "kmeans" else 3,
            )
            for place, values in zip(x[1:], by_k.values(), strict=True):
                axis.scatter([place] * len(values), [100 * v for v in values], color=color, s=9, zorder=5)
        axis.scatter([0], [100 * zero], color="0.15", s=22, zorder=6, label="data sheet only")
        if ceilings is not None:
            axis.scatter(
                [0],
                [100 * ceilings],
                marker="D",
                facecolor="white",
                edgecolor="0.15",
                s=22,
                zorder=6,
                label="data sheet and measured peak rates",
            )
        axis.set_title(f"{HEADLINES[source]} on {entry['device']}", fontsize=9)
        axis.set_xticks(range(len(KS) + 1), ["0", *map(str, KS)])
        _error_axis(axis, "y", _FINE_TICKS)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.supxlabel("number of measurements of the device", fontsize=9)
    figure.supylabel("error on the remaining measurements (%)", fontsize=9)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= {str(label): h for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def interval_coverage(shapes: Mapping[str, Any] | None, devices: Mapping[str, Any] | None, path: Path) -> None:
    """Share of measurements inside the 50, 80 and 90 % intervals, one named line per source or device."""
    blocks: list[tuple[str, list[tuple[str, Sequence[float], Sequence[float]]]]] = []
    if shapes is not None:
        nominal = shapes["coverage"]["nominal"]
        curves = [(title(source), nominal, shares) for source, shares in shapes["coverage"]["sources"].items()]
        blocks.append(("known devices, held-out shapes", curves))
    for source in sorted({entry["source"] for group in _groups(devices) for entry in group["tables"]}):
        assert devices is not None
        curves = [
            (entry["device"], entry["coverage_curve"]["nominal"], entry["coverage_curve"]["empirical"])
            for _, entry in tables_of(devices, source)
        ]
        if curves:
            blocks.append((f"devices left out of training, {title(source)}", curves))
    named = [(head, [name for name, _, _ in curves]) for head, curves in blocks]
    figure, axis, y = _named_rows(named, gap=1.8, width=9.5, line=0.23, rest=1.3)
    for promised, color in INTERVALS.items():
        shares = [
            dict(zip((round(100 * n) for n in nominal), empirical, strict=True)).get(promised, np.nan)
            for _, curves in blocks
            for _, nominal, empirical in curves
        ]
        axis.axvline(promised, color=color, linewidth=1.2, linestyle="--", zorder=1)
        axis.scatter(100 * np.array(shares), y, color=color, s=26, zorder=3, label=f"{promised} % interval")
    axis.set_xlim(35, 100)
    axis.set_xlabel("measurements inside the interval (%); dashed: the promised share")
    axis.grid(color="0.93", zorder=0)
    figure.legend(frameon=False, loc="outside upper center", ncols=3, fontsize=9)
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def _named_rows(
    blocks: Sequence[tuple[str, Sequence[str]]], gap: float, width: float, line: float, rest: float
) -> tuple[Figure, Axes, list[float]]:
    """A figure with a line for each name, under the title of its block, and the places of the lines from the top.

    ``gap``: between a block and the next title. ``line``, ``rest``: height of a line, and of all else, in inches.
    """
    at, y = 0.0, list[float]()
    heads: list[tuple[str, float]] = []
    for head, names in blocks:
        heads.append((head, at))
        y += [at + i for i in range(1, len(names) + 1)]
        at += len(names) + gap
    figure, axis = plt.subplots(figsize=(width, line * at + rest), constrained_layout=True)
    axis.set_yticks(y, [name for _, names in blocks for name in names], fontsize=8)
    for head, place in heads:
        axis.text(0.008, place, head, transform=axis.get_yaxis_transform(), fontsize=8.5, weight="bold", va="center")
    axis.set_ylim(at - 1.2, -0.8)
    return figure, axis, y


def _groups(devices: Mapping[str, Any] | None) -> list[Any]:
    return list((devices or {"groups": {}})["groups"].values())


def _error_axis(axis: Axes, which: Literal["x", "y"], ticks: Sequence[float]) -> None:
    """Logarithmic axis in per cent with plain numbers as ticks."""
    shown = axis.xaxis if which == "x" else axis.yaxis
    (axis.set_xscale if which == "x" else axis.set_yscale)("log")
    shown.set_major_locator(FixedLocator(ticks))
    shown.set_minor_locator(NullLocator())
    shown.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.grid(axis=which, color="0.92", zorder=0)
