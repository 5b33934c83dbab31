"""CSV files of programs and latencies: accepted values, and errors for wrong cells."""

from pathlib import Path

import numpy as np
import pytest

from cdmpp.data.load import load_table
from cdmpp.data.records import as_device, write_records
from cdmpp.data.table import MeasurementTable
from cdmpp.devices import lookup
from cdmpp.errors import DataError
from cdmpp.programs.operators import parse_operator
from tests.data.test_device_specs import cpu

LINEAR, SOFTMAX = "linear:dtype=float16,m=512,n=4096,k=1024", "softmax:rows=4096,cols=512"


def read(folder: Path, *lines: str) -> MeasurementTable:
    path = folder / "mine.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return load_table(path)


@pytest.mark.parametrize("column, cell", [("latency_us", "120"), ("latency_ms", "0.12"), ("latency_s", "1.2e-4")])
def test_every_unit_is_read(tmp_path: Path, column: str, cell: str) -> None:
    table = read(tmp_path, f"program,{column},device", f'"{LINEAR}",{cell},Tesla T4')
    assert table.latency_s.tolist() == pytest.approx([1.2e-4])
    assert table.program_hashes == (parse_operator(LINEAR).hash(),)
    assert (table.device[0], table.backend[0], table.protocol[0], table.framework[0]) == ("t4", "library", "kernel", "")
    assert table.trainable.all()


def test_settings_and_other_columns_and_json(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        "note,program,operator,latency_us,latency_ms,protocol,framework,implementation,device",
        f'x,"{LINEAR}",linear,50,,eager,pytorch,compiled,t4',
        'y,"{""operator"": ""softmax"", ""rows"": 4096, ""cols"": 512}",softmax,,,,,,t4',
    )
    assert table.protocol.array().tolist() == ["eager", "kernel"]
    assert table.framework.array().tolist() == ["pytorch", ""]
    assert table.implementation.array().tolist() == ["compiled", "fused"]
    assert table.op.array().tolist() == ["linear", "softmax"]
    assert table.program_hashes[table.program_key[1]] == parse_operator(SOFTMAX).hash()
    assert table.excluded.array().tolist() == ["", "no_latency"]
    assert table.source_row.tolist() == [0, 1]
    assert table.source.used() == ("mine",)


def test_rows_without_a_device_get_the_given_one(tmp_path: Path) -> None:
    table = read(tmp_path, "program,latency_us", f'"{LINEAR}",50', f'"{SOFTMAX}",0.0001')
    assert table.unsupported.array().tolist() == ["unknown_device"] * 2
    known = as_device(table, lookup("t4"))
    assert known.predictable.all() and known.device.used() == ("t4",)
    assert known.excluded.array().tolist() == ["", "too_fast"]
    ours = as_device(known, cpu("mine"))
    assert ours.device_spec("mine") == cpu("mine")
    write_records(ours, tmp_path / "records.parquet")
    again = load_table(tmp_path / "records.parquet")
    assert again.device.used() == ("mine",) and again.predictable.all()
    assert np.array_equal(again.latency_s, ours.latency_s)


@pytest.mark.parametrize(
    "lines, message, hint",
    [
        (["program,latency_us", f"{LINEAR},5"], "Expected 2 columns", "quotes"),
        (["program,latency_us", f'"{SOFTMAX}",5', f'"{LINEAR}",fast'], "'fast' is not a latency in row 2", "empty"),
        (["program,latency_us", f'"{SOFTMAX}",-5'], "'-5' is not a latency in row 1", "positive"),
        (["program,latency_us", f'"{SOFTMAX}",inf'], "'inf' is not a latency", "positive"),
        (["program,latency_us", f'"{SOFTMAX}",'], "no row has a latency", "latency_us"),
        (["program,latency_us,latency_ms", f'"{SOFTMAX}",5,5'], "both hold latencies", "one of"),
        (["program,latency_us", '"softmax:rows=4096",5'], "program in row 1: softmax: cols", "cols"),
        (["program,latency_us", '"conv9d:a=1",5', '"softmax",5'], "in rows 1, 2: operator 'conv9d'", "linear"),
        (["program,latency_us", '"{""tvm_json"": ""x""}",5'], "operator None", "linear"),
        (["program,latency_us", ",5"], "in row 1: the cell is empty", "linear"),
        (["program,latency_us,protocol", f'"{SOFTMAX}",5,cuda'], "protocol in row 1: 'cuda'", "graph"),
        (["program,latency_us,implementation", f'"{SOFTMAX}",5,best'], "implementation in row 1: 'best'", "tuned"),
    ],
)
def test_wrong_cells_are_named(tmp_path: Path, lines: list[str], message: str, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, *lines)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_many_wrong_rows_are_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"in rows 1, 2, 3, 4, 5 and 3 more"):
        read(tmp_path, "program,latency_us", *['"tanh",5'] * 8)
