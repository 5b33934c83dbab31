"""Small tables in the layouts of the public data, with values made up for the tests."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from tests.data import comm_collectives, operator_layouts, serving_layouts

Columns = dict[str, list[Any]]
Layout = tuple[Columns, Columns]  # columns that are needed, columns that change nothing


def _neusight() -> Layout:
    n = None
    needed: Columns = {
        "op": ["linear", "bmm", "conv2d", "add", "pow_scalar", "softmax"],
        "device": ["Tesla T4", "Tesla T4", "Tesla P4", "AMD Instinct MI100", "Tesla T4", "Tesla T4"],
        "latency_us": [120.0, 250.0, 900.0, 40.0, 35.5, 61.0],
        "batch": [1, 8, 4, n, n, n],
        "m": [128, 64, n, n, n, n],
        "n": [256, 32, n, n, n, n],
        "k": [512, 16, n, n, n, n],
        "rows": [n, n, n, 4096, 100, 8192],
        "cols": [n, n, n, 512, 7, 1024],
        "c_in": [n, n, 16, n, n, n],
        "c_out": [n, n, 32, n, n, n],
        "kernel_hw": [n, n, 3, n, n, n],
        "in_hw": [n, n, 28, n, n, n],
        "stride": [n, n, 2, n, n, n],
        "pad": [n, n, 1, n, n, n],
        "dtype": ["float32"] * 6,
    }
    optional: Columns = {
        "split": ["train"] * 6,
        "torch_version": ["2.1.0"] * 6,
        "kernel_name": ["sgemm"] * 6,
        "n_kernels": [1, 1, 2, n, n, n],
        "n_rep": [1] * 6,
    }
    return needed, optional


def _gemm() -> Layout:
    needed: Columns = {
        "op": ["linear"] * 3,
        "device": ["NVIDIA L40S", "NVIDIA B200", "NVIDIA L40S"],
        "framework": ["vllm", "sglang", "trtllm"],
        "dtype": ["bfloat16"] * 3,
        "m": [1, 64, 32768],
        "n": [128, 4096, 65536],
        "k": [256, 8192, 32],
        "latency_us": [2.5, 11.0, 9000.0],
    }
    return needed, {"version": ["0.20.0"] * 3}


def _attention() -> Layout:
    needed: Columns = {
        "op": ["attention_decode", "attention_prefill", "attention_encoder"],
        "device": ["NVIDIA L40S", "NVIDIA GB200", "NVIDIA A100-SXM4-80GB"],
        "framework": ["vllm", "trtllm", "vllm"],
        "dtype": ["bfloat16"] * 3,
        "batch": [4, 1, 2],
        "q_len": [1, 2048, 576],
        "past_len": [1023, 0, 0],
        "heads": [32, 32, 16],
        "kv_heads": [8, 8, 16],
        "head_dim": [128, 128, 72],
        "latency_us": [30.0, 800.0, 95.0],
    }
    return needed, {"version": ["1"] * 3, "kernel_source": ["flash"] * 3}


def _miopen() -> Layout:
    ones = [1, 1, 1]
    needed: Columns = {
        "op": ["conv2d"] * 3,
        "direction": ["fwd", "bwd_data", "bwd_weight"],
        "device": ["AMD gfx908 120CU (MI100)", "AMD gfx90a 104CU (MI210)", "AMD gfx1030 36WGP"],
        "dtype": ["float32", "float16", "bfloat16"],
        "n": [8, 16, 2],
        "c_in": [32, 64, 48],
        "h": [28, 14, 35],
        "w": [28, 14, 35],
        "c_out": [64, 64, 64],
        "kh": [3, 1, 5],
        "kw": [3, 1, 5],
        "pad_h": [1, 0, 2],
        "pad_w": [1, 0, 2],
        "stride_h": ones,
        "stride_w": ones,
        "dil_h": ones,
        "dil_w": ones,
        "groups": [32, 1, 1],
        "latency_us": [60.0, 30.0, 180_920_000.0],
    }
    return needed, {"best_solver": ["winograd"] * 3, "n_solvers": [3, 4, 1]}


def _vidur() -> Layout:
    needed: Columns = {
        "op": ["linear", "silu_and_mul", "rmsnorm", "add", "add"],
        "model": ["meta-llama/Llama-2-7b-hf"] * 4 + ["microsoft/phi-2"],
        "device": ["NVIDIA A40", "NVIDIA A100 80GB (vidur)", "NVIDIA A40", "NVIDIA A40", "NVIDIA A40"],
        "m": [64, 64, 64, 64, 64],
        "n": [4096, 11008, 4096, 4096, 2560],
        "k": [4096, None, None, None, None],
        "latency_us": [60.0, 12.0, 9.0, 6.0, 7.0],
        "dtype": ["float16"] * 5,
    }
    optional: Columns = {
        "role": ["a", "b", "c", "d", "e"],
        "tp": [1, 1, 2, 4, 8],
        "mean_us": [61.0] * 5,
        "std_us": [1.0] * 5,
        "min_us": [59.0] * 5,
    }
    return needed, optional


def _deepbench() -> Layout:
    n = None
    needed: Columns = {
        "op": ["gemm", "gemm", "conv2d", "conv2d"],
        "precision": [
            "Float",
            "GEMM, Conv: Int8 multiplication, 32 bit accumulation",
            "16 bit inputs, 16 bit multiplication, 32 bit addition",
            "Float",
        ],
        "device": ["NVIDIA Tesla M40", "Tesla T4", "Tesla T4", "Raspberry Pi 3"],
        "m": [1760, 5124, n, n],
        "n": [16, 700, n, n],
        "k": [1024, 2048, n, n],
        "trans_a": ["N", "N", "", ""],
        "trans_b": ["N", "T", "", ""],
        "direction": ["fwd", "fwd", "bwd_weight", "fwd"],
        "w": [n, n, 700, 112],
        "h": [n, n, 161, 112],
        "c_in": [n, n, 1, 64],
        "batch": [n, n, 8, 1],
        "c_out": [n, n, 32, 64],
        "kw": [n, n, 20, 1],
        "kh": [n, n, 5, 1],
        "pad_w": [n, n, 0, 0],
        "pad_h": [n, n, 0, 0],
        "stride_w": [n, n, 2, 1],
        "stride_h": [n, n, 2, 1],
        "latency_us": [200.0, 3000.0, 500.0, 670000.0],
    }
    return needed, {"suite": ["train", "inference", "train", "inference"]}


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "neusight": _neusight,
    "aiconfigurator_gemm": _gemm,
    "aiconfigurator_attention": _attention,
    "miopen": _miopen,
    "vidur": _vidur,
    "deepbench": _deepbench,
    "comm_collectives": lambda: (dict(comm_collectives.NEEDED), dict(comm_collectives.OPTIONAL)),
    **operator_layouts.LAYOUTS,
    "llmservingsim_layers": serving_layouts.layers,
    "llmservingsim_attention": serving_layouts.attention,
    "frontier": serving_layouts.frontier,
    "infersim": serving_layouts.infersim,
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> tuple[str, Columns, Columns]:
    """Name, needed and optional columns of each layout in turn."""
    return (request.param, *LAYOUTS[request.param]())


@pytest.fixture
def columns_of() -> Callable[[str], Columns]:
    """Needed columns of one layout."""
    return lambda name: LAYOUTS[name]()[0]


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write columns to a file whose suffix chooses the format."""

    def write(columns: Columns | pa.Table, name: str = "table.parquet") -> Path:
        path = tmp_path / name
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        if name.endswith(".parquet"):
            pq.write_table(table, path)
        else:
            with (gzip.open if name.endswith(".gz") else open)(path, "wb") as stream:
                pa_csv.write_csv(table, stream)
        return path

    return write
