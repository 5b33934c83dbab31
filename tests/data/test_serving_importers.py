"""Rows of LLMServingSim, Frontier and InferSim become the operators that were timed."""

import pytest

from cdmpp.data.assemble import DOUBTFUL, with_doubts
from cdmpp.data.labels import Labels
from cdmpp.data.load import load_table
from cdmpp.data.records import read_records, write_records
from tests.data.layouts import FRONTIER_ROWS


def specs(table):
    """Canonical fields of every row's operator."""
    return [table.program_fields(int(key)) for key in table.program_key]


def sizes(spec, *names):
    """Values of some fields of an operator."""
    return tuple(spec[name] for name in names)


def frontier_rows(table, op):
    """(row number, operator) of every row of one operation of the source."""
    every = specs(table)
    return [(i, every[i]) for i, row in enumerate(FRONTIER_ROWS) if row["op"] == op]


@pytest.fixture
def layers(columns_of, save):
    return load_table(save(columns_of("llmservingsim_layers")))


@pytest.fixture
def frontier(columns_of, save):
    return load_table(save(columns_of("frontier")))


def test_sizes_of_layers_follow_from_the_model(layers):
    rows = specs(layers)
    by_layer = dict(zip(layers.op.array().tolist(), rows, strict=True))
    assert sizes(rows[0], "operator", "m", "n", "k") == ("linear", 16, 4096, 14336)
    assert sizes(rows[1], "operator", "rows", "cols", "table_rows") == ("embedding", 512, 4096, 64128)
    assert sizes(rows[2], "operator", "rows", "cols") == ("rmsnorm", 512, 4096)
    assert sizes(by_layer["rope"], "rows", "cols", "head_dim") == (512, 20 * 128, 128)
    assert sizes(by_layer["gate"], "operator", "rows", "cols", "topk") == ("moe_gating", 512, 8, 2)
    assert sizes(by_layer["sampler"], "operator", "rows", "cols") == ("argmax", 64, 151936)
    assert sizes(rows[11], "batch", "q_len", "past_len", "heads", "kv_heads") == (1, 512, 0, 16, 4)


def test_phi_has_layernorm(layers):
    assert specs(layers)[3]["operator"] == "layernorm"


def test_norms_of_queries_and_keys_are_not_divided_among_ranks(layers):
    assert sizes(specs(layers)[13], "operator", "rows", "cols") == ("rmsnorm", 64 * 72, 128)


def test_experts_have_all_tokens_and_all_columns_on_every_rank(layers):
    rows = specs(layers)
    assert sizes(rows[5], "rows", "cols") == (512, 7168)  # Llama, tp 2
    assert sizes(rows[6], "rows", "cols") == (512, 14336)  # Mixtral, tp 2
    assert sizes(rows[7], "m", "n", "k") == (512, 14336, 4096)
    assert sizes(rows[8], "m", "n", "k") == (512, 4096, 14336)


def test_layer_of_an_unknown_model_is_unsupported(columns_of, save):
    columns = columns_of("llmservingsim_layers")
    columns["model"] = ["acme/model"] * len(columns["op"])
    table = load_table(save(columns))
    assert table.unsupported.array()[0] == ""  # a product states its sizes
    assert set(table.unsupported.array()[1:]) == {"unknown_operator"}


def test_doubtful_layers_are_evaluated_but_not_trained_on(layers):
    assert layers.excluded.counts() == {"": 14, "fused": 1, "other_kernel": 1}
    assert layers.predictable.all()


def test_frameworks_of_llmservingsim_follow_its_version(layers, columns_of, save):
    assert layers.framework.counts() == {"pytorch": 13, "vllm": 3}
    attention = load_table(save(columns_of("llmservingsim_attention"), "attention.parquet"))
    assert attention.framework.array().tolist() == ["vendor", "pytorch", "vllm"]
    assert attention.protocol.used() == ("kernel",)


def test_small_layers_of_llmservingsim_v0_on_gpus_are_composed_but_layernorm(layers):
    composed = set(layers.op.take(layers.implementation.is_("composed")).used())
    assert composed == {"input_layernorm", "act_fn", "gate", "rope"}
    assert layers.implementation.counts() == {"fused": 11, "composed": 5}  # fused: Phi's LayerNorm, and XLA's norm


