"""aiconfigurator attention: fused kernels of serving frameworks, captured in a CUDA graph.

``attention_prefill``, ``attention_decode`` and ``attention_encoder`` keep their names and columns (batch,
q_len, past_len, heads, kv_heads, head_dim); ``framework`` is an input. ``version`` and ``kernel_source`` are
never read.
"""

from __future__ import annotations

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer
from cdmpp.data.labels import Labels
from cdmpp.data.raw import RawTable

_SIZES = ("batch", "q_len", "past_len", "heads", "kv_heads", "head_dim")
_OPERATORS = ("attention_prefill", "attention_decode", "attention_encoder")


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    sizes = {name: raw.ints(name) for name in _SIZES}
    return [Group(name, op.is_(name), sizes) for name in _OPERATORS]


IMPORTER = Importer(
    name="aiconfigurator_attention",
    file_name="ops_aiconfigurator_attention_bf16.parquet",
    repository="ai-dynamo/aiconfigurator",
    commit="095f58a5",
    origin="aic-core/src/aiconfigurator_core/systems/data/<system>/{attention,encoder_attention}/",
    licence="Apache-2.0",
    protocol="graph",
    needs=frozenset({"op", "device", "framework", "dtype", *_SIZES}),
    lacks=frozenset({"precision", "direction"}),
    groups=_groups,
    framework=lambda raw: raw.labels("framework"),
)
