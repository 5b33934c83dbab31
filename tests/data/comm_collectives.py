"""The layout of ``comm_collectives`` with values made up for the tests."""

from __future__ import annotations

from typing import Any

Columns = dict[str, list[Any]]

NEEDED: Columns = {
    "op": ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "all_reduce", "all_reduce"],
    "device": ["NVIDIA H200", "NVIDIA B200", "NVIDIA L40S", "NVIDIA GB200", "NVIDIA A40", "NVIDIA H200", "Arc Pro B60"],
    "library": ["vllm", "nccl", "nccl", "nccl", "torch.distributed (NCCL)", "sglang", "oneccl"],
    "ranks": [8, 4, 2, 4, 2, 2, 2],
    "ranks_per_node": [-1, -1, -1, -1, 1, 2, -1],
    "message_bytes": [65536, 2**30, 1024, 4096, 2**20, 333334, 512],
    "dtype": ["bfloat16", "float16", "int8", "float16", "float16", "bfloat16", "float16"],
    "mode": ["graph", "nccl-tests", "nccl-tests", "nccl-tests", "kernel", "eager", "oneccl-benchmark"],
    "link": [
        "NVLink4 450 GB/s",
        "NVLink5 900 GB/s",
        "PCIe4 x16 32 GB/s",
        "NVLink5 900 GB/s",
        "NVLink in pairs, slower between pairs",
        "not stated",
        "PCIe5 x8 28.4 GB/s",
    ],
    "latency_us": [11.5, 3100.0, 9.1, 10.2, 250.0, 40.0, 14.0],
}
OPTIONAL: Columns = {
    "kernel_source": ["vLLM_custom_graph"] * 7,
    "version": ["0.19.0"] * 7,
    "table": ["comm/vllm/0.19.0"] * 7,
    "n_rep": [1] * 7,
    "std_us": [0.1] * 7,
}
