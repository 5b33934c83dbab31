"""Leave one GPU out on brute-forced schedules: tables, figures, choices and the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.gpu_schedules import methods
from benchmarks.gpu_schedules.__main__ import means
from benchmarks.gpu_schedules.pool import Pool
from benchmarks.gpu_schedules.programs import EXTRA
from benchmarks.gpu_schedules.study import Study, figures
from benchmarks.gpu_schedules.tables import TWINS, KernelTable, load_kernel
from benchmarks.report.gpu_schedules import left_out, mean_score
from benchmarks.report.results import Results
from cdmpp.data.importers.kernel_tuner.template import TunedKernel
from cdmpp.features.gpu_schedule import GPU_COLUMNS, GPU_FLAGS

GPUS = ("AMD MI250X", "NVIDIA A100-PCIE-40GB", "NVIDIA RTX 3090", "NVIDIA RTX A4000")
COUNT = 60


def test_rows_of_two_collections_are_averaged_and_inexpressible_ones_counted(tmp_path: Path) -> None:
    rows = [
        *(
            {"device": d, "block_size_x": 64, "tile_size": 2, "latency_us": us}
            for d in GPUS[1:3]
            for us in (10.0, 40.0)
        ),
        {"device": GPUS[1], "block_size_x": 32, "tile_size": 1, "latency_us": 5.0},
        {"device": GPUS[1], "block_size_x": 32, "tile_size": 1, "use_method": 7, "latency_us": 5.0},
    ]
    filled = [{"kernel": "cn_pnpoly", "collection": "a", "between_method": 0, "use_method": 0} | row for row in rows]
    other = filled[0] | {"kernel": "convolution_kernel"}
    pq.write_table(pa.Table.from_pylist([*filled, other]), tmp_path / "sched_benchmark_hub.parquet")
    table = load_kernel("pnpoly", tmp_path)
    assert table.devices == GPUS[1:3]
    assert [table.mapping(i)["block_size_x"] for i in range(2)] == [32, 64]
    np.testing.assert_allclose(table.log_latency, np.log([[5e-6, np.nan], [20e-6, 20e-6]]))
    assert table.left_out == {"use_method is unknown": 1}


def tables(seed: int = 0) -> Pool:
    """Two kernels whose order is about the same on every GPU."""
    rng = np.random.default_rng(seed)
    found, features = [], []
    for name in ("one", "two"):
        quality = rng.normal(0, 0.5, COUNT)
        log_latency = -6 + quality[:, None] + rng.normal(0, 0.02, (COUNT, len(GPUS))) + np.arange(len(GPUS))
        configurations = np.column_stack([np.arange(COUNT), np.round(quality * 100)]).astype(np.int64)
        kernel = TunedKernel(name, ("a", "b"), lambda p: None, lambda p: None)
        found.append(KernelTable(name, kernel, kernel.parameters, configurations, GPUS, log_latency, {}))
        own = np.zeros((COUNT, len(GPU_COLUMNS) + len(EXTRA)), dtype=np.float32)
        for i, column in enumerate(GPU_COLUMNS):
            own[:, i] = 1.0 if column in GPU_FLAGS else 6.0
        own[:, GPU_COLUMNS.index("float_ops")] += quality
        own[:, len(GPU_COLUMNS) :] = 30.0, 20.0, 3.0, 0.0
        features.append((own, np.full(COUNT, 1e6)))
    return Pool(found, features)


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "TREES", 10)


def test_measured_rows_count_for_the_order_and_not_for_the_error() -> None:
    pool = tables()
    rows = pool.rows.take(np.flatnonzero((pool.rows.device == 0) & (pool.rows.kernel == 0)))
    best, worst = int(rows.log_latency.argmin()), int(rows.log_latency.argmax())
    guess = rows.log_latency.copy()
    guess[[best, worst]] = guess[[worst, best]]
    wrong = figures(pool, rows, guess)["one"]
    assert wrong["top1"] < 0.6 and wrong["mape"] > 0.1
    right = guess.copy()
    right[[best, worst]] = rows.log_latency[[best, worst]]
    found = figures(pool, rows, right, np.array([best, worst]))["one"]
    assert found["top1"] == 1.0 and found["mape"] == pytest.approx(0)


def test_a_shared_order_is_found_on_a_gpu_that_is_left_out() -> None:
    study = Study(tables(), 8)
    found = study.result(1)
    assert found["validation"] == [GPUS[0], *GPUS[2:]]
    for count in ("0", "8"):
        for by_kernel in found["methods"]["cdmpp"][count].values():
            assert by_kernel["top1"] > 0.9 and by_kernel["tau"] > 0.8
    after, before = (np.mean([m["mape"] for m in found["methods"]["cdmpp"][c].values()]) for c in ("8", "0"))
    assert after < before
    assert set(means({"x": found})["cdmpp"]) == {"0", "8", "8, KMeans alone"}


def test_promising_schedules_are_measured_evenly_over_kernels() -> None:
    pool = tables()
    rows = pool.rows.take(np.flatnonzero(pool.rows.device == 1))
    first = np.array([0, 1, COUNT, COUNT + 1])
    prediction, measured = methods.search(rows, first, lambda measured: rows.log_latency.copy(), 12)
    assert len(set(measured.tolist())) == 12 and measured[:4].tolist() == first.tolist()
    for kernel in (0, 1):
        own = np.setdiff1d(np.flatnonzero(rows.kernel == kernel), first)
        best = own[np.argsort(rows.log_latency[own])[:4]]
        assert set(best.tolist()) == set(measured[4:][rows.kernel[measured[4:]] == kernel].tolist())
    np.testing.assert_array_equal(prediction, rows.log_latency)


def test_choices_do_not_depend_on_the_left_out_gpu() -> None:
    pool, other = tables(), tables()
    held = 2
    mine = other.rows.device == held
    shuffled = np.where(mine, np.random.default_rng(1).permutation(other.rows.log_latency), other.rows.log_latency)
    other.rows = replace(other.rows, log_latency=shuffled)
    one, two = Study(pool, 8), Study(other, 8)
    assert one.choose_blend(held) == two.choose_blend(held)
    blend = one.choose_blend(held)
    assert one.choose_process(held, blend) == two.choose_process(held, blend)
    np.testing.assert_array_equal(one.measured(held), two.measured(held))


def test_report_names_the_sample_twins_and_what_was_left_out() -> None:
    cell = {"n": 60, "tau": 0.7, "top1": 0.9, "top5": 0.95, "mape": 0.2}
    result = {
        "command": "python -m benchmarks.gpu_schedules --public-data DIR",
        "thin": 1500,
        "twins": [list(pair) for pair in TWINS],
        "kernels": {"gemm": {"configurations": 1500, "left_out": {"switch": 3}, "gpus": 3}},
        "means": {"cdmpp": {"0": cell, "40": cell}},
        "devices": {"NVIDIA RTX 3090": {"methods": {"cdmpp": {"0": {"gemm": cell}, "40": {"gemm": cell}}}}},
    }
    results = Results({"gpu_schedules": result})
    text = left_out(results)
    for part in ("1,500 configurations of each kernel", "gemm: switch (3)", "NVIDIA RTX 3090 and", "| cdmpp | 40 |"):
        assert part in text
    assert mean_score(results, 40) == 0.9 and mean_score(Results({}), 40) is None
