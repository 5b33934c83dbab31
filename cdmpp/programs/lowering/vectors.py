"""Operators on ``[rows, cols]`` tensors, convolutions, pooling and batch normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cdmpp.programs.lowering.common import FACTOR, SLOPE, Sizes, as_float, cast, const, dtype_of, narrow, te, topi, wide

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


def fused_add_rms_norm(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """The sum is the new residual; the norm reads it."""
    shape = rows, cols = s["rows"], s["cols"]
    x, residual = (te.placeholder(shape, name=n, dtype=dtype) for n in ("x", "residual"))
    gamma = te.placeholder((cols,), name="gamma", dtype=dtype)
    total = te.compute(shape, lambda i, j: as_float(x[i, j]) + as_float(residual[i, j]), name="total")
    r = te.reduce_axis((0, cols), name="r")
    squares = te.compute((rows,), lambda i: te.sum(total[i, r] * total[i, r], axis=r), name="squares")
    factor = const(FACTOR, "float32")
    y = te.compute(
        shape,
        lambda i, j: cast(total[i, j] * te.rsqrt(squares[i] * factor + factor) * as_float(gamma[j]), dtype),
        name="rmsnorm",
    )
    return [x, residual, gamma, te.compute(shape, lambda i, j: cast(total[i, j], dtype), name="new_residual"), y]


def norm_backward(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """Gradients of the weights, then of the input; ``mean`` and ``scale`` (1 / deviation) are kept per row."""
    shape = rows, cols = s["rows"], s["cols"]
    layer = flags["operator"] == "layernorm_backward"
    dy, x = (te.placeholder(shape, name=n, dtype=dtype) for n in ("dy", "x"))
    gamma = te.placeholder((cols,), name="gamma", dtype=dtype)
    kept = [te.placeholder((rows,), name=n, dtype="float32") for n in (("mean", "scale") if layer else ("scale",))]
    scale, factor = kept[-1], const(FACTOR, "float32")

    def unit(i: Any, j: Any) -> Any:
        return (as_float(x[i, j]) - kept[0][i] if layer else as_float(x[i, j])) * scale[i]

    def weighted(i: Any, j: Any) -> Any:
        return as_float(dy[i, j]) * as_float(gamma[j])

    def along(size: Any, count: Any, term: Callable[[Any, Any], Any], name: str) -> Any:
        r = te.reduce_axis((0, count), name="r")
        return te.compute((size,), lambda i: te.sum(term(i, r), axis=r), name=name)

    shared = along(rows, cols, lambda i, r: weighted(i, r) * unit(i, r), "shared")
    weights = [along(cols, rows, lambda j, r: as_float(dy[r, j]) * unit(r, j), "dgamma")]
    shift = along(rows, cols, weighted, "shift") if layer else None
    if layer:
        weights.append(along(cols, rows, lambda j, r: as_float(dy[r, j]), "dbeta"))

    def gradient(i: Any, j: Any) -> Any:
        value = weighted(i, j) - unit(i, j) * shared[i] * factor
        return cast((value if shift is None else value - shift[i] * factor) * scale[i], dtype)

    return [dy, x, gamma, *kept, *(narrow(w, dtype) for w in weights), te.compute(shape, gradient, name="dx")]


def softmax_cross_entropy(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """``bwd`` reads the logarithms of the sums that ``fwd`` kept, and the gradient of each loss."""
    shape = rows, cols = s["rows"], s["cols"]
    direction = flags["direction"]
    x = te.placeholder(shape, name="x", dtype=dtype)
    target = te.placeholder((rows,), name="target", dtype="int32")
    inputs, results = [x, target], []
    if direction == "bwd":
        inputs += [te.placeholder((rows,), name=n, dtype="float32") for n in ("log_sum", "dloss")]
        log_sum, dloss = inputs[2:]
    else:
        r, q = (te.reduce_axis((0, cols), name=n) for n in "rq")
        largest = te.compute((rows,), lambda i: te.max(as_float(x[i, r]), axis=r), name="largest")
        total = te.compute((rows,), lambda i: te.sum(te.exp(as_float(x[i, q]) - largest[i]), axis=q), name="total")
        log_sum = te.compute((rows,), lambda i: te.log(total[i]) + largest[i], name="log_sum")
        results.append(te.compute((rows,), lambda i: log_sum[i] - as_float(x[i, target[i]]), name="loss"))
    if direction != "fwd":

        def gradient(i: Any, j: Any) -> Any:
            share = te.exp(as_float(x[i, j]) - log_sum[i])
            value = te.if_then_else(target[i] == j, share - const(1.0, "float32"), share)
            return cast(value * (dloss[i] if direction == "bwd" else const(FACTOR, "float32")), dtype)

        results.append(te.compute(shape, gradient, name="dx"))
    return [*inputs, *results]


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


def conv2d(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    n, c_in, c_out, groups = s["n"], s["c_in"], s["c_out"], s["groups"]
    h, w, kh, kw = s["h"], s["w"], s["kh"], s["kw"]
    sh, sw, dh, dw, ph, pw = (s[k] for k in ("stride_h", "stride_w", "dil_h", "dil_w", "pad_h", "pad_w"))
    if not flags["padded"]:
        ph = pw = 0
    grouped = flags["grouped"]
    ci = te.floordiv(c_in, groups) if grouped else c_in  # input channels of a group
    co = te.floordiv(c_out, groups) if grouped else c_out
    oh = te.floordiv(h + 2 * ph - (kh - 1) * dh - 1, sh) + 1
    ow = te.floordiv(w + 2 * pw - (kw - 1) * dw - 1, sw) + 1
    x_shape, w_shape, y_shape = (n, c_in, h, w), (c_out, ci, kh, kw), (n, c_out, oh, ow)
    direction = flags["direction"]

    def inside(index: Any, size: Any) -> Any:
        return te.all(index >= 0, index < size)

    if direction == "fwd":
        x = te.placeholder(x_shape, name="x", dtype=dtype)
        f = te.placeholder(w_shape, name="w", dtype=dtype)
        padded = x
        if flags["padded"]:
            # In place of topi.nn.pad, which drops its predicate when one of the two paddings is a literal 0.
            padded = te.compute(
                (n, c_in, h + 2 * ph, w + 2 * pw),
                lambda b, c, i, j: te.if_then_else(
                    te.all(inside(i - ph, h), inside(j - pw, w)), x[b, c, i - ph, j - pw], te.const(0, dtype)
                ),
                name="pad",
            )
        rc, ry, rx = (te.reduce_axis((0, e), name=nm) for e, nm in ((ci, "rc"), (kh, "ry"), (kw, "rx")))
        y = te.compute(
            y_shape,
            lambda b, o, i, j: te.sum(
                wide(
                    padded[b, (te.floordiv(o, co) * ci + rc) if grouped else rc, i * sh + ry * dh, j * sw + rx * dw],
                    dtype,
                )
                * wide(f[o, rc, ry, rx], dtype),
                axis=[rc, ry, rx],
            ),
            name="conv",
        )
        inputs = [x, f]
        if flags["bias"]:
            bias = te.placeholder((c_out,), name="bias", dtype=dtype)
            inputs.append(bias)
            conv = y
            y = te.compute(y_shape, lambda b, o, i, j: conv[b, o, i, j] + wide(bias[o], dtype), name="add_bias")
        return [*inputs, narrow(y, dtype)]

    dy = te.placeholder(y_shape, name="dy", dtype=dtype)
    if direction == "bwd_data":
        f = te.placeholder(w_shape, name="w", dtype=dtype)
        ro, ry, rx = (te.reduce_axis((0, e), name=nm) for e, nm in ((co, "ro"), (kh, "ry"), (kw, "rx")))

        def term(b: Any, c: Any, i: Any, j: Any) -> Any:
            o = te.floordiv(c, ci) * co + ro if grouped else ro
            cc = te.floormod(c, ci) if grouped else c
            yi, yj = i + ph - ry * dh, j + pw - rx * dw
            valid = te.all(
                inside(te.floordiv(yi, sh), oh),
                inside(te.floordiv(yj, sw), ow),
                te.floormod(yi, sh) == 0,
                te.floormod(yj, sw) == 0,
            )
            value = dy[b, o, te.floordiv(yi, sh), te.floordiv(yj, sw)]
            grad = te.if_then_else(valid, value, te.const(0, dtype))
            return te.sum(wide(grad, dtype) * wide(f[o, cc, ry, rx], dtype), axis=[ro, ry, rx])

        return [dy, f, narrow(te.compute(x_shape, term, name="conv_grad_x"), dtype)]

    x = te.placeholder(x_shape, name="x", dtype=dtype)
    rn, ry, rx = (te.reduce_axis((0, e), name=nm) for e, nm in ((n, "rn"), (oh, "ry"), (ow, "rx")))

    def weight_term(o: Any, c: Any, u: Any, v: Any) -> Any:
        channel = te.floordiv(o, co) * ci + c if grouped else c
        xi, xj = ry * sh + u * dh - ph, rx * sw + v * dw - pw
        value = x[rn, channel, xi, xj]
        if flags["padded"]:
            value = te.if_then_else(te.all(inside(xi, h), inside(xj, w)), value, te.const(0, dtype))
        return te.sum(wide(dy[rn, o, ry, rx], dtype) * wide(value, dtype), axis=[rn, ry, rx])

    return [dy, x, narrow(te.compute(w_shape, weight_term, name="conv_grad_w"), dtype)]


def pool2d(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    n, c, h, w, kh, kw, sh, sw = (s[k] for k in ("n", "c", "h", "w", "kh", "kw", "stride_h", "stride_w"))
    ph, pw = (s["pad_h"], s["pad_w"]) if flags["padded"] else (0, 0)
    oh, ow = te.floordiv(h + 2 * ph - kh, sh) + 1, te.floordiv(w + 2 * pw - kw, sw) + 1
    x = te.placeholder((n, c, h, w), name="x", dtype=dtype)
    ry, rx = te.reduce_axis((0, kh), name="ry"), te.reduce_axis((0, kw), name="rx")
    largest = flags["operator"] == "max_pool2d"

    def body(b: Any, k: Any, i: Any, j: Any) -> Any:
        y, z = i * sh + ry - ph, j * sw + rx - pw
        value = x[b, k, y, z]
        if flags["padded"]:
            inside = te.all(y >= 0, y < h, z >= 0, z < w)
            value = te.if_then_else(inside, value, te.const(0, dtype))
        return (te.max if largest else te.sum)(wide(value, dtype), axis=[ry, rx])

    pooled = te.compute((n, c, oh, ow), body, name="pool")
    if not largest:
        total, factor = pooled, const(FACTOR, "int8" if dtype == "int8" else "float32")
        pooled = te.compute((n, c, oh, ow), lambda b, k, i, j: total[b, k, i, j] * factor, name="mean")
    return [x, narrow(pooled, dtype)]


def batch_norm(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    shape = tuple(s[k] for k in ("n", "c", "h", "w"))
    x = te.placeholder(shape, name="x", dtype=dtype)
    scale, shift = (te.placeholder((s["c"],), name=nm, dtype="float32") for nm in ("scale", "shift"))

    def body(b: Any, k: Any, i: Any, j: Any) -> Any:
        value = as_float(x[b, k, i, j]) * scale[k] + shift[k]
        return value if dtype == "float32" else value.astype(dtype)

    return [x, scale, shift, te.compute(shape, body, name="batch_norm")]
