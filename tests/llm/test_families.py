"""This year's architectures: parameter counts, operators and memory of published dimensions."""

import json
from pathlib import Path
from typing import Any

import pytest

from cdmpp.errors import FieldError
from cdmpp.llm import Decode, Layout, Prefill, estimate, read_config, step_operators
from cdmpp.llm.layout import Types
from cdmpp.llm.memory import memory_of, parameter_count, part_memory, weights_read
from cdmpp.llm.mixers import STAND_INS
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.operators import resident_bytes


def sizes(
    model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, **own: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **own,
    }


def latent(q_rank: int, nope: int, v_dim: int) -> dict[str, int]:
    return {
        "q_lora_rank": q_rank,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": nope,
        "v_head_dim": v_dim,
    }


def experts(count: int, topk: int, width: int, shared: int = 1) -> dict[str, int]:
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": topk,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
    }


DELTA = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {"head_dim": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
GPT_OSS = sizes(
    "gpt_oss", 2880, 36, 64, 8, 201088, head_dim=64, intermediate_size=2880, num_local_experts=128,
    num_experts_per_tok=4, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18,
    quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
)  # fmt: skip
NEMOTRON_NANO = sizes(
    "nemotron_h", 2688, 52, 32, 2, 131072, **MAMBA, mamba_num_heads=64, intermediate_size=1856,
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", **experts(128, 6, 1856),
    moe_shared_expert_intermediate_size=3712,
)  # fmt: skip
QWEN35 = sizes("qwen3_5_text", 5120, 64, 24, 4, 248320, **DELTA, linear_num_value_heads=48, intermediate_size=17408)
GLM5 = sizes(
    "glm_moe_dsa", 6144, 78, 64, 64, 154880, **latent(2048, 192, 256), **experts(256, 8, 2048), first_k_dense_replace=3,
    intermediate_size=12288, index_n_heads=32, index_head_dim=128, index_topk=2048,
)  # fmt: skip
DEEPSEEK_V4 = sizes(
    "deepseek_v4", 4096, 43, 64, 1, 129280, head_dim=512, **experts(256, 6, 2048), q_lora_rank=1024, o_lora_rank=1024,
    o_groups=8, qk_rope_head_dim=64, index_n_heads=64, index_head_dim=128, index_topk=512, sliding_window=128,
    hc_mult=4, compress_ratios=[0, 0] + [4, 128] * 20 + [4, 0], expert_dtype="fp4",
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
)  # fmt: skip
GEMMA4 = sizes(
    "gemma4_text", 5376, 60, 32, 16, 262144, head_dim=256, global_head_dim=512, num_global_key_value_heads=4,
    attention_k_eq_v=True, intermediate_size=21504, sliding_window=1024,
)  # fmt: skip
#: Fields of the published files, and billions of parameters that the model cards state.
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "gpt-oss-120b": (GPT_OSS, 116.8),
    "nemotron-3-nano": (NEMOTRON_NANO, 31.6),
    "nemotron-3-super": (
        sizes(
            "nemotron_h", 4096, 88, 32, 2, 131072, **MAMBA, mamba_num_heads=128, intermediate_size=2688,
            hybrid_override_pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
            **experts(512, 22, 2688), moe_shared_expert_intermediate_size=5376, moe_latent_size=1024,
        ),
        120.6,
    ),
    "qwen3.5-27b": (QWEN35, 27.0),
    "qwen3.5-122b-a10b": (
        sizes(
            "qwen3_5_moe_text", 3072, 48, 32, 2, 248320, **DELTA, linear_num_value_heads=64, num_experts=256,
            num_experts_per_tok=8, moe_intermediate_size=1024, shared_expert_intermediate_size=1024,
        ),
        122.0,
    ),
    "glm-5": (GLM5, 744.0),
    "deepseek-v4-flash": (DEEPSEEK_V4, 284.0),
    "gemma-4-31b": (GEMMA4, 30.7),
    "llama-4-scout": (
        sizes(
            "llama4_text", 5120, 48, 40, 8, 202048, head_dim=128, intermediate_size=8192, intermediate_size_mlp=16384,
            interleave_moe_layer_step=1, num_local_experts=16, num_experts_per_tok=1, attention_chunk_size=8192,
        ),
        109.0,
    ),
    "minimax-m2": (
        sizes(
            "minimax_m2", 3072, 62, 48, 8, 200064, head_dim=128, intermediate_size=1536, num_local_experts=256,
            num_experts_per_tok=8,
        ),
        230.0,
    ),
    "mimo-v2-flash": (
        sizes(
            "mimo_v2_flash", 4096, 48, 64, 4, 152576, head_dim=192, v_head_dim=128, intermediate_size=16384,
            sliding_window=128, swa_num_key_value_heads=8, hybrid_layer_pattern=[0] * 9 + [1] * 39,
            moe_layer_freq=[0] + [1] * 47, **experts(256, 8, 2048, 0),
        ),
        309.0,
    ),
    "kimi-k2": (
        sizes(
            "kimi_k2", 7168, 61, 64, 64, 163840, **latent(1536, 128, 128), **experts(384, 8, 2048),
            first_k_dense_replace=1, intermediate_size=18432,
        ),
        1000.0,
    ),
    "step-3.7-flash": (
        sizes(
            "step3p7", 4096, 45, 64, 8, 128896, head_dim=128, intermediate_size=11264, sliding_window=512,
            first_k_dense_replace=3, num_experts=288, num_experts_per_tok=8, moe_intermediate_size=1280,
            share_expert_dim=1280, n_shared_experts=1,
        ),
        196.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_architectures_have_the_published_number_of_parameters(name: str) -> None:
    fields, billions = PUBLISHED[name]
    # Cards round, and count encoders or layers for the prediction of several tokens.
    assert parameter_count(read_config(fields)) == pytest.approx(billions * 1e9, rel=0.03)


@pytest.mark.parametrize("name", PUBLISHED)
def test_operators_read_the_weights_that_memory_counts(name: str) -> None:
    config = read_config({**PUBLISHED[name][0], "quantization_config": None, "expert_dtype": None})
    parts = step_operators(config, Layout(), Decode(1, 10))
    read = sum(part.count * resident_bytes(part.program)[0] for part in parts)
    assert read == pytest.approx(memory_of(config, Layout(), Types.of(config), 1, 10).weights, rel=0.06)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "nemotron-3-nano", "qwen3.5-27b", "glm-5", "deepseek-v4-flash"])
