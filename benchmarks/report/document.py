"""The generated parts of docs/accuracy.md and README.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.report import goals, known, studies, unseen
from benchmarks.report.markdown import fill
from benchmarks.report.results import Results

Part = Callable[[Results], str]

#: File -> its marked parts.
DOCUMENTS: dict[str, Mapping[str, Part]] = {
    "docs/accuracy.md": {
        "goals": goals.goals,
        "headlines": goals.headlines,
        "shapes": known.overview,
        "shapes-details": known.details,
        "devices": unseen.zero_shot,
        "samplers": unseen.samplers,
        "trust": unseen.trust,
        "schedules": studies.schedules,
        "reference": studies.reference,
        "ablations": studies.ablations,
    },
    "README.md": {"known": known.readme_rows, "unseen": unseen.readme_rows},
}


def rendered(root: Path, results: Results) -> dict[Path, str]:
    """Every document as it should be, from its own text and the results.

    Raises
    ------
    DataError
        A document's marked parts are not those that are generated.
    """
    out = {}
    for name, parts in DOCUMENTS.items():
        path = root / name
        text = path.read_text(encoding="utf-8")
        out[path] = fill(text, {part: make(results) for part, make in parts.items()})
    return out
