"""The table of devices: complete, physically consistent, every figure with a source."""

from __future__ import annotations

import csv
from importlib.resources import files

import pytest

from cdmpp.devices import DeviceSpec, known, lookup, sources
from cdmpp.devices.table import COLUMNS

ROWS = list(csv.DictReader(files("cdmpp.devices").joinpath("table.csv").read_text("utf-8").splitlines()))

# Vector peaks above 2 x units x cores x clock: packed (CDNA3) and dual issue (RDNA3); the sheet's
# rounded figure for the two Grace boards.
PEAK_ABOVE_CLOCK = {"mi300x": 2.0, "mi325x": 2.0, "pro-w7800": 2.0, "gb200": 1.046, "gb300": 1.046}


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


@pytest.mark.parametrize("spec", known(), ids=lambda spec: spec.name)
def test_vector_peak_follows_from_units_and_clock(spec: DeviceSpec) -> None:
    by_clock = 2.0 * spec.compute_units * spec.cores_per_unit * spec.clock_hz
    expected = by_clock * PEAK_ABOVE_CLOCK.get(spec.name, 1.0)
    assert spec.peak_flops_fp32 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("spec", known(), ids=lambda spec: spec.name)
def test_rates_are_in_a_plausible_order(spec: DeviceSpec) -> None:
    assert spec.peak("float32", True) >= spec.peak_flops_fp32
    assert spec.peak("float16", True) >= spec.peak("float32", True)
    assert spec.peak("int8", True) >= 0.99 * spec.peak("float16", True)
    assert 1 <= spec.peak_flops_fp32 / spec.mem_bandwidth_bytes_per_s <= 1000


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
