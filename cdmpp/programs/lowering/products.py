"""Matrix products, bare or between narrow types with scales (:mod:`cdmpp.programs.elements`), and layers of experts.

A grouped product works on tiles of rows, each of one expert. Index tensors made by the routing say which token each
row of a tile is (``token_of``), which expert each tile belongs to (``expert_of``) and where a row's result lies
(``tile_of``, ``place_of``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cdmpp.programs.lowering.common import (
    NARROW,
    Sizes,
    accumulator,
    as_float,
    cast,
    ceil_divide,
    narrow,
    te,
    tvm_dtype,
    written,
)

#: Scaling -> elements along k that share a scale, and the type in which a weight's scales are stored.
BLOCKS = {"block128": (128, "float32"), "mx32": (32, "uint8"), "nvfp4": (16, "uint8")}
Index = tuple[Any, ...]


@dataclass
class Operand:
    """One side of a product: how it is read, and the scales of its elements."""

    tensor: Any  # ``[..., k]``
    inputs: list[Any] = field(default_factory=list)  # arguments of the program that it needs
    inside: Callable[[Index], Any] | None = None  # index -> scale that changes along k
    outside: Callable[[Index], Any] | None = None  # index without k -> scale of the whole row


def activations(x: Any, dtype: str, scaling: str | None, name: str, k: Any = None) -> Operand:
    """The left side: ``x[..., :k]``, quantised by the program where ``dtype`` is narrow and there is a scaling."""
    if scaling is None or dtype not in NARROW:
        return Operand(x)
    lead, k, target = tuple(x.shape[:-1]), x.shape[-1] if k is None else k, tvm_dtype(dtype)
    shape = (*lead, k)
    if scaling == "tensor":
        scale = te.placeholder((1,), name=f"{name}_scale", dtype="float32")
        q = te.compute(shape, lambda *i: (cast(x[i], "float32") * scale[0]).astype(target), name=f"{name}_quantised")
        return Operand(q, [scale], outside=lambda i: scale[0])
    if scaling == "channel":
        r = te.reduce_axis((0, k), name="r")
        amax = te.compute(lead, lambda *i: te.max(te.abs(cast(x[(*i, r)], "float32")), axis=r), name=f"{name}_amax")
        q = te.compute(
            shape, lambda *i: (cast(x[i], "float32") / amax[i[:-1]]).astype(target), name=f"{name}_quantised"
        )
        return Operand(q, outside=lambda i: amax[i])
    block, _ = BLOCKS[scaling]
    r = te.reduce_axis((0, block), name="r")
    amax = te.compute(
        (*lead, ceil_divide(k, block)),
        # The last block may be shorter than the others.
        lambda *i: te.max(te.abs(cast(x[(*i[:-1], te.min(i[-1] * block + r, k - 1))], "float32")), axis=r),
        name=f"{name}_amax",
    )

    def scale_of(i: Index) -> Any:
        return amax[(*i[:-1], te.floordiv(i[-1], block))]

    q = te.compute(shape, lambda *i: (cast(x[i], "float32") / scale_of(i)).astype(target), name=f"{name}_quantised")
    return Operand(q, inside=scale_of)


def weights(shape: Index, dtype: str, scaling: str | None, name: str) -> Operand:
    """The right side, ``[..., n, k]``: an argument, with its scales as another."""
    w = te.placeholder(shape, name=name, dtype=tvm_dtype(dtype))
    *lead, n, k = shape
    if scaling is None:
        return Operand(w, [w])
    if scaling == "tensor":
        scale = te.placeholder((*lead, 1), name=f"{name}_scale", dtype="float32")
        return Operand(w, [w, scale], outside=lambda i: scale[(*i[:-1], 0)])
    if scaling == "channel":
        scale = te.placeholder((*lead, n), name=f"{name}_scale", dtype="float32")
        return Operand(w, [w, scale], outside=lambda i: scale[i])
    block, kind = BLOCKS[scaling]
    rows = ceil_divide(n, block) if scaling == "block128" else n
    scale = te.placeholder((*lead, rows, ceil_divide(k, block)), name=f"{name}_scale", dtype=kind)

    def scale_of(i: Index) -> Any:
        row = te.floordiv(i[-2], block) if scaling == "block128" else i[-2]
        return scale[(*i[:-2], row, te.floordiv(i[-1], block))]

    return Operand(w, [w, scale], inside=scale_of)


@dataclass
class ProductSums:
    """Sums of products, and how they are read: rescaled by what is constant along k."""

    tensor: Any
    read: Callable[[Index], Any]
    scaled: bool

    def written_as(self, dtype: str, name: str) -> Any:
        """The product in the type that the program writes, by one pass."""
        target = tvm_dtype(dtype)
        return te.compute(tuple(self.tensor.shape), lambda *at: cast(self.read(at), target), name=name)


def product(
    shape: Index,
    left: Operand,
    left_at: Callable[[Index], Index],
    right: Operand,
    right_at: Callable[[Index], Index],
    name: str = "dot",
    k: Any = None,
) -> ProductSums:
    """``sum_k left[left_at(i), k] * right[right_at(i), k]`` for every index i of ``shape``."""
    a, b = left.tensor, right.tensor
    kind = accumulator(str(a.dtype), str(b.dtype))
    r = te.reduce_axis((0, a.shape[-1] if k is None else k), name="r")

    def body(*at: Any) -> Any:
        i, j = (*left_at(at), r), (*right_at(at), r)
        value = cast(a[i], kind) * cast(b[j], kind)
        for scale in (s(x) for s, x in ((left.inside, i), (right.inside, j)) if s is not None):
            value = cast(value, "float32") * cast(scale, "float32")
        return te.sum(value, axis=r)

    total = te.compute(shape, body, name=name)

    def read(at: Index) -> Any:
        value = total[at]
        for side, index in ((left, left_at), (right, right_at)):
            if side.outside is not None:
                value = cast(value, "float32") * side.outside(index(at))
        return value

    return ProductSums(total, read, left.outside is not None or right.outside is not None)


def source_dtype(dtype: str, scaling: str | None) -> str:
    """Type of the activations that a program is given: it quantises bfloat16 itself."""
    return "bfloat16" if scaling is not None and dtype in NARROW else dtype


def linear(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """``x[m, k] @ w[n, k].T (+ bias[n])``."""
    scaling = flags.get("scaling")
    if scaling is None:
        return _bare(s, dtype, flags, "nt")
    result = tvm_dtype(source_dtype(written(dtype), scaling))
    x = te.placeholder((s["m"], s["k"]), name="x", dtype=tvm_dtype(source_dtype(dtype, scaling)))
    b = te.placeholder((s["n"],), name="bias", dtype=result) if flags["bias"] else None
    left = activations(x, dtype, scaling, "x")
    right = weights((s["n"], s["k"]), flags.get("weight_dtype") or dtype, scaling, "w")
    y = product((s["m"], s["n"]), left, lambda at: at[:1], right, lambda at: at[1:])

    def body(*at: Any) -> Any:
        value = y.read(at)
        return cast(value if b is None else cast(value, "float32") + cast(b[at[1]], "float32"), result)

    out = te.compute((s["m"], s["n"]), body, name="rescale")
    return [x, *left.inputs, *right.inputs, *([] if b is None else [b]), out]


def bmm(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """``a[batch, m, k] @ b[batch, k, n]``; a scaled ``b`` is stored transposed, as its scales are."""
    scaling = flags.get("scaling")
    if scaling is None:
        return _bare(s, dtype, flags, "nn", s["batch"])
    result, shape = source_dtype(written(dtype), scaling), (s["batch"], s["m"], s["n"])
    a = te.placeholder((s["batch"], s["m"], s["k"]), name="a", dtype=tvm_dtype(source_dtype(dtype, scaling)))
    left = activations(a, dtype, scaling, "a")
    right = weights((s["batch"], s["n"], s["k"]), flags.get("weight_dtype") or dtype, scaling, "b")
    y = product(shape, left, lambda at: at[:2], right, lambda at: (at[0], at[2]))
    return [a, *left.inputs, *right.inputs, y.written_as(result, "rescale")]


def _bare(s: Sizes, dtype: str, flags: Sizes, layout: str, *batch: Any) -> list[Any]:
    """A product without scales, its operands stored as ``layout`` says."""
    stored = flags.get("layout") or layout
    first, second = stored[0], stored[1]
    m, n, k = s["m"], s["n"], s["k"]
    name = ("a", "b") if batch else ("x", "w")
    x = te.placeholder((*batch, *((k, m) if first == "t" else (m, k))), name=name[0], dtype=tvm_dtype(dtype))
    w = te.placeholder((*batch, *((n, k) if second == "t" else (k, n))), name=name[1], dtype=tvm_dtype(dtype))
    r = te.reduce_axis((0, k), name="r")
    # Sums kept in 16 bits are kept in the operands' type.
    kind = tvm_dtype(dtype) if flags.get("accumulate") else accumulator(dtype)

    def body(*at: Any) -> Any:
        *z, i, j = at
        a = x[(*z, *((r, i) if first == "t" else (i, r)))]
        b = w[(*z, *((j, r) if second == "t" else (r, j)))]
        return te.sum(cast(a, kind) * cast(b, kind), axis=r)

    y = te.compute((*batch, m, n), body, name="dot")
    result = flags.get("out_dtype") or written(dtype)
    if not flags.get("bias"):
        return [x, w, narrow(y, result)]
    bias = te.placeholder((n,), name="bias", dtype=tvm_dtype(result))
    added = te.compute((m, n), lambda i, j: y[i, j] + cast(bias[j], kind), name="add_bias")
    return [x, w, bias, narrow(added, result)]


def _indices(name: str, *shape: Any) -> Any:
    return te.placeholder(shape, name=name, dtype="int32")


class _Tiles:
    """The first product of a grouped kernel, on tiles of gathered rows."""

    def __init__(self, s: Sizes, dtype: str, flags: Sizes, rows: Any, k: Any, columns: Any) -> None:
        self.scaling = flags.get("scaling")
        self.weight = flags.get("weight_dtype") or dtype
        self.dtype = dtype
        self.source = source_dtype(dtype, self.scaling)
        self.result = tvm_dtype(source_dtype(written(dtype), self.scaling))
        self.grid = (s["tiles"], s["tile_rows"])
        x = te.placeholder((rows, k), name="x", dtype=tvm_dtype(self.source))
        self.token_of, self.expert_of = _indices("token_of", *self.grid), _indices("expert_of", s["tiles"])
        left = activations(x, dtype, self.scaling, "x")
        right = weights((s["active"], columns, k), self.weight, self.scaling, "w13")
        self.first = product(
            (*self.grid, columns), left, lambda at: (self.token_of[at[0], at[1]],), right, self.of_expert, "first"
        )
        self.inputs = [x, *left.inputs, *right.inputs, self.token_of, self.expert_of]

    def of_expert(self, at: Index) -> Index:
        """Index of a column of the weight that the tile of a row uses."""
        return (self.expert_of[at[0]], at[2])

    def rows(self, y: ProductSums, count: Any, columns: Any, name: str) -> list[Any]:
        """The result without the padding of the tiles: program of the product alone."""
        tile_of, place_of = _indices("tile_of", count), _indices("place_of", count)
        out = te.compute(
            (count, columns), lambda i, j: cast(y.read((tile_of[i], place_of[i], j)), self.result), name=name
        )
        return [*self.inputs, tile_of, place_of, out]


def grouped_gemm(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """Rows in groups, each multiplied with its group's weight."""
    tiles = _Tiles(s, dtype, flags, s["rows"], s["k"], s["n"])
    return tiles.rows(tiles.first, s["rows"], s["n"], "grouped_gemm")


