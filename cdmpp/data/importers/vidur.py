"""Vidur: fp16 layers of language models, kernel time (median of 20 runs).

``linear`` becomes ``linear`` without bias (m tokens, n, k); the vector operators take rows = ``m`` and cols =
``n`` (``silu_and_mul`` reads 2n columns). ``add`` has two inputs, but three where ``model`` is
``microsoft/phi-2``, whose parallel residual adds three tensors; without the column ``model``, two.
pipeweave's fp8 GEMM has columns that a part of this table has, too: rows of type fp8 have the source
``pipeweave_gemm_fp8``. They are bare products of a vendor's library (kernel time, statistic not stated).
``mean_us``, ``min_us``, ``std_us``, ``role`` and ``tp`` are never read, nor is pipeweave's ``split``.

pipeweave MoE
-------------
pipeweave MoE: the first grouped product of a layer of experts in vLLM's Triton kernel (average kernel time).

``moe_w13``: ``tokens`` x ``topk`` rows over ``num_experts`` experts of equal load, [hidden] -> [n_out] with both halves
of the gate-up projection, so ``intermediate`` = ``n_out`` / 2 and the layer is gated. An odd ``n_out`` has no such
half and is an invalid size. The kernel ran with its default, untuned tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import EXPERTS, FP8, Importer, always, column_set, plain, typed_groups
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import IntColumn, RawTable
from cdmpp.data.table import Flags

_VECTOR = ("silu_and_mul", "rmsnorm", "layernorm", "gelu", "relu", "silu", "tanh", "mul", "softmax")
PIPEWEAVE_FP8 = "pipeweave_gemm_fp8"
_VLLM = ("silu_and_mul", "rmsnorm")
_THREE_INPUTS = "microsoft/phi-2"


def _source(raw: RawTable) -> Labels:
    return raw.labels("dtype").map(lambda name: PIPEWEAVE_FP8 if plain(name).dtype == FP8 else IMPORTER.name)


def _framework(raw: RawTable) -> Labels:
    """Norms and gated activations are vLLM's fused kernels; eager PyTorch composes these."""
    pipeweave = _source(raw).is_(PIPEWEAVE_FP8)
    names = ("pytorch", "vllm", "vendor")
    return Labels(np.where(pipeweave, 2, raw.labels("op").is_in(_VLLM)).astype(np.int32), names)


def _three_inputs(raw: RawTable, op: Labels) -> Mask:
    """Rows that add three tensors."""
    return op.is_("add") & raw.labels("model").is_(_THREE_INPUTS)


def _implementation(raw: RawTable) -> Labels:
    """The sum of three tensors is two calls of PyTorch; all other layers are one kernel."""
    return Labels(_three_inputs(raw, raw.labels("op")).astype(np.int32), ("fused", "composed"))


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    m, n = raw.ints("m"), raw.ints("n")
    vector = {"rows": m, "cols": n}
    add, three = op.is_("add"), _three_inputs(raw, op)
    return [
        Group("linear", op.is_("linear"), {"m": m, "n": n, "k": raw.ints("k")}),
        Group("add", add & ~three, vector, {"inputs": 2}),
        Group("add", three, vector, {"inputs": 3}),
        *(Group(name, op.is_(name), vector) for name in _VECTOR if name in op.names),
    ]


IMPORTER = Importer(
    name="vidur",
    file_name="ops_vidur_fp16.parquet",
    repository="microsoft/vidur",
    commit="7d47513",
    origin="data/profiling/compute/*/*/*/mlp.csv",
    licence="MIT",
    protocol="kernel",
    needs=column_set("op device dtype m n"),
    lacks=column_set("framework batch rows q_len trans_a direction precision program family protocol cfg"),
    reads=column_set("model k"),
    groups=_groups,
    framework=_framework,
    implementation=_implementation,
    dtype=lambda raw: raw.labels("dtype").map(lambda name: plain(name).dtype),
    row_source=_source,
)
_PIPEWEAVE: Any = {"repository": "zksainx/pipeweave", "commit": "55e03178", "licence": "Apache-2.0"}
PIPEWEAVE_GEMM = replace(
    IMPORTER,
    name=PIPEWEAVE_FP8,
    file_name="ops_pipeweave_gemm_fp8.parquet",
    **_PIPEWEAVE,
    origin="dataset/gemm_fp8_*",
    needs=column_set("op device dtype m n k"),
    read_by=IMPORTER.name,
)


def _moe_groups(raw: RawTable, op: Labels) -> Iterator[Group]:
    both = raw.ints("n_out")
    half = IntColumn(both.values // 2, both.missing, both.invalid | np.asarray(both.values % 2 == 1))
    sizes = {
        "tokens": raw.ints("tokens"),
        "hidden": raw.ints("hidden"),
        "intermediate": half,
        "experts": raw.ints("num_experts"),
        "topk": raw.ints("topk"),
    }
    flags: Flags = {"balance": "balanced", "gated": True}
    return typed_groups("moe_w13", op.is_("moe_w13"), raw.labels("dtype"), EXPERTS, sizes, flags)


PIPEWEAVE_MOE = Importer(
    **_PIPEWEAVE,
    name="pipeweave_moe",
    file_name="ops_pipeweave_moe.parquet",
    origin="mlp_models_quantile/moe/*/kernel_reports",
    protocol="kernel",
    needs=column_set("op device dtype tokens num_experts topk hidden n_out"),
    lacks=column_set("framework program num_tokens token m rows in_hw q_len direction message_bytes"),
    groups=_moe_groups,
    framework=always("triton"),
)
