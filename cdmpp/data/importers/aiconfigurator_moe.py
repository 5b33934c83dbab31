"""aiconfigurator MoE: one rank's fused layer of experts in serving frameworks, captured in a CUDA graph.

``moe``: ``tokens`` = ``num_tokens`` (all ranks), ``hidden`` = ``hidden_size``, ``intermediate`` = ``inter_size`` and
``experts`` = ``num_experts`` of the whole model, ``tp`` and ``ep`` shards, ``balance`` = ``distribution`` (a power law:
the rank with the highest load). Types: see :data:`cdmpp.data.importers.element_types.EXPERTS`.

Layers are gated, except TensorRT-LLM's layers of the models in :func:`_without_gate`. The source says so only in
``kernel_source``, which is a result and never read; the rule agrees with it in every row. Some frameworks' latency
includes the routing kernels; the source does not mark which. Rows faster than their weights can be read are left out of
training (``weights_not_read`` in :mod:`cdmpp.data.physics`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer
from cdmpp.data.importers.element_types import EXPERTS, typed_groups
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import RawTable
from cdmpp.programs.products import BALANCES

_SIZES = {
    "tokens": "num_tokens",
    "hidden": "hidden_size",
    "intermediate": "inter_size",
    "experts": "num_experts",
    "topk": "topk",
}


def _without_gate(raw: RawTable) -> Mask:
    """Nemotron models run by TensorRT-LLM: 22 of 512 experts, or 6 of 128 experts of [2688, 1856]."""
    hidden, inner, experts, topk = (raw.ints(_SIZES[n]).values for n in ("hidden", "intermediate", "experts", "topk"))
    models = (experts == 512) & (topk == 22)
    models |= (experts == 128) & (topk == 6) & (hidden == 2688) & (inner == 1856)
    return np.asarray(models & raw.labels("framework").is_("trtllm"))


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    return list(_each_group(raw, op))


def _each_group(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = {field: raw.ints(column) for field, column in _SIZES.items()}
    sizes |= {name: raw.ints(name) for name in ("tp", "ep") if name in raw.columns}
    ungated, balance = _without_gate(raw), raw.labels("distribution", "balanced")
    for rows, gated in ((~ungated, True), (ungated, False)):
        for name in BALANCES:
            chosen = op.is_("moe") & rows & (balance.is_(name) | (balance.is_("") if name == "balanced" else False))
            yield from typed_groups(
                "moe", chosen, raw.labels("dtype"), EXPERTS, sizes, {"balance": name, "gated": gated}
            )


IMPORTER = Importer(
    name="aiconfigurator_moe",
    file_name="ops_aiconfigurator_moe.parquet",
    repository="ai-dynamo/aiconfigurator",
    commit="095f58a5",
    origin="aic-core/src/aiconfigurator_core/systems/data/<system>/moe/",
    licence="Apache-2.0",
    protocol="graph",
    needs=frozenset({"op", "device", "dtype", *_SIZES.values()}),
    lacks=frozenset({"program", "tokens", "token", "m", "rows", "in_hw", "q_len", "direction", "message_bytes"}),
    reads=frozenset({"framework", "tp", "ep", "distribution"}),
    groups=_groups,
    framework=lambda raw: raw.labels("framework"),
)
