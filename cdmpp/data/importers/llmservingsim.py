"""LLMServingSim: layers and attention of six language models, kernel time.

Layers
------
Layers by number of tokens.

====================================  =======================================================================
in the table                          here
====================================  =======================================================================
``linear``                            ``linear`` [m, k] -> n, without bias
``expert.w1``, ``w2``, ``w3``         ``linear`` of one expert with all m tokens, not divided by ``tp``
``gate``                              ``moe_gating``: m tokens, the model's experts and top-k
``*layernorm``                        ``rmsnorm`` (Phi: ``layernorm``) on [m, hidden]
``qk_norm``                           ``rmsnorm`` on [m * (heads + kv_heads), head_dim], not divided by ``tp``
``rope``, ``rotary_emb``              ``rotary_embedding`` on (heads + kv_heads) * head_dim / tp columns
``act_fn``                            ``silu_and_mul`` on [m, intermediate / tp]; of experts, not divided by ``tp``
``embedding``                         ``embedding`` of m tokens in vocab / tp rows
``attn``                              ``attention_prefill`` of one sequence of m tokens, heads / tp
``sampler``                           ``argmax`` on [m, vocab]
====================================  =======================================================================

Layers other than ``linear`` state no sizes; they follow from the published dimensions (:data:`MODELS`). Rows per
expert are not stated either. The data show that one expert received all tokens: at the same m, Mixtral's ``w1`` takes
1.007 times (median) what Llama-3.1-8B's ``gate_proj`` of equal size takes, and does not change with ``tp``. Of v1,
``qk_norm``, the norms and ``sampler`` have the same values for every ``tp``.

``gate`` holds more than its product: 44 us for 16 tokens and 64 us for 2,048 on the H100 are softmax and top-k.
``v0`` is PyTorch, ``v1`` is vLLM. Rows of doubtful meaning are left out of training (``fused``, ``other_kernel``).

Attention
---------
Attention over a prefill chunk, decoding sequences, or both in one batch. ``attention_prefill`` is one sequence:
``prefill_chunk`` new tokens behind ``kv_prefill`` cached ones. ``attention_decode`` is ``n_decode`` sequences with
``kv_decode`` cached tokens each. ``attention_mixed`` is both. ``heads`` and ``kv_heads`` are those of one rank. ``v0
torch-profiler`` is a plain flash-attention call of PyTorch, ``v0 tpu`` is XLA (``vendor``), ``v1`` is vLLM.

Of v0 on TPUs the source does not say whether ``kv_prefill`` contains the chunk. It does not: rows with
``kv_prefill`` = 0 exist, and no row has more than 2,048 tokens in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import NOT_SERVING, Importer, column_set
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import IntColumn, RawTable


@dataclass(frozen=True)
class ModelDimensions:
    """Dimensions of a decoder, as its configuration file states them."""

    hidden: int
    intermediate: int  # columns between the projections of the feed-forward layer, or of one expert
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0  # of a layer; 0 for a dense model
    topk: int = 0  # experts per token
    norm: str = "rmsnorm"


MODELS: dict[str, ModelDimensions] = {
    "meta-llama/Llama-3.1-8B": ModelDimensions(4096, 14336, 32, 8, 128, 128256),
    "meta-llama/Llama-3.1-70B": ModelDimensions(8192, 28672, 64, 8, 128, 128256),
    "mistralai/Mixtral-8x7B-v0.1": ModelDimensions(4096, 14336, 32, 8, 128, 32000, experts=8, topk=2),
    "microsoft/Phi-mini-MoE-instruct": ModelDimensions(
        4096, 960, 32, 8, 128, 32064, experts=16, topk=2, norm="layernorm"
    ),
    "Qwen/Qwen3-32B": ModelDimensions(5120, 25600, 64, 8, 128, 151936),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ModelDimensions(2048, 768, 32, 4, 128, 151936, experts=128, topk=8),
}


_NORMS = ("final_layernorm", "input_layernorm", "post_layernorm", "layernorm")
_DEVICE_TPU = "Google TPU v6e"
#: Phi attends to at most this many tokens; from here on PyTorch takes a kernel with an explicit mask.
_PHI, _PHI_WINDOW = "microsoft/Phi-mini-MoE-instruct", 2047


def _layer(
    layer: str, model: ModelDimensions, m: IntColumn, shard: Callable[[int], IntColumn]
) -> tuple[str, dict[str, IntColumn]] | None:
    """Operator and sizes of a layer of one model; None where it has none.

    ``shard`` divides a size by the degree of tensor parallelism of each row.
    """

    def whole(value: int) -> IntColumn:
        return IntColumn.constant(value, len(m.values))

    heads, hidden, head_dim = model.heads + model.kv_heads, whole(model.hidden), whole(model.head_dim)
    if layer in _NORMS:
        return model.norm, {"rows": m, "cols": hidden}
    if layer == "qk_norm":
        return "rmsnorm", {"rows": m.times(whole(heads)), "cols": head_dim}
    if layer in ("rope", "rotary_emb"):
        return "rotary_embedding", {"rows": m, "cols": shard(heads).times(head_dim), "head_dim": head_dim}
    if layer == "act_fn":
        columns = whole(model.intermediate) if model.experts else shard(model.intermediate)
        return "silu_and_mul", {"rows": m, "cols": columns}
    if layer == "embedding":
        return "embedding", {"rows": m, "cols": hidden, "table_rows": shard(model.vocab)}
    if layer == "attn":
        sizes = {"batch": whole(1), "q_len": m, "past_len": whole(0), "head_dim": head_dim}
        return "attention_prefill", {**sizes, "heads": shard(model.heads), "kv_heads": shard(model.kv_heads)}
    if layer == "sampler":
        return "argmax", {"rows": m, "cols": whole(model.vocab)}
    if not model.experts:
        return None
    if layer == "gate":
        return "moe_gating", {"rows": m, "cols": whole(model.experts), "topk": whole(model.topk)}
    if layer in ("expert.w1", "expert.w3"):
        return "linear", {"m": m, "n": whole(model.intermediate), "k": hidden}
    return ("linear", {"m": m, "n": hidden, "k": whole(model.intermediate)}) if layer == "expert.w2" else None


def _layers_groups(raw: RawTable, op: Labels) -> list[Group]:
    sizes = {name: raw.ints(name) for name in ("m", "n", "k")}
    return [Group("linear", op.is_("linear"), sizes), *_layers(raw, op, sizes["m"])]


def _layers(raw: RawTable, op: Labels, m: IntColumn) -> Iterator[Group]:
    models, tp = raw.labels("model"), raw.ints("tp")

    def shard(value: int) -> IntColumn:
        return IntColumn.constant(value, len(raw)).shard(tp)

    for name, model in MODELS.items():
        of_model = models.is_(name)
        for layer in op.names:
            rows = of_model & op.is_(layer)
            if rows.any() and (named := _layer(layer, model, m, shard)):
                operator, sizes = named
                yield Group(operator, rows, sizes)


def _doubtful(raw: RawTable) -> dict[str, Mask]:
    op = raw.labels("op")
    flat = op.is_("post_layernorm") | op.is_("final_layernorm")
    masked = op.is_("attn") & raw.labels("model").is_(_PHI) & (raw.ints("m").values >= _PHI_WINDOW)
    return {"fused": flat & raw.labels("device").is_(_DEVICE_TPU), "other_kernel": masked}


def _framework(raw: RawTable) -> Labels:
    """Framework by the version of LLMServingSim's profiler: v0 on GPUs is PyTorch, v0 on TPUs XLA, v1 is vLLM."""
    names = {"v0 torch-profiler": "pytorch", "v0 tpu": "vendor", "v1 vllm layerwise kernel": "vllm"}
    return raw.labels("protocol").map(lambda name: names.get(name, ""))


