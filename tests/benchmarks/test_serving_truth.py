"""Measurements of serving systems that contradict others are left out."""

import pytest

from tests.llm.test_read_config import EXAMPLES

pytest.importorskip("pandas")

from benchmarks.serving_truth.cells import Cell, consistent


def cells(device: str, *milliseconds: float) -> list[Cell]:
    """A series at fixed concurrency: 1, 2, 4, ... requests in flight."""
    config = str(EXAMPLES / "llama-3.1-8b.json")
    return [
        Cell(
            "fixed concurrency", "vllm", device, "m", config, {"batch": 1 << i}, "tpot_s", time / 1e3, closed_loop=True
        )
        for i, time in enumerate(milliseconds)
    ]


def test_a_series_that_gets_faster_with_load_is_left_out() -> None:
    good, bad = cells("b200", 5, 6, 5.8, 9), cells("h100-sxm", 10, 40, 20)
    assert consistent([*good, *bad]) == good


def test_a_cell_that_is_slower_than_on_a_slower_device_is_left_out() -> None:
    old, new = cells("h100-sxm", 10, 12, 20), cells("b200", 9, 30, 31)
    assert consistent([*old, *new]) == [*old, new[0]]
    # The slower device may be slower.
    assert consistent(slower := [*cells("h100-sxm", 30, 40), *cells("b200", 9, 10)]) == slower