def moe(s: Sizes, dtype: str, flags: Sizes) -> list[Any]:
    """One rank's layer of experts; ``moe_w13`` ends after the first product."""
    middle, gated = s["rank_intermediate"], flags["gated"]
    columns = middle * 2 if gated else middle
    tiles = _Tiles(s, dtype, flags, s["tokens"], s["hidden"], columns)
    first = tiles.first
    if flags["operator"] == "moe_w13":
        return tiles.rows(first, s["rank_rows"], columns, "moe_w13")

    def activated(*at: Any) -> Any:
        t, i, j = at
        gate = as_float(first.read((t, i, j)))
        if not gated:  # squared ReLU, as in Nemotron
            positive = te.max(gate, te.const(0, "float32"))
            return cast(positive * positive, tvm_dtype(tiles.source))
        value = gate * te.sigmoid(gate) * as_float(first.read((t, i, j + middle)))
        return cast(value, tvm_dtype(tiles.source))

    h = te.compute((*tiles.grid, middle), activated, name="activation")
    left = activations(h, dtype, tiles.scaling, "h")
    right = weights((s["active"], s["hidden"], middle), tiles.weight, tiles.scaling, "w2")
    second = product((*tiles.grid, s["hidden"]), left, lambda at: at[:2], right, tiles.of_expert, "second")
    places = [_indices(name, s["tokens"], s["topk"]) for name in ("tile_of", "place_of")]
    share = te.placeholder((s["tokens"], s["topk"]), name="share", dtype="float32")
    e = te.reduce_axis((0, s["topk"]), name="e")
    total = te.compute(
        (s["tokens"], s["hidden"]),
        lambda i, j: te.sum(share[i, e] * as_float(second.read((places[0][i, e], places[1][i, e], j))), axis=e),
        name="combine",
    )
    inputs = [*tiles.inputs, *left.inputs, *right.inputs, *places, share]
    if tiles.result == "float32":
        return [*inputs, total]
    out = te.compute((s["tokens"], s["hidden"]), lambda i, j: cast(total[i, j], tiles.result), name="moe")
    return [*inputs, out]
