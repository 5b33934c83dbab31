"""The rows of the coverage table of docs/networks.md; test_lowering.py compares the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.coverage import Measured, coverage_row, measured, sources
from cdmpp.frontends.tasks import Task, TaskList
from cdmpp.predictor import LatencyPredictor

pytestmark = pytest.mark.tvm


def test_a_row_counts_measured_and_predicted_programs(
    lowered: Callable[[str], TaskList], predictor: LatencyPredictor
) -> None:
    tasks = lowered("bert-tiny:seq=8,layers=1")
    broken = Task("broken", "0" * 32, '{"nodes": [], "root_index": 0}', 1)
    changed = TaskList("bert-tiny", (*tasks.tasks[:4], broken), (("dynamic", "its shapes are dynamic"),))
    measurements = Measured(frozenset({tasks.tasks[0].hash, "of another network"}))
    counts = coverage_row("bert-tiny", [changed, changed], measurements, predictor).split("|")[4:-1]
    launches = 2 * (sum(task.calls for task in tasks.tasks[:4]) + 1)
    assert [int(count) for count in counts] == [launches, 6, 5, 1, 4]


def test_measured_tasks_are_read_from_records(tmp_path: Path) -> None:
    assert measured(tmp_path / "none.parquet") == Measured()
    columns = {
        "task": ["a", "b", "a"],
        "networks": ["vgg11;vit:image=32", "vgg11", None],
        "latency_s": [1.0, None, 2.0],
    }
    pq.write_table(pa.table(columns), tmp_path / "records.parquet")
    measurements = measured(tmp_path / "records.parquet")
    assert measurements == Measured(frozenset({"a"}), frozenset({"vgg11", "vit:image=32"}))
    assert sources("vit", measurements.networks) == ["vit:image=32"] and sources("resnet18", measurements.networks) == [
        "resnet18"
    ]
