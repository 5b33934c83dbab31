"""The table of devices: complete, physically consistent, every figure with a source."""

from __future__ import annotations

import csv
from importlib.resources import files

import pytest

from cdmpp.devices import DeviceSpec, known, lookup, sources
from cdmpp.devices.links import LINKS
from cdmpp.devices.registry import COLUMNS

ROWS = list(csv.DictReader(files("cdmpp.devices").joinpath("table.csv").read_text("utf-8").splitlines()))

# Vector peaks above 2 x units x cores x clock: packed (CDNA3) and dual issue (RDNA3); the sheet's
# rounded figure for the two Grace boards.
PEAK_ABOVE_CLOCK = {
    **dict.fromkeys(("mi300x", "mi325x", "mi300a", "mi308x", "gfx942-tensile"), 2.0),
    **dict.fromkeys(("mi350x", "mi355x", "gfx950-mi350x-mi355x"), 2.0),
    **dict.fromkeys(("pro-w7800", "rx-7900-xtx", "gfx1102-navi33"), 2.0),
    **dict.fromkeys(("gb200", "gb300"), 1.046),
}


def test_every_figure_names_a_known_document() -> None:
    documents = sources()
    used = set()
    for row in ROWS:
        used.add(row["source"])
        for item in filter(None, row["source_of"].split(";")):
            column, key = item.split("=")
            assert column in row, (row["name"], column)
            assert row[column], f"{row['name']}: a source for the missing {column}"
            used.add(key)
    assert used == set(documents)


def test_names_are_slugs_and_unique() -> None:
    names = [row["name"] for row in ROWS]
    assert len(set(names)) == len(names)
    for name in names:
        assert name == name.lower().strip()
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_vector_peak_follows_from_units_and_clock() -> None:
    for spec in known():
        by_clock = 2.0 * spec.compute_units * spec.cores_per_unit * spec.clock_hz
        expected = by_clock * PEAK_ABOVE_CLOCK.get(spec.name, 1.0)
        assert spec.peak_flops_fp32 == pytest.approx(expected, rel=0.02), spec.name


def test_rates_are_in_a_plausible_order() -> None:
    for spec in known():
        assert spec.peak("float32", True) >= spec.peak_flops_fp32, spec.name
        assert spec.peak("float16", True) >= spec.peak("float32", True), spec.name
        assert spec.peak("int8", True) >= 0.99 * spec.peak("float16", True), spec.name
        assert 1 <= spec.peak_flops_fp32 / spec.mem_bandwidth_bytes_per_s <= 1000, spec.name


def test_matrix_rates_of_further_types_are_in_a_plausible_order() -> None:
    for spec in known():
        half = spec.peak("float16", True)
        assert spec.peak("float4_e2m1", True) >= spec.peak("float8_e4m3", True) >= half, spec.name
        assert spec.peak("float64", True) <= max(spec.peak("float32", True), 2 * spec.peak_flops_fp32), spec.name
        assert spec.peak_flops_fp32 <= 1.01 * spec.peak("tfloat32", True), spec.name
        assert spec.peak("tfloat32", True) <= half, spec.name
        if spec.l2_bandwidth_bytes_per_s is not None:
            assert spec.l2_bandwidth_bytes_per_s > spec.mem_bandwidth_bytes_per_s, spec.name
        if spec.sustained_clock_hz is not None:
            assert spec.sustained_clock_hz <= spec.clock_hz, spec.name


def test_matrix_peak_follows_from_operations_per_cycle() -> None:
    """Data sheets state some peaks at a clock below the highest one: up to 14 % (the Hopper PCIe boards)."""
    for spec in known():
        if spec.matrix_flops_per_cycle_per_unit is not None:
            clock = spec.sustained_clock_hz or spec.clock_hz
            at_clock = spec.matrix_flops_per_cycle_per_unit * spec.compute_units * clock
            assert 0.85 <= spec.peak("float16", True) / at_clock <= 1.04, spec.name


def test_status_and_links_of_the_table() -> None:
    stand_ins = {spec.name for spec in known() if spec.status == "stand-in"}
    assert stand_ins == {
        "gfx900-vega10",
        "gfx906-vega20",
        "gfx906-mi50-mi60",
        "gfx942-tensile",
        "gfx950-mi350x-mi355x",
        "gfx1030-navi21",
        "gfx1102-navi33",
    }
    assert not [spec.name for spec in known() if spec.status == "unreleased"]
    links = {name: lookup(name).link for name in ("a100-sxm4-80gb", "a800-sxm4-80gb", "h100-sxm", "h800", "b200")}
    assert {spec.link for spec in known() if spec.link} <= set(LINKS)
    assert list(links.values()) == ["nvlink3", "nvlink3-400", "nvlink4", "nvlink4-400", "nvlink5"]


def test_figures_of_the_hardware_file() -> None:
    h100, h20 = lookup("h100-sxm"), lookup("h20")
    assert (h100.l2_bandwidth_bytes_per_s, h20.l2_bandwidth_bytes_per_s) == (8820e9, 8815e9)
    assert h100.sustained_clock_hz == h20.sustained_clock_hz == 1830e6
    assert (h100.matrix_flops_per_cycle_per_unit, h20.matrix_flops_per_cycle_per_unit) == (4096, 1024)
    assert lookup("l20").matrix_flops_per_cycle_per_unit == lookup("l40").matrix_flops_per_cycle_per_unit == 512
    assert lookup("t4").l2_bandwidth_bytes_per_s is None


def test_units_of_the_table_become_base_units() -> None:
    t4 = lookup("t4")
    assert t4.clock_hz == 1590e6
    assert t4.memory_bytes == 16e9
    assert t4.mem_bandwidth_bytes_per_s == 320e9
    assert t4.peak_flops_fp32 == 8.1e12
    assert t4.peak_flops_fp16_matrix == 65e12
    assert t4.l2_bytes == 4 * 2**20
    assert t4.tdp_w == 70
    assert {field for field, _ in COLUMNS.values()} <= set(DeviceSpec.model_fields)


def test_corrections_to_the_public_table_are_kept() -> None:
    assert (lookup("p4").compute_units, lookup("p4").cores_per_unit) == (20, 128)
    assert lookup("l4").compute_units == 58
    assert lookup("v100-pcie-32gb").clock_hz == 1380e6
    assert lookup("rtx-3090").peak_flops_fp16_matrix == 71e12  # fp32 accumulation
    assert lookup("mi210").peak_flops_fp32_matrix == 45.3e12
    assert lookup("mi210").l2_bytes == 8 * 2**20
