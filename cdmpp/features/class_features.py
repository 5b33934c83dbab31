"""Features of a structural class: one walk of its template, repeated for any sizes.

:func:`useful_flops` counts what an operator's result needs, where its loop nest does more.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from cdmpp.features.affine import Num
from cdmpp.features.ast import CompactAST
from cdmpp.features.leaf import LINEAR_MASK, element_bytes, leaf_values, positions, scaled, unique_elements
from cdmpp.features.schema import COLUMN, WIDTH
from cdmpp.features.tape import Tape
from cdmpp.features.walk import build_ast
from cdmpp.programs.templates import template_json
from cdmpp.programs.tvm_json import Nodes, load
from cdmpp.programs.vectors import output_hw

Array = np.ndarray[Any, np.dtype[Any]]

#: Whole-program quantities, one row per program, float64, in this order.
PROGRAM_COLUMNS = ("flops", "bytes", "matrix", "work_fraction", "output_elements", "parallel_blocks")
#: Walks of a class whose comparisons of sizes had different outcomes.
_MOST_TAPES = 8


@lru_cache(maxsize=512)
def template(structural_class: str) -> tuple[Nodes, int]:
    """Nodes and root of the class's template."""
    return load(template_json(structural_class))


@lru_cache(maxsize=512)
def class_features(structural_class: str) -> ClassFeatures:
    """Computes the features of the shapes of a class."""
    return ClassFeatures(structural_class)


class ClassFeatures:
    """Features of the shapes of one structural class. Safe to share between threads."""

    def __init__(self, structural_class: str) -> None:
        self._nodes, self._root = template(structural_class)
        self._walks: tuple[_ClassWalk, ...] = ()

    def compute(self, sizes: Mapping[str, Array], count: int) -> tuple[Array, Array, Array]:
        """Leaf vectors (count, leaves, WIDTH), totals (count, len(PROGRAM_COLUMNS)) and positions (leaves,)."""
        for walk in self._walks:
            features = walk.repeat(sizes, count)
            if features is not None:
                return features
        walk = _ClassWalk(self._nodes, self._root, sizes)
        features = walk.repeat(sizes, count)
        assert features is not None
        self._walks = (walk, *self._walks[: _MOST_TAPES - 1])
        return features


class _ClassWalk:
    """Operations of one walk of a template; ``sizes`` are those of the walk, with the outcomes of its comparisons."""

    def __init__(self, nodes: Nodes, root: int, sizes: Mapping[str, Array]) -> None:
        tape = Tape(sizes)
        ast = build_ast(nodes, root, bindings=tape.traced)
        values = [value for leaf in ast.leaves for value in leaf_values(ast, leaf)]
        linear = np.tile(LINEAR_MASK, len(ast.leaves)).tolist()
        # Most values occur several times, or are constants: one row for each different one.
        rows: dict[tuple[Any, bool], int] = {}
        different: list[Num] = []
        places = []
        for value, is_linear in zip(values, linear, strict=True):
            key = (tape.key(value), is_linear)
            if key not in rows:
                rows[key] = len(different)
                different.append(value)
            places.append(rows[key])
        self._places = np.array(places)
        self._linear = np.array([is_linear for _, is_linear in rows])[:, None]
        self._leaves, self._positions = len(ast.leaves), positions(ast)
        self._tape = tape
        tape.finish([*different, argument_bytes(ast), output_elements(ast)])

    def repeat(self, sizes: Mapping[str, Array], count: int) -> tuple[Array, Array, Array] | None:
        """As :meth:`ClassFeatures.compute`; None if a comparison of the sizes has another outcome."""
        values = self._values(sizes, count)
        if values is None:
            return None
        raw = np.empty((len(self._linear), count))
        if count == 1:
            raw[:, 0] = values[:-2]
        else:
            for row, value in zip(raw, values, strict=False):
                row[:] = value
        table = np.ascontiguousarray(scaled(raw, self._linear).T)
        matrix = np.take(table, self._places, axis=1).reshape(count, self._leaves, WIDTH)
        return matrix, totals(matrix, values[-2], values[-1]), self._positions

    def _values(self, sizes: Mapping[str, Array], count: int) -> list[Any] | None:
        if count == 1:
            try:
                return self._tape.repeat({name: int(values[0]) for name, values in sizes.items()})
            except ArithmeticError:  # a division by 0 or an overflow, which arrays answer with inf
                pass
        values = self._tape.repeat(sizes)
        return values if values is None or count > 1 else [np.reshape(value, -1)[0] for value in values]


def totals(matrix: Array, moved: Num, outputs: Num) -> Array:
    """Whole-program quantities.

    ``matrix``: leaf vectors.
    ``moved``, ``outputs``: :func:`argument_bytes` and :func:`output_elements`.
    """
    flops = np.exp2(matrix[:, :, COLUMN["flops"]].astype(np.float64)) - 1
    contraction = matrix[:, :, COLUMN["is_contraction"]] > 0
    blocks = np.exp2(matrix[:, :, COLUMN["blocks"]].astype(np.float64)) - 1
    is_gpu = matrix[:, :, COLUMN["is_gpu"]].max(axis=1) > 0
    total = flops.sum(axis=1)
    out = np.empty((len(matrix), len(PROGRAM_COLUMNS)))
    out[:, 0] = total
    out[:, 1] = moved
    out[:, 2] = (flops * contraction).sum(axis=1) > 0.5 * np.maximum(total, 1.0)
    out[:, 3] = 1.0
    out[:, 4] = outputs
    out[:, 5] = np.where(is_gpu, np.rint(blocks.max(axis=1)), 0.0)
    return out


def output_elements(ast: CompactAST) -> Num:
    """Elements of the tensor that the last leaf writes."""
    stores: Num = 1.0
    for extent in ast.leaves[-1].store.buffer.shape:
        stores = stores * (extent * 1.0)
    return stores


def argument_bytes(ast: CompactAST) -> Num:
    """Distinct bytes of the arguments: per buffer the widest access, each buffer once.

    A program whose stores all go to buffers it allocated (no argument written) counts those instead.
    """
    widest: dict[int, Num] = {}
    for leaf in ast.leaves:
        extents = {p: ast.loops[p].extent * 1.0 for p in leaf.path}
        trips: Num = 1.0
        for extent in extents.values():
            trips = trips * extent
        for access in (leaf.store, *leaf.reads):
            if not access.buffer.is_parameter:
                continue
            size = unique_elements(access, extents, trips) * element_bytes(access.buffer.dtype)
            key = id(access.buffer)
            widest[key] = size if key not in widest else np.maximum(widest[key], size)
    total: Num = 0.0
    for size in widest.values():
        total = total + size
    return np.maximum(total, 1.0)


def useful_flops(operator: str, s: Mapping[str, Any], structure: str = "") -> Array | None:
    """Floating-point operations that an operator's result needs, where the loop nest does more.

    A causal mask halves attention; a backward convolution's loop nest multiplies zeros; tiles of experts have
    rows of padding; scales of blocks are multiplied as often as elements. None: as many as the loop nest counts.

    ``s``: integer fields and derived sizes.
    ``structure``: structural class: ``scaling``, ``gated`` and the like.
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
    if operator == "attention_backward" and "causal=True" in structure:
        pairs, wide = (s["q_len"] + 1.0) / 2, 2.0 * s["v_dim"]
        each = pairs * (6.0 * s["head_dim"] + 2 * wide + 5) + wide
        return np.asarray(s["batch"] * s["heads"] * s["q_len"] * each)
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
