"""Layouts of the public tables, with values made up for the tests."""

from collections.abc import Sequence
from typing import Any, NamedTuple

Columns = dict[str, list[Any]]
n = None
MI300X, MI350, TENSILE = "AMD gfx942 304CU (MI300X)", "AMD gfx950 256CU (MI350X/MI355X)", "AMD gfx942 (Tensile)"
H100, TPU, BLACKWELL = "NVIDIA H100 80GB HBM3", "Google TPU v6e", "NVIDIA RTX PRO 6000 Blackwell Server"
LLAMA, LLAMA2, MIXTRAL = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-7b-hf", "mistralai/Mixtral-8x7B-v0.1"
PHI, QWEN = "microsoft/Phi-mini-MoE-instruct", "Qwen/Qwen3-32B"
INT8 = "GEMM, Conv: Int8 multiplication, 32 bit accumulation"
HALF = "16 bit inputs, 16 bit multiplication, 32 bit addition"
TESTS, ONECCL, TORCH = "nccl-tests", "oneccl-benchmark", "torch.distributed (NCCL)"
PAIRS = "NVLink in pairs, slower between pairs"
V0, V1 = "v0 torch-profiler", "v1 vllm layerwise kernel"

LIGER_TABLE = '{"B": 4, "T": 8, "D": 768, "dtype": "float32"}'
LIGER_NORM = '{"hidden_size": 128, "dtype": "half"}'
LIGER_HEADS = '{"num_q_heads": 32, "num_kv_heads": 8, "hidden_size": 4096, "dtype": "torch.bfloat16"}'


class Table(NamedTuple):
    """A layout: ``names`` of the columns in ``rows``, needed columns of one value, and columns that change nothing."""

    names: str
    rows: Sequence[tuple[Any, ...]]
    same: dict[str, Any]
    optional: dict[str, Any]


def layout_of(source: str) -> tuple[Columns, Columns]:
    """Needed columns of a source's table, and columns that change nothing."""
    table = LAYOUTS[source]
    size = len(table.rows)
    columns = zip(*table.rows, strict=True)
    needed = {name: list(values) for name, values in zip(table.names.split(), columns, strict=True)}
    needed |= {name: [value] * size for name, value in table.same.items()}
    return needed, {name: [value] * size for name, value in table.optional.items()}


