"""Rows of the quantised, expert, latent-attention and AMD tables become the operators that docs/data.md states."""

import numpy as np
import pytest

from cdmpp.data.importers import IMPORTERS
from cdmpp.data.importers.base import EXPERTS, LINEAR
from cdmpp.data.load import find_public_tables, load_public, load_table
from cdmpp.data.physics import table_roofline_s
from cdmpp.data.splits import split_by_shape
from cdmpp.data.summary import summarise
from cdmpp.programs.elements import combinations
from cdmpp.programs.operators import make_operator

#: Sources of quantised products, layers of experts, latent attention and AMD GPUs.
SOURCES = (
    *("aiconfigurator_gemm_quantised", "aiconfigurator_moe", "aiconfigurator_mla", "pipeweave_gemm_fp8"),
    *("pipeweave_moe", "tensile_gemm", "aiter_gemm", "aiter_moe"),
)


def fields(table):
    """Fields of every row's operator."""
    return [table.program_fields(int(key)) for key in table.program_key]


def types(table):
    return [(f["dtype"], f.get("weight_dtype"), f.get("scaling")) for f in fields(table)]


@pytest.mark.parametrize("name", SOURCES)
def test_every_row_is_a_valid_operator_with_the_hash_of_its_specification(name, columns_of, save):
    table = load_table(save(columns_of(name)))
    hashes = table.program_hashes
    for key, row in zip(table.program_key, fields(table), strict=True):
        assert make_operator(row).hash() == hashes[key]
    assert table.predictable.all()
    assert table.source.used() == (name,)
    assert np.isfinite(table_roofline_s(table)).all()
    assert (table_roofline_s(table) > 0).all()


def test_named_types_exist():
    for names, experts in ((LINEAR, False), (EXPERTS, True)):
        for t in names.values():
            assert (t.weight_dtype, t.scaling) in set(combinations(t.dtype, experts=experts))


def test_quantised_layers(columns_of, save):
    table = load_table(save(columns_of("aiconfigurator_gemm_quantised")))
    assert types(table) == [
        ("float8_e4m3", None, "channel"),
        ("float8_e4m3", None, "tensor"),
        ("float8_e4m3", None, "block128"),
        ("float4_e2m1", None, "nvfp4"),
        ("bfloat16", "int8", "channel"),
        ("bfloat16", "int4", "block128"),
        ("int8", None, "channel"),
    ]
    assert table.protocol.used() == ("graph",)


def test_source_of_aiconfigurator_rows_follows_their_type(columns_of, save):
    columns = columns_of("aiconfigurator_gemm_quantised")
    columns["dtype"] = ["bfloat16", "fp8", *["nvfp4"] * 5]
    table = load_table(save(columns))
    assert table.source.counts() == {"aiconfigurator_gemm": 1, "aiconfigurator_gemm_quantised": 6}


def test_unknown_type_is_unsupported_and_not_an_unknown_operator(columns_of, save):
    columns = columns_of("aiconfigurator_gemm_quantised")
    columns["dtype"][0] = "fp6"
    assert load_table(save(columns)).unsupported.counts() == {"unknown_dtype": 1, "": 6}


def test_expert_layers(columns_of, save):
    table = load_table(save(columns_of("aiconfigurator_moe")))
    assert types(table) == [
        ("bfloat16", None, None),
        ("float8_e4m3", None, "tensor"),
        ("float8_e4m3", None, "block128"),
        ("bfloat16", "int4", "block128"),
        ("float4_e2m1", None, "nvfp4"),
        ("bfloat16", "float4_e2m1", "mx32"),
        ("float8_e4m3", "float4_e2m1", "mx32"),
        ("float8_e4m3", "int4", "block128"),
    ]
    first, second = fields(table)[:2]
    assert (first["tokens"], first["hidden"], first["intermediate"]) == (64, 7168, 2048)
    assert (first["experts"], first["topk"], first["tp"], first["ep"]) == (256, 8, 1, 8)
    assert (first["balance"], second["balance"], first["gated"]) == ("balanced", "power_law_1.01", True)