def test_attention_of_llmservingsim(columns_of, save):
    decode, prefill, mixed = specs(load_table(save(columns_of("llmservingsim_attention"))))
    assert sizes(decode, "operator", "batch", "q_len", "past_len") == ("attention_decode", 4, 1, 96)
    assert sizes(prefill, "operator", "batch", "q_len", "past_len") == ("attention_prefill", 1, 256, 1024)
    assert sizes(mixed, "q_len", "past_len", "decodes", "decode_past_len") == (512, 1728, 16, 4096)


def test_frontier_protocols_types_and_frameworks(frontier):
    rows = {row["op"]: i for i, row in enumerate(FRONTIER_ROWS)}
    assert frontier.protocol[rows["mlp_act"]] == "eager"
    assert frontier.protocol[rows["attn_post_proj"]] == "kernel"
    add = specs(frontier)[rows["add"]]
    assert (frontier.protocol[rows["add"]], frontier.framework[rows["add"]]) == ("kernel", "pytorch")
    assert sizes(add, "dtype", "rows", "cols") == ("float16", 16, 4096)
    assert frontier.framework[rows["moe_grouped_gemm"]] == "vllm"
    assert frontier.framework[rows["attn_prefill"]] == "flashinfer"


def test_products_of_an_fp8_model_are_quantised(frontier):
    [(row, up)] = frontier_rows(frontier, "mlp_up_proj")
    assert sizes(up, "dtype", "scaling", "m", "n", "k") == ("float8_e4m3", "channel", 16, 26624, 16384)
    assert frontier.excluded[row] == ""
    assert specs(frontier)[0]["dtype"] == "bfloat16"


def test_frontier_sizes_are_those_of_one_rank(frontier):
    one = {op: frontier_rows(frontier, op)[0][1] for op in {row["op"] for row in FRONTIER_ROWS}}
    assert sizes(one["emb"], "rows", "cols", "table_rows") == (16, 2048, 75968)
    assert one["attn_rope"]["cols"] == (4 + 1) * 128  # one key head stays on each of 8 ranks
    assert sizes(one["mlp_act"], "operator", "cols") == ("silu_and_mul", 384)
    assert sizes(one["mtp_fusion_proj"], "n", "k") == (2048, 4096)
    assert sizes(one["share_expert_up_proj"], "n", "k") == (2048, 2048)
    assert sizes(one["attn_pre_proj_qkv"], "n", "k") == (2048 + 512, 7168)
    assert one["attn_pre_proj_q_norm"]["cols"] == 2048
    assert sizes(one["attn_pre_proj_wq"], "n", "k") == (16 * 256, 2048)
    assert sizes(one["moe_gating_linear"], "n", "k") == (128, 2048)
    assert sizes(one["moe_gating_routing_topk"], "operator", "cols", "topk") == ("moe_gating", 128, 8)
    assert sizes(one["moe_shuffling"], "operator", "rows", "cols", "topk") == ("moe_shuffle", 64, 2048, 8)
    moe = one["moe_grouped_gemm"]
    assert sizes(moe, "operator", "tokens", "intermediate", "experts", "tp", "ep") == ("moe", 64, 768, 128, 2, 4)


def test_projections_that_are_timed_with_norms_are_not_trained_on(frontier):
    for row, _ in frontier_rows(frontier, "attn_pre_proj"):
        assert frontier.excluded[row] == "composite"
    _, step = frontier_rows(frontier, "attn_pre_proj")[1]
    # Both products of Step3's projection: 7168 -> 2560 and 2048 -> 16 * 256.
    assert step["n"] == 2560 + 2048 * 16 * 256 // 7168


def test_lengths_of_frontier_batches(frontier):
    (_, decode), (empty, nothing) = frontier_rows(frontier, "attn_decode")
    assert sizes(decode, "operator", "batch", "past_len", "heads", "kv_heads") == ("attention_decode", 2, 2432, 4, 1)
    assert sizes(nothing, "operator", "rows", "cols") == ("copy", 64, 1)
    assert frontier.framework[empty] == "flashinfer"
    single, unequal, unknown = (spec for _, spec in frontier_rows(frontier, "attn_prefill"))
    assert sizes(single, "batch", "q_len", "past_len") == (1, 64, 4032)
    assert sizes(unequal, "batch", "q_len", "past_len") == (2, 35, 0)
    assert sizes(unknown, "batch", "q_len", "past_len") == (3, 1, 0)
    assert frontier.excluded[frontier_rows(frontier, "attn_prefill")[2][0]] == "no_sizes"
    [(_, reshape)] = frontier_rows(frontier, "attn_input_reshape")
    assert sizes(reshape, "operator", "rows", "cols") == ("copy", 4, 3)


