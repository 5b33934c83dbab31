"""Attention over grouped heads, and batches of a prefill chunk and decoding sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cdmpp.programs.lowering.common import (
    FACTOR,
    Sizes,
    accumulator,
    as_float,
    cast,
    const,
    dtype_of,
    narrow,
    te,
    topi,
    tvm_dtype,
    written,
)


def attend(
    shape: tuple[Any, Any, Any, Any],
    depths: tuple[Any, Any],
    query: Callable[..., Any],
    key: Callable[..., Any],
    value: Callable[..., Any],
    *,
    past: Any = None,
    prefix: str = "",
) -> Any:
    """Scores, softmax and weighted sum: ``[batch, q_len, heads, depth of the values]`` in float32.

    Parameters
    ----------
    shape
        Sequences, queries, heads, keys.
    depths
        Columns of a key, and of a value.
    query, key, value : callable
        ``query(z, i, h, r)``, ``key(z, j, h, r)``, ``value(z, j, h, e)``: elements for a query head.
    past : optional
        Keys before the first query; given: a query sees no key behind its own (causal).
    """
    b, sq, heads, keys = shape
    rd, rk = te.reduce_axis((0, depths[0]), name="rd"), te.reduce_axis((0, keys), name="rk")

    def score(z: Any, h: Any, i: Any, j: Any) -> Any:
        one, other = query(z, i, h, rd), key(z, j, h, rd)
        kind = accumulator(dtype_of(one), dtype_of(other))
        return te.sum(cast(one, kind) * cast(other, kind), axis=rd)

    scores = te.compute((b, heads, sq, keys), score, name=f"{prefix}scores")
    factor = const(FACTOR, str(scores.dtype))

    def masked(z: Any, h: Any, i: Any, j: Any) -> Any:
        scaled = scores[z, h, i, j] * factor
        if past is not None:
            scaled = te.if_then_else(j <= i + past, scaled, te.const(-1, str(scores.dtype)))
        return scaled

    scaled = te.compute((b, heads, sq, keys), masked, name=f"{prefix}scaled")
    weights = topi.nn.softmax(narrow(scaled, "float32"), axis=3)
    return te.compute(
        (b, sq, heads, depths[1]),
        lambda z, i, h, e: te.sum(weights[z, h, i, rk] * as_float(value(z, rk, h, e)), axis=rk),
        name=f"{prefix}attend",
    )


def _grouped(
    s: Sizes, dtype: str, flags: Sizes, shape: tuple[Any, Any, Any], *, causal: bool, past: Any, prefix: str = ""
) -> list[Any]:
    """Arguments and result of attention over a cache of grouped heads; ``shape``: sequences, queries, keys."""
    b, sq, keys = shape
    heads, d, kv_kind = s["heads"], s["head_dim"], flags["kv"]
    kv = {"same": heads, "one": 1}.get(kv_kind, s["kv_heads"])
    cached = tvm_dtype(flags.get("kv_dtype") or dtype)
    q = te.placeholder((b, sq, heads, d), name=f"{prefix}q", dtype=tvm_dtype(dtype))
    k = te.placeholder((b, keys, kv, d), name=f"{prefix}k", dtype=cached)
    v = te.placeholder((b, keys, kv, d), name=f"{prefix}v", dtype=cached)

    def shared(head: Any) -> Any:
        if kv_kind == "same":
            return head
        return 0 if kv_kind == "one" else te.floordiv(head, te.floordiv(heads + kv - 1, kv))

    out = attend(
        (b, sq, heads, keys),
        (d, d),
        lambda z, i, h, r: q[z, i, h, r],
        lambda z, j, h, r: k[z, j, shared(h), r],
        lambda z, j, h, e: v[z, j, shared(h), e],
        past=past if causal else None,
        prefix=prefix,
    )
    return [q, k, v, narrow(out, written(dtype))]


def attention(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """``attention_prefill``, ``attention_decode`` and ``attention_encoder``."""
    keys = s["q_len"] + s["past_len"]
    shape = (s["batch"], s["q_len"], keys)
    return _grouped(s, dtype, flags, shape, causal=flags["causal"], past=s["past_len"])


def attention_mixed(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """A causal chunk of one sequence, and one token of each decoding sequence."""
    chunk = (1, s["q_len"], s["q_len"] + s["past_len"])
    *first, out = _grouped(s, dtype, flags, chunk, causal=True, past=s["past_len"])
    decoding = (s["decodes"], 1, s["decode_past_len"] + 1)
    *second, decoded = _grouped(s, dtype, flags, decoding, causal=False, past=None, prefix="decode_")
    return [*first, *second, out, decoded]
