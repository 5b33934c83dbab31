"""Operators of one step, compared with lists by hand."""

import json

import pytest

from cdmpp.errors import FieldError
from cdmpp.llm import Decode, Layout, LLMConfig, Prefill, StepPart, read_config, step_operators
from cdmpp.llm.operators import attention_batches
from tests.llm.test_read_config import EXAMPLES, OTHERS


def config(name: str) -> LLMConfig:
    return read_config(OTHERS[name][0] if name in OTHERS else EXAMPLES / f"{name}.json")


def texts(parts: list[StepPart]) -> list[tuple[int, str]]:
    return [(part.count, part.program.text().replace("dtype=bfloat16,", "")) for part in parts]


def by_name(parts: list[StepPart]) -> dict[str, StepPart]:
    return {part.name: part for part in parts}


def test_prefill_of_llama_8b_on_two_ranks() -> None:
    assert texts(step_operators(config("llama-3.1-8b"), Layout(tp=2), Prefill([512] * 4))) == [
        (1, "embedding:rows=2048,cols=4096,table_rows=64128"),
        (1, "all_reduce:bytes=16777216,ranks=2"),
        (32, "rmsnorm:rows=4096,cols=4096"),
        (32, "linear:m=2048,n=3072,k=4096"),
        (32, "rotary_embedding:rows=2048,cols=2560"),
        (32, "kv_cache_save:rows=2048,cols=1024"),
        (32, "attention_prefill:batch=4,q_len=512,heads=16,kv_heads=4,head_dim=128"),
        (32, "linear:m=2048,n=4096,k=2048"),
        (32, "all_reduce:bytes=16777216,ranks=2"),
        (32, "rmsnorm:rows=4096,cols=4096"),
        (32, "linear:m=2048,n=14336,k=4096"),
        (32, "silu_and_mul:rows=2048,cols=7168"),
        (32, "linear:m=2048,n=4096,k=7168"),
        (32, "all_reduce:bytes=16777216,ranks=2"),
        (1, "rmsnorm:rows=4096,cols=4096"),
        (1, "linear:m=4,n=64128,k=4096"),
        (1, "all_gather:bytes=1026048,ranks=2"),
        (1, "argmax:rows=4,cols=128256"),
    ]


def test_decode_reads_the_cache_and_has_one_row_per_sequence() -> None:
    parts = by_name(step_operators(config("llama-3.1-8b"), Layout(), Decode(16, 1000)))
    assert parts["attention"].program.text() == (
        "attention_decode:dtype=bfloat16,batch=16,past_len=1000,heads=32,kv_heads=8,head_dim=128"
    )
    assert parts["qkv_proj"].program.sizes()["m"] == parts["lm_head"].program.sizes()["m"] == 16
    assert not any("all_" in name for name in parts)
    unequal = by_name(step_operators(config("llama-3.1-8b"), Layout(), Decode(16, past_total=16_016)))
    assert unequal["attention"].program.sizes()["past_len"] == 1001


def test_key_value_heads_are_replicated_where_ranks_exceed_them() -> None:
    parts = by_name(step_operators(config("llama-3.1-70b"), Layout(tp=16), Decode(1, 10)))
    assert parts["attention"].program.sizes() == {
        "batch": 1,
        "q_len": 1,
        "past_len": 10,
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 128,
    }
    assert parts["qkv_proj"].program.sizes()["n"] == 6 * 128
    # The device decides how many ranks share a node.
    assert parts["mlp_all_reduce"].program.text() == f"all_reduce:dtype=bfloat16,bytes={8192 * 2},ranks=16"


def test_latent_attention_expands_in_prefill_and_absorbs_in_decode() -> None:
    deepseek = config("deepseek-v3")
    prefill = by_name(step_operators(deepseek, Layout(tp=8), Prefill([128])))
    decode = by_name(step_operators(deepseek, Layout(tp=8), Decode(2, 100)))
    assert prefill["attention"].program.text() == "mla_prefill:dtype=bfloat16,batch=1,q_len=128,heads=16"
    assert prefill["qkv_a_proj"].program.sizes() == {"m": 128, "n": 1536 + 512 + 64, "k": 7168}
    assert prefill["kv_b_proj"].program.sizes() == {"m": 128, "n": 16 * 256, "k": 512}
    assert decode["attention"].program.text() == "mla_decode:dtype=bfloat16,batch=2,past_len=100,heads=16"
    assert "kv_b_proj" not in decode
    assert decode["k_absorb"].program.sizes() == {"batch": 16, "m": 2, "n": 512, "k": 128}
    assert decode["v_expand"].program.sizes() == {"batch": 16, "m": 2, "n": 128, "k": 512}
    lite = by_name(step_operators(config("deepseek-v2-lite"), Layout(), Decode(1, 1)))
    assert lite["q_proj"].program.sizes() == {"m": 1, "n": 16 * 192, "k": 2048}


