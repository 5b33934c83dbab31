"""Layers of experts and grouped products: tiles of rows, each of one expert.

Index tensors made by the routing say which token each row of a tile is (``token_of``), which expert each tile
belongs to (``expert_of``) and where a row's result lies (``tile_of``, ``place_of``).
"""

from __future__ import annotations

from typing import Any

from cdmpp.programs.lowering.common import Sizes, as_float, cast, te, tvm_dtype, written
from cdmpp.programs.lowering.products import Index, Product, activations, product, source_dtype, weights


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

    def rows(self, y: Product, count: Any, columns: Any, name: str) -> list[Any]:
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
