"""Prediction of a table in slices."""

import tracemalloc
from pathlib import Path

from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.tables.predict import SlicePredictor, TableTask, predict_slices, write_answers
from cdmpp.predict.tables.rows import TableOptions


def test_memory_does_not_grow_with_the_table(predictor: LatencyPredictor, tmp_path: Path) -> None:
    table, peaks = tmp_path / "t.txt", []
    for rows in (500, 500, 2_000):  # the first fills caches
        table.write_text("relu:rows=4096,cols=64,dtype=float16\n" * rows)
        task = TableTask(table, TableOptions((predictor.artifact.device("t4"),)))
        tracemalloc.start()
        summary = write_answers(task, predict_slices(SlicePredictor(task, predictor), rows=125), tmp_path / "out.csv")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (summary.rows, summary.failed) == (rows, 0)
    assert peaks[2] < 1.5 * peaks[1]
