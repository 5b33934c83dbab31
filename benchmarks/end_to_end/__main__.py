"""``python -m benchmarks.end_to_end --public-data DIR``: whole networks against public measurements.

Writes ``benchmarks/results/end_to_end.json``, ``docs/end_to_end.png`` and the generated tables of
docs/replay.md, and prints the summary. It takes two minutes on one core. The networks are traced, each kernel is
predicted, and the kernel times are composed. Nothing is fitted. ``--render`` draws the figure and fills the tables
from the stored result.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import content, report
from benchmarks.end_to_end.labels import read_labels
from benchmarks.end_to_end.listed import check_lists, listed_parts, read_lists
from benchmarks.end_to_end.study import answer_labels
from benchmarks.report.markdown import fill_document
from benchmarks.report.results import write_result
from cdmpp.data.load import public_data_dir
from cdmpp.predict.predictor import LatencyPredictor

ROOT = Path(__file__).parents[2]
OUT, PICTURE, DOCUMENT = "benchmarks/results/end_to_end.json", "docs/end_to_end.png", "docs/replay.md"
COMMAND = "python -m benchmarks.end_to_end --public-data DIR"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--public-data", type=Path, help="folder of the public tables")
    parser.add_argument("--model", type=Path, help="model folder (default: the shipped model)")
    parser.add_argument("--out", type=Path, default=ROOT / OUT)
    parser.add_argument("--render", action="store_true", help="render the stored result")
    options = parser.parse_args()
    if options.render:
        render(json.loads(options.out.read_text(encoding="utf-8")))
        return
    folder = public_data_dir(options.public_data)
    labels, lists = read_labels(folder), read_lists(folder)
    print(f"{check_lists(lists)} kernels of the source's lists: the same here")
    predictor = LatencyPredictor.load(options.model)
    answers = answer_labels(labels.kept, predictor, listed_parts(labels.kept, lists))
    result = content.result(answers, labels, predictor.model_id, COMMAND)
    write_result(options.out, result)
    render(result)
    print(report.summary_table(result), report.device_table(result), sep="\n\n")


def render(result: Mapping[str, Any]) -> None:
    """Draw the figure and fill the generated tables."""
    report.draw(result["rows"], ROOT / PICTURE)
    fill_document(ROOT / DOCUMENT, report.parts(result))


if __name__ == "__main__":
    main()
