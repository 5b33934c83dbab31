"""Small tables in the layouts of the quantised, expert, latent-attention and AMD sources."""

from __future__ import annotations

from typing import Any

Columns = dict[str, list[Any]]
Layout = tuple[Columns, Columns]

MI300X, MI350 = "AMD gfx942 304CU (MI300X)", "AMD gfx950 256CU (MI350X/MI355X)"


def quantised() -> Layout:
    names = ["fp8", "fp8_static", "fp8_block", "nvfp4", "int8_wo", "int4_wo", "sq"]
    rows = len(names)
    needed: Columns = {
        "op": ["linear"] * rows,
        "device": ["NVIDIA B200"] * rows,
        "framework": ["vllm", "sglang", "trtllm", "trtllm", "trtllm", "trtllm", "trtllm"],
        "dtype": names,
        "m": [64] * rows,
        "n": [4096] * rows,
        "k": [8192] * rows,
        "latency_us": [12.0] * rows,
    }
    return needed, {"version": ["0.20.0"] * rows, "kernel_source": ["deepgemm"] * rows}


def moe() -> Layout:
    names = ["bfloat16", "fp8", "fp8_block", "int4_wo", "nvfp4", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "w4afp8"]
    rows = len(names)
    needed: Columns = {
        "op": ["moe"] * rows,
        "device": ["NVIDIA B200"] * rows,
        "framework": ["trtllm"] * rows,
        "dtype": names,
        "num_tokens": [64] * rows,
        "hidden_size": [7168] * rows,
        "inter_size": [2048] * rows,
        "topk": [8] * rows,
        "num_experts": [256] * rows,
        "tp": [1, 2, 4, 8, 1, 1, 1, 1],
        "ep": [8, 4, 2, 1, 8, 8, 8, 8],
        "distribution": ["balanced", "power_law_1.01", "power_law_1.2", *["balanced"] * (rows - 3)],
        "latency_us": [900.0] * rows,
    }
    return needed, {"version": ["1"] * rows, "kernel_source": ["cutlass"] * rows, "n_rep": [1] * rows}


