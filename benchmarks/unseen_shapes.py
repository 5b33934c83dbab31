"""Error on shapes that training never saw, on known devices: the test part, as users' queries are answered.

``python -m benchmarks.unseen_shapes --public-data DIR [--model models/base] [--out FILE]`` answers every row
of the test part once and writes ``benchmarks/results/unseen_shapes.json``:

* ``model_id``, ``command``, ``n``;
* ``parts``: figures by ``source``, ``device`` and ``family`` ("" stands for all), ``filtered`` where only the
  rows count that the source's authors keep in their own figures; the metrics are those of ``cdmpp eval``,
  fractions;
* ``coverage``: ``nominal`` shares, and ``sources``: of each source the share of rows inside;
* ``domain``: rows, error and coverage per label, and ``auc``: how well the score ranks rows that are off by
  more than 30 %.

The baselines on the same rows are in ``errors.json`` of the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.intervals import NOMINAL, auc, coverage_curve
from benchmarks.report.results import rounded, write_result
from cdmpp.data.table import MeasurementTable
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.domain.calibration import read_quantiles
from cdmpp.model.domain.score import label
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.programs.operators import operator_family
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import choose_parts
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.metrics import measure, rank
from cdmpp.train.evaluation.query_batches import query_parts
from cdmpp.train.evaluation.tables import INTERVAL, reasons
from cdmpp.train.run import load_training_table

Array = np.ndarray[Any, np.dtype[Any]]
OUT = Path("benchmarks/results/unseen_shapes.json")
#: The domain score should detect relative errors above this.
FAR_OFF = 0.3


@dataclass(frozen=True)
class Answered:
    """Test rows with their answers, arrays of one length (names as objects)."""

    source: Array
    device: Array
    family: Array
    filtered: Array
    task: Array
    program: Array
    log_measured: Array
    point: Array
    levels: Array
    factor: Array
    score: Array

    def __len__(self) -> int:
        return len(self.point)

    def take(self, rows: Array) -> Answered:
        """Some rows."""
        return Answered(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})

    def figures(self) -> dict[str, Any]:
        """The metrics of ``cdmpp eval``; with the order within tasks where programs are schedules."""
        point, measured = np.exp(self.point), np.exp(self.log_measured)
        low, high = np.exp(read_quantiles(self.levels, self.factor, INTERVAL)).T
        result = measure(point, measured, np.minimum(low, point), np.maximum(high, point))
        if (self.task >= 0).any():
            result |= rank(point, measured, self.task, self.program)
        figures: dict[str, Any] = rounded(result)
        return figures


def held_out_rows(table: MeasurementTable, config: TrainConfig) -> Array:
    """Rows of the test part, ordered by program."""
    parts = choose_parts(table, config.data)
    chosen = np.flatnonzero((reasons(table) == "") & table.trainable)
    chosen = chosen[parts[table.program_key[chosen]] == 2]
    ordered: Array = chosen[np.argsort(table.program_key[chosen], kind="stable")]
    return ordered


def answer_rows(artifact: Artifact, table: MeasurementTable, rows: Array) -> Answered:
    """The model's answers for rows (ordered by program); those that cannot be encoded are left out."""
    pipeline = InferencePipeline(artifact)
    cache = FeatureCache(schedule=artifact.reads_schedules)
    filtered = np.ones(len(table), dtype=bool) if table.row_filter is None else table.row_filter
    device = table.device.array()
    tasks = {name: i for i, name in enumerate(sorted(set(table.tvm.tasks) - {""}))}
    task_of = np.full(table.n_programs, -1, dtype=np.int64)
    task_of[table.tvm.first_key :] = [tasks.get(name, -1) for name in table.tvm.tasks]
    pieces: dict[str, list[Array]] = {name: [] for name in Answered.__dataclass_fields__}
    for part in query_parts(table, rows, cache, half_type=pipeline.half_type):
        output = pipeline.forward(part.batch)
        operators = np.array([kind[0] for kind in part.batch.kinds], dtype=object)
        operator = operators[np.asarray(part.batch.kind)[part.batch.rows.program]][part.position]
        here = rows[part.index]
        task = task_of[table.program_key[here]]
        columns = {
            "source": table.source.take(here).array(),
            "device": device[here],
            "family": np.array([_family(name) for name in operator], dtype=object),
            "filtered": filtered[here],
            # Task and device: schedules are ranked on one device.
            "task": np.where(task < 0, -1, task * len(table.device.names) + table.device.codes[here]),
            "program": table.program_key[here],
            "log_measured": np.log(table.latency_s[here]),
            "point": output.point[part.position],
            "levels": output.levels[part.position],
            "factor": output.factor[part.position],
            "score": output.score[part.position],
        }
        for name, values in columns.items():
            pieces[name].append(values)
    return Answered(**{name: np.concatenate(parts) for name, parts in pieces.items()})


def _family(operator: str) -> str:
    return "scheduled" if operator == "tir" else operator_family(operator)


def parts_of(rows: Answered) -> Iterator[dict[str, Any]]:
    """Figures by source, by source and device, by source and family, and by all three."""
    for source in sorted(set(rows.source)):
        of_source = rows.take(np.flatnonzero(rows.source == source))
        views = [(of_source, False)]
        if not of_source.filtered.all():
            views.append((of_source.take(np.flatnonzero(of_source.filtered)), True))
        for view, filtered in views:
            devices, families = sorted(set(view.device)), sorted(set(view.family))
            for device in ("", *devices):
                for family in ("", *(families if len(families) > 1 else ())):
                    chosen = np.ones(len(view), dtype=bool)
                    if device:
                        chosen &= view.device == device
                    if family:
                        chosen &= view.family == family
                    if chosen.any():
                        names = {"source": source, "device": device, "family": family, "filtered": filtered}
                        yield names | view.take(np.flatnonzero(chosen)).figures()


def domain_of(rows: Answered) -> dict[str, Any]:
    """Rows, error and coverage per domain label, and the score's AUC."""
    labels = np.array([label(score) for score in rows.score.tolist()], dtype=object)
    error = np.abs(np.expm1(rows.point - rows.log_measured))
    by_label = {
        name: rows.take(np.flatnonzero(labels == name)).figures()
        for name in ("in", "near", "out")
        if (labels == name).any()
    }
    area = auc(rows.score, error > FAR_OFF)
    return {"labels": by_label, "auc": None if area is None else round(area, 4)}


def study(artifact: Artifact, public_data: str | None) -> dict[str, Any]:
    """The whole result file but its command."""
    config = TrainConfig.of_manifest(artifact.manifest["config"])
    table = load_training_table(config, public_data, ())
    rows = answer_rows(artifact, table, held_out_rows(table, config))
    sources = {}
    for source in sorted(set(rows.source)):
        of_source = rows.take(np.flatnonzero(rows.source == source))
        sources[source] = coverage_curve(of_source.log_measured, of_source.point, of_source.levels, of_source.factor)
    return {
        "model_id": artifact.model_id,
        "n": len(rows),
        "parts": list(parts_of(rows)),
        "coverage": {"nominal": list(NOMINAL), "sources": sources},
        "domain": domain_of(rows),
    }


def main() -> None:
    """Answer the test part and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--public-data")
    parser.add_argument("--model", default="models/base")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    results = study(load_artifact(options.model), options.public_data)
    command = f"python -m benchmarks.unseen_shapes --public-data DIR --model {options.model}"
    write_result(options.out, {"command": command, **results})
    print(f"{results['model_id']}: {results['n']:,} test rows, written to {options.out}")


if __name__ == "__main__":
    main()
