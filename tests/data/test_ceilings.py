"""Ceilings from measured rows: the best of the largest, never a wrong one."""

import numpy as np
import pytest

from cdmpp.data.ceilings import check_ceilings, derive_ceilings
from cdmpp.data.records import Measurement, from_measurements
from cdmpp.data.table import MeasurementTable
from cdmpp.devices import lookup
from cdmpp.devices.spec import Ceilings
from cdmpp.errors import UnknownDeviceError

T4 = lookup("t4")
GEMM = "linear:dtype=float16,m=4096,n=4096,k={k}"
FLOPS = 2 * 4096**3
COPY_BYTES = 2 * 4 * 16384 * 4096


def table(*rows: tuple[str, float], protocol: str = "eager", backend: str = "library") -> MeasurementTable:
    return from_measurements(
        [Measurement(text, "operator", "t4", latency, protocol=protocol, backend=backend) for text, latency in rows]
    )


def test_rates_and_floor_of_a_few_programs() -> None:
    ceilings = derive_ceilings(
        table(
            (GEMM.format(k=4096), FLOPS / 4e13),
            (GEMM.format(k=8192), 2 * FLOPS / 3e13),
            ("linear:m=4096,n=4096,k=4096", FLOPS / 5e12),
            ("conv2d:n=64,c_in=256,h=56,w=56,c_out=256,kh=3,kw=3,pad_h=1,pad_w=1", 1 / 20),
            ("copy:rows=16384,cols=4096", COPY_BYTES / 2.5e11),
            ("add:rows=16384,cols=4096", 1.5 * COPY_BYTES / 2.4e11),
            ("relu:rows=1,cols=1", 3e-5),
            ("add:rows=1,cols=1", 2e-5),
            ("relu:rows=64,cols=2", 9e-5),
        ),
        "t4",
    )
    assert ceilings.gemm_flops_fp16 == pytest.approx(4e13, rel=1e-3)
    assert ceilings.gemm_flops_fp32 == pytest.approx(5e12, rel=1e-3)
    assert ceilings.conv_flops_fp32 == pytest.approx(20 * 2 * 64 * 56 * 56 * 256 * 256 * 9, rel=1e-3)
    assert ceilings.bytes_per_s == pytest.approx(2.5e11, rel=1e-3)
    assert 2e-5 <= (ceilings.floor_eager_s or 0) < 3e-5
    assert (
        ceilings.floor_kernel_s is None and ceilings.gemm_flops_bf16 is None and ceilings.attention_flops_fp16 is None
    )


def test_one_slip_among_many_does_not_count() -> None:
    rows = [
        (f"linear:dtype=float16,m=4096,n=4096,k={4096 + 64 * i}", FLOPS / 4e13 * (4096 + 64 * i) / 4096)
        for i in range(200)
    ]
    rows[7] = (rows[7][0], rows[7][1] / 3)
    assert derive_ceilings(table(*rows), "t4").gemm_flops_fp16 == pytest.approx(4e13, rel=1e-3)


def test_only_the_rows_that_may_be_used() -> None:
    both = table((GEMM.format(k=4096), FLOPS / 4e13), (GEMM.format(k=8192), 2 * FLOPS / 6e13))
    ceilings = derive_ceilings(both, "t4", np.array([True, False]))
    assert ceilings.gemm_flops_fp16 == pytest.approx(4e13, rel=1e-3)


@pytest.mark.parametrize(
    "row, backend",
    [
        (("linear:dtype=float16,m=512,n=512,k=512", 3e-5), "library"),  # the launch is in it
        ((GEMM.format(k=4096), FLOPS / 4e13), "tvm"),  # as scheduled, not as a library would
        ((GEMM.format(k=4096), FLOPS / 1e16), "library"),  # faster than physics: flagged already
        (("copy:rows=512,cols=512", 1e-6), "library"),  # from the cache
        (("embedding:rows=16384,cols=4096,table_rows=4", 1e-4), "library"),
    ],
)
def test_rows_without_large_programs_give_no_ceiling(row: tuple[str, float], backend: str) -> None:
    assert derive_ceilings(table(row, backend=backend), "t4").figures() == {}


def test_devices_without_rows() -> None:
    measured = table((GEMM.format(k=4096), FLOPS / 4e13))
    assert derive_ceilings(measured, "l4") == Ceilings()
    with pytest.raises(UnknownDeviceError):
        derive_ceilings(measured, "no-such-device")


def test_figures_that_contradict_the_data_sheet_are_rejected() -> None:
    good = {"gemm_flops_fp16": 4e13, "conv_flops_fp32": 1.6e13, "bytes_per_s": 2.6e11, "floor_eager_s": 2e-5}
    assert check_ceilings(Ceilings(**good), T4) == (Ceilings(**good), [])
    wrong = {"gemm_flops_fp32": 2e13, "gemm_ops_int8": 1e12, "floor_graph_s": 0.5}
    kept, warnings = check_ceilings(Ceilings(**good, **wrong, source="probe"), T4)
    assert kept == Ceilings(**good, source="probe")
    assert [w.code for w in warnings] == ["ceiling_above_nominal", "ceiling_far_below_nominal", "floor_not_believable"]
    assert "gemm_flops_fp32" in warnings[0].message and "8.1e+12" in warnings[0].message


def test_a_type_that_the_sheet_is_silent_about_cannot_be_checked() -> None:
    m40 = lookup("m40")
    assert m40.peak_flops_fp16_matrix is None
    fast = Ceilings(gemm_flops_fp16=100 * m40.peak_flops_fp32)
    assert check_ceilings(fast, m40) == (fast, [])
