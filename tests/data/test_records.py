"""Project records: what is written is what is read; rows that cannot be used keep their place and get a reason."""

import errno
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from cdmpp.data.device_specs import spec_text
from cdmpp.data.load import import_table, load_table
from cdmpp.data.records import (
    COLUMNS,
    Measurement,
    from_measurements,
    read_records,
    table_from_arrow,
    to_arrow,
    write_records,
)
from cdmpp.data.splits import assert_disjoint, split_by_shape
from cdmpp.data.summary import fingerprint, info
from cdmpp.data.table import UNSUPPORTED, concat
from cdmpp.errors import DataError
from cdmpp.programs.operators import make_operator
from tests.data.test_device_specs import cpu


def tvm(number=0, task="", **changes):
    fields = {
        "program": json.dumps({"nodes": [number]}),
        "program_kind": "tvm_json",
        "program_hash": f"{number:032x}",
        "device": "t4",
        "backend": "tvm",
        "latency_s": 1e-3,
        "task": task,
    }
    return Measurement(**(fields | changes))


def operator(text="softmax:rows=4096,cols=512", **changes):
    fields = {"program": text, "program_kind": "operator", "device": "t4", "latency_s": 1e-4}
    return Measurement(**(fields | changes))


def test_round_trip_of_every_layout(layout, save, tmp_path):
    name, needed, _ = layout
    needed = {column: [*cells, cells[0]] for column, cells in needed.items()}
    needed["op"][-1] = "unheard_of"
    out = tmp_path / "records.parquet"
    table = import_table(save(needed), out)
    again = load_table(out)
    assert fingerprint(again) == fingerprint(table)
    assert again.unsupported[len(again) - 1] == "unknown_operator"
    assert again.source.used() == (name,)
    assert again.source_row.tolist() == table.source_row.tolist()
    second = tmp_path / "second.parquet"
    write_records(again, second)
    assert fingerprint(load_table(second)) == fingerprint(table)


def test_schema_states_units_and_version(columns_of, save, tmp_path):
    out = tmp_path / "records.parquet"
    import_table(save(columns_of("vidur")), out)
    schema = pq.read_schema(out)
    assert list(schema.names) == list(COLUMNS)
    assert schema.field("latency_s").metadata[b"unit"] == b"s"
    assert schema.metadata[b"cdmpp_records_version"] == b"1"
    for field in schema:
        assert field.metadata[b"description"]
        # A dictionary of large strings is read back as one of strings.
        assert field.type == COLUMNS[field.name][0] or field.name == "program"


def test_newer_version_is_refused(columns_of, save, tmp_path):
    out = tmp_path / "records.parquet"
    import_table(save(columns_of("vidur")), out)
    table = pq.read_table(out).replace_schema_metadata({"cdmpp_records_version": "99"})
    pq.write_table(table, out)
    with pytest.raises(DataError, match="version 99"):
        load_table(out)


def test_each_program_is_stored_once(tmp_path):
    rng = np.random.default_rng(0)
    texts = [json.dumps({"nodes": rng.integers(0, 10**9, 20_000).tolist()}) for _ in range(3)]
    table = from_measurements([tvm(n, program=texts[n]) for n in range(3)])
    many = table.select(np.tile(np.arange(3), 4000))
    write_records(table, tmp_path / "one.parquet")
    write_records(many, tmp_path / "many.parquet")
    size = {name: (tmp_path / f"{name}.parquet").stat().st_size for name in ("one", "many")}
    assert size["many"] < size["one"] + 100_000
    back = load_table(tmp_path / "many.parquet")
    assert (len(back), back.tvm.texts) == (12_000, tuple(texts))


def test_long_texts_make_more_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("cdmpp.data.records.ROW_GROUP_TEXT", 1000)
    table = from_measurements([tvm(n % 50, program="x" * 100 + str(n % 50)) for n in range(200)])
    out = tmp_path / "records.parquet"
    write_records(table, out)
    assert pq.ParquetFile(out).metadata.num_row_groups > 3
    assert fingerprint(load_table(out)) == fingerprint(table)


def test_tvm_programs_repeats_and_provenance(tmp_path):
    rows = [
        tvm(1, task="conv", repeats_s=(1e-3, 1.1e-3), provenance={"tvm_version": "0.27", "date": "2026-01-01"}),
        tvm(2, task="conv", provenance={"tvm_version": "0.27"}, excluded_reason="throttled"),
        operator(protocol="eager", framework="pytorch"),
        tvm(1, task="conv", device="l4"),
        tvm(3, latency_s=None),
    ]
    table = from_measurements(rows)
    assert table.unsupported.counts() == {"": 5}
    assert table.program_key.tolist() == [1, 2, 0, 1, 3]
    assert table.op.array().tolist() == ["tvm", "tvm", "softmax", "tvm", "tvm"]
    assert table.excluded.array().tolist() == ["", "throttled", "", "", "no_latency"]
    out = tmp_path / "records.parquet"
    write_records(table, out)
    again = load_table(out)
    assert fingerprint(again) == fingerprint(table)
    assert again.tvm.tasks == ("conv", "conv", "")
    assert again.repeats_s.to_pylist() == [[1e-3, 1.1e-3], None, None, None, None]
    assert again.provenance["tvm_version"].array().tolist() == ["0.27", "0.27", "", "", ""]
    flagged = pq.read_table(out).column("flagged").to_pylist()
    assert flagged == [False, True, False, False, True]


