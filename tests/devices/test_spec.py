"""DeviceSpec: bounds, stated fallbacks of the peak, and the digest."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cdmpp.devices import DeviceSpec, lookup
from cdmpp.devices.table import table

MINIMAL = {
    "name": "x",
    "vendor": "NVIDIA",
    "arch": "none",
    "kind": "gpu",
    "compute_units": 10,
    "cores_per_unit": 128,
    "clock_hz": 1e9,
    "mem_bandwidth_bytes_per_s": 1e11,
    "peak_flops_fp32": 2.56e12,
}


def test_optional_figures_are_none_not_zero() -> None:
    spec = DeviceSpec.model_validate(MINIMAL)
    assert spec.memory_bytes is None
    assert spec.tdp_w is None
    assert spec.aliases == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clock_hz", 1.4),  # GHz
        ("clock_hz", float("nan")),
        ("mem_bandwidth_bytes_per_s", 504.0),  # GB/s
        ("peak_flops_fp32", 19.5),  # Tflop/s
        ("peak_flops_fp32", 2.56e15),  # a thousand times what units and clock allow
        ("peak_flops_fp32", float("inf")),
        ("compute_units", 0),
        ("compute_units", -4),
        ("compute_units", 10.5),
        ("compute_units", True),
        ("compute_units", "10"),
        ("kind", "tpu"),
        ("name", ""),
        ("name", "a\nb"),
        ("tdp_w", -1.0),
        ("unknown_field", 1),
    ],
)
def test_slips_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        DeviceSpec.model_validate({**MINIMAL, field: value})


def test_whole_floats_count_as_integers() -> None:
    assert DeviceSpec.model_validate({**MINIMAL, "compute_units": 10.0}).compute_units == 10


def test_specification_is_frozen() -> None:
    spec = DeviceSpec.model_validate(MINIMAL)
    with pytest.raises(ValidationError):
        spec.clock_hz = 2e9


def test_peak_falls_back_as_documented() -> None:
    bare = DeviceSpec.model_validate(MINIMAL)
    for dtype in ("float32", "float16", "bfloat16", "int8", "float64", "int32"):
        assert bare.peak(dtype, True) == bare.peak(dtype, False) == 2.56e12
    a100 = lookup("a100-pcie-40gb")
    assert a100.peak("float16", True) == 312e12
    assert a100.peak("bfloat16", True) == 312e12  # stated once for both
    assert a100.peak("int8", True) == 624e12
    assert a100.peak("float32", True) == 19.5e12  # TF32 is not fp32
    assert a100.peak("float16", False) == 19.5e12
    mi100 = lookup("mi100")
    assert mi100.peak("float32", True) == 46.1e12
    assert mi100.peak("float32", False) == 23.1e12
    assert mi100.peak("bfloat16", True) == 92.3e12
    assert lookup("v100-pcie-32gb").peak("bfloat16", True) == 14e12  # no bfloat16 units
    assert lookup("p4").peak("float16", True) == 5.7e12


def test_digest_follows_the_figures_not_the_name() -> None:
    spec = DeviceSpec.model_validate(MINIMAL)
    assert spec.digest() == DeviceSpec.model_validate({**MINIMAL, "name": "y", "source": "z"}).digest()
    assert spec.digest() != DeviceSpec.model_validate({**MINIMAL, "clock_hz": 1.1e9}).digest()
    # Boards that differ in capacity or power only (the two V100 sizes) must not share one either.
    digests = [device.digest() for device in table().values()]
    assert len(set(digests)) == len(digests)