def test_dense_and_expert_layers_are_counted_apart() -> None:
    parts = by_name(step_operators(config("deepseek-v3"), Layout(tp=8), Decode(2, 100)))
    assert (parts["gate_up_proj"].count, parts["experts"].count, parts["shared_gate_up_proj"].count) == (3, 58, 58)
    assert parts["experts"].program.text() == (
        "moe:dtype=float8_e4m3,scaling=block128,balance=power_law_1.01,"
        "tokens=2,hidden=7168,intermediate=2048,experts=256,topk=8,tp=8"
    )


def test_experts_are_chosen_by_a_product_and_one_kernel() -> None:
    parts = by_name(step_operators(config("qwen3-30b-a3b"), Layout(), Decode(4, 10), weights="fp8"))
    assert parts["router"].program.text() == "linear:dtype=bfloat16,m=4,n=128,k=2048"
    assert parts["router_topk"].program.text() == "softmax:dtype=float32,rows=4,cols=128"


def test_experts_are_spread_over_the_ranks_of_a_layer() -> None:
    parts = by_name(step_operators(config("qwen3-30b-a3b"), Layout(tp=4, ep=2), Decode(8, 100)))
    assert "tokens=8" in parts["experts"].program.text()
    assert parts["experts"].program.text().endswith("tp=2,ep=2")
    assert "mlp_all_reduce" in parts
    assert "expert_dispatch" not in parts


def test_replicas_of_the_attention_divide_the_batch_and_exchange_tokens() -> None:
    layout = Layout(tp=2, ep=8)
    assert (layout.dp, layout.gpus) == (4, 8)
    parts = by_name(step_operators(config("qwen3-30b-a3b"), layout, Decode(10, 100)))
    assert parts["attention"].program.sizes()["batch"] == 3
    assert parts["experts"].program.sizes()["tokens"] == 10
    # Three tokens in the fullest replica; each of its ranks sends two of them to eight ranks.
    assert parts["expert_dispatch"].program.text() == f"all_to_all:dtype=bfloat16,bytes={2 * 8 * 2048 * 2},ranks=8"
    prefill = by_name(step_operators(config("qwen3-30b-a3b"), layout, Prefill([100] * 10)))
    assert prefill["attention"].program.sizes()["batch"] == 3


def test_experts_have_no_tokens_of_replicas_without_a_sequence() -> None:
    parts = by_name(step_operators(config("qwen3-30b-a3b"), Layout(tp=1, ep=64), Prefill([1024])))
    assert parts["experts"].program.sizes()["tokens"] == 1024


def test_window_limits_the_keys() -> None:
    gemma = config("gemma-2-9b")
    decode = by_name(step_operators(gemma, Layout(), Decode(2, 5000)))
    assert (decode["attention"].count, decode["window_attention"].count) == (21, 21)
    assert decode["attention"].program.sizes()["past_len"] == 5000
    assert decode["window_attention"].program.sizes()["past_len"] == 4095
    assert {"attention_output_norm", "mlp_output_norm", "logits_soft_cap", "embedding_scale"} <= set(decode)
    blocks = [
        part.program.sizes()
        for part in step_operators(gemma, Layout(), Prefill([10_000]))
        if part.name == "window_attention"
    ]
    assert sum(block["batch"] * block["q_len"] for block in blocks) == 10_000
    pairs = sum(block["batch"] * block["q_len"] * (block["past_len"] + block["q_len"] / 2) for block in blocks)
    assert pairs == 4096 * 4096 / 2 + (10_000 - 4096) * 4096


def test_short_prompts_are_not_split_by_a_window() -> None:
    parts = by_name(step_operators(config("gemma-2-9b"), Layout(), Prefill([100, 100])))
    assert parts["window_attention"].program.sizes()["batch"] == 2


def test_gpt2_has_learned_positions_and_no_gate() -> None:
    parts = by_name(step_operators(config("gpt2-xl"), Layout(), Prefill([64])))
    assert parts["position_embedding"].program.sizes()["table_rows"] == 1024
    assert "rotary" not in parts
    assert [parts[name].program.operator for name in ("attention_norm", "activation")] == ["layernorm", "gelu"]
    assert parts["up_proj"].program.sizes() == {"m": 64, "n": 6400, "k": 1600}


def test_heads_of_qwen3_are_normalised() -> None:
    parts = by_name(step_operators(config("qwen3-8b"), Layout(), Decode(4, 10)))
    assert parts["qk_norm"].program.sizes() == {"rows": 4 * (32 + 8), "cols": 128}


