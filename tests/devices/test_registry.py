"""Names: aliases of the public tables, nearest names, refused family names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.devices import family, known, lookup, nearest_names
from cdmpp.devices.registry import commonest
from cdmpp.errors import UnknownDeviceError

# The `device` column of the public tables, and the device it means here.
PUBLIC_NAMES = {
    "Tesla P4": "p4",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla P100 (DeepBench)": "p100-pcie-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "NVIDIA V100 (DGX-1, SXM2)": "v100-sxm2-32gb",
    "Tesla T4": "t4",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm4-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm4-80gb",
    "NVIDIA A100 80GB (vidur)": "a100-sxm4-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 80GB (vidur)": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A40": "a40",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300": "b300",
    "NVIDIA GB300": "gb300",
    "NVIDIA RTX PRO 6000 Blackwell Server": "rtx-pro-6000-server",
    "NVIDIA RTX PRO 6000 Max-Q": "rtx-pro-6000-max-q",
    "Intel Arc Pro B60": "arc-pro-b60",
    "NVIDIA RTX A4000": "rtx-a4000",
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA RTX 3060 Laptop": "rtx-3060-laptop",
    "NVIDIA RTX 3090": "rtx-3090",
    "NVIDIA RTX 4090": "rtx-4090",
    "NVIDIA RTX 5090": "rtx-5090",
    "NVIDIA RTX 2080 Ti": "rtx-2080-ti",
    "GeForce RTX 2080 Ti": "rtx-2080-ti",
    "NVIDIA TITAN RTX": "titan-rtx",
    "TITAN RTX": "titan-rtx",
    "NVIDIA TITAN V": "titan-v",
    "TITAN V": "titan-v",
    "NVIDIA GTX 1080 Ti": "gtx-1080-ti",
    "NVIDIA TITAN Xp": "titan-xp",
    "TITAN Xp": "titan-xp",
    "NVIDIA TITAN X (Pascal)": "titan-x-pascal",
    "NVIDIA TITAN X (Maxwell)": "titan-x-maxwell",
    "NVIDIA Tesla M40": "m40",
    "AMD Instinct MI100": "mi100",
    "AMD gfx908 120CU (MI100)": "mi100",
    "AMD Instinct MI210": "mi210",
    "AMD gfx90a 104CU (MI210)": "mi210",
    "AMD Instinct MI250": "mi250-gcd",
    "AMD gfx90a 110CU (MI250X GCD)": "mi250x-gcd",
    "AMD MI250X": "mi250x-gcd",
    "AMD gfx942 304CU (MI300X)": "mi300x",
    "AMD gfx900 56CU": "rx-vega-56",
    "AMD gfx906 60CU": "mi50",
    "AMD gfx906 64CU": "mi60",
    "AMD gfx1030 36WGP": "rx-6800-xt",
    "AMD W6600": "pro-w6600",
    "AMD W7800": "pro-w7800",
    "AMD Radeon Instinct MI25": "mi25",
    "AMD Radeon Vega Frontier Edition": "vega-frontier-edition",
    "NVIDIA H20": "h20",
    "NVIDIA H800": "h800",
    "NVIDIA L20": "l20",
    "NVIDIA L40": "l40",
    "NVIDIA RTX 6000 Ada": "rtx-6000-ada",
    "NVIDIA A800-SXM4-80GB": "a800-sxm4-80gb",
    "AMD gfx942 80CU (MI308X)": "mi308x",
    "AMD gfx942 (Tensile)": "gfx942-tensile",
    "AMD gfx950 256CU (MI350X/MI355X)": "gfx950-mi350x-mi355x",
    "AMD gfx906 (Vega20)": "gfx906-vega20",
    "AMD gfx906 (MI50/MI60)": "gfx906-mi50-mi60",
    "AMD gfx900 (Vega10)": "gfx900-vega10",
    "AMD gfx803 (R9 Nano)": "r9-nano",
    "AMD gfx1030 (Navi21)": "gfx1030-navi21",
    "AMD gfx1102 (Navi33)": "gfx1102-navi33",
    "Google TPU v6e": "tpu-v6e",
    "Intel Xeon Phi 7250 (KNL)": "xeon-phi-7250",
    "Intel Xeon Platinum 8124M": "xeon-platinum-8124m",
    "Intel i9-10940X": "core-i9-10940x",
    "Intel i7-12700H": "core-i7-12700h",
    "Apple M1 GPU (metal)": "apple-m1-pro-gpu",
    "Raspberry Pi 3": "raspberry-pi-3",
    "Apple iPhone 6": "iphone-6",
    "Apple iPhone 7": "iphone-7",
}


def test_names_of_the_public_tables() -> None:
    for public, name in PUBLIC_NAMES.items():
        assert lookup(public).name == name, public


def test_every_name_and_alias_finds_its_device() -> None:
    for spec in known():
        for text in (spec.name, spec.name.upper(), spec.name.replace("-", " "), *spec.aliases):
            assert lookup(text) is spec


@pytest.mark.parametrize("text", ["RTX3090", "rtx 3090", "geforce-rtx-3090", "NVIDIA GeForce RTX 3090"])
def test_case_and_punctuation_do_not_matter(text: str) -> None:
    assert lookup(text).name == "rtx-3090"


def test_a_family_name_lists_its_boards() -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        lookup("A100")
    for board in ("a100-pcie-40gb", "a100-sxm4-40gb", "a100-pcie-80gb", "a100-sxm4-80gb"):
        assert board in caught.value.message
    assert family("v100") == ["v100-pcie-16gb", "v100-pcie-32gb", "v100-sxm2-16gb", "v100-sxm2-32gb"]
    assert family("") == []


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H20", "h20"),
        ("nvidia h800", "h800"),
        ("rtx6000ada", "rtx-6000-ada"),
        ("AMD Instinct MI350X", "mi350x"),
        ("MI355X", "mi355x"),
        ("tpu v6e", "tpu-v6e"),
        ("TPUv6e", "tpu-v6e"),
        ("v6e", "tpu-v6e"),
        ("A800-SXM", "a800-sxm4-80gb"),
        ("GeForce RTX 5080", "rtx-5080"),
        ("Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("GH200", "gh200"),
    ],
)
def test_names_as_people_type_them(typed: str, name: str) -> None:
    assert lookup(typed).name == name


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


def test_short_name_of_a_workstation_board() -> None:
    board = commonest("6000ada")
    assert board is not None
    assert board.name == "rtx-6000-ada"


@pytest.mark.parametrize(
    ("typed", "board"),
    [("DGX H100", "h100-sxm"), ("B200 SXM", "b200"), ("B60", "arc-pro-b60"), ("V100 32GB", "v100-sxm2-32gb")],
)
def test_system_form_factor_or_memory_in_a_name(typed: str, board: str) -> None:
    found = commonest(typed)
    assert found is not None
    assert found.name == board


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
