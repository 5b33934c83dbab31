"""pipeweave MoE: the first grouped product of a layer of experts in vLLM's Triton kernel (average kernel time).

``moe_w13``: ``tokens`` x ``topk`` rows over ``num_experts`` experts of equal load, [hidden] -> [n_out] with both halves
of the gate-up projection, so ``intermediate`` = ``n_out`` / 2 and the layer is gated. An odd ``n_out`` has no such
half and is an invalid size. The kernel ran with its default, untuned tiles.
"""

from __future__ import annotations

import numpy as np

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer, always
from cdmpp.data.importers.element_types import EXPERTS, typed_groups
from cdmpp.data.labels import Labels
from cdmpp.data.raw import IntColumn, RawTable
from cdmpp.data.table import Flags


def _groups(raw: RawTable, op: Labels) -> list[Group]:
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
    return list(typed_groups("moe_w13", op.is_("moe_w13"), raw.labels("dtype"), EXPERTS, sizes, flags))


IMPORTER = Importer(
    name="pipeweave_moe",
    file_name="ops_pipeweave_moe.parquet",
    repository="zksainx/pipeweave",
    commit="55e03178",
    origin="mlp_models_quantile/moe/*/kernel_reports",
    licence="Apache-2.0",
    protocol="kernel",
    needs=frozenset({"op", "device", "dtype", "tokens", "num_experts", "topk", "hidden", "n_out"}),
    lacks=frozenset(
        {"framework", "program", "num_tokens", "token", "m", "rows", "in_hw", "q_len", "direction", "message_bytes"}
    ),
    groups=_groups,
    framework=always("triton"),
)
