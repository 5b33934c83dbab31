"""Floating-point operations that an operator's result needs, where its loop nest does more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cdmpp.programs.vectors import output_hw

Array = np.ndarray[Any, np.dtype[Any]]


def useful_flops(operator: str, s: Mapping[str, Any], structure: str = "") -> Array | None:
    """Floating-point operations that an operator's result needs, where the loop nest does more.

    A causal mask halves attention; a backward convolution's loop nest multiplies zeros; tiles of experts have
    rows of padding; scales of blocks are multiplied as often as elements. None: as many as the loop nest counts.

    Parameters
    ----------
    operator : str
    s : mapping
        Integer fields and derived sizes.
    structure : str
        Structural class: ``scaling``, ``gated`` and the like.
    """
    if operator == "conv2d":
        oh, ow = output_hw(s)
        per_group = s["c_in"] // s["groups"]
        return np.asarray(2.0 * s["n"] * s["c_out"] * oh * ow * per_group * s["kh"] * s["kw"])
    if operator in ("linear", "bmm"):
        if "scaling=" not in structure:
            return None
        return np.asarray(2.0 * s.get("batch", 1) * s["m"] * s["n"] * s["k"])
    if operator == "grouped_gemm":
        return np.asarray(2.0 * s["rows"] * s["n"] * s["k"])
    if operator in ("moe", "moe_w13"):
        products = (2 if "gated=True" in structure else 1) + (operator == "moe")
        return np.asarray(2.0 * s["rank_rows"] * s["hidden"] * s["rank_intermediate"] * products)
    if operator in ("attention_prefill", "attention_mixed"):
        q, past = s["q_len"] * 1.0, s["past_len"]
        pairs = s.get("batch", 1) * (q * past + q * (q + 1) / 2)
        if operator == "attention_mixed":
            pairs = pairs + s["decodes"] * (s["decode_past_len"] + 1.0)
        return np.asarray(s["heads"] * pairs * (4.0 * s["head_dim"] + 5))
    if operator in ("mla_prefill", "mla_decode"):
        return _latent_flops(operator, s, module="module=True" in structure)
    return None


def _latent_flops(operator: str, s: Mapping[str, Any], *, module: bool) -> Array | None:
    decode = operator == "mla_decode"
    if decode and not module:
        return None
    q, keys = s["q_len"] * 1.0, s["q_len"] * 1.0 + s["past_len"]
    heads, deep = s["heads"] * 1.0, s["nope"] + s["rope"]
    if decode:
        flops = s["batch"] * q * heads * keys * (4.0 * s["latent"] + 2.0 * s["rope"] + 6)
    else:
        pairs = q * s["past_len"] + q * (q + 1) / 2
        flops = s["batch"] * heads * pairs * (2.0 * (deep + s["v_dim"]) + 5)
    if module:
        weights = s["hidden"] * (s["q_latent"] + s["latent"] + s["rope"]) + heads * (
            s["q_latent"] * deep + s["v_dim"] * s["hidden"]
        )
        expand = heads * s["latent"] * (s["nope"] + s["v_dim"])
        flops = flops + 2.0 * s["batch"] * (q * weights + (q if decode else keys) * expand)
    return np.asarray(flops)