def test_nemotron_layers_have_no_gate_in_tensorrt_llm_alone(columns_of, save):
    columns = columns_of("aiconfigurator_moe")
    columns["framework"] = ["trtllm", "trtllm", "sglang", *["trtllm"] * 5]
    columns["hidden_size"][:3] = [8192, 2688, 8192]
    columns["inter_size"][:3] = [5120, 1856, 5120]
    columns["num_experts"][:3] = [512, 128, 512]
    columns["topk"][:3] = [22, 6, 22]
    assert [f["gated"] for f in fields(load_table(save(columns)))] == [False, False, *[True] * 6]


def test_of_two_kernels_of_one_framework_the_faster_is_trained_on(columns_of, save):
    columns = columns_of("aiconfigurator_moe")
    for values in columns.values():
        values += [values[1], values[1]]  # the second row again, slower and as fast
    columns["latency_us"][-2:] = [2 * columns["latency_us"][1], columns["latency_us"][1]]
    assert load_table(save(columns)).excluded.counts() == {"": 8, "slower_kernel": 2}


def test_expert_layers_faster_than_their_weights_are_read_are_not_trained_on(columns_of, save):
    columns = columns_of("aiconfigurator_moe")
    # 32 experts of 3 x 7168 x 2048 bfloat16 values: 2.8 GB, 352 us at 8 TB/s.
    columns["latency_us"][0] = 300.0
    assert load_table(save(columns)).excluded.array().tolist() == ["weights_not_read", *[""] * 7]
    columns["distribution"][0] = "power_law_1.2"
    assert load_table(save(columns, "drawn.parquet")).excluded.used() == ("",)


def test_latent_attention(columns_of, save):
    context, generation, module, both = fields(load_table(save(columns_of("aiconfigurator_mla"))))
    assert (context["operator"], context["dtype"], context["module"]) == ("mla_prefill", "bfloat16", False)
    assert "kv_dtype" not in context
    assert "weight_dtype" not in context
    assert (generation["operator"], generation["kv_dtype"], generation["past_len"]) == (
        "mla_decode",
        "float8_e4m3",
        4095,
    )
    # The projections have the attention's type here, so that only their scaling is stated.
    assert (module["dtype"], module.get("weight_dtype"), module["scaling"]) == ("float8_e4m3", None, "block128")
    assert (both["dtype"], both["weight_dtype"], both["scaling"]) == ("bfloat16", "float4_e2m1", "nvfp4")
    assert (both["module"], both["hidden"], both["q_latent"], both["heads"]) == (True, 7168, 1536, 64)


def test_pipeweave_fp8_is_bare_and_no_row_of_vidur(columns_of, save):
    table = load_table(save(columns_of("pipeweave_gemm_fp8")))
    assert types(table) == [("float8_e4m3", None, None)] * 2
    assert (table.protocol.used(), table.framework.used()) == (("kernel",), ("vendor",))


def test_pipeweave_experts(columns_of, save):
    columns = columns_of("pipeweave_moe")
    table = load_table(save(columns))
    first = fields(table)[0]
    assert (first["operator"], first["intermediate"], first["gated"], first["tp"]) == ("moe_w13", 512, True, 1)
    assert table.framework.used() == ("triton",)
    columns["n_out"][0] = 1023
    assert load_table(save(columns, "odd.csv")).unsupported.counts() == {"invalid_size": 1, "": 1}


def test_tensile(columns_of, save):
    columns = columns_of("tensile_gemm")
    table = load_table(save(columns))
    half, wide, double, tf32, mixed, byte = fields(table)
    assert (half["layout"], half["accumulate"], half["dtype"]) == ("nn", "float16", "float16")
    assert (wide.get("layout"), wide.get("accumulate"), wide["out_dtype"]) == (None, None, "float32")
    assert (double["operator"], double["batch"], double["dtype"], double["layout"]) == ("bmm", 8, "float64", "tn")
    assert (tf32["dtype"], tf32["layout"]) == ("tfloat32", "tt")
    assert (mixed["dtype"], mixed["weight_dtype"], mixed["scaling"]) == ("float16", "float8_e4m3", "tensor")
    assert "layout" not in mixed
    assert (byte["dtype"], byte.get("scaling"), byte.get("layout")) == ("int8", None, None)
    assert table.framework.used() == ("rocblas", "hipblaslt")
    for name in ("library", "acc", "tensile_type"):
        del columns[name]
    bare = load_table(save(columns, "bare.parquet"))
    assert bare.framework.used() == ("",)
    assert bare.predictable.all()
    assert fields(bare)[0] == {k: v for k, v in half.items() if k != "accumulate"}


