"""Layouts of the LLMServingSim, Frontier and InferSim tables, with values made up for the tests."""

from __future__ import annotations

from typing import Any

Columns = dict[str, list[Any]]
Layout = tuple[Columns, Columns]

LLAMA, MIXTRAL = "meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1"
PHI, QWEN = "microsoft/Phi-mini-MoE-instruct", "Qwen/Qwen3-32B"
V0, V1 = "v0 torch-profiler", "v1 vllm layerwise kernel"
H100, TPU, BLACKWELL = "NVIDIA H100 80GB HBM3", "Google TPU v6e", "NVIDIA RTX PRO 6000 Blackwell Server"


def _columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Columns:
    return {name: list(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}


def layers() -> Layout:
    names = ("op", "layer", "device", "model", "tp", "m", "n", "k", "protocol", "latency_us")
    rows = [
        ("linear", "down_proj", TPU, LLAMA, 1, 16, 4096, 14336, V0, 154.0),
        ("embedding", "embedding", H100, LLAMA, 2, 512, 0, 0, V0, 16.0),
        ("input_layernorm", "input_layernorm", H100, MIXTRAL, 4, 512, 0, 0, V0, 44.0),
        ("input_layernorm", "input_layernorm", "NVIDIA RTX A6000", PHI, 1, 512, 0, 0, V0, 11.0),
        ("post_layernorm", "post_layernorm", TPU, LLAMA, 1, 16, 0, 0, V0, 0.56),
        ("act_fn", "act_fn", H100, LLAMA, 2, 512, 0, 0, V0, 12.0),
        ("act_fn", "act_fn", H100, MIXTRAL, 2, 512, 0, 0, V0, 21.0),
        ("expert.w1", "expert.w1", H100, MIXTRAL, 4, 512, 0, 0, V0, 94.0),
        ("expert.w2", "expert.w2", H100, MIXTRAL, 4, 512, 0, 0, V0, 82.0),
        ("gate", "gate", H100, MIXTRAL, 4, 512, 0, 0, V0, 52.0),
        ("rope", "rope", H100, LLAMA, 2, 512, 0, 0, V0, 45.0),
        ("attn", "attn", H100, LLAMA, 2, 512, 0, 0, V0, 16.0),
        ("attn", "attn", "NVIDIA RTX A6000", PHI, 1, 2048, 0, 0, V0, 1870.0),
        ("qk_norm", "qk_norm", BLACKWELL, QWEN, 2, 64, 0, 0, V1, 3.3),
        ("rotary_emb", "rotary_emb", BLACKWELL, QWEN, 2, 64, 0, 0, V1, 2.7),
        ("sampler", "sampler", BLACKWELL, QWEN, 2, 64, 0, 0, V1, 39.0),
    ]
    columns = _columns(names, rows)
    return {**columns, "dtype": ["bfloat16"] * len(rows)}, {}


def attention() -> Layout:
    names = ("op", "device", "protocol", "heads", "kv_heads", "head_dim")
    lengths = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "latency_us")
    rows = [
        ("attention_decode", TPU, "v0 tpu", 32, 8, 128, 0, 0, 4, 96, 7.3),
        ("attention_prefill", H100, V0, 16, 2, 128, 256, 1024, 0, 0, 40.0),
        ("attention_mixed", BLACKWELL, V1, 32, 4, 128, 512, 1728, 16, 4096, 300.0),
    ]
    needed = {**_columns((*names, *lengths), rows), "dtype": ["bfloat16"] * 3}
    return needed, {"model": [LLAMA] * 3, "tp": [1, 4, 1], "mean_us": [7.0, 41.0, 301.0], "n_rep": [1] * 3}


