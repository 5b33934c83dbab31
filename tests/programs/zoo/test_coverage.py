"""The rows of the coverage table of docs/networks.md; test_lowering.py compares the table."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.coverage import Measured, coverage_row, measured
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.frontends.tasks import TaskList, TuningTask

pytestmark = pytest.mark.tvm


def test_a_row_counts_measured_and_predicted_programs(
    lowered: Callable[[str], TaskList], predictor: LatencyPredictor
) -> None:
    tasks = lowered("bert-tiny:seq=8,layers=1")
    broken = TuningTask("broken", "0" * 32, '{"nodes": [], "root_index": 0}', 1)
    changed = replace(
        tasks,
        network="bert-tiny",
        tasks=(*tasks.tasks[:4], broken),
        unsupported=(("dynamic", "its shapes are dynamic"),),
    )
    found = Measured(frozenset({"bert-tiny", "bert-tiny:seq=8"}), frozenset({"a", "b", "c"}))
    counts = coverage_row(changed, found, predictor).split("|")[4:-1]
    launches = sum(task.calls for task in tasks.tasks[:4]) + 1
    assert [int(count) for count in counts] == [launches, 6, 5, 4, 2, 3]


def test_measured_tasks_are_read_from_records(tmp_path: Path) -> None:
    assert measured(tmp_path / "none.parquet") == {}
    columns = {
        "task": ["a", "b", "a", "c", "d"],
        "networks": ["vgg11;vit:image=32", "vgg11", None, "vit", "vit:image=32"],
        "latency_s": [1.0, None, 2.0, 1.0, 1.0],
    }
    pq.write_table(pa.table(columns), tmp_path / "records.parquet")
    assert measured(tmp_path / "records.parquet") == {
        "vgg11": Measured(frozenset({"vgg11"}), frozenset({"a"})),
        "vit": Measured(frozenset({"vit", "vit:image=32"}), frozenset({"a", "c", "d"})),
    }
