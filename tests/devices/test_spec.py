"""DeviceSpec: bounds, stated fallbacks of the peak, the digest, and sustained ceilings."""

import pytest
from pydantic import ValidationError

from cdmpp.devices import DeviceSpec, from_mapping, lookup
from cdmpp.devices.registry import table
from cdmpp.devices.spec import FAMILIES, Ceilings, flops_field
from cdmpp.errors import InvalidDeviceError
from cdmpp.programs.elements import BASIC_DTYPES
from cdmpp.programs.query_options import PROTOCOLS

UNITS = {"compute_units": 10, "cores_per_unit": 128, "clock_hz": 1e9, "peak_flops_fp32": 2.56e12}
KIND = {"name": "x", "vendor": "NVIDIA", "arch": "none", "kind": "gpu"}
MINIMAL = {**KIND, **UNITS, "mem_bandwidth_bytes_per_s": 1e11}


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
        ("l2_bandwidth_bytes_per_s", 3235.0),  # GB/s
        ("sustained_clock_hz", 1830.0),  # MHz
        ("peak_flops_fp8_matrix", 1979.0),  # Tflop/s
        ("link", "token ring"),
        ("link", 4),
        ("status", "rumoured"),
        ("unknown_field", 1),
    ],
)
def test_slips_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        DeviceSpec.model_validate({**MINIMAL, field: value})


def test_link_is_stored_by_its_canonical_name() -> None:
    for given, stored in (("NVLink 4", "nvlink4"), ("pcie5", "pcie5-x16"), ("64 GB/s", "64GB/s"), (None, None)):
        assert DeviceSpec.model_validate({**MINIMAL, "link": given}).link == stored


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


def test_peak_of_further_types_falls_back_as_documented() -> None:
    bare = DeviceSpec.model_validate({**MINIMAL, "peak_flops_fp16_matrix": 4e13})
    assert bare.peak("float8_e4m3", True) == bare.peak("float4_e2m1", True) == bare.peak("int4", True) == 4e13
    assert bare.peak("float64", True) == bare.peak("tfloat32", True) == 2.56e12
    int8 = DeviceSpec.model_validate({**MINIMAL, "peak_flops_fp16_matrix": 4e13, "peak_ops_int8": 6e13})
    assert int8.peak("int4", True) == 6e13
    assert int8.peak("float8_e4m3", True) == 4e13  # not the int8 rate
    fp8 = DeviceSpec.model_validate({**MINIMAL, "peak_flops_fp16_matrix": 4e13, "peak_flops_fp8_matrix": 8e13})
    assert fp8.peak("float4_e2m1", True) == 8e13
    matrix32 = DeviceSpec.model_validate({**MINIMAL, "peak_flops_fp32_matrix": 5e12})
    assert matrix32.peak("tfloat32", True) == 5e12
    b200 = lookup("b200")
    assert b200.peak("float8_e4m3", True) == 4500e12
    assert b200.peak("float4_e2m1", True) == 9000e12
    assert b200.peak("float4_e2m1", False) == b200.peak_flops_fp32
    a100 = lookup("a100-sxm4-80gb")
    assert a100.peak("tfloat32", True) == 156e12
    assert a100.peak("float64", True) == 19.5e12
    assert a100.peak("float8_e4m3", True) == 312e12  # no fp8 units


def test_digest_follows_the_figures_not_the_name() -> None:
    spec = DeviceSpec.model_validate(MINIMAL)
    assert spec.digest() == DeviceSpec.model_validate({**MINIMAL, "name": "y", "source": "z"}).digest()
    assert spec.digest() != DeviceSpec.model_validate({**MINIMAL, "clock_hz": 1.1e9}).digest()
    # Boards that differ in capacity or power only (the two V100 sizes) must not share one either.
    twins = {"a800-pcie-80gb": "a100-pcie-80gb", "a800-sxm4-80gb": "a100-sxm4-80gb", "h800": "h100-sxm"}
    digests = [device.digest() for device in table().values() if device.name not in twins]
    assert len(set(digests)) == len(digests)
    for name, twin in twins.items():  # they differ in link and fp64 only
        assert lookup(name).digest() == lookup(twin).digest()