def test_aiter_products(columns_of, save):
    table = load_table(save(columns_of("aiter_gemm")))
    assert types(table) == [
        ("float8_e4m3", None, "channel"),
        ("float4_e2m1", None, "mx32"),
        ("bfloat16", None, None),
        ("bfloat16", None, None),
        ("float8_e4m3", None, "block128"),
        ("int8", None, "channel"),
        ("bfloat16", None, None),
    ]
    assert [f.get("out_dtype") for f in fields(table)] == [None, None, None, "float32", None, None, None]
    assert [f["operator"] for f in fields(table)] == ["linear"] * 5 + ["bmm"] * 2
    assert (table.protocol.used(), table.framework.used()) == (("kernel",), ("aiter",))


def test_aiter_experts(columns_of, save):
    table = load_table(save(columns_of("aiter_moe")))
    assert types(table) == [
        ("bfloat16", None, None),
        ("float8_e4m3", None, "channel"),
        ("float8_e4m3", None, "block128"),
        ("float4_e2m1", None, "mx32"),
        ("float8_e4m3", "float4_e2m1", "mx32"),
        ("bfloat16", "int4", "block128"),
        ("float8_e4m3", None, "block128"),
    ]
    first = fields(table)[0]
    assert (first["experts"], first["topk"], first["intermediate"], first["gated"]) == (257, 9, 256, True)


@pytest.mark.parametrize("name", SOURCES)
def test_split_depends_on_sizes_alone(name, columns_of, save):
    """Rows of equal sizes fall into one part, whatever their types, devices, layouts and routing."""
    columns = columns_of(name)
    sizes = {"m", "n", "k", "tokens", "num_tokens", "token", "batch", "q_len", "past_len", "heads", "tp", "ep"}
    sizes |= {"hidden", "hidden_size", "n_out", "num_experts", "topk"}
    for size in sizes & columns.keys():
        columns[size] = [columns[size][0]] * len(columns[size])
    if name == "tensile_gemm":
        columns["batch"] = [1, 1, 8, 1, 1, 64]
    first = next(size for size in ("m", "num_tokens", "tokens", "token", "batch") if size in columns)
    rows = len(columns["op"])
    repeated = {column: cells * 39 for column, cells in columns.items()}
    repeated[first] = [m for m in range(1, 40) for _ in range(rows)]
    parts = split_by_shape(load_table(save(repeated))).reshape(39, rows)
    assert (parts == parts[:, :1]).all() and len(np.unique(parts)) > 1


def test_sources_that_share_a_layout_are_told_apart_in_a_folder(columns_of, save, tmp_path):
    save(columns_of("aiconfigurator_gemm"), "a.parquet")
    save(columns_of("aiconfigurator_gemm_quantised"), "b.parquet")
    found = find_public_tables(tmp_path, ["aiconfigurator_gemm_quantised"])
    assert [t.path.name for t in found] == ["b.parquet"]
    mixed = columns_of("aiconfigurator_gemm_quantised")
    mixed["dtype"][0] = "bfloat16"
    save(mixed, "b.parquet")
    assert load_public(tmp_path, ["aiconfigurator_gemm_quantised"]).source.counts() == {
        "aiconfigurator_gemm_quantised": 6
    }


def test_every_source_is_read_by_an_importer_that_recognises_tables():
    readers = {i.name for i in IMPORTERS if not i.read_by}
    assert {i.read_by for i in IMPORTERS if i.read_by} <= readers


def test_summary_counts_rows_by_operator_and_type(columns_of, save):
    table = summarise(load_table(save(columns_of("tensile_gemm"))))
    assert table["op"] == {"gemm": 4, "bmm": 2}
    assert table["operator"] == {"linear": 4, "bmm": 2}
    assert table["dtype"] == {"float16": 3, "float64": 1, "tfloat32": 1, "int8": 1}
