"""Sustained ceilings as part of a specification."""

from __future__ import annotations

import pytest

from cdmpp.devices import DeviceSpec, from_mapping, lookup
from cdmpp.devices.spec import FAMILIES, Ceilings, flops_field
from cdmpp.errors import InvalidDeviceError
from cdmpp.programs.elements import BASIC_DTYPES
from cdmpp.programs.query_options import PROTOCOLS

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
    assert values["sustained"] == {
        "gemm_flops_fp16": 5e13,
        "bytes_per_s": 2.5e11,
        "floor_eager_s": 2e-5,
        "source": "probe",
    }
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
