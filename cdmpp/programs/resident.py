"""Bytes that an operator keeps in device memory between its runs: weights, and the cache of keys and values."""

from __future__ import annotations

from typing import Any

from cdmpp.programs.elements import DTYPE_BYTES
from cdmpp.programs.spec import OperatorSpec


def resident_bytes(operator: OperatorSpec) -> tuple[float, float]:
    """Bytes of the weights and of the cache of one operator; scales of quantised weights are not counted."""
    fields = operator.model_dump()
    weight = DTYPE_BYTES[fields.get("weight_dtype") or operator.dtype]
    cache = DTYPE_BYTES[fields.get("kv_dtype") or operator.dtype]
    return _weights(operator.operator, fields) * weight, _cache(operator.operator, fields) * cache


def _weights(name: str, f: dict[str, Any]) -> float:
    """Elements of the weights."""
    if name == "linear":
        return float(f["n"] * f["k"])
    if name == "grouped_gemm":
        return float(f["groups"] * f["n"] * f["k"])
    if name in ("moe", "moe_w13"):
        columns = (2 if f["gated"] else 1) + (name == "moe")
        return float(f["experts"] / f["ep"] * columns * f["hidden"] * f["intermediate"] / f["tp"])
    if name in ("mla_prefill", "mla_decode") and f["module"]:
        down = f["hidden"] * (f["q_latent"] + f["latent"] + f["rope"])
        up = f["q_latent"] * f["heads"] * (f["nope"] + f["rope"])
        expand = f["latent"] * f["heads"] * (f["nope"] + f["v_dim"])
        return float(down + up + expand + f["heads"] * f["v_dim"] * f["hidden"])
    return 0.0


def _cache(name: str, f: dict[str, Any]) -> float:
    """Elements of the cached keys and values, or latents."""
    if name == "attention_decode":
        return float(f["batch"] * (f["past_len"] + f["q_len"]) * 2 * f["kv_heads"] * f["head_dim"])
    if name == "mla_decode":
        return float(f["batch"] * (f["past_len"] + f["q_len"]) * (f["latent"] + f["rope"]))
    return 0.0
