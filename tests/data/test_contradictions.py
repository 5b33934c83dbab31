"""Narrow kernels that are slower than on the same chip elsewhere, and than their own 16-bit form, are left out."""

import pytest

from cdmpp.data.contradictions import MIN_PAIRS, contradicting_rows
from cdmpp.data.records import Measurement, from_measurements
from cdmpp.data.table import MeasurementTable
from cdmpp.train.limits import host_bound

FP8, BF16 = "linear:m={},n=4096,k=4096,dtype=float8_e4m3,scaling=tensor", "linear:m={},n=4096,k=4096,dtype=bfloat16"


def table_of(fp8_h100_s: float, fp8_h200_s: float, bf16_h100_s: float, sibling: str = "h200") -> MeasurementTable:
    """Products of 64 row counts under vLLM, with these seconds per row of the product."""
    cells = ((FP8, "h100-sxm", fp8_h100_s), (FP8, sibling, fp8_h200_s), (BF16, "h100-sxm", bf16_h100_s))
    return from_measurements(
        [
            Measurement(text.format(64 + m), "operator", device, (64 + m) * seconds, framework="vllm")
            for text, device, seconds in cells
            for m in range(MIN_PAIRS + 10)
        ]
    )


def test_kernel_slower_than_the_sibling_and_than_its_16_bit_form_is_left_out() -> None:
    table = table_of(4e-6, 1e-6, 2e-6)
    count = MIN_PAIRS + 10
    assert set(table.device.take(contradicting_rows(table)).used()) == {"h100-sxm"}
    assert table.excluded.counts() == {"contradicts_sibling": count, "": 2 * count}
    assert host_bound(table) == {"h100-sxm|linear|float8_e4m3+tensor|vllm"}


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param((4e-6, 1e-6, 4e-6, "h200"), id="as slow as its 16-bit form"),
        pytest.param((4e-6, 3e-6, 2e-6, "h200"), id="as slow as on the sibling"),
        pytest.param((4e-6, 1e-6, 2e-6, "b200"), id="another chip"),
        pytest.param((4e-6, 2e-6, 2e-6, "h200"), id="the sibling has the faster memory"),
    ],
)
def test_kernel_with_one_explanation_is_kept(cells: tuple[float, float, float, str]) -> None:
    assert not contradicting_rows(table_of(*cells)).any()
