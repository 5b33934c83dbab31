"""LLMServingSim: attention over a prefill chunk, decoding sequences, or both in one batch; kernel time.

``attention_prefill`` is one sequence: ``prefill_chunk`` new tokens behind ``kv_prefill`` cached ones.
``attention_decode`` is ``n_decode`` sequences with ``kv_decode`` cached tokens each. ``attention_mixed`` is both.
``heads`` and ``kv_heads`` are those of one rank. ``v0 torch-profiler`` is a plain flash-attention call of PyTorch,
``v0 tpu`` is XLA (``vendor``), ``v1`` is vLLM.

Of v0 on TPUs the source does not say whether ``kv_prefill`` contains the chunk. It does not: rows with
``kv_prefill`` = 0 exist, and no row has more than 2,048 tokens in all.
"""

from __future__ import annotations

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import NOT_SERVING, Importer
from cdmpp.data.importers.llmservingsim_layers import version_framework
from cdmpp.data.labels import Labels
from cdmpp.data.raw import IntColumn, RawTable

_HEADS = ("heads", "kv_heads", "head_dim")
_LENGTHS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    heads = {name: raw.ints(name) for name in _HEADS}
    chunk, cached, sequences, past = (raw.ints(name) for name in _LENGTHS)
    one = IntColumn.constant(1, len(raw))
    return [
        Group(
            "attention_prefill",
            op.is_("attention_prefill"),
            {"batch": one, "q_len": chunk, "past_len": cached, **heads},
        ),
        Group(
            "attention_decode",
            op.is_("attention_decode"),
            {"batch": sequences, "q_len": one, "past_len": past, **heads},
        ),
        Group(
            "attention_mixed",
            op.is_("attention_mixed"),
            {"q_len": chunk, "past_len": cached, "decodes": sequences, "decode_past_len": past, **heads},
        ),
    ]


IMPORTER = Importer(
    name="llmservingsim_attention",
    file_name="ops_llmservingsim_attention.parquet",
    repository="casys-kaist/LLMServingSim",
    commit="5daddb21",
    origin="profiler/v0/perf_models, profiler/perf",
    licence="MIT",
    protocol="kernel",
    needs=frozenset({"op", "device", "dtype", "protocol", *_HEADS}),
    one_of=(frozenset(_LENGTHS[:2]), frozenset(_LENGTHS[2:])),
    lacks=NOT_SERVING | {"n_out", "token", "q_len", "cfg", "layer", "n_embd", "hidden_dim", "n_q_head"},
    groups=_groups,
    framework=version_framework,
)
