"""Arithmetic and least traffic of products with narrow types, expert layers and latent attention, on arrays.

Every function returns (floating-point operations, bytes). Inputs are read once and outputs written once. Scaled
products and expert layers read activations in their own type and write results of 16 bits; scales are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.programs.elements import DTYPE_BYTES
from cdmpp.programs.operators import derived_sizes

Float64 = NDArray[np.float64]
Flags = Mapping[str, bool | int | str | None]
Sizes = Mapping[str, NDArray[Any]]

#: Bytes of a result of a scaled product.
_WIDE = 2.0


def weight_bytes(dtype: str, flags: Flags) -> float:
    """Bytes of an element of the weight: ``weight_dtype``, or ``dtype`` where it is None."""
    return DTYPE_BYTES[str(flags.get("weight_dtype") or dtype)]


def product_work(dtype: str, flags: Flags, f: Sizes) -> tuple[Float64, Float64]:
    """``linear`` and ``bmm``."""
    batch = f.get("batch", np.float64(1))
    flops = 2 * batch * f["m"] * f["n"] * f["k"]
    own = DTYPE_BYTES[dtype]
    out = 4.0 if flags.get("out_dtype") == "float32" else max(own, _WIDE) if flags.get("scaling") else own
    moved = batch * (f["m"] * f["k"] * own + f["k"] * f["n"] * weight_bytes(dtype, flags) + f["m"] * f["n"] * out)
    if flags.get("bias"):
        flops, moved = flops + f["m"] * f["n"], moved + f["n"] * out
    return flops, moved


def experts_work(operator: str, dtype: str, flags: Flags, sizes: Sizes) -> tuple[Float64, Float64]:
    """``moe``, ``moe_w13`` and ``grouped_gemm`` of the rank with most rows; only experts with rows are read."""
    load = {n: v.astype(np.float64) for n, v in derived_sizes(operator, {**flags, **sizes}).items()}
    f = {name: column.astype(np.float64) for name, column in sizes.items()}
    own, weight = DTYPE_BYTES[dtype], weight_bytes(dtype, flags)
    out = max(own, _WIDE)
    rows, active = load["rank_rows"], load["active"]
    if operator == "grouped_gemm":
        flops = 2 * rows * f["n"] * f["k"]
        return flops, rows * f["k"] * own + active * f["n"] * f["k"] * weight + rows * f["n"] * out
    inner, hidden = load["rank_intermediate"], f["hidden"]
    columns = inner * (2 if flags["gated"] else 1)
    tokens = np.minimum(f["tokens"], rows)
    flops, moved = 2 * rows * hidden * columns, tokens * hidden * own + active * hidden * columns * weight
    if operator == "moe_w13":
        return flops, moved + rows * columns * out
    return flops + 2 * rows * hidden * inner, moved + active * hidden * inner * weight + tokens * hidden * out


def expert_weight_bytes(operator: str, dtype: str, flags: Flags, sizes: Sizes) -> Float64:
    """Bytes of the weights of all experts with at least one row."""
    load = derived_sizes(operator, {**flags, **sizes})
    columns = 2 if flags["gated"] else 1
    columns += operator == "moe"
    each = load["rank_intermediate"].astype(np.float64) * sizes["hidden"] * columns
    return np.asarray(load["active"] * each * weight_bytes(dtype, flags))


def latent_attention_work(operator: str, dtype: str, flags: Flags, f: Sizes) -> tuple[Float64, Float64]:
    """``mla_prefill`` and ``mla_decode``; the least traffic of both reads the latent cache once."""
    own = DTYPE_BYTES[dtype]
    cache = DTYPE_BYTES[str(flags.get("kv_dtype") or dtype)]
    keys, new = f["past_len"] + f["q_len"], f["batch"] * f["q_len"]
    pairs = new * f["heads"] * (f["past_len"] + (f["q_len"] + 1) / 2)
    decode = operator == "mla_decode"
    query = f["latent"] + f["rope"] if decode else f["nope"] + f["rope"]
    value = f["latent"] if decode else f["v_dim"]
    flops = 2 * pairs * (query + value)
    moved = f["batch"] * keys * (f["latent"] + f["rope"]) * cache
    if not flags.get("module"):
        return flops, moved + new * f["heads"] * (query * own + value * max(own, _WIDE))
    down = f["hidden"] * (f["q_latent"] + f["latent"] + f["rope"])
    up = f["q_latent"] * f["heads"] * (f["nope"] + f["rope"])
    expand = f["latent"] * f["heads"] * (f["nope"] + f["v_dim"])
    last = f["heads"] * f["v_dim"] * f["hidden"]
    weights = (down + up + expand + last) * weight_bytes(dtype, flags)
    # The prefill form expands the latents of all keys, the absorbed form multiplies queries and results instead.
    expanded = new if decode else f["batch"] * keys
    flops = flops + 2 * (new * (down + up + last) + expanded * expand)
    return flops, moved + weights + 2 * new * f["hidden"] * _WIDE
