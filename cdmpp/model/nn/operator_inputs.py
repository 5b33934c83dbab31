"""Summary columns that come from an operator's own fields: types, scales, sizes, loads of experts.

The leaves of a program give its loops and accesses. What a kernel does with scales, cached keys or the rows of an
expert does not follow from them as directly, so the fields are inputs themselves. They are read from
:attr:`cdmpp.features.encode.EncodedPrograms.structure` and ``sizes``; the columns of other programs are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

import numpy as np

from cdmpp.programs.elements import DTYPE_BYTES, SCALINGS
from cdmpp.programs.operators import derived_sizes, operator_family, operator_types
from cdmpp.programs.products import Layout
from cdmpp.programs.templates import size_names

Array = np.ndarray[Any, np.dtype[Any]]

LAYOUTS: tuple[str, ...] = get_args(Layout)
#: Sizes of attention and of layers of experts that are inputs, as log2(1 + x).
SIZES = (
    "batch",
    "q_len",
    "past_len",
    "heads",
    "kv_heads",
    "head_dim",
    "decodes",
    "decode_past_len",
    "hidden",
    "tokens",
    "intermediate",
    "experts",
    "topk",
    "tp",
    "ep",
)
#: Loads of the rank with most rows (:mod:`cdmpp.programs.products`), as log2(1 + x); ``imbalance`` is log2 of the
#: largest load over the mean load.
LOADS = ("active_experts", "rows_per_expert", "tiles", "tile_rows", "imbalance")

OPERATOR_COLUMNS = (
    "weight_bits",  # log2 of the bits of a weight that has another type than the activations
    *(f"scaling_{name}" for name in SCALINGS),
    "cache_bits",  # log2 of the bits of a cached key that has another type than the query
    "module",
    "gated",
    "power_law",  # exponent of the rows per expert; 0: balanced
    *(f"layout_{name}" for name in LAYOUTS),  # of a product that states another layout than its operator's
    "half_accumulate",
    "wide_result",
    *(f"size_{name}" for name in SIZES),
    *(f"load_{name}" for name in LOADS),
)
_AT = {name: i for i, name in enumerate(OPERATOR_COLUMNS)}
_FIRST_LOAD = _AT[f"load_{LOADS[0]}"]
#: A grouped product has the sizes of a layer of experts under other names.
_GROUPED = {"groups": "experts", "rows": "tokens", "n": "intermediate", "k": "hidden"}
#: Families whose sizes are inputs. The extents of the others are in the leaves.
_SIZED = ("attention", "moe")


@dataclass(frozen=True)
class _Layout:
    """What the operators of one structural class have in common.

    Attributes
    ----------
    constant : (len(OPERATOR_COLUMNS),) float32
    columns : columns of the sizes
    sizes : their positions in :attr:`EncodedPrograms.sizes`
    names : size names of the operator
    operator : str
    flags : structural fields, for the loads of experts; None for other operators
    """

    constant: Array
    columns: Array
    sizes: Array
    names: tuple[str, ...]
    operator: str
    flags: Mapping[str, str] | None


def _bits(dtype: str | None) -> float:
    return 0.0 if dtype is None else float(np.log2(8 * DTYPE_BYTES[dtype]))


@lru_cache(maxsize=4096)
def _layout(structure: str) -> _Layout | None:
    """Layout of a structural class; None for a name that is not one."""
    operator, _, *parts = structure.split(":")
    if operator not in operator_types():
        return None
    flags = dict(part.partition("=")[::2] for part in parts)
    constant = np.zeros(len(OPERATOR_COLUMNS), dtype=np.float32)
    constant[_AT["weight_bits"]] = _bits(flags.get("weight_dtype"))
    constant[_AT["cache_bits"]] = _bits(flags.get("kv_dtype"))
    constant[_AT["half_accumulate"]] = "accumulate" in flags
    constant[_AT["wide_result"]] = "out_dtype" in flags
    for name in ("scaling", "layout"):
        if name in flags:
            constant[_AT[f"{name}_{flags[name]}"]] = 1
    for name in ("module", "gated"):
        constant[_AT[name]] = flags.get(name) == "True"
    balance = flags.get("balance", "balanced")
    constant[_AT["power_law"]] = 0.0 if balance == "balanced" else float(balance.rpartition("_")[2])
    names, family = tuple(size_names(operator)), operator_family(operator)
    # Without projections, ``hidden`` of latent attention is unused.
    unused = {"hidden"} if operator.startswith("mla_") and flags.get("module") != "True" else set()
    pairs = [
        (_AT[f"size_{known}"], position)
        for position, name in enumerate(names)
        if (known := _GROUPED.get(name, name) if operator == "grouped_gemm" else name) in SIZES and name not in unused
        if family in _SIZED or name in ("topk", "head_dim")
    ]
    columns, positions = (np.array(column, dtype=np.intp) for column in zip(*pairs, strict=True)) if pairs else ((), ())
    return _Layout(
        constant,
        np.asarray(columns, dtype=np.intp),
        np.asarray(positions, dtype=np.intp),
        names,
        operator,
        {**flags, "balance": balance} if family == "moe" else None,
    )


def operator_columns(structure: str, sizes: Array) -> tuple[Array, Array | None]:
    """Columns of operators that share a structural class.

    Parameters
    ----------
    structure : str
    sizes : (programs, size names of the operator) int64

    Returns
    -------
    columns : float32, (programs, len(OPERATOR_COLUMNS))
    grouped : float64, (programs, 2), optional
        Experts with rows and mean rows per such expert; None for other operators.
    """
    layout, count = _layout(structure), len(sizes)
    if layout is None:
        return np.zeros((count, len(OPERATOR_COLUMNS)), dtype=np.float32), None
    out = np.tile(layout.constant, (count, 1))
    if len(layout.columns):
        out[:, layout.columns] = np.log2(1.0 + sizes[:, layout.sizes])
    if layout.flags is None:
        return out, None
    loads, intermediate = _loads(layout, sizes)
    active, mean, largest = loads["active"] * 1.0, loads["rank_rows"] / loads["active"], loads["largest"]
    figures = [np.log2(1.0 + x) for x in (active, mean, loads["tiles"], loads["tile_rows"])]
    for column, values in enumerate([*figures, np.log2(np.maximum(largest / mean, 1.0))]):
        out[:, _FIRST_LOAD + column] = values
    if intermediate is not None:
        out[:, _AT["size_intermediate"]] = np.log2(1.0 + intermediate)
    grouped = np.empty((count, 2))
    grouped[:, 0], grouped[:, 1] = active, mean
    return out, grouped


def _loads(layout: _Layout, sizes: Array) -> tuple[dict[str, Any], Any]:
    """Loads of experts, and the columns of the first product's weight that the rank holds."""
    one = len(sizes) == 1  # integers are cached by size, arrays are not
    row = sizes[0].tolist() if one else list(sizes.T)
    fields = dict(zip(layout.names, row, strict=True)) | dict(layout.flags or {})
    derived = derived_sizes(layout.operator, fields)
    return derived, derived.get("rank_intermediate")
