"""Convolutions, pooling and batch normalisation."""

from __future__ import annotations

from typing import Any

from cdmpp.programs.lowering.common import FACTOR, Sizes, as_float, const, narrow, te, wide


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
