"""``python -m benchmarks.llm_serving --public-data DIR``: whole language models against measured serving batches.

Writes ``benchmarks/results/llm_serving.json`` and the table of docs/benchmarks.md. Nothing is fitted to these
measurements. ``--render`` fills the table from the stored result.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.llm_serving.study import FIGURES, ROOT, answer, errors, read_batches
from benchmarks.report.markdown import fill_document, folded, percent, table
from benchmarks.report.results import write_result
from cdmpp.data.load import public_data_dir
from cdmpp.predict.predictor import LatencyPredictor

OUT, DOCUMENT = "benchmarks/results/llm_serving.json", "docs/benchmarks.md"
COMMAND = "python -m benchmarks.llm_serving --public-data DIR"
#: Its measured prefill is slower than that of the L40, although its single kernels are faster.
THROTTLED = "rtx-6000-ada"
WAYS = {"predicted": "cdmpp", "without_collectives": "without collectives", "roofline": "roofline"}


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--public-data", type=Path, help="folder of the public tables")
    parser.add_argument("--model", type=Path, help="model folder (default: the shipped model)")
    parser.add_argument("--out", type=Path, default=ROOT / OUT)
    parser.add_argument("--render", action="store_true", help="render the stored result")
    options = parser.parse_args()
    if not options.render:
        folder, predictor = public_data_dir(options.public_data), LatencyPredictor.load(options.model)
        rows = [answer(batch, predictor) for batch in read_batches(folder)]
        result = {"command": COMMAND, "model_id": predictor.model_id, "summary": summary(rows), "rows": rows}
        write_result(options.out, result)
    result = json.loads(options.out.read_text(encoding="utf-8"))
    fill_document(ROOT / DOCUMENT, {"llm-serving": report(result)})
    print(summary_table(result))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors by way, over all batches and without the throttled device."""
    parts = {"all": rows, "without_throttled": [row for row in rows if row["device"] != THROTTLED]}
    return {name: {"batches": len(part), **{way: errors(part, way) for way in WAYS}} for name, part in parts.items()}


def summary_table(result: Mapping[str, Any]) -> str:
    """Mean and median error of each phase."""
    header = ["batches", "estimate", "prefill, mean / median", "decode step", "total"]
    rows = []
    for name, part in result["summary"].items():
        label = f"{part['batches']}" + ("" if name == "all" else f", without {THROTTLED}")
        for way, title in WAYS.items():
            cells = [f"{percent(part[way][f]['mean'])} / {percent(part[way][f]['median'])}" for f in FIGURES]
            rows.append([label, title, *cells])
    return table(header, rows, left=2)


def report(result: Mapping[str, Any]) -> str:
    """Summary, and all batches collapsed."""
    header = ["GPU", "TP", "model", "requests", "phase", "measured", "predicted", "80 % interval", "error"]
    header += ["without collectives", "roofline", "domain"]
    rows = [cells for row in result["rows"] for cells in _cells(row)]
    return f"{summary_table(result)}\n\n{folded('All batches', table(header, rows, left=5))}"


def _cells(row: Mapping[str, Any]) -> list[list[str]]:
    lines = []
    for figure, phase in zip(FIGURES, ("prefill", "decode step", "total"), strict=True):
        measured = row["measured"][figure]
        seconds = [_seconds(row[key][figure]) for key in ("measured", "predicted")]
        interval = f"{_seconds(row['lower'][figure])} to {_seconds(row['upper'][figure])}"
        wrong = [f"{100 * (row[way][figure] / measured - 1):+.1f} %" for way in WAYS]
        setting = [row["device"], str(row["tp"]), row["model"], row["workload"], phase]
        lines.append([*setting, *seconds, interval, *wrong, row["domain"]])
    return lines


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


if __name__ == "__main__":
    main()
