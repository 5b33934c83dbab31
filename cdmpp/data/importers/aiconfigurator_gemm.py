"""aiconfigurator GEMM: the dense layers of serving frameworks, captured in a CUDA graph (no launch cost).

``linear`` becomes ``linear`` without bias: [m, k] x [k, n]; ``framework`` is an input. The bfloat16 and the quantised
table have the same columns and one importer. Rows of type bfloat16 have the source ``aiconfigurator_gemm``, all others
``aiconfigurator_gemm_quantised``, whichever file they are in.

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
"""

from __future__ import annotations

from dataclasses import replace

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer
from cdmpp.data.importers.element_types import LINEAR, plain, typed_groups
from cdmpp.data.labels import Labels
from cdmpp.data.raw import RawTable

QUANTISED = "aiconfigurator_gemm_quantised"


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    sizes = {name: raw.ints(name) for name in ("m", "n", "k")}
    return list(typed_groups("linear", op.is_("linear"), raw.labels("dtype"), LINEAR, sizes, {"bias": False}))


def _source(raw: RawTable) -> Labels:
    return raw.labels("dtype").map(lambda name: IMPORTER.name if plain(name).dtype == "bfloat16" else QUANTISED)


IMPORTER = Importer(
    name="aiconfigurator_gemm",
    file_name="ops_aiconfigurator_gemm_bf16.parquet",
    repository="ai-dynamo/aiconfigurator",
    commit="095f58a5",
    origin="aic-core/src/aiconfigurator_core/systems/data/<system>/gemm/",
    licence="Apache-2.0",
    protocol="graph",
    needs=frozenset({"op", "device", "framework", "dtype", "m", "n", "k"}),
    lacks=frozenset({"q_len", "rows", "trans_a", "direction", "precision", "batch", "program", "family", "protocol"}),
    groups=_groups,
    framework=lambda raw: raw.labels("framework"),
    row_source=_source,
)
QUANTISED_IMPORTER = replace(
    IMPORTER, name=QUANTISED, file_name="ops_aiconfigurator_gemm_quantised.parquet", read_by=IMPORTER.name
)