def test_stages_transfer_the_activations() -> None:
    near = by_name(step_operators(config("llama-3.1-8b"), Layout(pp=4), Decode(8, 10)))
    far = by_name(step_operators(config("llama-3.1-8b"), Layout(tp=4, pp=4), Decode(8, 10)))
    assert (near["stage_transfer"].count, far["stage_transfer"].count) == (3, 3)
    assert near["stage_transfer"].program.text() == f"send_recv:dtype=bfloat16,bytes={8 * 4096 * 2},span=4"
    assert far["stage_transfer"].program.text() == f"send_recv:dtype=bfloat16,bytes={8 * 4096 * 2},span=16"
    assert near["qkv_proj"].count == 32


@pytest.mark.parametrize(
    ("weights", "fields", "expert_fields"),
    [
        (None, "dtype=bfloat16", "dtype=bfloat16"),
        ("fp8", "dtype=float8_e4m3,scaling=channel", "dtype=float8_e4m3,scaling=tensor"),
        ("int8", "dtype=int8,scaling=channel", "dtype=int8,scaling=channel"),
        ("float4_e2m1", "dtype=float4_e2m1,scaling=nvfp4", "dtype=float4_e2m1,scaling=nvfp4"),
        (
            "int4",
            "dtype=bfloat16,weight_dtype=int4,scaling=block128",
            "dtype=bfloat16,weight_dtype=int4,scaling=block128",
        ),
    ],
)
def test_quantised_weights(weights: str | None, fields: str, expert_fields: str) -> None:
    parts = by_name(step_operators(config("mixtral-8x7b"), Layout(), Decode(1, 1), weights=weights))
    assert parts["qkv_proj"].program.text() == f"linear:{fields},m=1,n=6144,k=4096"
    assert parts["experts"].program.text().startswith(f"moe:{expert_fields},balance=power_law_1.01,tokens=1")
    assert parts["lm_head"].program.text() == "linear:dtype=bfloat16,m=1,n=32000,k=4096"


def test_sequences_of_different_lengths_keep_tokens_and_pairs() -> None:
    assert attention_batches([100, 100, 100]) == [(3, 100)]
    lengths = [4000, 200, 300, 3000, 50]
    [(batch, length)] = attention_batches(lengths)
    assert batch * length == pytest.approx(sum(lengths), rel=0.2)
    assert batch * length**2 == pytest.approx(sum(n * n for n in lengths), rel=0.01)


def test_expected_experts_of_a_token_have_as_many_rows() -> None:
    mixtral = {**json.loads((EXAMPLES / "mixtral-8x7b.json").read_text()), "num_experts_per_tok": 1.25}
    parts = by_name(step_operators(read_config(mixtral), Layout(), Prefill((4096,))))
    # Two experts of 2,560 tokens: 5,120 rows, 1.25 for each token.
    assert ",tokens=2560," in parts["experts"].program.text() and ",topk=2" in parts["experts"].program.text()


@pytest.mark.parametrize(
    ("name", "layout", "message", "allowed"),
    [
        (
            "llama-3.1-70b",
            Layout(tp=3),
            "tp: 3 does not divide the model: 64 heads, 8 key-value heads",
            "1, 2, 4, 8, 16",
        ),
        ("gpt2-xl", Layout(tp=2), "tp: 2 does not divide", "1, 5, 25"),
        ("qwen2.5-14b", Layout(tp=5), "tp: 5 does not divide", "1, 2, 4, 8"),
        ("llama-3.1-8b", Layout(pp=33), "pp: 33 stages for 32 layers", "1 to 32"),
        ("llama-3.1-8b", Layout(ep=2), "llama has no experts", "ep=1"),
        ("mixtral-8x7b", Layout(ep=3), "ep: 3 does not fit tp=1, 8 experts", "1, 2, 4, 8"),
        ("llama-3.1-8b", Layout(tp=0), "tp: '0' is not allowed", "from 1"),
    ],
)
def test_layouts_that_do_not_divide_the_model_are_errors(name: str, layout: Layout, message: str, allowed: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        step_operators(config(name), layout, Decode(1, 1))
    assert allowed in caught.value.hint


def test_unknown_types_are_errors() -> None:
    llama = config("llama-3.1-8b")
    with pytest.raises(FieldError, match="weights: 'int3' is not allowed"):
        step_operators(llama, Layout(), Decode(1, 1), weights="int3")
    with pytest.raises(FieldError, match="dtype: 'int8' is not allowed"):
        step_operators(llama, Layout(), Decode(1, 1), dtype="int8")
    with pytest.raises(FieldError, match="weights: no int4 weights with dtype float32"):
        step_operators(llama, Layout(), Decode(1, 1), dtype="float32", weights="int4")
    with pytest.raises(FieldError, match="lengths"):
        Prefill([])