#: Layers that Hugging Face's eager modules compose of several kernels. Its LayerNorm (Phi) is one.
_COMPOSED = ("act_fn", "rope", "gate", *_NORMS)


def _implementation(raw: RawTable) -> Labels:
    """v0 on GPUs sums the kernels of a layer; v1 runs vLLM's kernels, and XLA fuses on TPUs."""
    layers = raw.labels("op").is_in(_COMPOSED) & raw.labels("protocol").is_("v0 torch-profiler")
    one_kernel = raw.labels("op").is_in(_NORMS) & raw.labels("model").map(_norm).is_("layernorm")
    tpu = raw.labels("device").is_(_DEVICE_TPU)
    return Labels((layers & ~one_kernel & ~tpu).astype(np.int32), ("fused", "composed"))


def _norm(model: str) -> str:
    return MODELS[model].norm if model in MODELS else ""


_importer = partial(
    Importer,
    repository="casys-kaist/LLMServingSim",
    commit="5daddb21",
    origin="profiler/v0/perf_models, profiler/perf",
    licence="MIT",
    protocol="kernel",
    framework=_framework,
    implementation=_implementation,
)

LAYERS = _importer(
    name="llmservingsim_layers",
    file_name="ops_llmservingsim_layers.parquet",
    needs=column_set("op device dtype model tp m layer protocol"),
    lacks=NOT_SERVING | column_set("q_len cfg n_embd hidden_dim n_q_head prefill_chunk n_decode"),
    reads=column_set("n k"),
    groups=_layers_groups,
    doubtful=_doubtful,
)


_HEADS = ("heads", "kv_heads", "head_dim")
_LENGTHS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def _attention_groups(raw: RawTable, op: Labels) -> list[Group]:
    heads = {name: raw.ints(name) for name in _HEADS}
    chunk, cached, sequences, past = (raw.ints(name) for name in _LENGTHS)
    ones = IntColumn.constant(1, len(raw))
    return [
        Group(name, op.is_(name), {**sizes, **heads})
        for name, sizes in (
            ("attention_prefill", {"batch": ones, "q_len": chunk, "past_len": cached}),
            ("attention_decode", {"batch": sequences, "q_len": ones, "past_len": past}),
            ("attention_mixed", {"q_len": chunk, "past_len": cached, "decodes": sequences, "decode_past_len": past}),
        )
    ]


ATTENTION = _importer(
    name="llmservingsim_attention",
    file_name="ops_llmservingsim_attention.parquet",
    needs=column_set("op device dtype protocol").union(_HEADS),
    one_of=(frozenset(_LENGTHS[:2]), frozenset(_LENGTHS[2:])),
    lacks=NOT_SERVING | column_set("n_out token q_len cfg layer n_embd hidden_dim n_q_head"),
    groups=_attention_groups,
)
