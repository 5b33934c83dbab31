"""Rows that cannot be used keep their place and get a reason; files that cannot be read are an error."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from cdmpp.data.load import load_table
from cdmpp.data.table import UNSUPPORTED
from cdmpp.errors import DataError


def gemm(columns_of, **changes):
    columns = columns_of("aiconfigurator_gemm")
    for name, value in changes.items():
        columns[name] = [value, *columns[name][1:]]
    return columns


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"op": "fft"}, "unknown_operator"),
        ({"op": None}, "unknown_operator"),
        ({"dtype": "float6"}, "unknown_dtype"),
        ({"dtype": None}, "unknown_dtype"),
        ({"device": "Abacus 9000"}, "unknown_device"),
        ({"device": None}, "unknown_device"),
        ({"framework": "homegrown"}, "unknown_setting"),
        ({"m": None}, "missing_size"),
        ({"m": 0}, "invalid_size"),
        ({"m": -5}, "invalid_size"),
        ({"m": 2**31}, "invalid_size"),
        ({"m": 2**31 - 1, "n": 2**20}, "contradictory_sizes"),
    ],
)
def test_reasons(columns_of, save, changes, reason):
    table = load_table(save(gemm(columns_of, **changes)))
    assert table.unsupported.array().tolist() == [reason, "", ""]
    assert reason in UNSUPPORTED
    assert len(table) == 3
    assert not table.predictable[0]
    assert table.trainable.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("12", ""),
        ("12.0", ""),
        ("12.5", "invalid_size"),
        ("many", "invalid_size"),
        ("inf", "invalid_size"),
        ("", "missing_size"),
        ("NaN", "missing_size"),
        ("1e300", "invalid_size"),
    ],
)
def test_text_cells(columns_of, save, value, reason):
    columns = columns_of("aiconfigurator_gemm")
    columns["m"] = [value, "64", "128"]
    table = load_table(save(columns, "table.csv"))
    assert table.unsupported.array().tolist() == [reason, "", ""]


def test_fractions_and_booleans_are_no_sizes(columns_of, save):
    columns = columns_of("aiconfigurator_gemm")
    columns["m"] = [1.5, 2.0, float("nan")]
    table = load_table(save(columns))
    assert table.unsupported.array().tolist() == ["invalid_size", "", "missing_size"]
    columns["m"] = [True, True, False]
    assert load_table(save(columns)).unsupported.counts() == {"invalid_size": 3}


def test_contradictions(columns_of, save):
    columns = columns_of("miopen")
    columns["groups"] = [5, 1, 1]
    columns["h"] = [28, 14, 1]
    columns["pad_h"] = [1, 0, 0]
    table = load_table(save(columns))
    assert table.unsupported.array().tolist() == ["contradictory_sizes", "", "contradictory_sizes"]
    columns["direction"] = ["sideways", "fwd", None]
    assert load_table(save(columns)).unsupported[0] == "unknown_operator"


def test_program_of_an_unknown_device_is_kept(columns_of, save):
    table = load_table(save(gemm(columns_of, device="Abacus 9000")))
    assert table.device[0] == "Abacus 9000"
    assert table.program_key[0] >= 0


@pytest.mark.parametrize(
    ("latency", "reason"),
    [
        (None, "no_latency"),
        (float("nan"), "no_latency"),
        (float("inf"), "no_latency"),
        (0.0, "latency_not_positive"),
        (-1.0, "latency_not_positive"),
        (1e9, "too_slow"),
        (1e-6, "too_fast"),
    ],
)
def test_physics_flags(columns_of, save, latency, reason):
    columns = columns_of("aiconfigurator_gemm")
    columns["latency_us"] = [2.5, latency, 9000.0]
    table = load_table(save(columns))
    assert table.excluded.array().tolist() == ["", reason, ""]
    assert table.predictable.all()
    assert table.trainable.tolist() == [True, False, True]


def test_latency_in_other_units(columns_of, save):
    columns = columns_of("aiconfigurator_gemm")
    reference = load_table(save(columns)).latency_s
    values = columns.pop("latency_us")
    columns["latency_ms"] = [v / 1e3 for v in values]
    assert np.allclose(load_table(save(columns)).latency_s, reference)
    columns["latency_s"] = [str(v / 1e6) for v in values]
    del columns["latency_ms"]
    assert np.allclose(load_table(save(columns)).latency_s, reference)


def test_text_latency_with_a_word_in_it(columns_of, save):
    columns = columns_of("aiconfigurator_gemm")
    columns["latency_us"] = ["2.5", "failed", "9000"]
    table = load_table(save(columns, "t.csv"))
    assert table.excluded.array().tolist() == ["", "no_latency", ""]


def test_table_without_rows(columns_of, save):
    columns = columns_of("aiconfigurator_gemm")
    table = load_table(save({name: [] for name in columns}))
    assert len(table) == 0
    assert table.specs == ()


@pytest.mark.parametrize(
    "content", [b"", b"PAR1 but not really", b"\x1f\x8bnot gzip", b"\xff\xfe\x00\x01", b"a,b\n1,2\n"]
)
def test_unreadable_files(tmp_path, content):
    path = tmp_path / "table.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError):
        load_table(path)


def test_truncated_parquet(columns_of, save):
    path = save(columns_of("aiconfigurator_gemm"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError):
        load_table(path)


def test_columns_that_make_no_sense(columns_of, save):
    columns = columns_of("aiconfigurator_gemm")
    table = pa.table(columns)
    with pytest.raises(DataError, match="two columns called 'm'"):
        load_table(save(table.append_column("m", table.column("n"))))
    columns["m"] = [[1], [2], [3]]
    with pytest.raises(DataError, match="neither text nor numbers"):
        load_table(save(columns))


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "absent.parquet", tmp_path):
        with pytest.raises(DataError) as caught:
            load_table(path)
        assert str(path) in caught.value.message
