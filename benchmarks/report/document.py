"""Generated parts of docs/accuracy.md, docs/model_card.md, docs/tuning.md and README.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.report import card, collectives, goals, known, schedules, unseen
from benchmarks.report.markdown import fill
from benchmarks.report.results import Results

Part = Callable[[Results], str]

#: Document -> its generated parts.
DOCUMENTS: dict[str, Mapping[str, Part]] = {
    "docs/accuracy.md": {
        "goals": goals.goals,
        "headlines": goals.headlines,
        "shapes": known.overview,
        "shapes-details": known.details,
        "collectives": collectives.sizes,
        "devices-summary": unseen.summary,
        "devices": unseen.zero_shot,
        "collectives-left-out": collectives.left_out,
        "samplers": unseen.samplers,
        "trust": unseen.trust,
        "schedules": schedules.schedules,
        "schedules-gpu": schedules.gpu,
        "schedules-study": schedules.study,
        "schedules-device": schedules.new_device,
        "original": schedules.original,
    },
    "docs/model_card.md": {
        "model": card.model,
        "sources": card.sources,
        "devices": card.devices,
        "operators": card.operators,
        "failures": card.failures,
    },
    "docs/tuning.md": {"search": schedules.search},
    "README.md": {"training": known.training, "known": known.readme_rows},
}


def rendered(root: Path, results: Results) -> dict[Path, str]:
    """Render every document from its own text and the results.

    Raises DataError: a document's marked parts differ from the generated ones.
    """
    out = {}
    for name, parts in DOCUMENTS.items():
        path = root / name
        text = path.read_text(encoding="utf-8")
        out[path] = fill(text, {part: make(results) for part, make in parts.items()})
    return out
