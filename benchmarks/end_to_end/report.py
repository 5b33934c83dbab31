"""Report of the study of whole networks from its result file: Markdown tables, sentences, figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.markdown import folded, percent, table

#: Names of the sources in tables and in the figure.
TITLES = {
    "neusight": "transformers, fp32 (NeuSight)",
    "torchvision": "image networks, batch 12 (torchvision)",
    "timm": "image networks, fp16 autocast, batch 24 to 2048 (timm)",
}
#: Share of a forward pass that the source's own kernels must have, for the pass to be one of kernels.
EXPLAINED = 0.75
#: Compositions in tables, and the one of a source in bold: that of README for the transformers.
COMPOSITIONS = ("called", "module", "queued")
HEADLINES = {"neusight": "called", "torchvision": "module", "timm": "module"}


def parts(result: Mapping[str, Any]) -> dict[str, str]:
    """Render the generated parts of docs/replay.md from the result file's content."""
    details = (
        folded("Every transformer", model_table(result)),
        folded("Forward and backward pass of the transformers", phase_table(result)),
        folded("Every device", device_table(result)),
        folded("Measurements that are not predicted", left_out_list(result)),
    )
    return {
        "end-to-end": summary_table(result),
        "end-to-end-training": findings(result),
        "end-to-end-details": "\n\n".join(details),
    }


def summary_table(result: Mapping[str, Any]) -> str:
    """Errors by source and mode; the composition that suits the source in bold."""
    rows = []
    for entry in result["by_source"]:
        kernels = entry.get("listed")
        rows.append(
            [
                f"{TITLES[entry['source']]}, {entry['mode']}",
                str(entry["n"]),
                *_compositions(entry),
                percent(entry[HEADLINES[entry["source"]]]["median_ape"]),
                percent(entry[HEADLINES[entry["source"]]]["within_10"], 0),
                percent(entry["roofline"]["mape"]),
                f"{percent(kernels['mape'])} ({kernels['n']})" if kernels else "-",
            ]
        )
    header = ("networks", "n", *COMPOSITIONS, "median", "within 10 %", "roofline", "measured kernels")
    return table(header, rows)


def _compositions(entry: Mapping[str, Any]) -> list[str]:
    """Mean errors of :data:`COMPOSITIONS`, the one that suits the source in bold."""
    texts = {name: percent(entry[name]["mape"]) for name in COMPOSITIONS}
    return [f"**{text}**" if name == HEADLINES[entry["source"]] else text for name, text in texts.items()]


def device_table(result: Mapping[str, Any]) -> str:
    """Errors by device."""
    rows = [
        [
            entry["source"],
            entry["device"],
            f"{entry['precision']} {entry['mode']}",
            str(entry["n"]),
            *_compositions(entry),
            percent(entry[HEADLINES[entry["source"]]]["median_ape"]),
            f"{100 * entry[HEADLINES[entry['source']]]['bias']:+.1f} %",
            percent(entry["roofline"]["mape"]),
        ]
        for entry in sorted(result["by_device"], key=lambda e: (e["source"], e["device"], e["precision"], e["mode"]))
    ]
    header = ("source", "device", "run", "n", *COMPOSITIONS, "median", "bias", "roofline")
    return table(header, rows, left=3)


def phase_table(result: Mapping[str, Any]) -> str:
    """Errors of the two passes of each training run."""
    rows = []
    for row in sorted(_training(result), key=lambda r: (r["device"], r["model"], r["batch"])):
        texts = [
            "-" if row["phases"][name] is None else f"{100 * row['phases'][name][place]:+.0f} %"
            for place in (0, 1)
            for name in ("called", "module", "listed")
        ]
        rows.append([row["device"], row["model"], str(row["batch"]), *texts])
    ways = ("called", "module", "measured kernels")
    header = ("device", "model", "batch", *(f"{phase}: {way}" for phase in ("forward", "backward") for way in ways))
    return table(header, rows, left=2)


def _training(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if "phases" in row]


