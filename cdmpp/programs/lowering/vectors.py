"""Operators on ``[rows, cols]`` tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cdmpp.programs.lowering.common import FACTOR, SLOPE, Sizes, as_float, cast, const, dtype_of, narrow, te, topi

UNARY: dict[str, Callable[[Any], Any]] = {
    "relu": lambda v: te.max(v, te.const(0, dtype_of(v))),
    "gelu": lambda v: v * (te.erf(v * const(SLOPE, "float32")) * const(0.5, "float32") + const(0.5, "float32")),
    "tanh": te.tanh,
    "sigmoid": te.sigmoid,
    "silu": lambda v: v * te.sigmoid(v),
    "exp": te.exp,
    "sqrt": te.sqrt,
    "erf": te.erf,
    "abs": lambda v: te.max(v, te.const(0, dtype_of(v)) - v),
    "neg": lambda v: te.const(0, dtype_of(v)) - v,
    "log": te.log,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: te.div(a, b) if "int" in dtype_of(a) else a / b,
    "pow": te.power,
    "maximum": te.max,
    "minimum": te.min,
}


def elementwise(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    name = flags["operator"]
    shape = (s["rows"], s["cols"])
    count = flags.get("inputs", 1)
    tensors = [te.placeholder(shape, name=f"x{i}", dtype=dtype) for i in range(count)]

    def body(i: Any, j: Any) -> Any:
        value = as_float(tensors[0][i, j])
        if name in UNARY:
            value = UNARY[name](value)
        elif name.endswith("_scalar"):
            operation = BINARY[name.removesuffix("_scalar")]
            value = operation(value, const(1.3, "float32"))
        else:
            for other in tensors[1:]:
                value = BINARY[name](value, as_float(other[i, j]))
        return value if dtype_of(value) == dtype else value.astype(dtype)

    return [*tensors, te.compute(shape, body, name=name)]


def rowwise(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    rows, cols, name = s["rows"], s["cols"], flags["operator"]
    x = te.placeholder((rows, cols), name="x", dtype=dtype)
    if name == "argmax":
        return [x, topi.argmax(narrow(x, "float32") if dtype == "int8" else x, axis=1)]
    v = narrow(x, "float32")
    if name == "softmax":
        return [x, narrow(topi.nn.softmax(v, axis=1), dtype)]

    def reduce(value: Callable[[Any, Any], Any], label: str) -> Any:
        r = te.reduce_axis((0, cols), name="r")
        return te.compute((rows,), lambda i: te.sum(value(i, r), axis=r), name=label)

    factor = const(FACTOR, "float32")
    if name == "reduce_mean":
        total = reduce(lambda i, r: v[i, r], "total")
        return [x, narrow(te.compute((rows,), lambda i: total[i] * factor, name="mean"), dtype)]
    gamma = te.placeholder((cols,), name="gamma", dtype=dtype)
    squares = reduce(lambda i, r: v[i, r] * v[i, r], "squares")
    if name == "rmsnorm":
        y = te.compute(
            (rows, cols),
            lambda i, j: v[i, j] * te.rsqrt(squares[i] * factor + factor) * as_float(gamma[j]),
            name="rmsnorm",
        )
        return [x, gamma, narrow(y, dtype)]
    beta = te.placeholder((cols,), name="beta", dtype=dtype)
    total = reduce(lambda i, r: v[i, r], "total")
    y = te.compute(
        (rows, cols),
        lambda i, j: (
            (v[i, j] - total[i] * factor)
            * te.rsqrt(squares[i] * factor - total[i] * total[i] * factor + factor)
            * as_float(gamma[j])
            + as_float(beta[j])
        ),
        name="layernorm",
    )
    return [x, gamma, beta, narrow(y, dtype)]


def silu_and_mul(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    rows, cols = s["rows"], s["cols"]
    x = te.placeholder((rows, cols * 2), name="x", dtype=dtype)

    def body(i: Any, j: Any) -> Any:
        gate, up = as_float(x[i, j]), as_float(x[i, j + cols])
        value = gate * te.sigmoid(gate) * up
        return value if dtype == "float32" else value.astype(dtype)

    return [x, te.compute((rows, cols), body, name="silu_and_mul")]


def copy(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    rows, cols = s["rows"], s["cols"]
    if flags["transposed"]:
        x = te.placeholder((cols, rows), name="x", dtype=dtype)
        return [x, te.compute((rows, cols), lambda i, j: x[j, i], name="transpose")]
    x = te.placeholder((rows, cols), name="x", dtype=dtype)
    return [x, te.compute((rows, cols), lambda i, j: x[i, j], name="copy")]


def embedding(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    table = te.placeholder((s["table_rows"], s["cols"]), name="table", dtype=dtype)
    ids = te.placeholder((s["rows"],), name="ids", dtype="int32")
    return [table, ids, te.compute((s["rows"], s["cols"]), lambda i, j: table[ids[i], j], name="embedding")]


def rotary_embedding(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """Pairs of neighbouring columns are rotated; the sign of the second sine is in the table."""
    rows, cols, depth = s["rows"], s["cols"], s["head_dim"]
    x = te.placeholder((rows, cols), name="x", dtype=dtype)
    cosine, sine = (te.placeholder((rows, depth), name=n, dtype=dtype) for n in ("cosine", "sine"))

    def body(i: Any, j: Any) -> Any:
        at, partner = te.floormod(j, depth), j + 1 - te.floormod(j, 2) * 2
        value = as_float(x[i, j]) * as_float(cosine[i, at]) + as_float(x[i, partner]) * as_float(sine[i, at])
        return cast(value, dtype)

    return [x, cosine, sine, te.compute((rows, cols), body, name="rotary_embedding")]


def kv_cache_save(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """The written part of the cache, in the order of its slots: ``token_of`` is the inverse of the slot mapping."""
    x = te.placeholder((s["rows"], s["cols"]), name="x", dtype=dtype)
    token_of = te.placeholder((s["rows"],), name="token_of", dtype="int32")
    return [x, token_of, te.compute((s["rows"], s["cols"]), lambda i, j: x[token_of[i], j], name="kv_cache_save")]


def moe_gating(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """Softmax over the experts; then ``topk`` passes over them, each for one maximum."""
    rows, cols = s["rows"], s["cols"]
    x = te.placeholder((rows, cols), name="x", dtype=dtype)
    shares = topi.nn.softmax(narrow(x, "float32"), axis=1)
    r = te.reduce_axis((0, cols), name="r")
    return [x, te.compute((rows, s["topk"]), lambda i, e: te.max(shares[i, r], axis=r), name="moe_gating")]


def moe_shuffle(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """Rows of tokens, copied to their places in the order of the experts."""
    count = s["rows"] * s["topk"]
    x = te.placeholder((s["rows"], s["cols"]), name="x", dtype=dtype)
    token_of = te.placeholder((count,), name="token_of", dtype="int32")
    return [x, token_of, te.compute((count, s["cols"]), lambda i, j: x[token_of[i], j], name="moe_shuffle")]
