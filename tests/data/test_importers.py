"""Every layout of the public tables is recognised by its columns and mapped; optional columns may be absent."""

import os

import pyarrow as pa
import pytest

from cdmpp.data.importers import IMPORTERS
from cdmpp.data.load import ENVIRONMENT, detect, load_public, load_table
from cdmpp.data.records import COLUMNS, NEEDED
from cdmpp.data.summary import fingerprint
from cdmpp.errors import DataError
from cdmpp.programs.query_options import IMPLEMENTATIONS
from tests.data.layouts import layout_of


def reader(name):
    """The importer that reads the tables of a source."""
    importer = next(i for i in IMPORTERS if i.name == name)
    return importer if not importer.read_by else reader(importer.read_by)


def specs(table):
    """Canonical fields of every row's operator, None for rows without one."""
    return [None if key < 0 else table.program_fields(int(key)) for key in table.program_key]


def test_optional_columns_and_file_format_change_nothing(layout, save):
    name, needed, optional = layout
    plain = load_table(save(needed))
    assert plain.source.used() == (name,)
    assert plain.unsupported.counts() == {"": len(plain)}
    assert plain.backend.used() == ("library",)
    shuffled = dict(reversed((needed | optional).items()))
    for columns, file in (
        (needed | optional, "full.parquet"),
        (shuffled, "shuffled.parquet"),
        (needed, "plain.csv"),
        (needed | optional, "full.csv.gz"),
    ):
        assert fingerprint(load_table(save(columns, file))) == fingerprint(plain)


def test_every_row_states_its_implementation(layout, save):
    name, needed, _ = layout
    table = load_table(save(needed))
    assert set(table.implementation.used()) <= set(IMPLEMENTATIONS)
    assert ("tuned" in table.implementation.used()) == (name in ("miopen", "tensile_gemm", "aiter_gemm", "aiter_moe"))


@pytest.mark.skipif(not os.environ.get(ENVIRONMENT), reason=f"{ENVIRONMENT} names no folder of public tables")
def test_every_visible_row_states_its_implementation():
    table = load_public()
    assert set(table.implementation.used()) == set(IMPLEMENTATIONS)
    composed = table.source.take(table.implementation.is_("composed"))
    assert set(composed.used()) == {"vidur", "llmservingsim_layers", "frontier", "liger"}


def test_optional_columns_are_never_read(layout):
    name, _, optional = layout
    importer = reader(name)
    # What one source of a shared layout ignores may be read for the other: Vidur's model.
    assert not importer.columns() & optional.keys()
    forbidden = {"mean_us", "min_us", "std_us", "n_rep", "split", "torch_version", "kernel_name", "n_kernels"}
    forbidden |= {"kernel_source", "best_solver", "n_solvers", "version"}
    assert not importer.columns() & forbidden


def parts(columns):
    """For each operator of a table, its rows without the columns that are empty in them."""
    for op in sorted(set(columns["op"])):
        rows = [i for i, name in enumerate(columns["op"]) if name == op]
        cut = {name: [values[i] for i in rows] for name, values in columns.items()}
        yield {name: v for name, v in cut.items() if any(cell not in (None, "") for cell in v)}


def test_no_part_of_a_layout_is_taken_for_another(layout):
    name, needed, optional = layout
    some, every = list(parts(needed)), list(parts(needed | optional))
    assert all(detect(columns) is reader(name) for columns in (*some, *every))
    assert not any(set(columns) >= NEEDED for columns in every)
    for other in IMPORTERS:
        if other.name == name or reader(name) in (other, reader(other.name)):
            continue
        assert not any(other.matches(columns) for columns in (*some, *every)), other.name
        # Nor do the other's columns, added to a part of this one, make a table that both would claim.
        theirs, _ = layout_of(other.name)
        for columns in some:
            assert sum(i.matches(columns.keys() | theirs.keys()) for i in IMPORTERS) <= 1, other.name


def test_records_are_not_taken_for_a_public_table():
    assert not any(importer.matches(COLUMNS) for importer in IMPORTERS)


def test_a_part_without_its_empty_columns_reads_as_the_whole_does(layout, save):
    _, needed, _ = layout
    whole = specs(load_table(save(needed)))
    for part in parts(needed):
        table = load_table(save(part, f"{part['op'][0]}.csv"))
        assert table.unsupported.used() == ("",)
        assert specs(table) == [s for s, op in zip(whole, needed["op"], strict=True) if op == part["op"][0]]


@pytest.mark.parametrize("kind", ["dictionary", "float", "int16", "string"])
def test_column_types_do_not_matter(layout, save, kind):
    _, needed, _ = layout
    table = pa.table(needed)
    for index, field in enumerate(table.schema):
        column = table.column(index)
        if pa.types.is_string(field.type) and kind == "dictionary":
            column = column.dictionary_encode()
        elif pa.types.is_int64(field.type):
            small = kind == "int16" and field.name == "batch"
            wanted = {"float": pa.float64(), "string": pa.string(), "int16": pa.int16() if small else pa.int32()}
            column = column.cast(wanted.get(kind, pa.int64()))
        table = table.set_column(index, field.name, column)
    assert fingerprint(load_table(save(table, "other.parquet"))) == fingerprint(load_table(save(needed)))