_FRONTIER = {
    "model": "Qwen3-30B-A3B-tiny",
    "device": "NVIDIA H800",
    "protocol": "KERNEL_ONLY",
    "profiling_precision": "BF16",
    "quant_signature": "none",
    "tp": 1,
    **dict.fromkeys(("m", "n", "k", "n_embd", "n_expanded_embd", "vocab_size", "n_q_head", "n_kv_head"), 0),
    **dict.fromkeys(("head_dim", "batch_size", "prefill_chunk_size", "kv_cache_size", "num_experts"), 0),
    **dict.fromkeys(("expert_parallel_size", "router_topk", "hidden_dim", "expert_hidden_dim"), 0),
    **dict.fromkeys(("is_prefill", "is_mixed_batch", "seq_lens", "load_distribution"), ""),
}
_LAYER = {"n_embd": 2048, "n_expanded_embd": 768, "vocab_size": 151936, "n_q_head": 32, "n_kv_head": 4, "head_dim": 128}
_HEADS = {"n_embd": 2048, "n_q_head": 32, "n_kv_head": 4, "head_dim": 128, "is_mixed_batch": "False"}
_EXPERTS = {"num_experts": 128, "router_topk": 8, "hidden_dim": 2048, "expert_hidden_dim": 768, "head_dim": 128}
_MOE = {**_EXPERTS, "expert_parallel_size": 4, "load_distribution": "uniform", "tp": 2, "m": 64}
FP8 = "method=fp8|act=none|serialized=False|block=none"
_STEP = {"model": "step-moe-noquant-small", "n_embd": 7168, "n_q_head": 64, "n_kv_head": 1, "head_dim": 256}
_OLD = {"model": "meta-llama/Llama-2-7b-hf", "protocol": "not stated", "profiling_precision": "", "quant_signature": ""}
#: One dictionary per row: what differs from ``_FRONTIER``.
FRONTIER_ROWS: list[dict[str, Any]] = [
    {"op": "attn_post_proj", **_LAYER, "m": 16, "n": 2048, "k": 2048, "tp": 2, "latency_us": 6.0},
    {"op": "attn_pre_proj", **_LAYER, "m": 16, "n": 5120, "k": 2048, "latency_us": 20.0},
    {
        "op": "mlp_up_proj",
        **_LAYER,
        "model": "Llama-3.1-405B-Instruct-FP8",
        "quant_signature": FP8,
        "m": 16,
        "n": 26624,
        "k": 16384,
        "tp": 4,
        "latency_us": 180.0,
    },
    {"op": "input_layernorm", **_LAYER, "m": 16, "latency_us": 2.5},
    {"op": "add", **_OLD, **_LAYER, "n_embd": 4096, "m": 16, "latency_us": 2.0},
    {"op": "emb", **_LAYER, "tp": 2, "m": 16, "latency_us": 3.0},
    {"op": "attn_rope", **_LAYER, "tp": 8, "m": 16, "latency_us": 2.1},
    {"op": "mlp_act", **_LAYER, "tp": 2, "m": 16, "protocol": "CUDA_EVENT", "latency_us": 9.0},
    {"op": "mtp_fusion_proj", **_LAYER, "m": 16, "latency_us": 95.0},
    {"op": "share_expert_up_proj", **_LAYER, "model": "Step2Mini-tiny", "tp": 2, "m": 16, "latency_us": 5.0},
    {"op": "attn_pre_proj", **_LAYER, **_STEP, "tp": 4, "m": 16, "latency_us": 33.0},
    {"op": "attn_pre_proj_qkv", **_LAYER, **_STEP, "m": 16, "latency_us": 17.0},
    {"op": "attn_pre_proj_q_norm", **_LAYER, **_STEP, "m": 16, "latency_us": 6.0},
    {"op": "attn_pre_proj_wq", **_LAYER, **_STEP, "tp": 4, "m": 16, "latency_us": 8.0},
    {"op": "moe_gating_linear", **_MOE, "latency_us": 6.0},
    {"op": "moe_gating_routing_topk", **_MOE, "latency_us": 40.0},
    {"op": "moe_shuffling", **_MOE, "latency_us": 4.0},
    {"op": "moe_grouped_gemm", **_MOE, "latency_us": 30.0},
    {
        "op": "attn_decode",
        **_HEADS,
        "tp": 8,
        "batch_size": 2,
        "kv_cache_size": 2432,
        "is_prefill": "False",
        "seq_lens": "[1, 1]",
        "latency_us": 12.0,
    },
    {
        "op": "attn_prefill",
        **_HEADS,
        "batch_size": 1,
        "prefill_chunk_size": 64,
        "kv_cache_size": 4032,
        "is_prefill": "True",
        "seq_lens": "[64]",
        "latency_us": 45.0,
    },
    {
        "op": "attn_prefill",
        **_HEADS,
        "batch_size": 2,
        "is_prefill": "True",
        "is_mixed_batch": "True",
        "seq_lens": "[30, 40]",
        "latency_us": 50.0,
    },
    {
        "op": "attn_decode",
        **_HEADS,
        "batch_size": 1,
        "prefill_chunk_size": 64,
        "is_prefill": "True",
        "seq_lens": "[64]",
        "protocol": "CUDA_EVENT",
        "latency_us": 7.0,
    },
    {
        "op": "attn_input_reshape",
        **_HEADS,
        "batch_size": 4,
        "kv_cache_size": 100,
        "is_prefill": "False",
        "seq_lens": "[1, 1, 1, 1]",
        "protocol": "CUDA_EVENT",
        "latency_us": 10.0,
    },
    {"op": "attn_prefill", **_HEADS, "batch_size": 3, "is_prefill": "True", "latency_us": 9.0},
    {
        "op": "attn_kv_cache_save",
        **_HEADS,
        "batch_size": 2,
        "is_prefill": "True",
        "is_mixed_batch": "True",
        "seq_lens": "[30, 40]",
        "latency_us": 4.0,
    },
    {
        "op": "attn_kv_cache_save",
        **_HEADS,
        **_OLD,
        "is_mixed_batch": "",
        "batch_size": 1,
        "prefill_chunk_size": 320,
        "is_prefill": "True",
        "latency_us": 268.0,
    },
]