@pytest.mark.parametrize(("device", "bandwidth"), [("h100-sxm", 3.35e12), ("b200", 8e12)])
def test_decode_takes_at_least_the_time_to_read_weights_and_cache(name: str, device: str, bandwidth: float) -> None:
    config, tp = read_config(PUBLISHED[name][0]), 32 if name == "glm-5" else 8
    layout, types = Layout(tp=tp), Types.of(config)
    read = weights_read(config, layout, types) + part_memory(config, layout, types, None, 1025)[1]
    decode = estimate(config, device, tp=tp, batch=1, input=1024, output=8).decode
    assert decode is not None
    assert decode.point >= read / bandwidth


def test_state_of_a_recurrent_layer_does_not_grow_with_the_context() -> None:
    config = read_config(NEMOTRON_NANO)
    types = Types.of(config)
    short, long = (memory_of(config, Layout(), types, 1, tokens).kv_cache for tokens in (1024, 2048))
    # Six layers of attention with two heads of keys and values, of 128 columns and two bytes.
    assert long - short == 1024 * 6 * 2 * 2 * 128 * 2
    parts = {part.name: part for part in step_operators(config, Layout(), Decode(4, 1000))}
    assert parts["scan"].program.text() == "silu:dtype=float32,rows=256,cols=8192"
    assert (parts["scan"].count, parts["attention"].count, parts["experts"].count) == (23, 6, 23)


@pytest.mark.parametrize("fields", [NEMOTRON_NANO, GLM5])
def test_kernels_without_an_operator_are_near_at_best(fields: dict[str, Any]) -> None:
    whole = estimate(fields, "h100-sxm", tp=2, weights="float8_e4m3", dp=8, batch=16, output=8)
    stood_for = [part for part in whole.parts if part.name in STAND_INS]
    assert stood_for
    assert "in" not in {part.domain for part in stood_for}
    assert any("approximated" in remark for remark in whole.remarks)


def test_a_type_excluded_from_some_layers_is_said() -> None:
    attention = [f"model.layers.{i}.self_attn" for i in range(78)]
    quantised = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": attention[:50]}
    some = read_config({**GLM5, "quantization_config": quantised})
    every = read_config({**GLM5, "quantization_config": {**quantised, "ignore": attention}})
    assert some.part_weights == every.part_weights
    assert [sum("several types" in remark for remark in config.remarks) for config in (some, every)] == [1, 0]


def test_prefill_of_a_recurrent_layer_is_products_of_chunks() -> None:
    parts = {part.name: part for part in step_operators(read_config(QWEN35), Layout(tp=4), Prefill([100, 1000]))}
    assert parts["scan_values"].program.sizes() == {"batch": 12 * (2 + 16), "m": 64, "n": 128, "k": 64}
    # The states of a sequence follow each other; those of several are computed together.
    assert parts["scan_state"].program.sizes() == {"batch": 12 * 2, "m": 128, "n": 128, "k": 64}
    assert (parts["scan_state"].count, parts["attention_gate"].count) == (48 * 16, 16)
    assert "scan" not in parts


def test_sparse_attention_reads_the_chosen_tokens() -> None:
    parts = {part.name: part for part in step_operators(read_config(GLM5), Layout(tp=8), Decode(2, 30_000))}
    assert parts["attention"].program.sizes()["past_len"] == 2047
    assert parts["index_scores"].program.sizes() == {"batch": 2, "m": 32, "n": 30_001, "k": 128}
    shared = {**GLM5, "indexer_types": ["full"] * 21 + ["shared"] * 57}
    parts = {part.name: part for part in step_operators(read_config(shared), Layout(tp=8), Decode(2, 30_000))}
    assert (parts["attention"].count, parts["index_scores"].count) == (78, 21)


