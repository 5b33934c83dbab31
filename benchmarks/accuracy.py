"""docs/accuracy.md, the README's accuracy tables and their figures (``make accuracy``).

``python -m benchmarks.accuracy [--public-data DIR] [--check]``: renders what the result files of the studies
say. With ``--public-data`` the studies that were not measured are run first, in their order; each goes on
where it was stopped. ``--check`` writes nothing and fails where a document differs from its results.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.report import card, collectives, goals, known, schedules, unseen
from benchmarks.report.figures import draw
from benchmarks.report.markdown import fill
from benchmarks.report.results import STUDIES, Results
from cdmpp.errors import CdmppError
from cdmpp.utils.writing import write_text

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


ROOT = Path(__file__).resolve().parent.parent


def command_of(name: str, public_data: str) -> list[str]:
    """A study's command for this interpreter."""
    words = [public_data if word == "DIR" else word for word in shlex.split(STUDIES[name].command)]
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    return [sys.executable, "-m", "cdmpp.cli.main", *words[1:]]


def run_missing(public_data: str) -> None:
    """Run every study that was not measured.

    Raises SystemExit: one failed; what it had done is kept by the study itself.
    """
    for name in Results.load(ROOT).missing():
        print(f"{name}: {STUDIES[name].command}", flush=True)
        status = subprocess.run(command_of(name, public_data), cwd=ROOT, check=False).returncode
        if status:
            raise SystemExit(f"the study {name} ended with {status}; the same command goes on")


def main() -> None:
    """Run missing studies if requested, then render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--public-data", metavar="DIR", help="folder of the public tables")
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    options = parser.parse_args()
    try:
        if options.public_data:
            run_missing(options.public_data)
        results = Results.load(ROOT)
        documents = rendered(ROOT, results)
        if options.check:
            old = [str(p.relative_to(ROOT)) for p, text in documents.items() if p.read_text("utf-8") != text]
            raise SystemExit(f"not what the results say: {', '.join(old)}; run make accuracy" if old else 0)
        for path, text in documents.items():
            write_text(path, text)
            print(path.relative_to(ROOT))
        for path in draw(results, ROOT / "docs"):
            print(path.relative_to(ROOT))
        for name in results.missing():
            print(f"not measured: {name} ({STUDIES[name].command})", file=sys.stderr)
    except CdmppError as error:
        raise SystemExit(f"error: {error.message}\nhint: {error.hint}") from None


if __name__ == "__main__":
    main()
