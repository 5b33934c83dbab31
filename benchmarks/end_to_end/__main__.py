"""``python -m benchmarks.end_to_end --public-data DIR``: whole networks against public labels.

Writes ``benchmarks/results/end_to_end.json``, ``docs/end_to_end.png`` and the marked tables of
docs/replay.md, and prints the summary. Two minutes on one core. Nothing is fitted: kernels are listed by
tracing the networks, predicted one by one, and put one after the other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.end_to_end import report
from benchmarks.end_to_end.document import put_parts
from benchmarks.end_to_end.labels import read_labels
from benchmarks.end_to_end.listed import check_lists, listed_sums, read_lists
from benchmarks.end_to_end.parallel import answer_parallel
from benchmarks.end_to_end.study import answer_labels
from benchmarks.report.markdown import folded
from benchmarks.report.results import write_result
from cdmpp.data.public import public_data_dir
from cdmpp.predictor import LatencyPredictor

ROOT = Path(__file__).parents[2]
OUT, PICTURE, DOCUMENT = "benchmarks/results/end_to_end.json", "docs/end_to_end.png", "docs/replay.md"
COMMAND = "python -m benchmarks.end_to_end --public-data DIR"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--public-data", type=Path, help="folder of the public tables")
    parser.add_argument("--model", type=Path, help="default: the model that ships")
    parser.add_argument("--out", type=Path, default=ROOT / OUT)
    options = parser.parse_args()
    folder = public_data_dir(options.public_data)
    labels, lists = read_labels(folder), read_lists(folder)
    print(f"{check_lists(lists)} kernels of the source's lists: the same here")
    predictor = LatencyPredictor.load(options.model)
    answers = answer_labels(labels.kept, predictor, listed_sums(labels.kept, lists))
    parallel = list(answer_parallel(folder, predictor))
    write_result(options.out, report.result(answers, parallel, labels, predictor.model_id, COMMAND))
    report.draw(answers, ROOT / PICTURE)
    parts = {
        "end-to-end": report.summary_table(answers),
        "end-to-end-parallel": report.parallel_table(parallel),
        "end-to-end-details": "\n\n".join(
            (
                folded("Every transformer", report.model_table(answers)),
                folded("Every device", report.device_table(answers)),
                folded("Labels that are not predicted", report.left_out_list(labels)),
            )
        ),
    }
    put_parts(ROOT / DOCUMENT, parts)
    print(parts["end-to-end"], parts["end-to-end-parallel"], report.device_table(answers), sep="\n\n")


if __name__ == "__main__":
    main()