def test_later_figures_change_the_cache_key_but_not_the_digest() -> None:
    spec = DeviceSpec.model_validate(MINIMAL)
    assert spec.cache_key() == spec.digest()
    with_l2 = DeviceSpec.model_validate({**MINIMAL, "l2_bandwidth_bytes_per_s": 2e12})
    other_l2 = DeviceSpec.model_validate({**MINIMAL, "l2_bandwidth_bytes_per_s": 3e12})
    assert with_l2.digest() == other_l2.digest() == spec.digest()
    assert len({spec.cache_key(), with_l2.cache_key(), other_l2.cache_key()}) == 3
    assert with_l2.agrees(spec)
    assert spec.agrees(with_l2)
    assert not with_l2.agrees(other_l2)


def test_status_changes_the_digest() -> None:
    spec = DeviceSpec.model_validate(MINIMAL)
    assert spec.status == ""
    digests = {DeviceSpec.model_validate({**MINIMAL, "status": s}).digest() for s in ("", "stand-in", "unreleased")}
    assert len(digests) == 3
    assert spec.digest() in digests


def test_digest_of_a_specification_without_later_figures_is_stable() -> None:
    """Stored models, observations and receipts refer to devices by this value."""
    assert DeviceSpec.model_validate(MINIMAL).digest() == "baed8620a8eed51f"
    assert lookup("a100-sxm4-80gb").digest() == "ca1918882b032046"


MEASURED = Ceilings(gemm_flops_fp16=5e13, bytes_per_s=2.5e11, floor_eager_s=2e-5, source="probe")


def with_ceilings() -> DeviceSpec:
    return lookup("t4").model_copy(update={"sustained": MEASURED})


def test_a_device_without_ceilings_keeps_its_digest() -> None:
    # Shipped models know their devices by it.
    assert lookup("t4").digest() == "ab05e4d30819ed1d"
    assert with_ceilings().digest() != lookup("t4").digest()
    assert with_ceilings().nominal() == lookup("t4")
    assert hash(with_ceilings()) != hash(lookup("t4"))


def test_the_source_of_ceilings_is_no_figure() -> None:
    other = lookup("t4").model_copy(update={"sustained": MEASURED.model_copy(update={"source": "elsewhere"})})
    assert other.digest() == with_ceilings().digest()


def test_files_and_requests_have_them_as_a_table() -> None:
    values = with_ceilings().model_dump(mode="json", exclude_none=True)
    rates = {"gemm_flops_fp16": 5e13, "bytes_per_s": 2.5e11, "floor_eager_s": 2e-5}
    assert values["sustained"] == {**rates, "source": "probe"}
    assert from_mapping(values) == with_ceilings()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"bytes_per_s": 320}, "sustained.bytes_per_s"),
        ({"floor_eager_s": 20.0}, "sustained.floor_eager_s"),
        ({"gemm": 1e12}, "sustained.gemm"),
        ("fast", "sustained"),
    ],
)
def test_slips_are_named(wrong: object, message: str) -> None:
    with pytest.raises(InvalidDeviceError, match=message):
        from_mapping({**lookup("t4").model_dump(mode="json", exclude_none=True), "sustained": wrong})


def test_a_missing_figure_has_no_substitute() -> None:
    assert MEASURED.flops("gemm", "float16") == 5e13
    assert MEASURED.flops("gemm", "bfloat16") is None and MEASURED.flops("vector", "float16") is None
    assert MEASURED.floor_s("eager") == 2e-5 and MEASURED.floor_s("graph") is None
    for family in FAMILIES:
        for dtype in BASIC_DTYPES:
            assert flops_field(family, dtype) in Ceilings.model_fields or dtype == "int8" != family
    assert all(f"floor_{protocol}_s" in Ceilings.model_fields for protocol in PROTOCOLS)
