"""Liger-Kernel: norms, rotary embedding, activations, softmax, cross entropy and embedding of its own benchmarks.

======================  ======================================================================================
in the table            here
======================  ======================================================================================
``rms_norm``,           ``rmsnorm`` and ``layernorm``; mode ``backward``: ``rmsnorm_backward`` and
``layer_norm``          ``layernorm_backward``
``megatron_rms_norm``   ``rmsnorm``
``fused_add_rms_norm``  the same
``rope``                ``rotary_embedding`` of the query and key heads
``softmax``             the same
``megatron_swiglu``     ``silu_and_mul``
``embedding``           the same
``cross_entropy``,      ``softmax_cross_entropy``. Liger's forward pass computes the gradient too: ``fwd_bwd``
``megatron_cross_..``
======================  ======================================================================================

``x_name`` and ``x_value`` are the swept size, ``config`` holds the others. The Megatron scripts and ``cross_entropy``
do not write their element type into ``config``: the scripts' inputs are bfloat16 and float32 (PyTorch's default).

Other rows are left out (``unknown_operator``): mode ``full``, whose gradients may be added to old ones; ``backward`` of
Megatron scripts, which repeats the forward pass; ``backward`` without an operator, and that of ``rope``, which copies
strided gradients; modules with products (``swiglu``, ``geglu``); operators without a specification. Vocabularies named
by a model (``x_name`` is ``model_config``) are not in the table.

``liger`` in ``triton`` is one kernel. ``torch`` and ``huggingface`` call PyTorch: one kernel for softmax, layer norm,
embedding and ``torch.nn.RMSNorm``, else several. ``liger_rms_norm`` is an addition and a norm.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer, column_set, joined
from cdmpp.data.labels import Labels
from cdmpp.data.raw import IntColumn, RawTable
from cdmpp.programs.elements import canonical_dtype

_SIZES = "op provider mode x_name x_value config"
#: Element types of the scripts that do not state one.
_TYPES = {
    "cross_entropy": "float32",
    **dict.fromkeys(("megatron_cross_entropy", "megatron_rms_norm", "megatron_swiglu"), "bfloat16"),
}
_NORMS = {"rms_norm": "rmsnorm", "layer_norm": "layernorm", "megatron_rms_norm": "rmsnorm"}
#: Tables whose PyTorch module is one kernel.
_ONE_KERNEL = ("softmax", "layer_norm", "embedding", "megatron_rms_norm")


class _Row(NamedTuple):
    """What a row ran."""

    operator: str
    dtype: str
    direction: str | None
    sizes: Mapping[str, int]
    framework: str
    implementation: str


def _rows_cols(f: Mapping[str, Any], cols: str) -> dict[str, int]:
    """Tokens as ``M``, ``BT``, or a length times a batch; columns as the field ``cols`` or the hidden size."""
    length = f.get("M") or f.get("BT") or f.get("S") or f["T"]
    batch = f["B"] if ("S" in f or "T" in f) and "B" in f else 1
    return {"rows": length * batch, "cols": f[cols] if cols in f else f["hidden_size"]}


def _rope(f: Mapping[str, Any]) -> dict[str, int]:
    heads = f["num_q_heads"] if "num_q_heads" in f else f["num_attention_heads"]
    kv_heads = f["num_kv_heads"] if "num_kv_heads" in f else f["num_key_value_heads"]
    head_dim = (f["H"] if "H" in f else f["hidden_size"]) // heads
    rows = f["T"] if "T" in f else f["seq_len"]
    return {"rows": rows, "cols": (heads + kv_heads) * head_dim, "head_dim": head_dim}


def _vocabulary(f: Mapping[str, Any]) -> dict[str, int]:
    return {**_rows_cols({"vocab_size": f.get("V"), **f}, "vocab_size")}


_SIZES_OF: Mapping[str, Callable[[Mapping[str, Any]], dict[str, int]]] = {
    "rms_norm": partial(_rows_cols, cols="H"),
    "megatron_rms_norm": partial(_rows_cols, cols="H"),
    "layer_norm": partial(_rows_cols, cols="N"),
    "fused_add_rms_norm": partial(_rows_cols, cols="H"),
    "softmax": partial(_rows_cols, cols="N"),
    "megatron_swiglu": partial(_rows_cols, cols="ffn_local"),
    "embedding": lambda f: {**_rows_cols(f, "D"), "table_rows": f["V"]},
    "rope": _rope,
    "cross_entropy": _vocabulary,
    "megatron_cross_entropy": _vocabulary,
}


def _operator(op: str, provider: str, mode: str) -> tuple[str, str | None] | None:
    """Operator and direction of a row; None where it has none."""
    forward = mode in ("forward", "no-grad-forward")
    separate = mode == "backward" and not op.startswith("megatron_")
    if op.endswith("cross_entropy"):
        if provider.startswith("liger"):
            return ("softmax_cross_entropy", "fwd_bwd") if forward else None
        return ("softmax_cross_entropy", "fwd" if forward else "bwd") if forward or separate else None
    if op in _NORMS:
        return (_NORMS[op] + ("" if forward else "_backward"), None) if forward or separate else None
    names = {"megatron_swiglu": "silu_and_mul", "rope": "rotary_embedding"}
    return (names.get(op, op), None) if forward and op in _SIZES_OF else None


def _ran(op: str, provider: str) -> tuple[str, str]:
    """Framework and implementation of a provider."""
    if provider.startswith("liger"):
        composed = op == "fused_add_rms_norm" and not provider.endswith("fused_add_rms_norm")
        return "triton", "composed" if composed else "fused"
    if provider == "torch_compile" or provider == "megatron-fused" or (provider, op) == ("megatron", "megatron_swiglu"):
        return "pytorch", "compiled"
    return "pytorch", "fused" if op in _ONE_KERNEL else "composed"


def _read(op: str, provider: str, mode: str, x_name: str, x_value: str, config: str) -> _Row | None:
    """What a row ran; None where it has no operator, or its sizes cannot be read."""
    named = _operator(op, provider, mode)
    if named is None:
        return None
    try:
        fields = {**json.loads(config), x_name: int(x_value)}
        sizes = _SIZES_OF[op](fields)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, RecursionError):
        return None
    if not all(type(size) is int and 0 < size < 2**53 for size in sizes.values()):
        return None
    dtype = str(fields.get("dtype") or _TYPES.get(op, "")).removeprefix("torch.")
    return _Row(named[0], str(canonical_dtype(dtype)), named[1], sizes, *_ran(op, provider))


def _decoded(raw: RawTable) -> tuple[Labels, list[_Row | None]]:
    """A label per row, and what each label ran."""
    label, parts = joined(*(raw.labels(name) for name in _SIZES.split()))
    return label, [_read(*part) for part in parts]


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    label, decoded = _decoded(raw)
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for code, row in enumerate(decoded):
        if row is not None:
            alike[row.operator, row.dtype, row.direction].append(code)
    groups, no = [], np.zeros(len(raw), dtype=np.bool_)
    for (operator, dtype, direction), codes in alike.items():
        first = decoded[codes[0]]
        assert first is not None
        columns = {}
        for name in first.sizes:
            values = [row.sizes.get(name, 0) if row else 0 for row in decoded]
            columns[name] = IntColumn(np.array(values, dtype=np.int64)[label.codes], no, no)
        flags = {"direction": direction} if direction else {}
        groups.append(Group(operator, np.isin(label.codes, codes), columns, flags, dtype))
    return groups


def _column(raw: RawTable, field: str) -> Labels:
    """A field of what each row ran; "" in rows without an operator."""
    label, decoded = _decoded(raw)
    return label.map(lambda name: getattr(decoded[int(name)], field, ""))


def _implementation(raw: RawTable) -> Labels:
    return _column(raw, "implementation").map(lambda name: name or "fused")


IMPORTER = Importer(
    name="liger",
    file_name="ops_liger.csv.gz",
    repository="linkedin/Liger-Kernel",
    commit="ead96b61",
    origin="benchmark/data",
    licence="BSD-2-Clause",
    protocol="kernel",
    needs=column_set(f"device {_SIZES}"),
    groups=_groups,
    framework=partial(_column, field="framework"),
    implementation=_implementation,
)
