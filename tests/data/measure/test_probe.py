"""Micro-benchmarks of a probe: bounded sizes, derived peak rates, and rejected ones."""

from dataclasses import replace

import pytest

from cdmpp.data.measure.probe import probe, probe_programs
from cdmpp.data.physics import UNSTABLE, needed_bytes
from cdmpp.data.records import Measurement
from cdmpp.devices import DeviceSpec, known, lookup
from cdmpp.programs.operators import OperatorSpec, parse_operator

ALL_TYPES = ("float32", "float16", "bfloat16", "int8")


def synthetic(device: DeviceSpec, share: float = 0.8) -> list[tuple[OperatorSpec, Measurement]]:
    """Every program of a probe at ``share`` of the nominal rates behind a launch of 10 µs."""
    from cdmpp.data.physics import uses_matrix_units, work
    from cdmpp.data.records import from_measurements

    specs = probe_programs(device, ALL_TYPES, 2**30)
    table = from_measurements([Measurement(s.text(), "operator", device.name, 1.0) for s in specs])
    found: dict[int, Measurement] = {}
    for block in table.specs:
        flops, moved = work(block.operator, block.dtype, block.flags, block.sizes)
        peak = share * device.peak(block.dtype, uses_matrix_units(block.operator))
        for row, f, m in zip(block.row_index, flops, moved, strict=True):
            latency = 1e-5 + max(f / peak, m / (share * device.mem_bandwidth_bytes_per_s))
            found[int(row)] = Measurement(
                specs[row].text(),
                "operator",
                device.name,
                latency,
                protocol="eager",
                device_spec=device,
                provenance={"date": "2026-11-21"},
            )
    return [(spec, found[row]) for row, spec in enumerate(specs)]


def test_number_of_programs_is_bounded_and_they_are_distinct() -> None:
    for device in known():
        for memory in (2**30, 2**27):
            specs = probe_programs(device, ALL_TYPES, memory)
            assert 12 <= len(specs) <= 32, device.name
            assert len({s.hash() for s in specs}) == len(specs), device.name
            assert all(needed_bytes(s, gpu=device.kind == "gpu") <= memory for s in specs), device.name


@pytest.mark.parametrize("name", ["t4", "a100-pcie-40gb", "h100-sxm", "raspberry-pi-3"])
def test_peak_rates_are_derived(name: str) -> None:
    device = lookup(name)
    rows = dict((spec.hash(), record) for spec, record in synthetic(device))
    result = probe(device, [s for s, _ in synthetic(device)], lambda spec: rows[spec.hash()])
    assert result.warnings == ()
    assert result.device.nominal() == device
    ceilings = result.device.sustained
    assert ceilings is not None and "2026-11-21" in ceilings.source
    for dtype in ("float32", "float16"):
        found = ceilings.flops("gemm", dtype)
        assert found == pytest.approx(0.8 * device.peak(dtype, True), rel=0.05)
    if device.l2_bytes:
        assert ceilings.bytes_per_s == pytest.approx(0.8 * device.mem_bandwidth_bytes_per_s, rel=0.1)
    assert ceilings.floor_eager_s == pytest.approx(1e-5, rel=0.05)


def test_implausible_peak_rate_is_reported_and_rejected() -> None:
    device = lookup("t4")
    rows = {s.hash(): replace(r, latency_s=(r.latency_s or 0) / 4) for s, r in synthetic(device)}
    result = probe(device, [s for s, _ in synthetic(device)], lambda spec: rows[spec.hash()])
    assert {w.code for w in result.warnings} == {"ceiling_above_nominal"}
    assert result.device.sustained is not None
    assert result.device.sustained.gemm_flops_fp16 is None and result.device.sustained.bytes_per_s is None
    assert all(r.latency_s is not None for r in result.records)  # measured is measured


def test_noisy_program_is_measured_again_once() -> None:
    spec = parse_operator("relu:rows=1,cols=1")
    noisy = Measurement(spec.text(), "operator", "t4", 2e-5, protocol="eager", excluded_reason=UNSTABLE)
    answers = [noisy, replace(noisy, latency_s=1e-5, excluded_reason="")]
    assert probe(lookup("t4"), [spec], lambda _: answers.pop(0)).records[0].latency_s == 1e-5
    still = [noisy, noisy]
    result = probe(lookup("t4"), [spec], lambda _: still.pop(0))
    assert result.records[0].excluded_reason == UNSTABLE and not still
    assert result.device.sustained is not None and result.device.sustained.floor_eager_s == 2e-5


def test_no_peak_rates_without_measurements() -> None:
    spec = parse_operator("relu:rows=1,cols=1")
    failed = Measurement(spec.text(), "operator", "t4", None, protocol="eager", failure="no kernel")
    result = probe(lookup("t4"), [spec], lambda _: failed)
    assert result.device == lookup("t4") and result.records == (failed,)