_FRONTIER = {
    "op": "",
    "latency_us": 0.0,
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
_HEADS = {"n_embd": 2048, "n_q_head": 32, "n_kv_head": 4, "head_dim": 128}
_EXPERTS = {"num_experts": 128, "router_topk": 8, "hidden_dim": 2048, "expert_hidden_dim": 768, "head_dim": 128}
_MOE = {**_EXPERTS, "expert_parallel_size": 4, "load_distribution": "uniform", "tp": 2, "m": 64}
_FP8 = {"model": "Llama-3.1-405B-Instruct-FP8", "quant_signature": "method=fp8|act=none|serialized=False|block=none"}
_STEP = {"model": "step-moe-noquant-small", "n_embd": 7168, "n_q_head": 64, "n_kv_head": 1, "head_dim": 256}
_OLD = {"model": "meta-llama/Llama-2-7b-hf", "protocol": "not stated", "profiling_precision": "", "quant_signature": ""}
_ATTENTION = "op tp protocol batch_size prefill_chunk_size kv_cache_size is_prefill is_mixed_batch seq_lens latency_us"
_ATTENTION_ROWS = [
    ("attn_decode", 8, "KERNEL_ONLY", 2, 0, 2432, "False", "False", "[1, 1]", 12.0),
    ("attn_prefill", 1, "KERNEL_ONLY", 1, 64, 4032, "True", "False", "[64]", 45.0),
    ("attn_prefill", 1, "KERNEL_ONLY", 2, 0, 0, "True", "True", "[30, 40]", 50.0),
    ("attn_decode", 1, "CUDA_EVENT", 1, 64, 0, "True", "False", "[64]", 7.0),
    ("attn_input_reshape", 1, "CUDA_EVENT", 4, 0, 100, "False", "False", "[1, 1, 1, 1]", 10.0),
    ("attn_prefill", 1, "KERNEL_ONLY", 3, 0, 0, "True", "False", "", 9.0),
    ("attn_kv_cache_save", 1, "KERNEL_ONLY", 2, 0, 0, "True", "True", "[30, 40]", 4.0),
    ("attn_kv_cache_save", 1, "not stated", 1, 320, 0, "True", "", "", 268.0),
]
#: One dictionary per row: what differs from ``_FRONTIER``.
FRONTIER_ROWS: list[dict[str, Any]] = [
    {"op": "attn_post_proj", **_LAYER, "m": 16, "n": 2048, "k": 2048, "tp": 2, "latency_us": 6.0},
    {"op": "attn_pre_proj", **_LAYER, "m": 16, "n": 5120, "k": 2048, "latency_us": 20.0},
    {"op": "mlp_up_proj", **_LAYER, **_FP8, "m": 16, "n": 26624, "k": 16384, "tp": 4, "latency_us": 180.0},
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
    *({**_HEADS, **dict(zip(_ATTENTION.split(), row, strict=True))} for row in _ATTENTION_ROWS),
]
FRONTIER_ROWS[-1] |= _OLD


LAYOUTS = {
    "neusight": Table(
        "op device latency_us batch m n k rows cols c_in c_out kernel_hw in_hw stride pad",
        [
            ("linear", "Tesla T4", 120.0, 1, 128, 256, 512, n, n, n, n, n, n, n, n),
            ("bmm", "Tesla T4", 250.0, 8, 64, 32, 16, n, n, n, n, n, n, n, n),
            ("conv2d", "Tesla P4", 900.0, 4, n, n, n, n, n, 16, 32, 3, 28, 2, 1),
            ("add", "AMD Instinct MI100", 40.0, n, n, n, n, 4096, 512, n, n, n, n, n, n),
            ("pow_scalar", "Tesla T4", 35.5, n, n, n, n, 100, 7, n, n, n, n, n, n),
            ("softmax", "Tesla T4", 61.0, n, n, n, n, 8192, 1024, n, n, n, n, n, n),
        ],
        {"dtype": "float32"},
        {"split": "train", "torch_version": "2.1.0", "kernel_name": "sgemm", "n_rep": 1, "n_kernels": 1},
    ),
    "aiconfigurator_gemm": Table(
        "device framework m n k latency_us",
        [
            ("NVIDIA L40S", "vllm", 1, 128, 256, 2.5),
            ("NVIDIA B200", "sglang", 64, 4096, 8192, 11.0),
            ("NVIDIA L40S", "trtllm", 32768, 65536, 32, 9000.0),
        ],
        {"op": "linear", "dtype": "bfloat16"},
        {"version": "0.20.0"},
    ),
    "aiconfigurator_attention": Table(
        "op device framework batch q_len past_len heads kv_heads head_dim latency_us",
        [
            ("attention_decode", "NVIDIA L40S", "vllm", 4, 1, 1023, 32, 8, 128, 30.0),
            ("attention_prefill", "NVIDIA GB200", "trtllm", 1, 2048, 0, 32, 8, 128, 800.0),
            ("attention_encoder", "NVIDIA A100-SXM4-80GB", "vllm", 2, 576, 0, 16, 16, 72, 95.0),
        ],
        {"dtype": "bfloat16"},
        {"version": "1", "kernel_source": "flash"},
    ),
    "miopen": Table(
        "direction device dtype n c_in h w kh kw pad_h pad_w groups latency_us",
        [
            ("fwd", "AMD gfx908 120CU (MI100)", "float32", 8, 32, 28, 28, 3, 3, 1, 1, 32, 60.0),
            ("bwd_data", "AMD gfx90a 104CU (MI210)", "float16", 16, 64, 14, 14, 1, 1, 0, 0, 1, 30.0),
            ("bwd_weight", "AMD gfx1030 36WGP", "bfloat16", 2, 48, 35, 35, 5, 5, 2, 2, 1, 180.92e6),
        ],
        {"op": "conv2d", "c_out": 64, "stride_h": 1, "stride_w": 1, "dil_h": 1, "dil_w": 1},
        {"best_solver": "winograd", "n_solvers": 3},
    ),
    "vidur": Table(
        "op model device n k latency_us",
        [
            ("linear", LLAMA2, "NVIDIA A40", 4096, 4096, 60.0),
            ("silu_and_mul", LLAMA2, "NVIDIA A100 80GB (vidur)", 11008, n, 12.0),
            ("rmsnorm", LLAMA2, "NVIDIA A40", 4096, n, 9.0),
            ("add", LLAMA2, "NVIDIA A40", 4096, n, 6.0),
            ("add", "microsoft/phi-2", "NVIDIA A40", 2560, n, 7.0),
        ],
        {"m": 64, "dtype": "float16"},
        {"mean_us": 61.0, "std_us": 1.0, "min_us": 59.0, "role": "a", "tp": 1},
    ),
    "deepbench": Table(
        "op precision device m n k trans_a trans_b direction latency_us "
        "w h c_in batch c_out kw kh pad_w pad_h stride_w stride_h",
        [
            ("gemm", "Float", "NVIDIA Tesla M40", 1760, 16, 1024, "N", "N", "fwd", 200.0, *[n] * 11),
            ("gemm", INT8, "Tesla T4", 5124, 700, 2048, "N", "T", "fwd", 3000.0, *[n] * 11),
            ("conv2d", HALF, "Tesla T4", n, n, n, "", "", "bwd_weight", 500.0, 700, 161, 1, 8, 32, 20, 5, 0, 0, 2, 2),
            ("conv2d", "Float", "Raspberry Pi 3", n, n, n, "", "", "fwd", 670e3, 112, 112, 64, 1, 64, 1, 1, 0, 0, 1, 1),
        ],
        {},
        {"suite": "train"},
    ),
    "comm_collectives": Table(
        "op device library ranks ranks_per_node message_bytes dtype mode link latency_us",
        [
            ("all_reduce", "NVIDIA H200", "vllm", 8, -1, 65536, "bfloat16", "graph", "NVLink4 450 GB/s", 11.5),
            ("all_gather", "NVIDIA B200", "nccl", 4, -1, 2**30, "float16", TESTS, "NVLink5 900 GB/s", 3100.0),
            ("reduce_scatter", "NVIDIA L40S", "nccl", 2, -1, 1024, "int8", TESTS, "PCIe4 x16 32 GB/s", 9.1),
            ("all_to_all", "NVIDIA GB200", "nccl", 4, -1, 4096, "float16", TESTS, "NVLink5 900 GB/s", 10.2),
            ("send_recv", "NVIDIA A40", TORCH, 2, 1, 2**20, "float16", "kernel", PAIRS, 250.0),
            ("all_reduce", "NVIDIA H200", "sglang", 2, 2, 333334, "bfloat16", "eager", "not stated", 40.0),
            ("all_reduce", "Arc Pro B60", "oneccl", 2, -1, 512, "float16", ONECCL, "PCIe5 x8 28.4 GB/s", 14.0),
        ],
        {},
        {"kernel_source": "vLLM_custom_graph", "version": "0.19.0", "table": "comm/vllm", "n_rep": 1, "std_us": 0.1},
    ),
    "aiconfigurator_gemm_quantised": Table(
        "framework dtype",
        [
            ("vllm", "fp8"),
            ("sglang", "fp8_static"),
            ("trtllm", "fp8_block"),
            ("trtllm", "nvfp4"),
            ("trtllm", "int8_wo"),
            ("trtllm", "int4_wo"),
            ("trtllm", "sq"),
        ],
        {"op": "linear", "device": "NVIDIA B200", "m": 64, "n": 4096, "k": 8192, "latency_us": 12.0},
        {"version": "0.20.0", "kernel_source": "deepgemm"},
    ),
    "aiconfigurator_moe": Table(
        "dtype tp ep distribution",
        [
            ("bfloat16", 1, 8, "balanced"),
            ("fp8", 2, 4, "power_law_1.01"),
            ("fp8_block", 4, 2, "power_law_1.2"),
            ("int4_wo", 8, 1, "balanced"),
            ("nvfp4", 1, 8, "balanced"),
            ("w4a16_mxfp4", 1, 8, "balanced"),
            ("w4a8_mxfp4_mxfp8", 1, 8, "balanced"),
            ("w4afp8", 1, 8, "balanced"),
        ],
        {"op": "moe", "device": "NVIDIA B200", "framework": "trtllm", "latency_us": 900.0, "topk": 8}
        | {"num_tokens": 64, "hidden_size": 7168, "inter_size": 2048, "num_experts": 256},
        {"version": "1", "kernel_source": "cutlass", "n_rep": 1},
    ),
    "aiconfigurator_mla": Table(
        "op framework mla_dtype kv_cache_dtype gemm_type heads batch q_len past_len latency_us",
        [
            ("context_mla", "vllm", "bfloat16", "bfloat16", "", 16, 1, 2048, 0, 300.0),
            ("generation_mla", "sglang", "bfloat16", "fp8", "", 16, 32, 1, 4095, 60.0),
            ("mla_context_module", "vllm", "fp8", "fp8", "fp8_block", 128, 2, 1024, 0, 2500.0),
            ("mla_generation_module", "trtllm", "bfloat16", "fp8", "nvfp4", 64, 8, 1, 1023, 150.0),
        ],
        {"device": "NVIDIA H200"},
        {"version": "1", "kernel_source": "default", "model": "", "n_rep": 1},
    ),
    "pipeweave_gemm_fp8": Table(
        "device m n k latency_us",
        [("NVIDIA H800", 4, 384, 2048, 9.8), ("NVIDIA H200", 512, 4096, 8192, 40.0)],
        {"op": "linear", "dtype": "fp8"},
        {"split": "train"},
    ),
    "pipeweave_moe": Table(
        "device tokens num_experts topk hidden n_out latency_us",
        [("NVIDIA A40", 2, 8, 2, 4096, 1024, 100.0), ("NVIDIA L40", 256, 128, 8, 2048, 1536, 900.0)],
        {"op": "moe_w13", "dtype": "bfloat16"},
        {"n_rep": 1},
    ),
    "tensile_gemm": Table(
        "op device library dtype acc tensile_type trans_a trans_b batch m latency_us",
        [
            ("gemm", "AMD gfx1030 (Navi21)", "rocBLAS", "fp16", "fp16", "HB", "N", "N", 1, 32, 11.0),
            ("gemm", TENSILE, "rocBLAS", "fp16", "fp32", "HSS_BH", "N", "T", 1, 64, 12.0),
            ("bmm", TENSILE, "rocBLAS", "fp64", "fp64", "DB", "T", "N", 8, 128, 90.0),
            ("gemm", TENSILE, "hipBLASLt", "xf32", "fp32", "S_MX_B_Bias_HA_SAV", "T", "T", 1, 256, 14.0),
            ("gemm", TENSILE, "hipBLASLt", "fp8/fp16 mixed", "fp32", "F8H_HHS_BH_UserArgs", "T", "N", 1, 512, 15.0),
            ("bmm", TENSILE, "rocBLAS", "int8", "int32", "I8II_BH", "N", "N", 64, 64, 30.0),
        ],
        {"n": 512, "k": 512},
        {"gflops": 1.0, "gflops_min": 1.0, "n_rep": 1, "logic_kind": "Equality", "logic_file": "navi21.yaml"},
    ),
    "aiter_gemm": Table(
        "op device family dtype outdtype batch latency_us",
        [
            ("linear", MI300X, "a8w8", "float8_e4m3fn", "not stated", 1, 10.0),
            ("linear", MI350, "a4w4_mxfp4", "a4w4_mxfp4", "not stated", 1, 9.0),
            ("linear", MI300X, "bf16/other", "bfloat16", "bfloat16", 1, 15.0),
            ("linear", MI350, "bf16/other", "bfloat16", "float32", 1, 12.0),
            ("linear", MI300X, "fp8_blockscale", "fp8_blockscale", "not stated", 1, 10.0),
            ("bmm", MI300X, "a8w8", "int8", "not stated", 16, 60.0),
            ("bmm", MI300X, "bf16/other", "a8w8", "not stated", 16, 111.0),
        ],
        {"m": 16, "n": 1280, "k": 8192},
        {"n_rep": 1, "libtype": "asm", "splitK": 0, "kernelName": "k", "errRatio": 0.0, "config_file": "a.csv"},
    ),
    "aiter_moe": Table(
        "device q_dtype_a q_dtype_w q_type latency_us",
        [
            (MI350, "bfloat16", "bfloat16", "No", 500.0),
            (MI350, "float8_e4m3fn", "float8_e4m3fn", "per_Token", 300.0),
            (MI350, "float8_e4m3fn", "float8_e4m3fn", "per_1x128", 320.0),
            (MI350, "float4_e2m1fn_x2", "float4_e2m1fn_x2", "per_1x32", 200.0),
            (MI350, "float8_e4m3fn", "float4_e2m1fn_x2", "per_1x32", 220.0),
            (MI350, "bfloat16", "int4", "per_1x32", 240.0),
            (MI300X, "float8_e4m3fnuz", "float8_e4m3fnuz", "per_1x128", 350.0),
        ],
        {"op": "fused_moe", "act_type": "Silu", "dtype": "bfloat16", "use_g1u1": 1}
        | {"token": 16, "model_dim": 7168, "inter_dim": 256, "expert": 257, "topk": 9},
        {"doweight_stage1": 0, "us1": 1.0, "us2": 1.0, "n_rep": 1, "block_m": 32, "ksplit": 0, "config_file": "a.csv"},
    ),
    "llmservingsim_layers": Table(
        "op layer device model tp m n k protocol latency_us",
        [
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
        ],
        {"dtype": "bfloat16"},
        {},
    ),
    "llmservingsim_attention": Table(
        "op device protocol heads kv_heads head_dim prefill_chunk kv_prefill n_decode kv_decode latency_us",
        [
            ("attention_decode", TPU, "v0 tpu", 32, 8, 128, 0, 0, 4, 96, 7.3),
            ("attention_prefill", H100, V0, 16, 2, 128, 256, 1024, 0, 0, 40.0),
            ("attention_mixed", BLACKWELL, V1, 32, 4, 128, 512, 1728, 16, 4096, 300.0),
        ],
        {"dtype": "bfloat16"},
        {"model": LLAMA, "tp": 1, "mean_us": 7.0, "n_rep": 1},
    ),
    "frontier": Table(
        " ".join(_FRONTIER),
        [tuple({**_FRONTIER, **row}.values()) for row in FRONTIER_ROWS],
        {},
        {"table": "linear_op", "family": "linear_op", "mean_us": 1.0, "std_us": 0.1, "n_rep": 1, "rep_spread": 0.0}
        | {"attention_backend": "FLASHINFER", "num_experts_per_device": 1},
    ),
    "infersim": Table(
        "op phase cfg dtype kv_dtype batch_size q_len kv_len seq_len m n k "
        "num_local_experts tokens_per_expert hidden_size intermediate_size latency_us",
        [
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
        ],
        {"device": "NVIDIA H800"},
        {"mfu": 0.1, "num_experts": n, "num_gpus": n, "topk": n},
    ),
    "liger": Table(
        "op provider mode x_name x_value config latency_us",
        [
            ("rms_norm", "huggingface", "backward", "H", "4096", '{"M": 64, "dtype": "torch.bfloat16"}', 60.0),
            ("rope", "liger", "forward", "T", "1024", LIGER_HEADS, 20.0),
            ("cross_entropy", "liger", "forward", "V", "4096", '{"B": 8, "T": 128}', 60.0),
            ("cross_entropy", "torch", "backward", "BT", "1024", '{"vocab_size": 4096, "seq_len": 8192}', 70.0),
            ("embedding", "torch_compile", "forward", "V", "512", LIGER_TABLE, 4.0),
            ("megatron_swiglu", "megatron", "forward", "ffn_local", "1024", '{"S": 2048, "B": 4}', 40.0),
            ("fused_add_rms_norm", "liger_rms_norm", "forward", "BT", "64", LIGER_NORM, 9.0),
        ],
        {"device": H100},
        {"liger_version": "0.8.0", "p20_us": 1.0, "p80_us": 2.0},
    ),
    "cudnn_attention": Table(
        "op dtype causal kv_heads head_dim head_dim_v latency_us",
        [
            ("attention_forward", "bfloat16", True, 8, 128, 128, 900.0),
            ("attention_forward", "fp8", False, 8, 128, 128, 900.0),
            ("attention_forward", "bfloat16", True, 64, 192, 128, 900.0),
            ("attention_backward", "fp8", True, 64, 192, 128, 2100.0),
        ],
        {"device": "NVIDIA GB200", "batch": 2, "q_len": 4096, "kv_len": 4096, "heads": 64}
        | {"window": 0, "deterministic": False},
        {"cudnn": "1.21.1"},
    ),
    "cudnn_norms": Table(
        "op provider rows cols latency_us",
        [
            ("rms_norm_forward", "cudnn", 16384, 4096, 42.0),
            ("rms_norm_backward", "pytorch", 8192, 4096, 120.0),
            ("layer_norm_forward", "torch_compile", 8192, 4096, 40.0),
        ],
        {"device": "NVIDIA GB300", "dtype": "bfloat16"},
        {},
    ),
}
