"""The computation vector of a leaf (CDMPP section 4.1), in the columns of :mod:`cdmpp.features.schema`.

All quantities mean the same for a concrete program and for a structural class with array sizes, and
none depends on how far a compiler simplified an index: a loop of extent 1 contributes nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from cdmpp.errors import InvalidProgramError
from cdmpp.features.affine import Num, maximum, minimum, where
from cdmpp.features.ast import OPERATIONS, Access, CompactAST, Leaf
from cdmpp.features.schema import (
    COLUMNS,
    COMPUTE_DTYPES,
    LINEAR,
    READ_SLOTS,
    REDUCE_SLOTS,
    SCOPES,
    SPATIAL_SLOTS,
    WIDTH,
)
from cdmpp.features.tape import Traced, as_integers
from cdmpp.programs.tvm_json import HINT

LINEAR_MASK = np.array([name in LINEAR for name in COLUMNS])
#: float16, float32x4, float8_e4m3fn, bool: a name, its bits, what distinguishes it, its lanes.
_DTYPE = re.compile(r"[a-z]+?(\d{0,4})(?:_[a-z0-9]+?)?(?:x(\d{1,4}))?")
_FLOP_WEIGHTS = {"float_add": 1, "float_mul": 1, "float_div": 1, "float_compare": 1, "float_math": 1}
_INT_FLOPS = {"int_add": 1, "int_mul": 1, "int_compare": 1, "int_div": 1}


@lru_cache(maxsize=256)
def element_bytes(dtype: str) -> float:
    """Bytes of one element: half a byte for types of 4 bits, else at least one; vector types count all lanes.

    Raises InvalidProgramError: not the name of a type.
    """
    match = _DTYPE.fullmatch(dtype)
    if match is None:
        raise InvalidProgramError(f"{dtype[:40]!r} is not an element type", hint=HINT)
    bits, lanes = match.groups()
    # A type without bits: a truth value, or a handle of which nothing is known.
    width = int(bits) if bits else 8 if dtype.startswith("bool") else 32
    return (width if width == 4 else max(width, 8)) / 8 * int(lanes or 1)


def leaf_values(ast: CompactAST, leaf: Leaf) -> list[Num]:
    """Raw (unscaled) columns of one leaf: floats, or arrays for a structural class."""
    loops = ast.loops
    path = leaf.path
    extents = {p: loops[p].extent * 1.0 for p in path}
    trips: Num = 1.0
    spatial: Num = 1.0
    reduce: Num = 1.0
    vectorized: Num = 1.0
    unrolled: Num = 1.0
    parallel: Num = 1.0
    blocks: Num = 1.0
    threads: Num = 1.0
    vthreads: Num = 1.0
    unroll_step = 0
    is_gpu = 0
    spatial_slots: list[Num] = []
    reduce_slots: list[Num] = []
    for p in reversed(path):
        loop, extent = loops[p], extents[p]
        trips = trips * extent
        if p in leaf.reduce_loops:
            reduce = reduce * extent
            reduce_slots.append(extent)
        else:
            spatial = spatial * extent
            spatial_slots.append(extent)
        kind = loop.kind
        if kind == "vectorized":
            vectorized = vectorized * extent
        elif kind == "unrolled":
            unrolled = unrolled * extent
        elif kind == "parallel":
            parallel = parallel * extent
        elif kind.startswith("blockIdx"):
            blocks, is_gpu = blocks * extent, 1
        elif kind.startswith("threadIdx"):
            threads, is_gpu = threads * extent, 1
        elif "vthread" in kind:
            vthreads, is_gpu = vthreads * extent, 1
        unroll_step = max(unroll_step, loop.unroll_step)
    inner = path[-1] if path else None

    counts = dict(zip(OPERATIONS, leaf.counts, strict=True))
    flops_per_trip = float(sum(counts[k] * w for k, w in _FLOP_WEIGHTS.items()))
    if flops_per_trip == 0:
        flops_per_trip = float(sum(counts[k] * w for k, w in _INT_FLOPS.items()))
    flops = flops_per_trip * trips

    reads = leaf.reads
    accesses: list[Access | None] = [leaf.store, *reads[:READ_SLOTS]]
    accesses += [None] * (1 + READ_SLOTS - len(accesses))
    access_columns: list[list[Num]] = []
    leaf_bytes: Num = 0.0
    for slot, access in enumerate(accesses):
        columns, unique_bytes = _access_values(access, extents, trips, inner)
        if slot == 0:
            columns += [float(leaf.store.also_read), _buffer_bytes(leaf.store)]
        leaf_bytes = leaf_bytes + unique_bytes
        access_columns.append(columns)
    for extra in reads[READ_SLOTS:]:
        leaf_bytes = leaf_bytes + _access_values(extra, extents, trips, inner)[1]

    intensity = np.log2(1 + flops / maximum(leaf_bytes, 1.0))
    indirect = any(i.indirect for a in (leaf.store, *reads) for i in a.indices)
    return [
        *(counts[name] * trips for name in OPERATIONS),
        trips,
        spatial,
        reduce,
        len(path) / 4,
        extents[inner] if inner is not None else 1.0,
        vectorized,
        unrolled,
        parallel,
        float(unroll_step),
        *_slots(spatial_slots, SPATIAL_SLOTS),
        *_slots(reduce_slots, REDUCE_SLOTS),
        float(is_gpu),
        blocks,
        threads,
        vthreads,
        *_contraction(leaf, extents, reduce),
        *(value for columns in access_columns for value in columns),
        flops,
        leaf_bytes,
        intensity,
        float(max(len(reads) - READ_SLOTS, 0)),
        float(indirect),
        (leaf.predicated > 0) * 1.0,
        float(leaf.is_init),
        float(bool(leaf.intrinsic)),
        *(float(leaf.compute_dtype.startswith(d)) for d in COMPUTE_DTYPES),
    ]


def _slots(extents: list[Num], count: int) -> list[Num]:
    """Innermost extents in slots; a nest with more loops has the rest multiplied into the last slot."""
    slots: list[Num] = [*extents[:count], *([1.0] * (count - len(extents)))]
    for extent in extents[count:]:
        slots[-1] = slots[-1] * extent
    return slots


def unique_elements(access: Access, extents: dict[int, Num], trips: Num) -> Num:
    """Distinct elements that an access touches: per dimension no more than the interval it sweeps, the
    dimension itself, and the iterations of the loops in its index."""
    total: Num = 1.0
    shape = [*access.buffer.shape, *([1 << 48] * len(access.indices))]
    for index, size in zip(access.indices, shape, strict=False):
        reachable: Num = 1.0
        for loop in index.steps:
            reachable = reachable * extents.get(loop, 1.0)
        span = minimum(index.high - index.low + 1, size) * 1.0
        total = total * maximum(minimum(span, reachable), 1.0)
    return minimum(total, trips)


def _buffer_bytes(access: Access) -> Num:
    size: Num = element_bytes(access.buffer.dtype)
    for extent in access.buffer.shape:
        size = size * extent
    return size * 1.0


def _access_values(
    access: Access | None, extents: dict[int, Num], trips: Num, inner: int | None
) -> tuple[list[Num], Num]:
    if access is None:
        return [0.0] * (6 + 1 + len(SCOPES)), 0.0
    width = element_bytes(access.buffer.dtype)
    unique = unique_elements(access, extents, trips)
    # Step of the flattened (row-major) address when the innermost loop advances by one.
    stride: Num = 0.0
    run: Num = 1.0
    pitch: Num = 1.0
    for dim in range(len(access.indices) - 1, -1, -1):
        index = access.indices[dim]
        size = access.buffer.shape[dim] if dim < len(access.buffer.shape) else 2
        if inner is not None and inner in index.steps:
            stride = stride + where(size > 1, index.steps[inner] * pitch, 0.0)
        if dim == len(access.indices) - 1:
            reachable: Num = 1.0
            for loop in index.steps:
                reachable = reachable * extents.get(loop, 1.0)
            run = maximum(minimum(minimum(index.high - index.low + 1.0, size), reachable), 1.0)
        if dim < len(access.buffer.shape):
            pitch = pitch * access.buffer.shape[dim]
    if inner is not None:
        stride = where(extents[inner] > 1, stride, 0.0)
    scope = access.buffer.scope
    return [
        trips * width,
        unique * width,
        trips / unique,
        stride * width,
        run * width,
        width,
        float(access.buffer.is_parameter),
        *(float(scope == s) for s in SCOPES),
    ], unique * width


def _contraction(leaf: Leaf, extents: dict[int, Num], reduce: Num) -> list[Num]:
    """Batch, m, n, k of a leaf that contracts two tensors: which loops occur in one, the other, both."""
    zero: list[Num] = [0.0] * 8
    if not leaf.reduce_loops or len(leaf.reads) < 2 or leaf.is_init:
        return zero
    left = {p for i in leaf.reads[0].indices for p in i.steps}
    right = {p for i in leaf.reads[1].indices for p in i.steps}
    if not (left & leaf.reduce_loops and right & leaf.reduce_loops):
        return zero
    batch: Num = 1.0
    m: Num = 1.0
    n: Num = 1.0
    for p in leaf.path:
        if p in leaf.reduce_loops:
            continue
        in_left, in_right = _depends(leaf.reads[0], p), _depends(leaf.reads[1], p)
        m = m * where(in_left * (1 - in_right) > 0, extents[p], 1.0)
        n = n * where(in_right * (1 - in_left) > 0, extents[p], 1.0)
        batch = batch * where(in_left == in_right, extents[p], 1.0)
    return [1.0, batch, m, n, reduce, _alignment(m), _alignment(n), _alignment(reduce)]


def _depends(access: Access, loop: int) -> Num:
    """1 where the address changes with the loop, else 0; a dimension of size 1 has one address."""
    result: Num = 0
    for index, size in zip(access.indices, access.buffer.shape, strict=False):
        if loop in index.steps:
            result = maximum(result, (1 * (index.steps[loop] != 0)) * (1 * (size > 1)))
    return result


def _alignment(extent: Num) -> Num:
    """Trailing zero bits of an extent, at most 8, over 8: kernels differ by divisibility."""
    if isinstance(extent, Traced):
        integers = as_integers(extent)
        return np.log2(np.minimum(integers & -integers, 256)) / 8
    whole = np.asarray(extent).astype(np.int64)
    bits = np.log2(np.minimum(whole & -whole, 256)) / 8
    return bits if bits.ndim else float(bits)


def ast_matrix(ast: CompactAST, count: int | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Scaled leaf vectors of a program or of a structural class.

    ``count``: number of shapes when the AST was built with arrays; None for one concrete program.
    Returns float32, (leaves, WIDTH) or (count, leaves, WIDTH): magnitudes as sign(x) * log2(1 + |x|), flags as they
    are.
    """
    if count is None:
        raw = np.array([leaf_values(ast, leaf) for leaf in ast.leaves], dtype=np.float64)[:, :, None]
    else:
        raw = np.empty((len(ast.leaves), WIDTH, count))
        for i, leaf in enumerate(ast.leaves):
            for j, value in enumerate(leaf_values(ast, leaf)):
                raw[i, j] = value
    out = scaled(raw, LINEAR_MASK[:, None])
    return out[:, :, 0] if count is None else np.ascontiguousarray(out.transpose(2, 0, 1))


def scaled(raw: np.ndarray[Any, np.dtype[Any]], linear: np.ndarray[Any, np.dtype[Any]]) -> Any:
    """Magnitudes as sign(x) * log2(1 + |x|), ``linear`` values as they are, float32."""
    return np.where(linear, raw, np.copysign(np.log2(1 + np.abs(raw)), raw)).astype(np.float32)


def positions(ast: CompactAST) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Position of each leaf in the depth-first sequence (2 * rank - depth)."""
    return np.array([leaf.position for leaf in ast.leaves], dtype=np.int32)
