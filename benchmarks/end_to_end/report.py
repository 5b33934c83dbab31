"""What the study found: a result file, tables of Markdown, a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.labels import Labels
from benchmarks.end_to_end.parallel import LINK_WORDS, Parallel
from benchmarks.end_to_end.study import Answer
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import rounded

#: What a source's rows are called in tables.
TITLES = {
    "neusight": "transformers, fp32 (NeuSight)",
    "torchvision": "image networks, batch 12 (torchvision)",
    "timm": "image networks, fp16 autocast, batch 24 to 2048 (timm)",
}
#: Compositions that are shown beside each other, by name -> what it is an attribute of.
ERRORS: Mapping[str, Callable[[Answer], float]] = {
    "called": lambda a: a.error("called"),
    "queued": lambda a: a.error("queued"),
    "issued": lambda a: a.error("issued"),
    "roofline": lambda a: a.error("roofline"),
}


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Errors over some answers: of each composition the mean, the median and the sign of the error."""
    found: dict[str, Any] = {"n": len(answers)}
    for name, error in ERRORS.items():
        errors = [error(a) for a in answers]
        absolute = [abs(e) for e in errors]
        found[name] = {
            "mape": statistics.fmean(absolute),
            "median_ape": statistics.median(absolute),
            "within_10": sum(e <= 0.1 for e in absolute) / len(absolute),
            "within_20": sum(e <= 0.2 for e in absolute) / len(absolute),
            "worst": max(errors, key=abs),
            "bias": statistics.median(errors),
        }
    listed = [abs(a.error("listed")) for a in answers if a.listed_s is not None]
    if listed:
        found["listed"] = {"n": len(listed), "mape": statistics.fmean(listed)}
    return found


def result(
    answers: Sequence[Answer], parallel: Sequence[Parallel], labels: Labels, model_id: str, command: str
) -> dict[str, Any]:
    """The result file's content."""
    groups = sorted({(a.label.source, a.label.mode, a.label.precision, a.label.device) for a in answers})
    everything: dict[str, Any] = {
        "model_id": model_id,
        "command": command,
        "n": len(answers),
        "left_out": [
            {"source": source, "reason": reason, "rows": n} for (source, reason), n in sorted(labels.left_out.items())
        ],
        "by_source": [
            {"source": source, "mode": mode, **rounded(figures(_some(answers, source=source, mode=mode)))}
            for source, mode in sorted({(a.label.source, a.label.mode) for a in answers})
        ],
        "by_device": [
            {
                "source": source,
                "mode": mode,
                "precision": precision,
                "device": device,
                **rounded(figures(_some(answers, source=source, mode=mode, precision=precision, device=device))),
            }
            for source, mode, precision, device in groups
        ],
        "four_gpus": [
            {
                "model": p.model,
                "device": p.device,
                "variant": p.variant,
                "batch": p.batch,
                "link": LINK_WORDS,
                "measured_ms": _ms(p.measured_s),
                "replayed_ms": _ms(p.replayed_s),
                "compute_ms": _ms(p.compute_s),
                "error": round(p.error, 4),
            }
            for p in parallel
        ],
        "rows": [_row(a) for a in answers],
    }
    return everything


def _some(answers: Iterable[Answer], **wanted: str) -> list[Answer]:
    return [a for a in answers if all(getattr(a.label, key) == value for key, value in wanted.items())]


def _row(a: Answer) -> dict[str, Any]:
    label = a.label
    row = {
        "source": label.source,
        "model": label.model,
        "device": label.device,
        "mode": label.mode,
        "precision": label.precision,
        "batch": label.batch,
        "size": label.size,
        "measured_ms": _ms(label.measured_s),
        "called_ms": _ms(a.called_s),
        "queued_ms": _ms(a.queued_s),
        "issued_ms": _ms(a.issued_s),
        "roofline_ms": _ms(a.roofline_s),
        "kernels": a.kernels,
        "in_share": round(a.in_share, 3),
        "largest": [[text, round(share, 3)] for text, share in a.largest],
    }
    if a.listed_s is not None:
        row["listed_ms"] = _ms(a.listed_s)
    if label.parts_s is not None:
        row["measured_parts_ms"] = [_ms(s) for s in label.parts_s]
        row["called_parts_ms"] = [_ms(s) for s in a.parts_s]
    return row


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.5g}")


# --- tables -----------------------------------------------------------------------------------------------


