"""aiconfigurator MLA: multi-head latent attention of DeepSeek-V3 in serving frameworks, captured in a CUDA graph.

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
"""

from __future__ import annotations

from collections.abc import Iterator

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer
from cdmpp.data.importers.element_types import LINEAR, Types, joined, plain
from cdmpp.data.labels import Labels
from cdmpp.data.raw import RawTable

_OPERATORS = {
    "context_mla": ("mla_prefill", False),
    "mla_context_module": ("mla_prefill", True),
    "generation_mla": ("mla_decode", False),
    "mla_generation_module": ("mla_decode", True),
}
_SIZES = ("batch", "q_len", "past_len", "heads")
#: Types of the projections; "" where the source states none, as beside kernels alone.
_PROJECTIONS = {name: LINEAR[name] for name in ("fp8_block", "nvfp4")} | {"fp8": Types("float8_e4m3", None, "tensor")}


def _projections(name: str, dtype: str) -> dict[str, str | None]:
    types = _PROJECTIONS.get(name) or plain(name or dtype)
    return {"weight_dtype": None if types.dtype == dtype else types.dtype, "scaling": types.scaling}


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    return list(_each_group(raw, op))


def _each_group(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = {name: raw.ints(name) for name in _SIZES if name in raw.columns}
    label, parts = joined(op, raw.labels("mla_dtype"), raw.labels("kv_cache_dtype"), raw.labels("gemm_type"))
    for number, (name, attention, cache, gemm) in enumerate(parts):
        if name not in _OPERATORS:
            continue
        operator, module = _OPERATORS[name]
        dtype = plain(attention).dtype
        kv = plain(cache).dtype if cache else dtype
        types = _projections(gemm, dtype) if module else {"weight_dtype": None, "scaling": None}
        flags = {"kv_dtype": None if kv == dtype else kv, "module": module, **types}
        yield Group(operator, label.is_(str(number)), sizes, flags, dtype=dtype)


IMPORTER = Importer(
    name="aiconfigurator_mla",
    file_name="ops_aiconfigurator_mla.parquet",
    repository="ai-dynamo/aiconfigurator",
    commit="095f58a5",
    origin="aic-core/src/aiconfigurator_core/systems/data/<system>/{context_mla,generation_mla,mla_*_module}/",
    licence="Apache-2.0",
    protocol="graph",
    needs=frozenset({"op", "device", "mla_dtype", "heads", "batch", "q_len"}),
    lacks=frozenset({"kv_heads", "program", "dtype", "m", "rows", "in_hw", "direction"}),
    reads=frozenset({"framework", "kv_cache_dtype", "gemm_type", "past_len"}),
    groups=_groups,
    framework=lambda raw: raw.labels("framework"),
)