def mla() -> Layout:
    needed: Columns = {
        "op": ["context_mla", "generation_mla", "mla_context_module", "mla_generation_module"],
        "device": ["NVIDIA H200"] * 4,
        "framework": ["vllm", "sglang", "vllm", "trtllm"],
        "mla_dtype": ["bfloat16", "bfloat16", "fp8", "bfloat16"],
        "kv_cache_dtype": ["bfloat16", "fp8", "fp8", "fp8"],
        "gemm_type": ["", "", "fp8_block", "nvfp4"],
        "heads": [16, 16, 128, 64],
        "batch": [1, 32, 2, 8],
        "q_len": [2048, 1, 1024, 1],
        "past_len": [0, 4095, 0, 1023],
        "latency_us": [300.0, 60.0, 2500.0, 150.0],
    }
    optional: Columns = {
        "version": ["1"] * 4,
        "kernel_source": ["default"] * 4,
        "model": ["", "", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3"],
        "n_rep": [1, 1, 1, 2],
    }
    return needed, optional


def pipeweave_fp8() -> Layout:
    needed: Columns = {
        "op": ["linear"] * 2,
        "device": ["NVIDIA H800", "NVIDIA H200"],
        "dtype": ["fp8"] * 2,
        "m": [4, 512],
        "n": [384, 4096],
        "k": [2048, 8192],
        "latency_us": [9.8, 40.0],
    }
    return needed, {"split": ["train", "test"]}


def pipeweave_moe() -> Layout:
    needed: Columns = {
        "op": ["moe_w13"] * 2,
        "device": ["NVIDIA A40", "NVIDIA L40"],
        "dtype": ["bfloat16"] * 2,
        "tokens": [2, 256],
        "num_experts": [8, 128],
        "topk": [2, 8],
        "hidden": [4096, 2048],
        "n_out": [1024, 1536],
        "latency_us": [100.0, 900.0],
    }
    return needed, {"n_rep": [1, 1]}


def tensile() -> Layout:
    needed: Columns = {
        "op": ["gemm", "gemm", "bmm", "gemm", "gemm", "bmm"],
        "device": ["AMD gfx1030 (Navi21)", *["AMD gfx942 (Tensile)"] * 5],
        "library": ["rocBLAS", "rocBLAS", "rocBLAS", "hipBLASLt", "hipBLASLt", "rocBLAS"],
        "dtype": ["fp16", "fp16", "fp64", "xf32", "fp8/fp16 mixed", "int8"],
        "acc": ["fp16", "fp32", "fp64", "fp32", "fp32", "int32"],
        "tensile_type": ["HB", "HSS_BH", "DB", "S_MX_B_Bias_HA_SAV", "F8H_HHS_BH_UserArgs", "I8II_BH"],
        "trans_a": ["N", "N", "T", "T", "T", "N"],
        "trans_b": ["N", "T", "N", "T", "N", "N"],
        "batch": [1, 1, 8, 1, 1, 64],
        "m": [32, 64, 128, 256, 512, 64],
        "n": [512] * 6,
        "k": [512] * 6,
        "latency_us": [11.0, 12.0, 90.0, 14.0, 15.0, 30.0],
    }
    optional: Columns = {
        "gflops": [1.0] * 6,
        "gflops_min": [1.0] * 6,
        "n_rep": [1] * 6,
        "logic_kind": ["Equality"] * 6,
        "logic_file": ["navi21.yaml"] * 6,
    }
    return needed, optional


def aiter_gemm() -> Layout:
    needed: Columns = {
        "op": ["linear", "linear", "linear", "linear", "linear", "bmm", "bmm"],
        "device": [MI300X, MI350, MI300X, MI350, MI300X, MI300X, MI300X],
        "family": ["a8w8", "a4w4_mxfp4", "bf16/other", "bf16/other", "fp8_blockscale", "a8w8", "bf16/other"],
        "dtype": ["float8_e4m3fn", "a4w4_mxfp4", "bfloat16", "bfloat16", "fp8_blockscale", "int8", "a8w8"],
        "outdtype": ["not stated", "not stated", "bfloat16", "float32", "not stated", "not stated", "not stated"],
        "batch": [1, 1, 1, 1, 1, 16, 16],
        "m": [16] * 7,
        "n": [1280] * 7,
        "k": [8192] * 7,
        "latency_us": [10.0, 9.0, 15.0, 12.0, 10.0, 60.0, 111.0],
    }
    optional: Columns = {
        "n_rep": [1] * 7,
        "libtype": ["asm"] * 7,
        "splitK": [0] * 7,
        "kernelName": ["k"] * 7,
        "errRatio": [0.0] * 7,
        "config_file": ["a.csv"] * 7,
    }
    return needed, optional


def aiter_moe() -> Layout:
    fp8, fp4 = "float8_e4m3fn", "float4_e2m1fn_x2"
    needed: Columns = {
        "op": ["fused_moe"] * 7,
        "device": [MI350] * 6 + [MI300X],
        "token": [16] * 7,
        "model_dim": [7168] * 7,
        "inter_dim": [256] * 7,
        "expert": [257] * 7,
        "topk": [9] * 7,
        "act_type": ["Silu"] * 7,
        "dtype": ["bfloat16"] * 7,
        "q_dtype_a": ["bfloat16", fp8, fp8, fp4, fp8, "bfloat16", "float8_e4m3fnuz"],
        "q_dtype_w": ["bfloat16", fp8, fp8, fp4, fp4, "int4", "float8_e4m3fnuz"],
        "q_type": ["No", "per_Token", "per_1x128", "per_1x32", "per_1x32", "per_1x32", "per_1x128"],
        "use_g1u1": [1] * 7,
        "latency_us": [500.0, 300.0, 320.0, 200.0, 220.0, 240.0, 350.0],
    }
    optional: Columns = {
        "doweight_stage1": [0] * 7,
        "us1": [1.0] * 7,
        "us2": [1.0] * 7,
        "n_rep": [1] * 7,
        "block_m": [32] * 7,
        "ksplit": [0] * 7,
        "config_file": ["a.csv"] * 7,
    }
    return needed, optional


LAYOUTS = {
    "aiconfigurator_gemm_quantised": quantised,
    "aiconfigurator_moe": moe,
    "aiconfigurator_mla": mla,
    "pipeweave_gemm_fp8": pipeweave_fp8,
    "pipeweave_moe": pipeweave_moe,
    "tensile_gemm": tensile,
    "aiter_gemm": aiter_gemm,
    "aiter_moe": aiter_moe,
}
