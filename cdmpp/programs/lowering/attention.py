"""Attention over grouped heads, mixed batches, and multi-head latent attention alone or with its projections."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import mul
from typing import Any

from cdmpp.programs.lowering.common import (
    FACTOR,
    NARROW,
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
from cdmpp.programs.lowering.products import Index, ProductSums, activations, product, weights


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

    ``shape``: sequences, queries, heads, keys. ``depths``: columns of a key, and of a value. ``query(z, i, h, r)``,
    ``key(z, j, h, r)``, ``value(z, j, h, e)``: elements for a query head. ``past``: keys before the first query; given:
    a query sees no key behind its own (causal).
    """
    b, sq, heads, keys = shape
    rd, rk = te.reduce_axis((0, depths[0]), name="rd"), te.reduce_axis((0, keys), name="rk")

    def score(z: Any, h: Any, i: Any, j: Any) -> Any:
        rotated, other = query(z, i, h, rd), key(z, j, h, rd)
        kind = accumulator(dtype_of(rotated), dtype_of(other))
        return te.sum(cast(rotated, kind) * cast(other, kind), axis=rd)

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


def attention_backward(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """Scores and their gradients once, then the gradients of queries, keys and values; ``log_sum`` is kept per row."""
    b, n, heads, d, e = (s[name] for name in ("batch", "q_len", "heads", "head_dim", "v_dim"))
    kv = {"same": heads, "one": 1}.get(flags["kv"], s["kv_heads"])
    share = te.floordiv(heads, kv) if flags["kv"] == "grouped" else {"same": 1, "one": heads}[flags["kv"]]

    def argument(name: str, count: Any, width: Any) -> Any:
        return te.placeholder((b, n, count, width), name=name, dtype=tvm_dtype(dtype))

    q, k, v = argument("q", heads, d), argument("k", kv, d), argument("v", kv, e)
    out, dout = argument("out", heads, e), argument("dout", heads, e)
    log_sum = te.placeholder((b, heads, n), name="log_sum", dtype="float32")
    factor, square = const(FACTOR, "float32"), (b, heads, n, n)

    def group(head: Any) -> Any:
        return {"same": head, "one": 0}[flags["kv"]] if flags["kv"] != "grouped" else te.floordiv(head, share)

    def product(shape: Any, extents: tuple[Any, ...], term: Callable[..., Any], name: str) -> Any:
        axes = [te.reduce_axis((0, extent), name=f"r{at}") for at, extent in enumerate(extents)]
        return te.compute(shape, lambda *at: te.sum(term(*at, *axes), axis=axes), name=name)

    def times(x: Any, y: Any) -> Any:
        return as_float(x) * as_float(y)

    scores = product(square, (d,), lambda z, h, i, j, r: times(q[z, i, h, r], k[z, j, group(h), r]), "scores")
    dweights = product(square, (e,), lambda z, h, i, j, r: times(dout[z, i, h, r], v[z, j, group(h), r]), "dweights")
    delta = product((b, heads, n), (e,), lambda z, h, i, r: times(dout[z, i, h, r], out[z, i, h, r]), "delta")

    def weight(z: Any, h: Any, i: Any, j: Any) -> Any:
        value = te.exp(scores[z, h, i, j] * factor - log_sum[z, h, i])
        return te.if_then_else(j <= i, value, const(0.0, "float32")) if flags["causal"] else value

    weights = te.compute(square, weight, name="weights")
    dscores = te.compute(
        square,
        lambda z, h, i, j: weights[z, h, i, j] * (dweights[z, h, i, j] - delta[z, h, i]) * factor,
        name="dscores",
    )
    queries = product(
        (b, n, heads, d), (n,), lambda z, i, h, c, r: times(dscores[z, h, i, r], k[z, r, group(h), c]), "dq"
    )

    def shared(of: Any, other: Any, width: Any, name: str) -> Any:
        """A gradient of keys or values: the sum over the query heads that share them."""
        if flags["kv"] == "same":
            return product(
                (b, n, kv, width), (n,), lambda z, j, h, c, r: times(of[z, h, r, j], other[z, r, h, c]), name
            )

        def term(z: Any, j: Any, h: Any, c: Any, g: Any, r: Any) -> Any:
            return times(of[z, h * share + g, r, j], other[z, r, h * share + g, c])

        return product((b, n, kv, width), (share, n), term, name)

    results = [queries, shared(dscores, q, d, "dk"), shared(weights, dout, e, "dv")]
    return [q, k, v, out, dout, log_sum, *(narrow(result, written(dtype)) for result in results)]


def attention_mixed(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """A causal chunk of one sequence, and one token of each decoding sequence."""
    chunk = (1, s["q_len"], s["q_len"] + s["past_len"])
    *first, out = _grouped(s, dtype, flags, chunk, causal=True, past=s["past_len"])
    decoding = (s["decodes"], 1, s["decode_past_len"] + 1)
    *second, decoded = _grouped(s, dtype, flags, decoding, causal=False, past=None, prefix="decode_")
    return [*first, *second, out, decoded]


def latent_attention(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """``mla_prefill`` and ``mla_decode``."""
    if flags["module"]:
        return _Module(s, dtype, flags).tensors()
    b, sq, heads, keys = s["batch"], s["q_len"], s["heads"], s["q_len"] + s["past_len"]
    stored = tvm_dtype(flags.get("kv_dtype") or dtype)
    shape = (b, sq, heads, keys)
    if flags["operator"] == "mla_decode":
        depth = s["latent"] + s["rope"]
        q = te.placeholder((b, sq, heads, depth), name="q", dtype=tvm_dtype(dtype))
        cache = te.placeholder((b, keys, depth), name="cache", dtype=stored)
        return [q, cache, narrow(_absorbed(shape, s, q, cache), written(dtype))]
    depth = s["nope"] + s["rope"]
    q = te.placeholder((b, sq, heads, depth), name="q", dtype=tvm_dtype(dtype))
    k = te.placeholder((b, keys, heads, depth), name="k", dtype=stored)
    v = te.placeholder((b, keys, heads, s["v_dim"]), name="v", dtype=stored)
    out = attend(
        shape,
        (depth, s["v_dim"]),
        lambda z, i, h, r: q[z, i, h, r],
        lambda z, j, h, r: k[z, j, h, r],
        lambda z, j, h, e: v[z, j, h, e],
        past=s["past_len"],
    )
    return [q, k, v, narrow(out, written(dtype))]


def _absorbed(shape: tuple[Any, Any, Any, Any], s: Sizes, q: Any, cache: Any) -> Any:
    """All heads read one cache, whose latents are the values too."""
    return attend(
        shape,
        (s["latent"] + s["rope"], s["latent"]),
        lambda z, i, h, r: q[z, i, h, r],
        lambda z, j, h, r: cache[z, j, r],
        lambda z, j, h, e: cache[z, j, e],
    )


class _Module:
    """The attention module: projections down, norms, projections up, attention, output projection."""

    def __init__(self, s: Sizes, dtype: str, flags: Sizes) -> None:
        self.s = s
        self.dtype = dtype
        self.weight = flags.get("weight_dtype") or dtype
        # Attention in a narrow type has its projections in that type, with static scales unless others are given.
        self.scaling = flags.get("scaling") or ("tensor" if self.weight in NARROW else None)
        wide_type = "bfloat16" if dtype in NARROW else dtype
        self.half = tvm_dtype(self.weight if self.scaling is None else wide_type)
        self.own = tvm_dtype(dtype)
        self.stored = tvm_dtype(flags.get("kv_dtype") or dtype)
        self.decode = flags["operator"] == "mla_decode"
        self.inputs: list[Any] = []

    def argument(self, name: str, dtype: str, *shape: Any) -> Any:
        """One more argument of the program."""
        tensor = te.placeholder(shape, name=name, dtype=dtype)
        self.inputs.append(tensor)
        return tensor

    def project(self, x: Any, k: Any, columns: tuple[Any, ...], name: str) -> ProductSums:
        """``x[..., :k] @ w[columns, k].T``, quantised where the projections are."""
        lead = len(x.shape) - 1
        left = activations(x, self.weight, self.scaling, f"{name}_x", k)
        right = weights((reduce(mul, columns), k), self.weight, self.scaling, f"{name}_w")
        self.inputs += [*left.inputs, *right.inputs]

        def column(at: Index) -> Index:
            head, *rest = at[lead:]
            return (head * columns[1] + rest[0],) if rest else (head,)

        return product((*x.shape[:-1], *columns), left, lambda at: at[:lead], right, column, name, k)

    def squares(self, x: Any, start: Any, columns: Any, name: str) -> Callable[..., Any]:
        """Reciprocal root of the mean square of some columns."""
        r = te.reduce_axis((0, columns), name="r")
        factor = const(FACTOR, "float32")

        def square(*i: Any) -> Any:
            value = as_float(x[(*i, start + r)])
            return te.sum(value * value, axis=r)

        total = te.compute(tuple(x.shape[:-1]), square, name=name)
        return lambda *i: te.rsqrt(total[i] * factor + factor)

    def per_head(self, read: Callable[..., Any], matrix: Any, name: str) -> Any:
        """A product with one matrix ``[heads, columns, k]`` per head, in float32."""
        heads, columns, k = matrix.shape
        r = te.reduce_axis((0, k), name="r")
        return te.compute(
            (self.s["batch"], self.s["q_len"], heads, columns),
            lambda z, i, h, j: te.sum(as_float(read(z, i, h, r)) * as_float(matrix[h, j, r]), axis=r),
            name=name,
        )

    def tensors(self) -> list[Any]:
        """Arguments and results of the program."""
        s, half = self.s, self.half
        b, sq, keys = s["batch"], s["q_len"], s["q_len"] + s["past_len"]
        latent, rope, nope, v_dim, q_latent = (s[n] for n in ("latent", "rope", "nope", "v_dim", "q_latent"))
        x = self.argument("x", half, b, sq, s["hidden"])
        gamma, kv_gamma = self.argument("q_gamma", half, q_latent), self.argument("kv_gamma", half, latent)
        cosine, sine = self.argument("cosine", half, sq, rope), self.argument("sine", half, sq, rope)
        cache = self.argument("cache", self.stored, b, keys, latent + rope)

        def rotated(read: Callable[[Any], Any], i: Any, r: Any) -> Any:
            partner = r + 1 - te.floormod(r, 2) * 2
            return as_float(read(r)) * as_float(cosine[i, r]) + as_float(read(partner)) * as_float(sine[i, r])

        down = self.project(x, s["hidden"], (q_latent + latent + rope,), "down").written_as(half, "down_out")
        root = self.squares(down, 0, q_latent, "q_squares")
        q_normed = te.compute(
            (b, sq, q_latent),
            lambda z, i, j: cast(as_float(down[z, i, j]) * root(z, i) * as_float(gamma[j]), half),
            name="q_norm",
        )
        up = self.project(q_normed, q_latent, (s["heads"], nope + rope), "q_up")
        q_type = half if self.decode else self.own

        def turned(z: Any, i: Any, h: Any, j: Any) -> Any:
            end = rotated(lambda r: up.read((z, i, h, nope + r)), i, j - nope)
            return cast(te.if_then_else(j < nope, as_float(up.read((z, i, h, j))), end), q_type)

        q = te.compute((b, sq, s["heads"], nope + rope), turned, name="q_rotate")
        kv_root = self.squares(down, q_latent, latent, "kv_squares")

        def cached(z: Any, i: Any, j: Any) -> Any:
            end = rotated(lambda r: down[z, i, q_latent + latent + r], i, j - latent)
            start = as_float(down[z, i, q_latent + j]) * kv_root(z, i) * as_float(kv_gamma[j])
            return cast(te.if_then_else(j < latent, start, end), self.stored)

        new = te.compute((b, sq, latent + rope), cached, name="cache_write")
        out = self.decoded(q, cache) if self.decode else self.prefilled(q, cache, keys)
        flat = te.compute(
            (b, sq, s["heads"] * v_dim),
            lambda z, i, c: cast(out[z, i, te.floordiv(c, v_dim), te.floormod(c, v_dim)], half),
            name="heads",
        )
        result = self.project(flat, s["heads"] * v_dim, (s["hidden"],), "output").written_as(half, "output_out")
        return [*self.inputs, new, result]

    def decoded(self, q: Any, cache: Any) -> Any:
        """Queries are lifted into the space of the latents, results brought back."""
        s = self.s
        b, sq, heads, latent, nope = s["batch"], s["q_len"], s["heads"], s["latent"], s["nope"]
        absorb = self.argument("absorb", self.half, heads, latent, nope)
        value_up = self.argument("value_up", self.half, heads, s["v_dim"], latent)
        lifted = self.per_head(lambda z, i, h, r: q[z, i, h, r], absorb, "absorb_q")

        def joined(z: Any, i: Any, h: Any, j: Any) -> Any:
            end = as_float(q[z, i, h, nope + j - latent])
            return cast(te.if_then_else(j < latent, lifted[z, i, h, j], end), self.own)

        query = te.compute((b, sq, heads, latent + s["rope"]), joined, name="absorbed_q")
        attended = _absorbed((b, sq, heads, cache.shape[1]), s, query, cache)
        return self.per_head(lambda z, i, h, r: attended[z, i, h, r], value_up, "unabsorb")

    def prefilled(self, q: Any, cache: Any, keys: Any) -> Any:
        """Keys and values are made of the latents, old and new."""
        s = self.s
        b, heads, latent, nope, rope, v_dim = (s[n] for n in ("batch", "heads", "latent", "nope", "rope", "v_dim"))
        up = self.project(cache, latent, (heads, nope + v_dim), "kv_up").written_as(self.own, "kv_up_out")

        def joined(z: Any, j: Any, h: Any, r: Any) -> Any:
            return te.if_then_else(r < nope, up[z, j, h, r], cast(cache[z, j, latent + r - nope], self.own))

        k = te.compute((b, keys, heads, nope + rope), joined, name="keys")
        return attend(
            (b, s["q_len"], heads, keys),
            (nope + rope, v_dim),
            lambda z, i, h, r: q[z, i, h, r],
            lambda z, j, h, r: k[z, j, h, r],
            lambda z, j, h, e: up[z, j, h, nope + e],
            past=s["past_len"],
        )