def test_table_without_latency_is_read_but_not_trained_on(layout, save):
    _, needed, _ = layout
    del needed["latency_us"]
    table = load_table(save(needed))
    assert table.predictable.all()
    assert table.excluded.counts() == {"no_latency": len(table)}


def test_neusight_mapping(columns_of, save):
    columns = columns_of("neusight")
    columns["neusight_filter"] = [True, True, True, False, False, True]
    table = load_table(save(columns))
    linear, bmm, conv, add, power, softmax = specs(table)
    assert linear == {"operator": "linear", "dtype": "float32", "m": 128, "n": 256, "k": 512, "bias": True}
    assert (bmm["batch"], bmm["m"], bmm["n"], bmm["k"]) == (8, 64, 32, 16)
    assert (conv["n"], conv["c_in"], conv["h"], conv["w"], conv["kh"], conv["kw"]) == (4, 16, 28, 28, 3, 3)
    assert (conv["stride_h"], conv["stride_w"], conv["pad_h"], conv["dil_w"], conv["groups"]) == (2, 2, 1, 1, 1)
    assert (conv["direction"], conv["bias"]) == ("fwd", False)
    assert add == {"operator": "add", "dtype": "float32", "inputs": 2, "rows": 4096, "cols": 512}
    assert (power["operator"], softmax["cols"]) == ("pow_scalar", 1024)
    assert (table.protocol.used(), table.framework.used()) == (("eager",), ("pytorch",))
    assert table.latency_s[0] == pytest.approx(120e-6)
    assert table.row_filter.tolist() == columns["neusight_filter"]
    assert table.device[0] == "t4"
    assert table.device_name[0] == "Tesla T4"


def test_neusight_linear_folds_leading_rows(columns_of, save):
    columns = columns_of("neusight")
    columns["batch"] = [3, 8, 4, None, None, None]
    assert specs(load_table(save(columns)))[0]["m"] == 3 * 128
    columns["batch"] = [None, 8, 4, None, None, None]
    assert specs(load_table(save(columns)))[0]["m"] == 128


def test_aiconfigurator_mapping(columns_of, save):
    gemm = load_table(save(columns_of("aiconfigurator_gemm")))
    assert specs(gemm)[1] == {"operator": "linear", "dtype": "bfloat16", "m": 64, "n": 4096, "k": 8192, "bias": False}
    assert gemm.framework.array().tolist() == ["vllm", "sglang", "trtllm"]
    assert gemm.protocol.used() == ("graph",)
    attention = load_table(save(columns_of("aiconfigurator_attention"), "attention.parquet"))
    assert specs(attention)[0] == {
        "operator": "attention_decode",
        "dtype": "bfloat16",
        "batch": 4,
        "q_len": 1,
        "past_len": 1023,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
    }


def test_miopen_mapping_and_its_absurd_row(columns_of, save):
    table = load_table(save(columns_of("miopen")))
    assert [s["direction"] for s in specs(table)] == ["fwd", "bwd_data", "bwd_weight"]
    assert specs(table)[0]["groups"] == 32
    assert table.excluded.array().tolist() == ["", "", "too_slow"]
    assert (table.protocol.used(), table.framework.used()) == (("kernel",), ("miopen",))


def test_vidur_mapping_and_phi_2(columns_of, save):
    columns = columns_of("vidur")
    table = load_table(save(columns))
    assert [s.get("inputs") for s in specs(table)] == [None, None, None, 2, 3]
    assert table.implementation.array().tolist() == ["fused"] * 4 + ["composed"]
    silu = specs(table)[1]
    assert (silu["operator"], silu["rows"], silu["cols"]) == ("silu_and_mul", 64, 11008)
    del columns["model"]
    without = load_table(save(columns, "without.parquet"))
    assert [s.get("inputs") for s in specs(without)] == [None, None, None, 2, 2]
    assert without.source.used() == ("vidur",)


def test_deepbench_mapping(columns_of, save):
    table = load_table(save(columns_of("deepbench")))
    first, second, conv, _ = specs(table)
    assert (first["m"], first["n"], first["k"], first["dtype"]) == (16, 1760, 1024, "float32")
    assert second["dtype"] == "int8"
    assert (conv["dtype"], conv["direction"]) == ("float16", "bwd_weight")
    assert (conv["n"], conv["h"], conv["w"], conv["kh"], conv["kw"]) == (8, 161, 700, 5, 20)
    assert table.op.array().tolist() == ["gemm", "gemm", "conv2d", "conv2d"]
    assert table.framework.used() == ("vendor",)


def test_equal_programs_share_a_key_over_devices_and_frameworks(columns_of, save):
    columns = columns_of("aiconfigurator_gemm")
    for name in ("m", "n", "k"):
        columns[name] = [64, 64, 128]
    table = load_table(save(columns))
    assert table.program_key.tolist() == [0, 0, 1]
    assert table.n_programs == 2


@pytest.mark.parametrize("missing", ["dtype", "framework", "m"])
def test_unknown_format_lists_found_and_known_columns(columns_of, save, missing):
    columns = columns_of("aiconfigurator_attention")
    del columns["batch" if missing == "m" else missing]
    with pytest.raises(DataError) as caught:
        load_table(save(columns))
    assert "q_len" in caught.value.message
    assert "aiconfigurator_attention" in caught.value.hint
    assert ("batch" if missing == "m" else missing) in caught.value.hint
