"""Records that bring their device: nothing is lost on the way, and one name stays one device."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdmpp.data.device_specs import SAME_DEVICE_FACTOR, disagreement, parse_spec, spec_text
from cdmpp.data.load import load_table
from cdmpp.data.physics import table_roofline_s
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.data.splits import split_by_device
from cdmpp.data.summary import fingerprint
from cdmpp.data.table import concat
from cdmpp.devices import DeviceSpec, known, lookup
from cdmpp.errors import DataError, InvalidDeviceError, UnknownDeviceError


def cpu(name: str = "my-cpu-1t", **changes: object) -> DeviceSpec:
    values = {
        "name": name,
        "vendor": "Intel",
        "arch": "x86-64",
        "kind": "cpu",
        "compute_units": 1,
        "cores_per_unit": 16,
        "clock_hz": 2.6e9,
        "mem_bandwidth_bytes_per_s": 11.25e9,
        "peak_flops_fp32": 2 * 16 * 2.6e9,
        "l2_bytes": 2.0**25,
        "source": "detected",
    }
    return DeviceSpec.model_validate(values | changes)


def row(device: DeviceSpec | str, /, **changes: object) -> Measurement:
    spec = device if isinstance(device, DeviceSpec) else None
    name = device.name if isinstance(device, DeviceSpec) else device
    fields = {
        "program": "softmax:rows=4096,cols=512",
        "program_kind": "operator",
        "device": name,
        "latency_s": 1e-2,
        "device_spec": spec,
    }
    return Measurement(**(fields | changes))


def test_a_specification_survives_its_text() -> None:
    for spec in known():
        again = parse_spec(spec_text(spec))
        assert again == spec, spec.name
        assert again.digest() == spec.digest(), spec.name
        assert spec_text(again) == spec_text(spec), spec.name


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 10_000, '{"name": "x"}', '"t4"'])
def test_other_texts_are_no_specification(text: str) -> None:
    with pytest.raises(InvalidDeviceError):
        parse_spec(text)


def test_rows_of_a_device_in_no_table_are_for_training(tmp_path) -> None:
    spec = cpu()
    table = from_measurements([row(spec), row("t4", latency_s=1e-4), row("nobody-s-device")])
    assert table.unsupported.array().tolist() == ["", "", "unknown_device"]
    assert table.trainable.tolist() == [True, True, False]
    assert table.device_spec("my-cpu-1t") == spec
    assert table.device_spec("t4") == lookup("t4")
    with pytest.raises(UnknownDeviceError):
        table.device_spec("nobody-s-device")
    bound = table_roofline_s(table)
    assert bound[0] == pytest.approx(2 * 4 * 4096 * 512 / spec.mem_bandwidth_bytes_per_s)
    assert np.isfinite(bound).tolist() == [True, True, False]
    out = tmp_path / "records.parquet"
    write_records(table.select(np.array([2, 0])), out)
    again = load_table(out)
    assert again.device_specs == {"my-cpu-1t": spec}
    assert again.unsupported.array().tolist() == ["unknown_device", ""]
    write_records(concat([from_measurements([row("t4")]), again]), out)
    assert load_table(out).device_spec("my-cpu-1t") == spec
    column = pq.read_table(out).column("device_spec").to_pylist()
    assert [bool(text) for text in column] == [False, False, True]


def test_a_second_measured_bandwidth_is_the_same_device() -> None:
    first, second = cpu(), cpu(mem_bandwidth_bytes_per_s=12.5e9)
    both = concat([from_measurements([row(first)]), from_measurements([row(second)])])
    assert both.trainable.all()
    assert both.device_spec("my-cpu-1t") == first
    assert disagreement(first, cpu(mem_bandwidth_bytes_per_s=11.25e9 * SAME_DEVICE_FACTOR * 1.01))


@pytest.mark.parametrize(
    "changes", [{"cores_per_unit": 4, "peak_flops_fp32": 2 * 4 * 2.6e9}, {"kind": "gpu"}, {"l2_bytes": 2.0**20}]
)
def test_two_devices_of_one_name_are_refused(changes) -> None:
    first, second = row(cpu()), row(cpu(**changes))
    with pytest.raises(DataError, match="two devices 'my-cpu-1t'"):
        concat([from_measurements([first]), from_measurements([second])])
    with pytest.raises(DataError, match="records call two devices"):
        from_measurements([first, second])


def test_the_table_wins_and_a_contradiction_is_an_error() -> None:
    t4 = lookup("t4")
    close = t4.model_copy(update={"mem_bandwidth_bytes_per_s": 300e9, "source": "measured"})
    table = from_measurements([row(close, device="Tesla T4")])
    assert table.trainable.all()
    assert table.device_spec("t4") == t4
    with pytest.raises(DataError, match="cdmpp's table of devices and the records call two devices 't4'"):
        from_measurements([row(cpu(name="t4"))])


def test_a_specification_of_another_device_is_rejected(tmp_path) -> None:
    table = from_measurements([row(cpu("other"), device="mine"), row(cpu("l4"), device="t4")])
    assert table.unsupported.counts() == {"invalid_device": 2}
    out = tmp_path / "records.parquet"
    write_records(from_measurements([row(cpu()), row(cpu())]), out)
    arrow = pq.read_table(out)
    index = arrow.column_names.index("device_spec")
    texts = [spec_text(cpu()), json.dumps({"name": "my-cpu-1t"})]
    pq.write_table(arrow.set_column(index, "device_spec", pa.array(texts)), out)
    assert load_table(out).unsupported.array().tolist() == ["", "invalid_device"]


def test_fingerprint_differs_by_device_and_is_stable_for_old_files(tmp_path) -> None:
    plain = from_measurements([row("t4")])
    assert fingerprint(from_measurements([row(lookup("t4"))])) == fingerprint(
        from_measurements([row(lookup("t4").model_copy(update={"source": "elsewhere"}))])
    )
    one, other = (from_measurements([row(cpu(cores_per_unit=n))]) for n in (16, 32))
    assert fingerprint(one) != fingerprint(other)
    out = tmp_path / "records.parquet"
    write_records(plain, out)
    arrow = pq.read_table(out).drop_columns(["device_spec", "failure"])  # as version 0.1 wrote it
    pq.write_table(arrow, out)
    assert fingerprint(load_table(out)) == fingerprint(plain)


def test_split_by_device_holds_out_a_user_defined_device() -> None:
    table = from_measurements([row(cpu("mine-1t")), row(cpu("mine-2t")), row("t4"), row("unheard-of")])
    train, test = split_by_device(table, ["mine-1t"])
    assert test.tolist() == [True, False, False, False]
    assert train.tolist() == [False, True, True, False]
    with pytest.raises(UnknownDeviceError):
        split_by_device(table, ["unheard-of"])


def test_failures(tmp_path) -> None:
    rows = [row(cpu()), row(cpu(), latency_s=None, failure="killed after 10 s"), row(cpu(), latency_s=None)]
    table = from_measurements(rows)
    assert table.failed.tolist() == [False, True, False]
    assert table.trainable.tolist() == [True, False, False]
    assert table.excluded.array().tolist() == ["", "failed", "no_latency"]
    out = tmp_path / "records.parquet"
    write_records(concat([from_measurements([row("t4")]), table]), out)
    again = load_table(out).select(np.array([2, 0]))
    assert again.failure.array().tolist() == ["killed after 10 s", ""]
    with pytest.raises(DataError, match="has a latency"):
        row(cpu(), failure="crashed")