def explained(row: Mapping[str, Any]) -> bool:
    """Whether the source's own kernels add up to at least :data:`EXPLAINED` of a training run's forward pass."""
    listed = row["phases"]["listed"]
    return listed is None or bool(1 + listed[0] >= EXPLAINED)


def findings(result: Mapping[str, Any]) -> str:
    """What the rows of the transformers say of the training passes, in sentences."""
    runs = _training(result)
    kept = [row for row in runs if explained(row)]

    def mean(rows: Sequence[Mapping[str, Any]], key: str) -> str:
        return percent(statistics.fmean(abs(row[key] / row["measured_ms"] - 1) for row in rows))

    backward = [statistics.fmean(abs(row["phases"][name][1]) for row in runs) for name in ("called", "module")]
    return (
        f"In {len(runs) - len(kept)} of the {len(runs)} training runs the source's own kernels add up to less than "
        f"{100 * EXPLAINED:.0f} % of the measured forward pass, and so do ours. What else these passes contain is not "
        "published; the source empties the allocator's cache before each iteration, so that they allocate memory anew. "
        f"The other {len(kept)} runs have an error of {mean(kept, 'called_ms')} as called and "
        f"**{mean(kept, 'module_ms')}** as a module. The backward passes of all runs have an error of "
        f"{percent(backward[0])} as called and {percent(backward[1])} as a module."
    )


def model_table(result: Mapping[str, Any]) -> str:
    """Every transformer."""
    runs = [row for row in result["rows"] if row["source"] == "neusight"]
    rows = []
    for row in sorted(runs, key=lambda r: (r["model"], r["mode"], r["device"], r["batch"])):
        rows.append(
            [
                row["model"],
                row["device"],
                f"{row['mode']}, batch {row['batch']}",
                f"{row['measured_ms']:,.1f}",
                f"{row['called_ms']:,.1f}",
                f"**{_error(row, 'called_ms')}**",
                _error(row, "roofline_ms"),
                _error(row, "listed_ms") if "listed_ms" in row else "-",
            ]
        )
    header = ("model", "device", "run", "measured, ms", "predicted, ms", "error", "roofline", "measured kernels")
    return table(header, rows, left=3)


def _error(row: Mapping[str, Any], key: str) -> str:
    return f"{100 * (row[key] / row['measured_ms'] - 1):+.1f} %"


def left_out_list(result: Mapping[str, Any]) -> str:
    """Measurements that are not predicted, and the reasons."""
    entries = sorted(result["left_out"], key=lambda entry: (entry["source"], -entry["rows"]))
    return "\n".join(f"- {entry['source']}: {entry['rows']:,} rows: {entry['reason']}" for entry in entries)


# --- figure -----------------------------------------------------------------------------------------------


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Predicted against measured latency of whole networks, one panel per source."""
    from matplotlib.figure import Figure

    sources = [source for source in TITLES if any(row["source"] == source for row in rows)]
    figure = Figure(figsize=(5.2 * len(sources), 5.2), constrained_layout=True)
    for index, source in enumerate(sources):
        axis = figure.add_subplot(1, len(sources), index + 1)
        own = [row for row in rows if row["source"] == source]
        predicted_as = f"{HEADLINES[source]}_ms"
        values = [row[key] for row in own for key in ("measured_ms", predicted_as)]
        ends = [min(values) / 1.2, max(values) * 1.2]
        axis.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="0.9", label="within 20 %")
        axis.plot(ends, ends, color="0.3", linewidth=1, label="predicted = measured")
        measured, roofline = ([row[key] for row in own] for key in ("measured_ms", "roofline_ms"))
        axis.scatter(measured, roofline, s=10, color="0.65", marker="v", label="roofline")
        for device in sorted({row["device"] for row in own}):
            runs = [row for row in own if row["device"] == device]
            measured, predicted = ([row[key] for row in runs] for key in ("measured_ms", predicted_as))
            axis.scatter(measured, predicted, s=14, label=device, alpha=0.8)
        axis.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)")
        axis.set_title(TITLES[source].replace(", ", "\n", 1), fontsize=11)
        axis.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=110)
