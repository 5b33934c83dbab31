"""Operator specifications lowered to TIR through TVM's tensor expressions and topi.

The sizes may be integers (one program) or symbolic variables named like the specification's fields (a
structural class, whose TIR is shipped as a template). Half types are read as they are, computed in
float32 and written back, int8 accumulates in int32: what the libraries do.

This module imports TVM; :mod:`cdmpp.programs.templates` is what the rest of the package uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cdmpp.errors import MissingDependencyError, UnsupportedOperatorError, install_hint
from cdmpp.programs.operators import OperatorSpec, structural_flags

try:
    import tvm
    from tvm import te, topi
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingDependencyError("lowering a program needs TVM", hint=install_hint("tvm")) from error

Sizes = Mapping[str, Any]
#: A constant whose value no feature depends on stands for 1/cols, 1/sqrt(head_dim) and the like.
_FACTOR = 0.125
_SLOPE = 0.7978845608


def _dtype(value: Any) -> str:
    """Element type of a tensor, a tensor slice or a scalar expression (three spellings in TVM 0.27)."""
    return str(value.dtype) if hasattr(value, "dtype") else str(value.ty.dtype)


def _accumulator(dtype: str) -> str:
    return "int32" if dtype == "int8" else "float32"


def _wide(value: Any, dtype: str) -> Any:
    wide = _accumulator(dtype)
    return value if dtype == wide else value.astype(wide)


def _const(value: float, dtype: str) -> Any:
    return te.const(int(value) or 1, "int32") if dtype == "int8" else te.const(value, "float32")


def _narrow(tensor: Any, dtype: str) -> Any:
    return tensor if _dtype(tensor) == dtype else topi.cast(tensor, dtype)


def _linear(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    x = te.placeholder((s["m"], s["k"]), name="x", dtype=dtype)
    w = te.placeholder((s["n"], s["k"]), name="w", dtype=dtype)
    r = te.reduce_axis((0, s["k"]), name="r")
    y = te.compute(
        (s["m"], s["n"]), lambda i, j: te.sum(_wide(x[i, r], dtype) * _wide(w[j, r], dtype), axis=r), name="dot"
    )
    inputs = [x, w]
    if flags["bias"]:
        b = te.placeholder((s["n"],), name="bias", dtype=dtype)
        inputs.append(b)
        dot = y
        y = te.compute((s["m"], s["n"]), lambda i, j: dot[i, j] + _wide(b[j], dtype), name="add_bias")
    return [*inputs, _narrow(y, dtype)]


def _bmm(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    a = te.placeholder((s["batch"], s["m"], s["k"]), name="a", dtype=dtype)
    b = te.placeholder((s["batch"], s["k"], s["n"]), name="b", dtype=dtype)
    r = te.reduce_axis((0, s["k"]), name="r")
    y = te.compute(
        (s["batch"], s["m"], s["n"]),
        lambda z, i, j: te.sum(_wide(a[z, i, r], dtype) * _wide(b[z, r, j], dtype), axis=r),
        name="dot",
    )
    return [a, b, _narrow(y, dtype)]


def _conv2d(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
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
                _wide(
                    padded[b, (te.floordiv(o, co) * ci + rc) if grouped else rc, i * sh + ry * dh, j * sw + rx * dw],
                    dtype,
                )
                * _wide(f[o, rc, ry, rx], dtype),
                axis=[rc, ry, rx],
            ),
            name="conv",
        )
        inputs = [x, f]
        if flags["bias"]:
            bias = te.placeholder((c_out,), name="bias", dtype=dtype)
            inputs.append(bias)
            conv = y
            y = te.compute(y_shape, lambda b, o, i, j: conv[b, o, i, j] + _wide(bias[o], dtype), name="add_bias")
        return [*inputs, _narrow(y, dtype)]

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
            return te.sum(_wide(grad, dtype) * _wide(f[o, cc, ry, rx], dtype), axis=[ro, ry, rx])

        return [dy, f, _narrow(te.compute(x_shape, term, name="conv_grad_x"), dtype)]

    x = te.placeholder(x_shape, name="x", dtype=dtype)
    rn, ry, rx = (te.reduce_axis((0, e), name=nm) for e, nm in ((n, "rn"), (oh, "ry"), (ow, "rx")))

    def weight_term(o: Any, c: Any, u: Any, v: Any) -> Any:
        channel = te.floordiv(o, co) * ci + c if grouped else c
        xi, xj = ry * sh + u * dh - ph, rx * sw + v * dw - pw
        value = x[rn, channel, xi, xj]
        if flags["padded"]:
            value = te.if_then_else(te.all(inside(xi, h), inside(xj, w)), value, te.const(0, dtype))
        return te.sum(_wide(dy[rn, o, ry, rx], dtype) * _wide(value, dtype), axis=[rn, ry, rx])

    return [dy, x, _narrow(te.compute(w_shape, weight_term, name="conv_grad_w"), dtype)]


_UNARY: dict[str, Callable[[Any], Any]] = {
    "relu": lambda v: te.max(v, te.const(0, _dtype(v))),
    "gelu": lambda v: v * (te.erf(v * _const(_SLOPE, "float32")) * _const(0.5, "float32") + _const(0.5, "float32")),
    "tanh": te.tanh,
    "sigmoid": te.sigmoid,
    "silu": lambda v: v * te.sigmoid(v),
    "exp": te.exp,
    "sqrt": te.sqrt,
    "erf": te.erf,
    "abs": lambda v: te.max(v, te.const(0, _dtype(v)) - v),
    "neg": lambda v: te.const(0, _dtype(v)) - v,
    "log": te.log,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: te.div(a, b) if "int" in _dtype(a) else a / b,
    "pow": te.power,
    "maximum": te.max,
    "minimum": te.min,
}


def _float(value: Any) -> Any:
    """Transcendental functions of half and integer types go through float32."""
    return value if _dtype(value) == "float32" else value.astype("float32")


def _elementwise(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    name = flags["operator"]
    shape = (s["rows"], s["cols"])
    count = flags.get("inputs", 1)
    tensors = [te.placeholder(shape, name=f"x{i}", dtype=dtype) for i in range(count)]

    def body(i: Any, j: Any) -> Any:
        value = _float(tensors[0][i, j])
        if name in _UNARY:
            value = _UNARY[name](value)
        elif name.endswith("_scalar"):
            operation = _BINARY[name.removesuffix("_scalar")]
            value = operation(value, _const(1.3, "float32"))
        else:
            for other in tensors[1:]:
                value = _BINARY[name](value, _float(other[i, j]))
        return value if _dtype(value) == dtype else value.astype(dtype)

    return [*tensors, te.compute(shape, body, name=name)]


def _rowwise(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    rows, cols, name = s["rows"], s["cols"], flags["operator"]
    x = te.placeholder((rows, cols), name="x", dtype=dtype)
    v = _narrow(x, "float32")
    if name == "softmax":
        return [x, _narrow(topi.nn.softmax(v, axis=1), dtype)]

    def reduce(value: Callable[[Any, Any], Any], label: str) -> Any:
        r = te.reduce_axis((0, cols), name="r")
        return te.compute((rows,), lambda i: te.sum(value(i, r), axis=r), name=label)

    factor = _const(_FACTOR, "float32")
    if name == "reduce_mean":
        total = reduce(lambda i, r: v[i, r], "total")
        return [x, _narrow(te.compute((rows,), lambda i: total[i] * factor, name="mean"), dtype)]
    gamma = te.placeholder((cols,), name="gamma", dtype=dtype)
    squares = reduce(lambda i, r: v[i, r] * v[i, r], "squares")
    if name == "rmsnorm":
        y = te.compute(
            (rows, cols),
            lambda i, j: v[i, j] * te.rsqrt(squares[i] * factor + factor) * _float(gamma[j]),
            name="rmsnorm",
        )
        return [x, gamma, _narrow(y, dtype)]
    beta = te.placeholder((cols,), name="beta", dtype=dtype)
    total = reduce(lambda i, r: v[i, r], "total")
    y = te.compute(
        (rows, cols),
        lambda i, j: (
            (v[i, j] - total[i] * factor)
            * te.rsqrt(squares[i] * factor - total[i] * total[i] * factor + factor)
            * _float(gamma[j])
            + _float(beta[j])
        ),
        name="layernorm",
    )
    return [x, gamma, beta, _narrow(y, dtype)]


def _silu_and_mul(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    rows, cols = s["rows"], s["cols"]
    x = te.placeholder((rows, cols * 2), name="x", dtype=dtype)

    def body(i: Any, j: Any) -> Any:
        gate, up = _float(x[i, j]), _float(x[i, j + cols])
        value = gate * te.sigmoid(gate) * up
        return value if dtype == "float32" else value.astype(dtype)

    return [x, te.compute((rows, cols), body, name="silu_and_mul")]


def _copy(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    rows, cols = s["rows"], s["cols"]
    if flags["transposed"]:
        x = te.placeholder((cols, rows), name="x", dtype=dtype)
        return [x, te.compute((rows, cols), lambda i, j: x[j, i], name="transpose")]
    x = te.placeholder((rows, cols), name="x", dtype=dtype)
    return [x, te.compute((rows, cols), lambda i, j: x[i, j], name="copy")]


def _embedding(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    table = te.placeholder((s["table_rows"], s["cols"]), name="table", dtype=dtype)
    ids = te.placeholder((s["rows"],), name="ids", dtype="int32")
    return [table, ids, te.compute((s["rows"], s["cols"]), lambda i, j: table[ids[i], j], name="embedding")]


def _pool2d(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
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
        return (te.max if largest else te.sum)(_wide(value, dtype), axis=[ry, rx])

    pooled = te.compute((n, c, oh, ow), body, name="pool")
    if not largest:
        total, factor = pooled, _const(_FACTOR, "int8" if dtype == "int8" else "float32")
        pooled = te.compute((n, c, oh, ow), lambda b, k, i, j: total[b, k, i, j] * factor, name="mean")
    return [x, _narrow(pooled, dtype)]


def _batch_norm(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    shape = tuple(s[k] for k in ("n", "c", "h", "w"))
    x = te.placeholder(shape, name="x", dtype=dtype)
    scale, shift = (te.placeholder((s["c"],), name=nm, dtype="float32") for nm in ("scale", "shift"))

    def body(b: Any, k: Any, i: Any, j: Any) -> Any:
        value = _float(x[b, k, i, j]) * scale[k] + shift[k]
        return value if dtype == "float32" else value.astype(dtype)

    return [x, scale, shift, te.compute(shape, body, name="batch_norm")]


def _attention(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    b, sq, past = s["batch"], s["q_len"], s["past_len"]
    heads, kv, d = s["heads"], s["kv_heads"], s["head_dim"]
    kv_kind = flags["kv"]
    keys = sq + past
    if kv_kind == "same":
        kv = heads
    elif kv_kind == "one":
        kv = 1
    q = te.placeholder((b, sq, heads, d), name="q", dtype=dtype)
    k = te.placeholder((b, keys, kv, d), name="k", dtype=dtype)
    v = te.placeholder((b, keys, kv, d), name="v", dtype=dtype)

    def shared(head: Any) -> Any:
        if kv_kind == "same":
            return head
        return 0 if kv_kind == "one" else te.floordiv(head, te.floordiv(heads + kv - 1, kv))

    rd, rk = te.reduce_axis((0, d), name="rd"), te.reduce_axis((0, keys), name="rk")
    scores = te.compute(
        (b, heads, sq, keys),
        lambda z, h, i, j: te.sum(_wide(q[z, i, h, rd], dtype) * _wide(k[z, j, shared(h), rd], dtype), axis=rd),
        name="scores",
    )
    factor = _const(_FACTOR, dtype)

    def masked(z: Any, h: Any, i: Any, j: Any) -> Any:
        value = scores[z, h, i, j] * factor
        if flags["causal"]:
            value = te.if_then_else(j <= i + past, value, te.const(-1, _dtype(value)))
        return value

    scaled = te.compute((b, heads, sq, keys), masked, name="scaled")
    weights = topi.nn.softmax(_narrow(scaled, "float32"), axis=3)
    out = te.compute(
        (b, sq, heads, d),
        lambda z, i, h, e: te.sum(weights[z, h, i, rk] * _float(v[z, rk, shared(h), e]), axis=rk),
        name="attend",
    )
    return [q, k, v, _narrow(out, dtype)]


_BUILDERS: dict[str, Callable[[Sizes, str, Sizes], list[Any]]] = {
    "linear": _linear,
    "bmm": _bmm,
    "conv2d": _conv2d,
    "silu_and_mul": _silu_and_mul,
    "copy": _copy,
    "embedding": _embedding,
    "max_pool2d": _pool2d,
    "avg_pool2d": _pool2d,
    "batch_norm": _batch_norm,
    "attention_prefill": _attention,
    "attention_decode": _attention,
    "attention_encoder": _attention,
    **dict.fromkeys(("softmax", "layernorm", "rmsnorm", "reduce_mean"), _rowwise),
    **dict.fromkeys(_UNARY, _elementwise),
    **dict.fromkeys(_BINARY, _elementwise),
    **dict.fromkeys(("add_scalar", "mul_scalar", "div_scalar", "pow_scalar"), _elementwise),
}


def _prim_func(operator: str, dtype: str, flags: Mapping[str, Any], sizes: Sizes) -> Any:
    builder = _BUILDERS.get(operator)
    if builder is None:
        raise UnsupportedOperatorError(f"operator {operator!r} has no lowering", hint=", ".join(_BUILDERS))
    tensors = builder(sizes, dtype, {**flags, "operator": operator})
    return te.create_prim_func(tensors).with_attr("global_symbol", "main")


def lower(spec: OperatorSpec) -> Any:
    """Lower one specification directly: an IRModule with static sizes."""
    flags = structural_flags(spec.operator, spec.model_dump())
    return tvm.IRModule({"main": _prim_func(spec.operator, spec.dtype, flags, spec.sizes())})


def lower_class(operator: str, dtype: str, flags: Mapping[str, Any], size_names: list[str]) -> Any:
    """Lower a structural class: an IRModule whose sizes are variables of the given names."""
    sizes = {name: te.var(name) for name in size_names}
    return tvm.IRModule({"main": _prim_func(operator, dtype, flags, sizes)})


def to_json(module: Any) -> str:
    """TVM JSON of an IRModule."""
    return str(tvm.ir.save_json(module))