def test_frontier_cache_writes_count_tokens_and_key_and_value_columns(frontier):
    (_, unequal), (old, single) = frontier_rows(frontier, "attn_kv_cache_save")
    assert sizes(unequal, "operator", "rows", "cols") == ("kv_cache_save", 70, 2 * 4 * 128)
    assert single["rows"] == 320
    assert frontier.excluded[old] == "paged_copy"


def test_frontier_skewed_load_is_a_power_law(columns_of, save):
    columns = columns_of("frontier")
    columns["load_distribution"] = ["skewed" if name else "" for name in columns["load_distribution"]]
    assert frontier_rows(load_table(save(columns)), "moe_grouped_gemm")[0][1]["balance"] == "power_law_1.2"


def test_infersim_mapping(columns_of, save):
    table = load_table(save(columns_of("infersim")))
    gemm, up, down, mha, decode, prefill, sparse, scores, sparse_prefill, prefill_scores = specs(table)
    assert sizes(gemm, "dtype", "scaling", "m", "n", "k") == ("float8_e4m3", "block128", 64, 4096, 7168)
    assert sizes(up, "groups", "rows", "n", "k") == (64, 256, 4096, 7168)
    assert sizes(down, "groups", "rows", "n", "k", "scaling") == (64, 64 * 128, 7168, 2048, "block128")
    assert sizes(mha, "operator", "batch", "past_len", "kv_heads") == ("attention_decode", 16, 1023, 8)
    assert sizes(decode, "operator", "heads", "latent", "past_len") == ("mla_decode", 128, 512, 4095)
    assert sizes(prefill, "operator", "batch", "q_len", "past_len", "nope") == ("mla_prefill", 1, 4096, 0, 128)
    assert sizes(sparse, "operator", "batch", "past_len", "kv_dtype") == ("mla_decode", 64, 2047, "float8_e4m3")
    assert sizes(sparse_prefill, "operator", "batch", "past_len") == ("mla_decode", 4096, 2047)
    assert sizes(scores, "operator", "dtype", "q_len", "kv_heads", "head_dim") == (
        "attention_decode",
        "float8_e4m3",
        2,
        1,
        64,
    )
    assert sizes(prefill_scores, "operator", "q_len", "past_len") == ("attention_prefill", 2048, 14336)
    assert table.excluded.counts() == {"": 6, "stand_in": 4}
    assert table.protocol.array().tolist() == ["kernel"] * 3 + ["eager"] + ["kernel"] * 6
    assert table.framework.array().tolist()[:5] == ["deepgemm", "deepgemm", "deepgemm", "flashinfer", ""]
    assert table.framework.array().tolist()[6:8] == ["", "deepgemm"]


@pytest.mark.parametrize("config", ["data", "32-8", "a-b-c"])
def test_infersim_attention_of_another_form_is_unsupported(columns_of, save, config):
    columns = columns_of("infersim")
    columns["cfg"][3] = config
    assert load_table(save(columns)).unsupported.array()[3] == "unknown_operator"


def test_records_keep_the_reasons_of_doubtful_rows(frontier, tmp_path):
    write_records(frontier, tmp_path / "records.parquet")
    again = read_records(tmp_path / "records.parquet")
    assert again.excluded.array().tolist() == frontier.excluded.array().tolist()


def test_doubts_follow_earlier_reasons():
    earlier = Labels.of(["", "too_slow", ""])
    rows = with_doubts(earlier, {"fused": earlier.is_("") | earlier.is_("too_slow")})
    assert rows.array().tolist() == ["fused", "too_slow", "fused"]
    with pytest.raises(ValueError, match="unknown reason 'other'"):
        with_doubts(earlier, {"other": earlier.is_("")})
    assert all(DOUBTFUL.values())
