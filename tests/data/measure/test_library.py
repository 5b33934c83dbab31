"""Timing of library kernels on this CPU, and on a GPU if there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cdmpp.data.measure.library import LibraryTimer
from cdmpp.data.measure.timing import TimingSettings
from cdmpp.data.measure.timing_devices import TimingDevice, find_timing_device, free_bytes
from cdmpp.data.records import from_measurements, read_records, write_records
from cdmpp.devices import lookup
from cdmpp.devices.host import this_cpu
from cdmpp.errors import InvalidDeviceError, MeasurementError
from cdmpp.programs.operators import parse_operator
from tests.data.test_device_specs import cpu

QUICK = TimingSettings(repeat_s=1e-4, total_s=1e-3)


@pytest.fixture
def place() -> TimingDevice:
    return find_timing_device("cpu", cpu("mine"), threads=1)


def test_larger_program_takes_longer(place: TimingDevice) -> None:
    with LibraryTimer(place, "eager", QUICK).ready() as timer:
        small, large = (timer.time(parse_operator(f"linear:m={m},n=256,k=256")) for m in (4, 1024))
    assert 0 < small.latency_s < large.latency_s < 1
    assert len(small.repeats_s) >= 3


def test_record_round_trip(place: TimingDevice, tmp_path: Path) -> None:
    specs = [parse_operator(t) for t in ("softmax:rows=8,cols=16", "softmax:rows=8,cols=16,dtype=int8")]
    with LibraryTimer(place, "eager", QUICK).ready() as timer:
        rows = [timer.record(spec, "probe") for spec in specs]
    write_records(from_measurements(rows), tmp_path / "records.parquet")
    table = read_records(tmp_path / "records.parquet")
    assert table.device.used() == ("mine",) and table.device_spec("mine") == cpu("mine")
    assert (table.protocol[0], table.framework[0], table.backend[0]) == ("eager", "pytorch", "library")
    assert table.latency_s[0] == rows[0].latency_s
    assert table.failed.tolist() == [False, True]
    assert "int8" in table.failure[1]  # type: ignore[index]
    assert table.program_hashes[table.program_key[0]] == specs[0].hash()


def test_pytorch_settings_are_restored(place: TimingDevice) -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), LibraryTimer(place, "eager", QUICK).ready():
        assert torch.get_num_threads() == 1
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == before and not torch.is_inference_mode_enabled()


def test_memory_is_checked_before_allocation(place: TimingDevice) -> None:
    timer = LibraryTimer(place, "eager", QUICK)
    with pytest.raises(MeasurementError, match="GiB may be used"):
        timer.time(parse_operator("relu:rows=1000000,cols=1000000"))
    small = LibraryTimer(place, "eager", QUICK, memory_bytes=1e4)
    with pytest.raises(MeasurementError, match="needs"):
        small.time(parse_operator("relu:rows=100,cols=100"))
    assert free_bytes(place) > 1e7


def test_pytorch_errors_become_measurement_errors(place: TimingDevice) -> None:
    with (
        LibraryTimer(place, "eager", QUICK).ready() as timer,
        pytest.raises(MeasurementError, match="PyTorch cannot run max_pool2d"),
    ):
        timer.time(parse_operator("max_pool2d:n=1,c=1,h=8,w=8,kh=2,kw=2,pad_h=2,pad_w=2"))


@pytest.mark.parametrize("protocol", ["kernel", "graph", "cuda"])
def test_gpu_protocols_are_refused_on_a_cpu(place: TimingDevice, protocol: str) -> None:
    with pytest.raises(MeasurementError, match=protocol):
        LibraryTimer(place, protocol)


def test_missing_devices_are_refused() -> None:
    with pytest.raises(MeasurementError, match="cannot measure on 'tpu'"):
        find_timing_device("tpu")
    with pytest.raises(InvalidDeviceError, match="not a CPU"):
        find_timing_device("cpu", "t4")
    with pytest.raises(MeasurementError, match="threads"):
        find_timing_device("cpu", cpu("mine"), threads=99_999)
    with pytest.raises(InvalidDeviceError, match="not xeon-phi-7250"):
        find_timing_device("cpu", "xeon-phi-7250")
    if not torch.cuda.is_available():
        with pytest.raises(MeasurementError, match="finds 0 CUDA devices"):
            find_timing_device("cuda:0", "t4")


def test_driver_identifies_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Tesla T4")
    assert find_timing_device("cuda").device == lookup("t4")
    with pytest.raises(InvalidDeviceError, match="is a t4, not a l4"):
        find_timing_device("cuda:0", "l4")
    with pytest.raises(MeasurementError, match="there is no number 1"):
        find_timing_device("cuda:1")


def test_cpu_name_has_the_widest_instruction_set() -> None:
    try:
        found = this_cpu(1)
    except InvalidDeviceError:
        pytest.skip("a CPU that cdmpp cannot describe")
    assert found.kind == "cpu" and found.compute_units == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_protocols_are_ordered() -> None:
    place = find_timing_device("cuda")
    spec = parse_operator("relu:rows=128,cols=128")
    figures = {}
    for protocol in ("kernel", "graph", "eager"):
        with LibraryTimer(place, protocol, TimingSettings()).ready() as timer:
            figures[protocol] = timer.time(spec).latency_s
    assert 1e-7 < figures["kernel"] < 1.1 * figures["graph"] < 1.2 * figures["eager"]
