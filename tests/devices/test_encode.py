"""The encoding: fixed ranges, flags for missing figures, no dependence on other devices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.devices import DEVICE_FEATURES, DeviceSpec, encode_device, encode_devices, encoding_schema, known, lookup


def column(spec: DeviceSpec, name: str) -> float:
    return float(encode_device(spec)[DEVICE_FEATURES.index(name)])


def test_known_devices_lie_inside_the_ranges() -> None:
    table = encode_devices(known())
    assert table.shape == (len(known()), len(DEVICE_FEATURES))
    assert table.dtype == np.float32
    # Phones of 2014 and boards of 2025 need no clipping: there is room on both sides.
    assert table.min() >= 0.0
    inside = table.copy()
    for name in ("log_l2_bytes", "log_l2_bytes_per_unit"):
        # One thread of a server has the cache of the whole socket beside it: more per unit than any board.
        threads = np.array([spec.source.startswith("what the operating system") for spec in known()])
        inside[threads, DEVICE_FEATURES.index(name)] = 0.0
    # A TPU is one unit of 4096 lanes.
    inside[[spec.name == "tpu-v6e" for spec in known()], DEVICE_FEATURES.index("log_cores_per_unit")] = 0.0
    assert inside.max() <= 1.0
    # A stand-in has the figures of a card that is in the table too.
    named = table[[not spec.status for spec in known()]]
    assert len(np.unique(named, axis=0)) > 0.95 * len(named)


def test_golden_values_of_one_device() -> None:
    t4 = lookup("t4")
    assert column(t4, "log_compute_units") == pytest.approx(np.log2(40) / 10)
    assert column(t4, "log_mem_bandwidth_bytes_per_s") == pytest.approx(np.log(320) / np.log(2e4))
    assert column(t4, "log_peak_flops_fp32") == pytest.approx(np.log10(810) / 5)
    assert column(t4, "is_gpu") == 1.0
    assert column(t4, "vendor_nvidia") == 1.0
    assert column(t4, "vendor_amd") == 0.0


def test_a_missing_figure_is_zero_with_its_flag() -> None:
    t4 = lookup("t4")
    assert column(t4, "missing_tdp_w") == 0.0
    without = t4.model_copy(update={"tdp_w": None})
    assert column(without, "log_tdp_w") == 0.0
    assert column(without, "missing_tdp_w") == 1.0
    assert column(without, "missing_fp32_flops_per_watt") == 1.0
    changed = np.flatnonzero(encode_device(t4) != encode_device(without))
    figures = ("tdp_w", "fp32_flops_per_watt")
    assert {DEVICE_FEATURES[i] for i in changed} == {f"{kind}_{n}" for n in figures for kind in ("log", "missing")}


@given(
    units=st.integers(1, 100_000),
    clock=st.floats(1e7, 2e10),
    bandwidth=st.floats(1e8, 1e16),
    power=st.none() | st.floats(0.1, 1e5),
)
def test_extreme_devices_are_clipped_and_finite(
    units: int, clock: float, bandwidth: float, power: float | None
) -> None:
    spec = DeviceSpec(
        name="x",
        vendor="v",
        arch="a",
        kind="cpu",
        compute_units=units,
        cores_per_unit=64,
        clock_hz=clock,
        mem_bandwidth_bytes_per_s=bandwidth,
        peak_flops_fp32=2 * 64 * units * clock,
        tdp_w=power,
    )
    row = encode_device(spec)
    assert np.isfinite(row).all()
    assert row.min() >= -0.25
    assert row.max() <= 1.25


def test_schema_names_every_column() -> None:
    schema = encoding_schema()
    assert schema["columns"] == list(DEVICE_FEATURES)
    assert len(set(DEVICE_FEATURES)) == len(DEVICE_FEATURES)
    assert encode_devices([]).shape == (0, len(DEVICE_FEATURES))
