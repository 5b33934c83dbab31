"""The study of serving stacks: ratios between frameworks, and intervals without a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import stacks
from benchmarks.stacks import (
    coverage,
    device_spread,
    overall_ratio,
    pair_ratios,
    shared_problems,
    shared_rows,
    tables_of,
)
from cdmpp.data.load import load_table
from cdmpp.data.table import MeasurementTable
from cdmpp.predict.predictor import LatencyPredictor

#: Latency of each framework relative to vLLM's.
FACTOR = {"vllm": 1.0, "sglang": 1.25, "trtllm": 0.5}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasurementTable:
    """Three frameworks on four sizes; vLLM alone on a fifth; a second, disagreeing row of vLLM on the first."""
    monkeypatch.setattr(stacks, "LEAST", 3)
    rows = [(64 * size, name, 10.0 * size * factor) for size in (1, 2, 3, 4) for name, factor in FACTOR.items()]
    rows += [(320, "vllm", 50.0), (64, "vllm", 30.0), (64, "vllm", 10.0)]
    columns: dict[str, list[Any]] = {
        "op": ["linear"] * len(rows),
        "device": ["NVIDIA L40S"] * len(rows),
        "framework": [name for _, name, _ in rows],
        "dtype": ["bfloat16"] * len(rows),
        "m": [m for m, _, _ in rows],
        "n": [4096] * len(rows),
        "k": [4096] * len(rows),
        "latency_us": [latency for _, _, latency in rows],
    }
    pq.write_table(pa.table(columns), tmp_path / "table.parquet")
    return load_table(tmp_path / "table.parquet")


def test_problems_of_one_framework_do_not_count(table: MeasurementTable) -> None:
    problems = shared_problems(table)
    assert len(problems.operator) == 4
    assert set(problems.operator) == {"linear bfloat16"}
    assert set(problems.device) == {"l40s"}


def test_repeated_rows_count_by_their_median(table: MeasurementTable) -> None:
    problems = shared_problems(table)
    vllm = problems.latency_s[:, problems.frameworks.index("vllm")]
    assert sorted(np.round(vllm * 1e6, 6)) == [10.0, 20.0, 30.0, 40.0]


def test_ratio_of_every_pair_of_frameworks(table: MeasurementTable) -> None:
    pairs = list(pair_ratios(shared_problems(table)))
    assert len(pairs) == 3
    for row in pairs:
        expected = FACTOR[row["second"]] / FACTOR[row["first"]]
        assert (row["n"], row["protocol"]) == (4, "graph")
        assert row["median"] == pytest.approx(expected, abs=1e-3) == row["low"] == row["high"]


def test_overall_ratio_counts_both_directions(table: MeasurementTable) -> None:
    ratio = overall_ratio(shared_problems(table))
    assert ratio["n"] == 24
    assert ratio["low"] * ratio["high"] == pytest.approx(1, abs=1e-2)


def test_spread_of_a_device_is_slowest_over_fastest(table: MeasurementTable) -> None:
    [row] = device_spread(shared_problems(table))
    assert (row["operator"], row["device"], row["n"], row["median"]) == ("linear bfloat16", "l40s", 4, 2.5)


def test_sample_holds_shared_problems_only_and_is_ordered_by_program(table: MeasurementTable) -> None:
    rows = shared_rows(table, np.arange(len(table)))
    assert len(rows) == 14
    assert (np.diff(table.program_key[rows]) >= 0).all()
    assert 320 not in {table.program_fields(int(key))["m"] for key in table.program_key[rows]}
    assert len(shared_rows(table, rows[:0])) == 0


def test_coverage_compares_queries_with_and_without_a_framework(table: MeasurementTable) -> None:
    rows = shared_rows(table, np.arange(len(table)))
    entries = list(coverage(LatencyPredictor.load().artifact, table, rows))
    assert [entry["operator"] for entry in entries] == ["linear bfloat16", ""]
    for entry in entries:
        assert entry["n"] == 14
        for kind in ("stated", "open"):
            assert 0 <= entry[kind]["inside"] <= 1 < entry[kind]["width"]


def test_tables_show_every_figure(table: MeasurementTable) -> None:
    problems = shared_problems(table)
    figures = {"inside": 0.8, "width": 1.5}
    result = {
        "problems": 4,
        "overall": overall_ratio(problems),
        "pairs": list(pair_ratios(problems)),
        "devices": list(device_spread(problems)),
        "coverage": [{"operator": "", "n": 14, "stated": figures, "open": figures}],
    }
    text = tables_of(result)
    assert "| linear bfloat16 | l40s | 4 | 2.50 | 2.50-2.50 |" in text
    assert "| all | 14 | 80.0 % | 1.50 | 80.0 % | 1.50 |" in text
