"""aiconfigurator: kernels of serving frameworks, captured in a CUDA graph (no launch cost).

GEMM
----
Dense layers. ``linear`` becomes ``linear`` without bias: [m, k] x [k, n]; ``framework`` is an input. The bfloat16 and
the quantised table have the same columns and one importer. Rows of type bfloat16 have the source
``aiconfigurator_gemm``, all others ``aiconfigurator_gemm_quantised``, whichever file they are in.

==============  ==========================================================================
``dtype``       here
==============  ==========================================================================
``fp8``         float8_e4m3, scaling channel; ``fp8_static`` tensor, ``fp8_block`` block128
``nvfp4``       float4_e2m1, scaling nvfp4
``int8_wo``     bfloat16, weight int8, scaling channel; ``int4_wo`` weight int4, block128
``sq``          int8, scaling channel (smooth quant)
==============  ==========================================================================

The source does not state whether its time includes the quantisation of the activations; here it does. The Intel B60
multiplies its fp8 rows in bfloat16. ``version`` and ``kernel_source`` are never read.

Attention
---------
Fused kernels. ``attention_prefill``, ``attention_decode`` and ``attention_encoder`` keep their names and columns
(batch, q_len, past_len, heads, kv_heads, head_dim); ``framework`` is an input. ``version`` and ``kernel_source`` are
never read.

MLA
---
Multi-head latent attention of DeepSeek-V3.

=========================  =======================================================================
in the table               here
=========================  =======================================================================
``context_mla``            ``mla_prefill``, the attention kernel alone
``generation_mla``         ``mla_decode``, the attention kernel alone
``mla_context_module``     ``mla_prefill`` with ``module``: with its projections
``mla_generation_module``  ``mla_decode`` with ``module``
=========================  =======================================================================

``mla_dtype`` is the type of the attention, ``kv_cache_dtype`` that of the cache, ``gemm_type`` that of the projections
(``fp8_block``: float8_e4m3 with block128, ``nvfp4``). ``heads`` are those of one rank, ``q_len`` the new and
``past_len`` the cached tokens. ``model`` has DeepSeek-V3's dimensions in every row. ``model``, ``kernel_source``,
``version`` and ``n_rep`` are never read.

MoE
---
One rank's fused layer of experts. ``moe``: ``tokens`` = ``num_tokens`` (all ranks), ``hidden`` = ``hidden_size``,
``intermediate`` = ``inter_size`` and ``experts`` = ``num_experts`` of the whole model, ``tp`` and ``ep`` shards,
``balance`` = ``distribution`` (a power law: the rank with the highest load). ProductTypes: see
:data:`~cdmpp.data.importers.base.EXPERTS`.

Layers are gated, except TensorRT-LLM's layers of the models in :func:`_without_gate`. The source says so only in
``kernel_source``, which is a result and never read; the rule agrees with it in every row. Some frameworks' latency
includes the routing kernels; the source does not mark which. Rows faster than their weights can be read are left out of
training (``weights_not_read`` in :mod:`cdmpp.data.physics`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import (
    EXPERTS,
    LINEAR,
    Importer,
    ProductTypes,
    column_set,
    combinations,
    plain,
    typed_groups,
)
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import RawTable
from cdmpp.programs.products import BALANCES

_importer = partial(
    Importer,
    repository="ai-dynamo/aiconfigurator",
    commit="095f58a5",
    licence="Apache-2.0",
    protocol="graph",
    framework=lambda raw: raw.labels("framework"),
)

QUANTISED = "aiconfigurator_gemm_quantised"


def _gemm_groups(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = {name: raw.ints(name) for name in ("m", "n", "k")}
    return typed_groups("linear", op.is_("linear"), raw.labels("dtype"), LINEAR, sizes, {"bias": False})


def _source(raw: RawTable) -> Labels:
    return raw.labels("dtype").map(lambda name: GEMM.name if plain(name).dtype == "bfloat16" else QUANTISED)


GEMM = _importer(
    name="aiconfigurator_gemm",
    file_name="ops_aiconfigurator_gemm_bf16.parquet",
    origin="aic-core/src/aiconfigurator_core/systems/data/<system>/gemm/",
    needs=column_set("op device framework dtype m n k"),
    lacks=column_set("q_len rows trans_a direction precision batch program family protocol"),
    groups=_gemm_groups,
    row_source=_source,
)
QUANTISED_GEMM = replace(GEMM, name=QUANTISED, file_name="ops_aiconfigurator_gemm_quantised.parquet", read_by=GEMM.name)


_ATTENTION_SIZES = ("batch", "q_len", "past_len", "heads", "kv_heads", "head_dim")
_ATTENTION_OPERATORS = ("attention_prefill", "attention_decode", "attention_encoder")


def _attention_groups(raw: RawTable, op: Labels) -> list[Group]:
    sizes = {name: raw.ints(name) for name in _ATTENTION_SIZES}
    return [Group(name, op.is_(name), sizes) for name in _ATTENTION_OPERATORS]


ATTENTION = _importer(
    name="aiconfigurator_attention",
    file_name="ops_aiconfigurator_attention_bf16.parquet",
    origin="aic-core/src/aiconfigurator_core/systems/data/<system>/{attention,encoder_attention}/",
    needs=column_set("op device framework dtype").union(_ATTENTION_SIZES),
    lacks=column_set("precision direction"),
    groups=_attention_groups,
)


_MLA_OPERATORS = {
    "context_mla": ("mla_prefill", False),
    "mla_context_module": ("mla_prefill", True),
    "generation_mla": ("mla_decode", False),
    "mla_generation_module": ("mla_decode", True),
}
_MLA_SIZES = ("batch", "q_len", "past_len", "heads")
#: ProductTypes of the projections; "" where the source states none, as beside kernels alone.
_PROJECTIONS = {name: LINEAR[name] for name in ("fp8_block", "nvfp4")} | {
    "fp8": ProductTypes("float8_e4m3", None, "tensor")
}


def _projections(name: str, dtype: str) -> dict[str, str | None]:
    types = _PROJECTIONS.get(name) or plain(name or dtype)
    return {"weight_dtype": None if types.dtype == dtype else types.dtype, "scaling": types.scaling}


def _mla_groups(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = {name: raw.ints(name) for name in _MLA_SIZES if name in raw.columns}
    columns = map(raw.labels, ("mla_dtype", "kv_cache_dtype", "gemm_type"))
    for rows, (name, attention, cache, gemm) in combinations(op, *columns):
        if name not in _MLA_OPERATORS:
            continue
        operator, module = _MLA_OPERATORS[name]
        dtype = plain(attention).dtype
        kv = plain(cache).dtype if cache else dtype
        types = _projections(gemm, dtype) if module else {"weight_dtype": None, "scaling": None}
        flags = {"kv_dtype": None if kv == dtype else kv, "module": module, **types}
        yield Group(operator, rows, sizes, flags, dtype=dtype)


MLA = _importer(
    name="aiconfigurator_mla",
    file_name="ops_aiconfigurator_mla.parquet",
    origin="aic-core/src/aiconfigurator_core/systems/data/<system>/{context_mla,generation_mla,mla_*_module}/",
    needs=column_set("op device mla_dtype heads batch q_len"),
    lacks=column_set("kv_heads program dtype m rows in_hw direction"),
    reads=column_set("framework kv_cache_dtype gemm_type past_len"),
    groups=_mla_groups,
)


_MOE_SIZES = {
    "tokens": "num_tokens",
    "hidden": "hidden_size",
    "intermediate": "inter_size",
    "experts": "num_experts",
    "topk": "topk",
}


def _without_gate(raw: RawTable) -> Mask:
    """Nemotron models run by TensorRT-LLM: 22 of 512 experts, or 6 of 128 experts of [2688, 1856]."""
    hidden, inner, experts, topk = (
        raw.ints(_MOE_SIZES[n]).values for n in ("hidden", "intermediate", "experts", "topk")
    )
    models = (experts == 512) & (topk == 22)
    models |= (experts == 128) & (topk == 6) & (hidden == 2688) & (inner == 1856)
    return np.asarray(models & raw.labels("framework").is_("trtllm"))


def _moe_groups(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = {field: raw.ints(column) for field, column in _MOE_SIZES.items()}
    sizes |= {name: raw.ints(name) for name in ("tp", "ep") if name in raw.columns}
    ungated, balance = _without_gate(raw), raw.labels("distribution", "balanced")
    for rows, gated in ((~ungated, True), (ungated, False)):
        for name in BALANCES:
            chosen = op.is_("moe") & rows & (balance.is_(name) | (balance.is_("") if name == "balanced" else False))
            yield from typed_groups(
                "moe", chosen, raw.labels("dtype"), EXPERTS, sizes, {"balance": name, "gated": gated}
            )


MOE = _importer(
    name="aiconfigurator_moe",
    file_name="ops_aiconfigurator_moe.parquet",
    origin="aic-core/src/aiconfigurator_core/systems/data/<system>/moe/",
    needs=column_set("op device dtype").union(_MOE_SIZES.values()),
    lacks=column_set("program tokens token m rows in_hw q_len direction message_bytes"),
    reads=column_set("framework tp ep distribution"),
    groups=_moe_groups,
)
