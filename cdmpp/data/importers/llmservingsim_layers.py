"""LLMServingSim: layers of six language models by number of tokens, kernel time.

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

Layers other than ``linear`` state no sizes; they follow from the published dimensions (:mod:`.llm_models`). Rows per
expert are not stated either. The data show that one expert received all tokens: at the same m, Mixtral's ``w1`` takes
1.007 times (median) what Llama-3.1-8B's ``gate_proj`` of equal size takes, and does not change with ``tp``. Of v1,
``qk_norm``, the norms and ``sampler`` have the same values for every ``tp``.

``gate`` holds more than its product: 44 us for 16 tokens and 64 us for 2,048 on the H100 are softmax and top-k.
``v0`` is PyTorch, ``v1`` is vLLM. Rows of doubtful meaning are left out of training (``fused``, ``other_kernel``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import NOT_SERVING, Importer
from cdmpp.data.importers.llm_models import MODELS, ModelDimensions
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import IntColumn, RawTable

_NORMS = ("final_layernorm", "input_layernorm", "post_layernorm", "layernorm")
_DEVICE_TPU = "Google TPU v6e"
#: Phi attends to at most this many tokens; from here on PyTorch takes a kernel with an explicit mask.
_PHI, _PHI_WINDOW = "microsoft/Phi-mini-MoE-instruct", 2047


def _sizes(layer: str, model: ModelDimensions, m: IntColumn, shard: Callable[[int], IntColumn]) -> dict[str, IntColumn]:
    """Sizes of a layer of one model; ``shard`` divides a size by the degree of tensor parallelism of each row."""

    def whole(value: int) -> IntColumn:
        return IntColumn.constant(value, len(m.values))

    heads = model.heads + model.kv_heads
    if layer in _NORMS:
        return {"rows": m, "cols": whole(model.hidden)}
    if layer == "qk_norm":
        return {"rows": m.times(whole(heads)), "cols": whole(model.head_dim)}
    if layer in ("rope", "rotary_emb"):
        return {"rows": m, "cols": shard(heads).times(whole(model.head_dim)), "head_dim": whole(model.head_dim)}
    if layer == "act_fn":
        return {"rows": m, "cols": whole(model.intermediate) if model.experts else shard(model.intermediate)}
    if layer == "embedding":
        return {"rows": m, "cols": whole(model.hidden), "table_rows": shard(model.vocab)}
    if layer == "attn":
        return {
            "batch": whole(1),
            "q_len": m,
            "past_len": whole(0),
            "heads": shard(model.heads),
            "kv_heads": shard(model.kv_heads),
            "head_dim": whole(model.head_dim),
        }
    if layer == "gate":
        return {"rows": m, "cols": whole(model.experts), "topk": whole(model.topk)}
    if layer == "sampler":
        return {"rows": m, "cols": whole(model.vocab)}
    wide = layer == "expert.w2"
    inner, outer = whole(model.intermediate), whole(model.hidden)
    return {"m": m, "n": outer if wide else inner, "k": inner if wide else outer}


def _operator(layer: str, model: ModelDimensions) -> str | None:
    if layer in _NORMS:
        return model.norm
    if layer in ("gate", "expert.w1", "expert.w2", "expert.w3") and not model.experts:
        return None
    return {
        "qk_norm": "rmsnorm",
        "rope": "rotary_embedding",
        "rotary_emb": "rotary_embedding",
        "act_fn": "silu_and_mul",
        "embedding": "embedding",
        "attn": "attention_prefill",
        "gate": "moe_gating",
        "sampler": "argmax",
        "expert.w1": "linear",
        "expert.w2": "linear",
        "expert.w3": "linear",
    }.get(layer)


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    sizes = {name: raw.ints(name) for name in ("m", "n", "k")}
    return [Group("linear", op.is_("linear"), sizes), *_layers(raw, op, sizes["m"])]


def _layers(raw: RawTable, op: Labels, m: IntColumn) -> Iterator[Group]:
    models, tp = raw.labels("model"), raw.ints("tp")

    def shard(value: int) -> IntColumn:
        parts = -(-value // np.maximum(tp.values, 1))
        return IntColumn(parts, tp.missing, tp.invalid | (~tp.missing & (tp.values < 1)))

    for name, model in MODELS.items():
        of_model = models.is_(name)
        for layer in op.names:
            operator, rows = _operator(layer, model), of_model & op.is_(layer)
            if operator is not None and rows.any():
                yield Group(operator, rows, _sizes(layer, model, m, shard))


def _doubtful(raw: RawTable) -> dict[str, Mask]:
    op = raw.labels("op")
    flat = op.is_("post_layernorm") | op.is_("final_layernorm")
    masked = op.is_("attn") & raw.labels("model").is_(_PHI) & (raw.ints("m").values >= _PHI_WINDOW)
    return {"fused": flat & raw.labels("device").is_(_DEVICE_TPU), "other_kernel": masked}


def version_framework(raw: RawTable) -> Labels:
    """Framework by the version of LLMServingSim's profiler: v0 on GPUs is PyTorch, v0 on TPUs XLA, v1 is vLLM."""
    names = {"v0 torch-profiler": "pytorch", "v0 tpu": "vendor", "v1 vllm layerwise kernel": "vllm"}
    return raw.labels("protocol").map(lambda name: names.get(name, ""))


IMPORTER = Importer(
    name="llmservingsim_layers",
    file_name="ops_llmservingsim_layers.parquet",
    repository="casys-kaist/LLMServingSim",
    commit="5daddb21",
    origin="profiler/v0/perf_models, profiler/perf",
    licence="MIT",
    protocol="kernel",
    needs=frozenset({"op", "device", "dtype", "model", "tp", "m", "layer", "protocol"}),
    lacks=NOT_SERVING | {"q_len", "cfg", "n_embd", "hidden_dim", "n_q_head", "prefill_chunk", "n_decode"},
    reads=frozenset({"n", "k"}),
    groups=_groups,
    framework=version_framework,
    doubtful=_doubtful,
)