def test_schedules_of_one_task_fall_together():
    table = from_measurements([tvm(n, task=f"task{n % 20}") for n in range(400)])
    parts = split_by_shape(table).reshape(20, 20)
    assert (parts == parts[0]).all()
    assert len(set(parts[0].tolist())) > 1
    assert_disjoint(table, parts.reshape(-1))


def test_a_filtered_file_still_has_its_programs(columns_of, save, tmp_path):
    out = tmp_path / "records.parquet"
    table = import_table(save(columns_of("neusight")), out)
    arrow = pq.read_table(out)
    pq.write_table(arrow.filter(pc.equal(arrow.column("source_op"), "bmm")), out)
    subset = load_table(out)
    assert len(subset) == 1
    assert subset.program_hashes == (table.program_hashes[table.program_key[1]],)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "missing_program"),
        ("{not json", "missing_program"),
        ("[1, 2]", "missing_program"),
        ("[" * 100_000, "missing_program"),
        ("softmax:rows=1", "missing_program"),
        ('{"operator": "softmax", "rows": 2, "cols": 3, "colour": 1}', "missing_program"),
        ('{"operator": "linear", "m": 2, "n": 3, "k": 4, "bias": "maybe"}', "missing_program"),
        ('{"operator": "linear", "m": 2, "n": 3, "k": 4, "bias": [1]}', "missing_program"),
        ('{"operator": "add", "rows": 2, "cols": 3, "inputs": 9}', "missing_program"),
        ('{"operator": "fft", "rows": 2}', "unknown_operator"),
        ('{"operator": "softmax", "rows": 2, "cols": 3, "dtype": "float8"}', "unknown_dtype"),
        ('{"operator": "softmax", "rows": 2}', "missing_size"),
        ('{"operator": "softmax", "rows": 2, "cols": 2.5}', "invalid_size"),
        ('{"operator": "softmax", "rows": 2, "cols": true}', "invalid_size"),
        ('{"operator": "softmax", "rows": 2, "cols": 1e400}', "invalid_size"),
        ('{"operator": "softmax", "rows": 2, "cols": "3"}', "invalid_size"),
        ('{"operator": "softmax", "rows": 0, "cols": 3}', "invalid_size"),
        ('{"operator": "softmax", "rows": 2e9, "cols": 2e9}', "contradictory_sizes"),
        ('{"operator": "softmax", "rows": 2.0, "cols": 3}', ""),
        ("softmax:rows=2,cols=3,dtype=float16", ""),
    ],
)
def test_program_texts(text, reason):
    table = from_measurements([operator(text), operator()])
    assert table.unsupported.array().tolist() == [reason, ""]
    if not reason:
        assert table.program_fields(int(table.program_key[0]))["cols"] == 3


def test_unknown_kinds_and_tvm_without_hash():
    rows = [tvm(1, program_hash=""), tvm(1, program=""), tvm(1, program_kind="verilog")]
    table = from_measurements(rows)
    assert table.unsupported.counts() == {"missing_program": 3}


@pytest.mark.parametrize(
    ("framework", "stated", "read", "reason"),
    [
        ("pytorch", "", "composed", ""),
        ("vllm", "", "fused", ""),
        ("pytorch", "compiled", "compiled", ""),
        ("vllm", "best", "best", "unknown_setting"),
    ],
)
def test_implementation_that_records_do_not_state_follows_operator_and_framework(framework, stated, read, reason):
    norm = "rmsnorm:rows=64,cols=512"
    table = from_measurements([operator(), operator(norm, framework=framework, implementation=stated)])
    assert table.implementation.array().tolist() == ["fused", read]
    assert table.unsupported.array().tolist() == ["", reason]
    older = to_arrow(table).drop_columns(["implementation"])
    assert table_from_arrow(older, Path("older")).implementation.array().tolist() == [
        "fused",
        "fused" if framework == "vllm" else "composed",
    ]


def test_hash_is_derived_not_believed():
    table = from_measurements([operator(program_hash="0" * 32)])
    spec = make_operator(table.program_fields(0))
    assert table.program_hashes == (spec.hash(),)


def test_records_lack_columns(columns_of, save, tmp_path):
    out = tmp_path / "records.parquet"
    import_table(save(columns_of("vidur")), out)
    pq.write_table(pq.read_table(out).drop_columns(["program"]), out)
    with pytest.raises(DataError, match="lack program"):
        read_records(out)
    with pytest.raises(DataError):
        load_table(out)


