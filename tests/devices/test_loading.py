"""User-defined specifications: mapping, JSON and TOML files, their errors, and the text that is read back."""

from pathlib import Path

import pytest

from cdmpp.devices import SPECIFICATION_EXAMPLE, from_mapping, host, known, load_device, lookup, resolve_device
from cdmpp.devices.loading import specification_toml
from cdmpp.devices.spec import Ceilings
from cdmpp.errors import InvalidDeviceError, UnknownDeviceError


def test_the_documented_example_loads(tmp_path: Path) -> None:
    path = tmp_path / "my-gpu.toml"
    path.write_text(SPECIFICATION_EXAMPLE, encoding="utf-8")
    spec = load_device(str(path))
    assert spec.name == "my-gpu"
    assert spec.peak("float16", True) == 80.2e12
    assert spec.source == "user"


def test_a_known_device_survives_json(tmp_path: Path) -> None:
    path = tmp_path / "T4.JSON"
    path.write_text(lookup("t4").model_dump_json(), encoding="utf-8")
    assert load_device(str(path)) == lookup("t4")


def test_a_name_is_looked_up() -> None:
    assert load_device("Tesla T4").name == "t4"
    with pytest.raises(UnknownDeviceError):
        load_device("some/where/else")


def test_native_is_this_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    names = {1: "xeon-platinum-8124m", 2: "not-known"}
    monkeypatch.setattr(host, "available_cores", lambda: (0, 1))
    monkeypatch.setattr(host, "_widest", lambda threads: (names[threads], "avx2"))
    measured = lookup("t4").model_copy(update={"name": "not-known"})
    monkeypatch.setattr(host, "host_device", lambda threads, isa: measured)
    assert load_device("native@1") == lookup("xeon-platinum-8124m")
    assert load_device("native", {"not-known": lookup("l4")}.__getitem__) == lookup("l4")
    assert not caplog.messages
    assert load_device("native") == measured
    assert "cdmpp devices native > my-cpu.toml" in caplog.text
    for text in ("native@0", "native@3"):
        with pytest.raises(InvalidDeviceError, match=f"{text}: this process may use 2 cores"):
            load_device(text)
    with pytest.raises(UnknownDeviceError):
        load_device("nativ")


def test_missing_and_unknown_fields_are_named() -> None:
    with pytest.raises(InvalidDeviceError) as caught:
        from_mapping({"name": "x", "clock_mhz": 1400})
    assert "clock_hz" in caught.value.message
    assert "clock_mhz" in caught.value.message
    assert caught.value.code == "invalid_device"
    assert "peak_flops_fp32" in caught.value.hint


def test_a_slip_of_units_is_explained() -> None:
    good = lookup("t4").model_dump()
    with pytest.raises(InvalidDeviceError, match="check the units"):
        from_mapping({**good, "peak_flops_fp32": 8.1e9})


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", b"{", "not valid JSON"),
        ("a.json", b"[1]", "no table"),
        ("a.json", b"\xff\xfe", "not valid JSON"),
        ("a.json", b"[" * 50_000, "not valid JSON"),
        ("a.json", b'{"clock_hz": NaN}', "clock_hz"),
        ("a.toml", b"name = ", "not valid TOML"),
        ("a.toml", b"#" * 70_000, "more than 65,536 bytes"),
    ],
)
def test_bad_files_are_clear_errors(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidDeviceError, match=expected) as caught:
        load_device(str(tmp_path / name))
    assert caught.value.hint


def test_an_absent_file_and_a_folder_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidDeviceError, match="cannot be read"):
        load_device(str(tmp_path / "absent.json"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InvalidDeviceError, match="cannot be read"):
        load_device(str(tmp_path / "folder.toml"))


def test_every_known_device(tmp_path: Path) -> None:
    for spec in known():
        path = tmp_path / "device.toml"
        path.write_text(specification_toml(spec, "a comment"), encoding="utf-8")
        assert load_device(str(path)) == spec, spec.name


def test_ceilings_and_odd_texts(tmp_path: Path) -> None:
    spec = lookup("t4").model_copy(
        update={
            "sustained": Ceilings(bytes_per_s=2.5e11, floor_graph_s=1.25e-6, source="probe"),
            "source": 'it "says" so\\: Büro 🙂 \x7f\n\ttwo lines',
        }
    )
    path = tmp_path / "device.toml"
    path.write_text(specification_toml(spec), encoding="utf-8")
    assert load_device(str(path)) == spec


@pytest.mark.parametrize(
    "name",
    ["v100-sxm2-16gb", "a100-sxm4-80gb", "rtx-4090", "h100-sxm", "b200", "mi210", "mi355x", "tpu-v6e", "arc-pro-b60"],
)
def test_matrix_units_without_a_rate_are_asked_for(name: str) -> None:
    spec = lookup(name)
    fields = spec.model_dump(exclude={"peak_flops_fp16_matrix", "peak_flops_bf16_matrix"}, exclude_none=True)
    with pytest.raises(InvalidDeviceError, match=r"peak_flops_fp16_matrix: .* has matrix units") as caught:
        resolve_device({**fields, "name": "mine"}, lookup)
    assert spec.name == "tpu-v6e" or "by its units and clock" in caught.value.hint


SPELLINGS = "sm90;SM90;sm 90;sm-90a;compute_90;compute capability 9.0;9.0;12.0;Ada Lovelace;RDNA-3;ascend910b"


@pytest.mark.parametrize("arch", SPELLINGS.split(";"))
def test_other_spellings_of_architectures_with_matrix_units(arch: str) -> None:
    fields = lookup("h100-sxm").model_dump(exclude={"peak_flops_fp16_matrix"}, exclude_none=True)
    with pytest.raises(InvalidDeviceError, match="has matrix units"):
        resolve_device({**fields, "name": "mine", "arch": arch}, lookup)


@pytest.mark.parametrize("arch", ["sm_61", "sm61", "compute_60", "6.1", "sm_13", "gfx906"])
def test_other_spellings_of_architectures_without_matrix_units(arch: str) -> None:
    fields = lookup("p40").model_dump(exclude_none=True)
    assert resolve_device({**fields, "name": "mine", "arch": arch}, lookup).peak_flops_fp16_matrix is None


@pytest.mark.parametrize("name", ["p40", "m40", "mi25", "xeon-phi-7250", "apple-m1-pro-gpu"])
def test_devices_without_matrix_units_need_no_rate(name: str) -> None:
    fields = lookup(name).model_dump(exclude={"peak_flops_fp16_matrix"}, exclude_none=True)
    assert resolve_device({**fields, "name": "mine"}, lookup).peak_flops_fp16_matrix is None