def summary_table(answers: Sequence[Answer]) -> str:
    """Errors by source and mode."""
    rows = []
    for source, mode in sorted({(a.label.source, a.label.mode) for a in answers}):
        found = figures(_some(answers, source=source, mode=mode))
        listed = found.get("listed")
        rows.append(
            [
                f"{TITLES[source]}, {mode}",
                str(found["n"]),
                f"**{percent(found['called']['mape'])}**",
                percent(found["called"]["median_ape"]),
                percent(found["called"]["within_10"], 0),
                percent(found["queued"]["mape"]),
                percent(found["issued"]["mape"]),
                percent(found["roofline"]["mape"]),
                f"{percent(listed['mape'])} ({listed['n']})" if listed else "-",
            ]
        )
    header = ("labels", "n", "MAPE", "median", "within 10 %", "queued", "issued", "roofline", "their kernels")
    return table(header, rows)


def device_table(answers: Sequence[Answer]) -> str:
    """Errors by device."""
    keys = sorted({(a.label.source, a.label.device, a.label.precision, a.label.mode) for a in answers})
    rows = []
    for source, device, precision, mode in keys:
        found = figures(_some(answers, source=source, device=device, precision=precision, mode=mode))
        rows.append(
            [
                source,
                device,
                f"{precision} {mode}",
                str(found["n"]),
                f"**{percent(found['called']['mape'])}**",
                f"{100 * found['called']['bias']:+.1f} %",
                percent(found["queued"]["mape"]),
                percent(found["issued"]["mape"]),
                percent(found["roofline"]["mape"]),
            ]
        )
    header = ("source", "device", "run", "n", "MAPE", "median error", "queued", "issued", "roofline")
    return table(header, rows, left=3)


def model_table(answers: Sequence[Answer]) -> str:
    """Every label of the transformers."""
    rows = []
    for a in sorted(
        _some(answers, source="neusight"), key=lambda a: (a.label.model, a.label.mode, a.label.device, a.label.batch)
    ):
        label = a.label
        rows.append(
            [
                label.model,
                label.device,
                f"{label.mode}, batch {label.batch}",
                f"{1e3 * label.measured_s:,.1f}",
                f"{1e3 * a.called_s:,.1f}",
                f"**{100 * a.error('called'):+.1f} %**",
                f"{100 * a.error('roofline'):+.1f} %",
                "-" if a.listed_s is None else f"{100 * a.error('listed'):+.1f} %",
            ]
        )
    header = ("model", "device", "run", "measured, ms", "predicted, ms", "error", "roofline", "their kernels")
    return table(header, rows, left=3)


def parallel_table(parallel: Sequence[Parallel]) -> str:
    """Iterations on four GPUs."""
    ways = {"dp4": "data parallel", "pp4_1": "pipeline, one micro-batch"}
    rows = [
        [
            f"{p.model} on 4 x {p.device}",
            f"{ways[p.variant]}, batch {p.batch}",
            f"{1e3 * p.measured_s:,.1f}",
            f"{1e3 * p.replayed_s:,.1f}",
            f"{1e3 * (p.replayed_s - p.compute_s):,.1f}",
            f"**{100 * p.error:+.1f} %**",
        ]
        for p in parallel
    ]
    header = ("training", "how", "measured, ms", "replayed, ms", "of it exposed communication", "error")
    return table(header, rows, left=2)


def left_out_list(labels: Labels) -> str:
    """What is not predicted, and why."""
    return "\n".join(
        f"- {source}: {n:,} rows: {reason}"
        for (source, reason), n in sorted(labels.left_out.items(), key=lambda item: (item[0][0], -item[1]))
    )


# --- picture ----------------------------------------------------------------------------------------------


def draw(answers: Sequence[Answer], path: Path) -> None:
    """Predicted against measured, one panel for each source."""
    from matplotlib.figure import Figure

    sources = [source for source in TITLES if any(a.label.source == source for a in answers)]
    figure = Figure(figsize=(5.2 * len(sources), 5), constrained_layout=True)
    for index, source in enumerate(sources):
        axis = figure.add_subplot(1, len(sources), index + 1)
        own = _some(answers, source=source)
        every = [1e3 * s for a in own for s in (a.label.measured_s, a.called_s)]
        ends = [min(every) / 1.2, max(every) * 1.2]
        axis.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="0.9", label="within 20 %")
        axis.plot(ends, ends, color="0.3", linewidth=1, label="y = x")
        axis.scatter(
            [1e3 * a.label.measured_s for a in own],
            [1e3 * a.roofline_s for a in own],
            s=10,
            color="0.65",
            marker="v",
            label="roofline",
        )
        for device in sorted({a.label.device for a in own}):
            at = _some(own, device=device)
            axis.scatter(
                [1e3 * a.label.measured_s for a in at], [1e3 * a.called_s for a in at], s=14, label=device, alpha=0.8
            )
        axis.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms", title=TITLES[source])
        axis.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=110)