def test_compressed_attention_keeps_a_window_and_compressed_tokens() -> None:
    config = read_config(DEEPSEEK_V4)
    counts = {
        part.program.sizes()["past_len"]: part.count
        for part in step_operators(config, Layout(tp=8), Decode(1, 12_800))
        if part.name == "attention"
    }
    assert counts == {127: 2, 127 + 512: 21, 127 + 100: 20}


def test_wide_heads_and_windows_of_gemma_4() -> None:
    parts = {part.name: part for part in step_operators(read_config(GEMMA4), Layout(), Decode(1, 5000))}
    assert (parts["attention"].count, parts["window_attention"].count) == (10, 50)
    assert parts["attention"].program.sizes()["head_dim"] == 512
    assert parts["window_attention"].program.sizes()["past_len"] == 1023


def test_only_the_experts_of_gpt_oss_are_quantised() -> None:
    config = read_config(GPT_OSS)
    parts = {part.name: part for part in step_operators(config, Layout(), Decode(1, 10))}
    assert parts["qkv_proj"].program.text().startswith("linear:dtype=bfloat16,m=1")
    assert parts["experts"].program.text().startswith("moe:dtype=float8_e4m3,weight_dtype=float4_e2m1,scaling=mx32")
    assert memory_of(config, Layout(), Types.of(config), 1, 10).weights == pytest.approx(65.2e9, rel=0.02)


def test_experts_of_deepseek_v4_have_four_bits_and_the_rest_eight() -> None:
    parts = {part.name: part for part in step_operators(read_config(DEEPSEEK_V4), Layout(), Decode(1, 10))}
    assert "dtype=float8_e4m3,weight_dtype=float4_e2m1,scaling=mx32" in parts["experts"].program.text()
    assert "dtype=float8_e4m3,scaling=block128" in parts["q_b_proj"].program.text()


def test_family_replaces_the_model_type(tmp_path: Path) -> None:
    fields = sizes("new_model", 4096, 32, 32, 8, 32000, intermediate_size=14336)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(FieldError, match="'new_model' is not known"):
        read_config(tmp_path)
    assert read_config(tmp_path, family="llama").model_type == "llama"
    with pytest.raises(FieldError, match="'lama' is not known; did you mean llama"):
        read_config(fields, family="lama")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**NEMOTRON_NANO, "hybrid_override_pattern": "MX"}, "'X' is not known"),
        ({**DEEPSEEK_V4, "compress_ratios": [4]}, "compress_ratios: is not a list"),
        ({**DEEPSEEK_V4, "o_groups": 7}, "7 does not divide"),
        ({**QWEN35, "layer_types": ["full_attention"]}, "one type per layer"),
        (sizes("nemotron-nas", 64, 1, 2, 2, 64, block_configs=[{}]), "has no attention or no ffn"),
        (sizes("kimi_linear", 64, 1, 2, 2, 64), "linear_attn_config: missing"),
    ],
)
def test_impossible_descriptions_are_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        read_config(fields)


def test_drafted_tokens_are_checked_in_one_step(predictor: LatencyPredictor) -> None:
    config, layout = read_config(PUBLISHED["kimi-k2"][0]), Layout(tp=8)
    plain, drafted = (step_operators(config, layout, Decode(4, 1000, drafted=n)) for n in (0, 2))
    names = [part.name for part in plain]
    checked = [part for part in drafted if (part.program.sizes().get("m") or 12) == 12]
    assert [part.name for part in checked if part.name == "q_b_proj"] == ["q_b_proj"]
    # Two drafts pass a layer and the output layer with one token of each sequence.
    heads = [(part.program.sizes()["m"], part.count) for part in drafted if part.name == "lm_head"]
    assert heads == [(12, 1), (4, 2)] and {"draft_norm", "draft_proj"} == {part.name for part in drafted} - set(names)
    attention = [(part.program.sizes()["heads"], part.count) for part in drafted if part.name == "attention"]
    assert attention == [(24, 61), (8, 2)]
    options: dict[str, Any] = {"tp": 16, "batch": 4, "output": 65, "predictor": predictor}
    one, some, none = (
        estimate(PUBLISHED["kimi-k2"][0], "b200", mtp=mtp, acceptance=share, **options)
        for mtp, share in ((0, 0.8), (1, 1.0), (1, 0.0))
    )
    assert one.tpot is not None and some.tpot is not None and none.tpot is not None and some.decode is not None
    # 32 steps make 64 tokens where all drafts are right, and as many steps as tokens where none is.
    assert some.tpot.point == pytest.approx(some.decode.point / 2, rel=0.01)
    assert some.tpot.point < one.tpot.point < none.tpot.point == pytest.approx(2 * some.tpot.point, rel=0.01)
    with pytest.raises(FieldError, match=r"acceptance: '1\.5' is not allowed"):
        estimate(PUBLISHED["kimi-k2"][0], "b200", mtp=1, acceptance=1.5, **options)
