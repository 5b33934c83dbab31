"""Names of devices, and the table: complete, physically consistent, every figure with a source."""

import csv
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.devices import DeviceSpec, encode_device, family, known, lookup, nearest_names, sources
from cdmpp.devices.limits import unit_limits
from cdmpp.devices.links import LINKS
from cdmpp.devices.registry import COLUMNS, commonest
from cdmpp.errors import UnknownDeviceError

# Spellings of public tables and of people that the table does not list as they stand.
SPELLINGS = {
    "Tesla K80": "k80",
    "NVIDIA GeForce RTX 3080": "rtx-3080",
    "RTX3090": "rtx-3090",
    "geforce-rtx-3090": "rtx-3090",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "AMD Instinct MI50": "mi50",
    "nvidia h800": "h800",
    "NVIDIA RTX 6000 Ada": "rtx-6000-ada",
    "rtx6000ada": "rtx-6000-ada",
    "A800-SXM": "a800-sxm4-80gb",
    "TPUv6e": "tpu-v6e",
    "Radeon RX 7900 XTX": "rx-7900-xtx",
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_other_spellings_find_their_device(text: str) -> None:
    assert lookup(text).name == SPELLINGS[text]


def test_every_name_and_alias_finds_its_device() -> None:
    for spec in known():
        for text in (spec.name, spec.name.upper(), spec.name.replace("-", " "), *spec.aliases):
            assert lookup(text) is spec


def test_a_family_name_lists_its_boards() -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        lookup("A100")
    for board in ("a100-pcie-40gb", "a100-sxm4-40gb", "a100-pcie-80gb", "a100-sxm4-80gb"):
        assert board in caught.value.message
    assert family("v100") == ["v100-pcie-16gb", "v100-pcie-32gb", "v100-sxm2-16gb", "v100-sxm2-32gb"]
    assert family("") == []


@pytest.mark.parametrize(
    ("typed", "board", "boards"),
    [
        ("a800", "a800-sxm4-80gb", {"a800-sxm4-80gb", "a800-pcie-80gb"}),
        ("mi300", "mi300x", {"mi300x", "mi300a", "mi308x"}),
        ("MI350", "mi350x", {"mi350x", "mi355x"}),
        ("gfx90a", None, {"mi210", "mi250-gcd", "mi250x-gcd"}),
        ("gfx942", None, {"mi300x", "mi325x", "mi300a", "mi308x", "gfx942-tensile"}),
    ],
)
def test_ambiguous_names_list_their_boards(typed: str, board: str | None, boards: set[str]) -> None:
    with pytest.raises(UnknownDeviceError, match="may mean several devices"):
        lookup(typed)
    assert set(family(typed)) == boards
    common = commonest(typed)
    assert (common.name if common else None) == board


@pytest.mark.parametrize(
    ("typed", "board"),
    [
        *[("6000ada", "rtx-6000-ada"), ("DGX H100", "h100-sxm"), ("B200 SXM", "b200"), ("B60", "arc-pro-b60")],
        ("V100 32GB", "v100-sxm2-32gb"),
    ],
)
def test_short_name_system_form_factor_or_memory_in_a_name(typed: str, board: str) -> None:
    common = commonest(typed)
    assert common is not None and common.name == board


def test_longer_name_of_another_board_is_not_one_of_several() -> None:
    with pytest.raises(UnknownDeviceError, match="no device named 'rtx 4070'; nearest known names: rtx-4070-ti"):
        lookup("rtx 4070")


@pytest.mark.parametrize("name", ["AMD gfx1250 256CU", "AMD gfx1250 96CU", "gfx1250"])
def test_chip_without_figures_is_unknown_with_the_reason(name: str) -> None:
    with pytest.raises(UnknownDeviceError, match="gfx1250 is unreleased hardware") as caught:
        lookup(name)
    assert ".toml" in caught.value.hint


def test_an_unknown_name_lists_the_nearest_and_explains_specifications() -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        lookup("a100-pci-40g")
    assert caught.value.code == "unknown_device"
    assert "a100-pcie-40gb" in caught.value.message
    assert ".toml" in caught.value.hint
    assert "clock_hz" in caught.value.hint
    assert nearest_names("rtx 3099")[0] in {"rtx-3090", "rtx-3080", "rtx-3070"}


@given(st.text(max_size=300))
def test_any_text_finds_a_device_or_a_clear_error(text: str) -> None:
    try:
        lookup(text)
    except UnknownDeviceError as error:
        assert len(error.message) < 600
        assert error.hint


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
        half = spec.peak("float16", True)
        assert half >= spec.peak("float32", True), spec.name
        assert spec.peak("int8", True) >= 0.99 * half, spec.name
        assert 1 <= spec.peak_flops_fp32 / spec.mem_bandwidth_bytes_per_s <= 1000, spec.name
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
    chips = ("900-vega10", "906-vega20", "906-mi50-mi60", "942-tensile", "950-mi350x-mi355x", "1030-navi21")
    assert stand_ins == {f"gfx{chip}" for chip in (*chips, "1102-navi33")}
    assert not [spec.name for spec in known() if spec.status == "unreleased"]
    links = {name: lookup(name).link for name in ("a100-sxm4-80gb", "a800-sxm4-80gb", "h100-sxm", "h800", "b200")}
    assert {spec.link for spec in known() if spec.link} <= set(LINKS)
    assert list(links.values()) == ["nvlink3", "nvlink3-400", "nvlink4", "nvlink4-400", "nvlink5"]


def test_remarks_on_one_chip_of_a_board_and_on_an_unstated_board() -> None:
    k80 = lookup("k80")
    assert (k80.compute_units * k80.cores_per_unit, k80.l2_bytes) == (2496, 3 * 2**19)
    assert k80.mem_bandwidth_bytes_per_s == 240e9
    assert "one of the board's two GK210 chips" in k80.source
    assert "bennu does not state the board" in lookup("NVIDIA A100 (bennu)").source


def test_limits_of_units_by_architecture() -> None:
    kepler, vega = unit_limits(lookup("k80")), unit_limits(lookup("mi50"))
    assert (kepler.threads, kepler.blocks, kepler.shared_bytes, kepler.registers) == (2048, 16, 112 * 1024, 131072)
    assert (vega.warp, vega.threads, vega.shared_bytes, vega.registers) == (64, 2560, 64 * 1024, 65536)
    assert unit_limits(lookup("mi250x-gcd")).registers_per_thread == 512  # gfx90a, not gfx9


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
    assert t4.memory_bytes == 14.75 * 2**30 and t4.nominal_memory_bytes == t4.sheet_memory_bytes == 16e9
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


@pytest.mark.parametrize(
    ("name", "bytes_"),
    [
        ("p100-pcie-16gb", 17.07e9),
        ("v100-sxm2-32gb", 34.1e9),
        ("rtx-3090", 25.3e9),
        ("h20", 102e9),
        ("h100-sxm", 84.9e9),
        ("h200", 150.1e9),
        ("a100-sxm4-40gb", 42.4e9),
        ("mi300x", 206.1e9),
        ("mi250x-gcd", 68.7e9),
    ],
)
def test_memory_is_what_drivers_report(name: str, bytes_: float) -> None:
    spec = lookup(name)
    assert spec.memory_bytes == pytest.approx(bytes_, rel=0.002)
    assert "memory_gib: total device memory as" in spec.source


def test_every_capacity_has_a_source_and_is_no_input_of_the_network() -> None:
    for spec in known():
        if spec.nominal_memory_bytes is None:
            assert spec.memory_bytes is None
            continue
        assert spec.memory_bytes is not None and (spec.status or "memory_gib: " in spec.source), spec.name
        assert 0.91 < spec.memory_bytes / spec.nominal_memory_bytes < 1.0738, spec.name
        sheet = spec.model_copy(update={"memory_bytes": spec.nominal_memory_bytes, "nominal_memory_bytes": None})
        assert sheet.digest() == spec.digest() and (encode_device(sheet) == encode_device(spec)).all()
