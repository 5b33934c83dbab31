"""Names: aliases of the public tables, nearest names, refused family names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.devices import family, known, lookup, nearest_names
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
    "Intel Xeon Phi 7250 (KNL)": "xeon-phi-7250",
    "Intel Xeon Platinum 8124M": "xeon-platinum-8124m",
    "Intel i9-10940X": "core-i9-10940x",
    "Intel i7-12700H": "core-i7-12700h",
    "Apple M1 GPU (metal)": "apple-m1-pro-gpu",
    "Raspberry Pi 3": "raspberry-pi-3",
    "Apple iPhone 6": "iphone-6",
    "Apple iPhone 7": "iphone-7",
}


@pytest.mark.parametrize(("public", "name"), PUBLIC_NAMES.items())
def test_names_of_the_public_tables(public: str, name: str) -> None:
    assert lookup(public).name == name


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
