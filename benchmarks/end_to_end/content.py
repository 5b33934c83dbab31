"""Content of the result file of the study of whole networks: error statistics and every row."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.end_to_end.labels import Labels
from benchmarks.end_to_end.study import Answer
from benchmarks.report.results import rounded

#: Ways to compose kernel times, by name -> relative error of an answer.
ERRORS: Mapping[str, Callable[[Answer], float]] = {
    "called": lambda a: a.error("called"),
    "queued": lambda a: a.error("queued"),
    "module": lambda a: a.error("module"),
    "roofline": lambda a: a.error("roofline"),
}


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Error statistics of each composition over ``answers``."""
    statistics_of: dict[str, Any] = {"n": len(answers)}
    for name, error in ERRORS.items():
        errors = [error(a) for a in answers]
        absolute = [abs(e) for e in errors]
        statistics_of[name] = {
            "mape": statistics.fmean(absolute),
            "median_ape": statistics.median(absolute),
            "within_10": sum(e <= 0.1 for e in absolute) / len(absolute),
            "within_20": sum(e <= 0.2 for e in absolute) / len(absolute),
            "worst": max(errors, key=abs),
            "bias": statistics.median(errors),
        }
    listed = [abs(a.error("listed")) for a in answers if a.listed_s is not None]
    if listed:
        statistics_of["listed"] = {"n": len(listed), "mape": statistics.fmean(listed)}
    return statistics_of


def result(answers: Sequence[Answer], labels: Labels, model_id: str, command: str) -> dict[str, Any]:
    """Content of the result file."""
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
        "rows": [_row(a) for a in answers],
    }
    return everything


def _phases(a: Answer) -> dict[str, Any]:
    """Relative errors of the two passes of a training run, forward and backward."""
    ways = {"called": a.parts_s, "module": a.module_parts_s, "listed": a.listed_parts_s}
    measured = a.label.parts_s or (1.0, 1.0)
    return {
        name: [s / m - 1 for s, m in zip(seconds, measured, strict=True)] if seconds is not None else None
        for name, seconds in ways.items()
    }


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
        "module_ms": _ms(a.module_s),
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
        row["phases"] = rounded(_phases(a))
    return row


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.5g}")
