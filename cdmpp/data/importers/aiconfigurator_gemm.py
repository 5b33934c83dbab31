"""aiconfigurator GEMM: the dense layers of serving frameworks, captured in a CUDA graph (no launch cost).

``linear`` becomes ``linear`` without bias: [m, k] x [k, n]; ``framework`` is an input. ``version`` is never
read.
"""

from __future__ import annotations

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer
from cdmpp.data.labels import Labels
from cdmpp.data.raw import RawTable


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    return [Group("linear", op.is_("linear"), {name: raw.ints(name) for name in ("m", "n", "k")})]


IMPORTER = Importer(
    name="aiconfigurator_gemm",
    file_name="ops_aiconfigurator_gemm_bf16.parquet",
    repository="ai-dynamo/aiconfigurator",
    commit="095f58a5",
    origin="aic-core/src/aiconfigurator_core/systems/data/<system>/gemm/",
    licence="Apache-2.0",
    protocol="graph",
    needs=frozenset({"op", "device", "framework", "dtype", "m", "n", "k"}),
    lacks=frozenset({"q_len", "rows", "trans_a", "direction", "precision", "batch", "program"}),
    groups=_groups,
    framework=lambda raw: raw.labels("framework"),
)