def test_nothing_is_left_behind_when_writing_fails(columns_of, save, tmp_path):
    table = load_table(save(columns_of("vidur")))
    target = tmp_path / "taken"
    target.mkdir()
    (target / "x").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError):
        write_records(table, target)
    with pytest.raises(DataError):
        write_records(table, tmp_path / "absent" / "records.parquet")
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_gives_a_hint(columns_of, save, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "records.parquet"
    table = import_table(save(columns_of("vidur")), out)
    before = out.read_bytes()
    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(DataError, match=r"cannot write .*No space left") as caught:
        write_records(table, out)
    assert caught.value.hint == "make room on its disk"
    assert out.read_bytes() == before


def test_texts_are_kept_once_however_many_records_they_have(monkeypatch):
    seen = []

    def build(arrow, path):
        seen.append(arrow)
        return table_from_arrow(arrow, path)

    monkeypatch.setattr("cdmpp.data.records.table_from_arrow", build)
    spec = cpu("cpu-1t")
    rows = [
        tvm(
            n % 4,
            task=f"task{n % 2}",
            program="x" * 30_000 + str(n % 4),
            source=f"run{n % 3}",
            provenance={"networks": "a;b" if n % 4 < 2 else "b", **({"note": "warm"} if n % 5 else {})},
            **({"device": spec.name, "device_spec": spec} if n % 2 else {}),
            **({"latency_s": None, "failure": f"ended with {n % 7}"} if n % 100 == 0 else {}),
        )
        for n in range(4000)
    ]
    table = from_measurements(rows)
    assert seen[0].nbytes < 2_000_000  # one text of 30 kB for each row would be 120 MB
    assert len(table.tvm.texts) == 4
    arrow = to_arrow(table)
    own = ("program", "program_hash", "program_kind", "task", "device", "backend", "protocol", "framework")
    for name in (*own, "failure", "source"):
        assert arrow.column(name).to_pylist() == [getattr(row, name) for row in rows], name
    for name in ("networks", "note"):
        assert arrow.column(name).to_pylist() == [row.provenance.get(name, "") for row in rows]
    assert set(arrow.column("device_spec").to_pylist()) == {"", spec_text(spec)}


def test_no_measurements_make_an_empty_table(tmp_path):
    table = from_measurements([])
    assert (len(table), table.n_programs) == (0, 0)
    write_records(table, tmp_path / "records.parquet")
    assert len(load_table(tmp_path / "records.parquet")) == 0


def test_provenance_may_not_take_a_column_s_name():
    with pytest.raises(DataError, match="latency_s"):
        from_measurements([operator(provenance={"latency_s": "1"})])


def test_repeats_must_be_numbers(tmp_path):
    out = tmp_path / "records.parquet"
    write_records(from_measurements([operator()]), out)
    arrow = pq.read_table(out)
    index = arrow.column_names.index("repeats_s")
    pq.write_table(arrow.set_column(index, "repeats_s", pa.array(["fast"])), out)
    with pytest.raises(DataError, match="repeats_s"):
        load_table(out)


def test_concat_merges_tvm_and_operator_programs():
    first = from_measurements([tvm(1, repeats_s=(1.0,)), operator(), tvm(2)])
    second = from_measurements([operator("relu:rows=2,cols=3"), tvm(2), operator(), operator("")])
    both = concat([first, second])
    assert both.n_programs == 4
    wanted = [t.program_hashes[k] if k >= 0 else None for t in (first, second) for k in t.program_key]
    hashes = [both.program_hashes[k] if k >= 0 else None for k in both.program_key]
    assert hashes == wanted
    assert both.repeats_s.to_pylist()[0] == [1.0]
    assert both.unsupported.array().tolist() == [""] * 6 + ["missing_program"]


def test_info_is_json(columns_of, save, tmp_path):
    path = save(columns_of("miopen"))
    hashes = json.loads(json.dumps(info(path), allow_nan=False))
    assert (hashes["rows"], hashes["trainable_rows"], hashes["excluded"]) == (3, 2, {"too_slow": 1})
    assert hashes["device"] == {"mi100": 1, "mi210": 1, "rx-6800-xt": 1}
    empty = tmp_path / "empty.parquet"
    write_records(load_table(path).select(np.zeros(0, dtype=np.int64)), empty)
    assert info(empty)["latency_s"] == {"min": None, "median": None, "max": None}


@pytest.mark.slow
def test_programs_of_a_task_are_stored_together_in_any_row_order(tmp_path):
    rng = np.random.default_rng(1)
    # Tasks have nothing in common; the schedules of one differ in a number each.
    bodies = [json.dumps(rng.integers(0, 10**9, 30_000).tolist()) for _ in range(20)]
    rows = [
        tvm(8 * task + n, task=f"task{task}", program=f'{{"n": {n}, "nodes": {body}}}')
        for task, body in enumerate(bodies)
        for n in range(8)
    ]
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    sizes = []
    for name, measured in (("sorted", rows), ("shuffled", shuffled)):
        table = from_measurements([operator(), *measured, operator("")])
        path = tmp_path / f"{name}.parquet"
        write_records(table, path)
        sizes.append(path.stat().st_size)
        back = load_table(path)
        assert fingerprint(back) == fingerprint(table)
        assert back.tvm.texts == table.tvm.texts
    assert sizes[1] < 1.05 * sizes[0]
    assert sizes[0] < 0.2 * sum(len(row.program) for row in rows)


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