def frontier() -> Layout:
    rows = [{**_FRONTIER, **row} for row in FRONTIER_ROWS]
    needed = {name: [row[name] for row in rows] for name in rows[0]}
    size = len(rows)
    optional = {
        "table": ["linear_op"] * size,
        "family": ["linear_op"] * size,
        "mean_us": [1.0] * size,
        "std_us": [0.1] * size,
        "n_rep": [1] * size,
        "rep_spread": [0.0] * size,
        "attention_backend": ["FLASHINFER"] * size,
        "num_experts_per_device": [1] * size,
    }
    return needed, optional


def infersim() -> Layout:
    n = None
    names = ("op", "phase", "cfg", "dtype", "kv_dtype", "batch_size", "q_len", "kv_len", "seq_len", "m", "n", "k")
    experts = ("num_local_experts", "tokens_per_expert", "hidden_size", "intermediate_size", "latency_us")
    rows = [
        ("gemm", n, "data", n, n, n, n, n, n, 64, 4096, 7168, n, n, n, n, 18.0),
        ("grouped_gemm_up", "decode", "data", n, n, n, n, n, n, n, n, n, 64, 4, 7168, 2048, 641.0),
        ("grouped_gemm_down", "prefill", "data", n, n, n, n, n, n, n, n, n, 64, 128, 7168, 2048, 421.0),
        ("mha", "decode", "32-8-128", "bf16", "bf16", 16, n, 1024, n, n, n, n, n, n, n, n, 35.0),
        ("mla", "decode", "128-512-64", "bf16", "bf16", 16, n, 4096, n, n, n, n, n, n, n, n, 53.0),
        ("mla", "prefill", "128-128-64", "bf16", n, n, n, n, 4096, n, n, n, n, n, n, n, 1100.0),
        ("dsa", "decode", "attn-128-576-2048", "bf16", "fp8", 64, n, 8192, n, n, n, n, n, n, n, n, 96.0),
        ("dsa", "decode", "logits-64-128", n, n, 64, 2, 8192, n, n, n, n, n, n, n, n, 37.0),
        ("dsa", "prefill", "attn-128-576-2048", "bf16", n, n, 4096, 8192, n, n, n, n, n, n, n, n, 3600.0),
        ("dsa", "prefill", "logits-64-128", n, n, n, 2048, 16384, n, n, n, n, n, n, n, n, 444.0),
    ]
    needed = {**_columns((*names, *experts), rows), "device": ["NVIDIA H800"] * len(rows)}
    optional = {"mfu": [0.1] * len(rows), "num_experts": [n] * len(rows), "num_gpus": [n] * len(rows)}
    return needed, {**optional, "topk": [n] * len(rows)}
