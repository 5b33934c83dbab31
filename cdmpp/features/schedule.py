"""Schedule features of a leaf: additional columns of :mod:`cdmpp.features.leaf`, for programs given as TIR.

The 96 columns of a leaf say how large its loops and accesses are; how fast a scheduled program runs on a
CPU depends as much on the order of the loops. Here, per leaf: the bytes that pass between levels of a memory
hierarchy of stated capacities, what is kept in registers, and how the innermost loops are laid out; behind
them what a compiler makes of it (:mod:`cdmpp.features.compiled`). Nothing is simulated: working sets are
products of intervals, and data are taken to be reused from one iteration of a loop to the next where the
working set of one iteration fits.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from cdmpp.features import compiled
from cdmpp.features.addresses import LINE_BYTES, places
from cdmpp.features.ast import Access, CompactAST, Leaf
from cdmpp.features.leaf import element_bytes

Array = np.ndarray[Any, np.dtype[np.float32]]

SCHEDULE_VERSION = 2
#: Capacities between which traffic is counted: vector registers, first-level caches, ... of any CPU.
CAPACITIES = (512, 4096, 32768, 262144, 2097152, 16777216)
#: Accesses that get columns of their own at the capacities in ``_EACH``: the store and two reads.
_ACCESSES = ("store", "read_0", "read_1")
_EACH = (512, 32768)

#: Columns that are no magnitudes; they come last.
SCHEDULE_FLAGS = ("vector_align", "tile_align", "fully_unrolled", "inner_is_reduce", "inner_is_vector", *compiled.FLAGS)
SCHEDULE_COLUMNS: tuple[str, ...] = (
    *(f"traffic_{c}" for c in CAPACITIES),
    *(f"{a}_traffic_{c}" for c in _EACH for a in _ACCESSES),
    "working_set_1",
    "working_set_2",
    "working_set_3",
    "working_set_4",
    "accumulators",
    "inner_reduce",
    "next_reduce",
    "inner_spatial",
    "vector_extent",
    "unrolled_body",
    "launches",
    "iterations_each",
    "store_visits",
    "outer_reduce",
    *compiled.MAGNITUDES,
    *SCHEDULE_FLAGS,
)
SCHEDULE_WIDTH = len(SCHEDULE_COLUMNS)
SCHEDULE_HASH = hashlib.sha256(f"{SCHEDULE_VERSION}\n{','.join(SCHEDULE_COLUMNS)}".encode()).hexdigest()[:16]


def schedule_matrix(ast: CompactAST) -> Array:
    """Schedule columns of a concrete program.

    Returns
    -------
    ndarray of float32, (leaves, SCHEDULE_WIDTH)
        Magnitudes as log2(1 + x), flags as they are; columns named by :data:`SCHEDULE_COLUMNS`.
    """
    where = places(ast)
    contiguous, launched = compiled.contiguous_loops(ast, where), set[int]()
    rows = []
    for leaf in ast.leaves:
        magnitudes, further = compiled.CompiledLeaf(ast, leaf, where, contiguous, launched).values()
        own, own_flags = _leaf(ast, leaf)
        rows.append([*own, *magnitudes, *own_flags, *further])
    raw = np.array(rows, dtype=np.float64)
    flags = len(SCHEDULE_FLAGS)
    raw[:, :-flags] = np.log2(1 + np.maximum(raw[:, :-flags], 0))
    return raw.astype(np.float32)


def _leaf(ast: CompactAST, leaf: Leaf) -> tuple[list[float], list[float]]:
    """Magnitudes and flags of the order of a leaf's loops."""
    # Innermost first; loops of one iteration are skipped.
    path = [p for p in reversed(leaf.path) if ast.loops[p].extent > 1]
    extents = [float(ast.loops[p].extent) for p in path]
    kinds = [ast.loops[p].kind for p in path]
    reduces = [p in leaf.reduce_loops for p in path]
    trips = list(accumulate(extents, mul, initial=1.0))
    accesses = [leaf.store, *leaf.reads]
    sets = [_working_sets(a, path, extents) for a in accesses]  # (accesses, loops + 1)
    total = [float(sum(values)) for values in zip(*sets, strict=True)]

    def traffic(capacity: int) -> list[float]:
        # The longest run of inner loops whose data fit; the loop around it finds them again.
        level = min(compiled.last_within(total, capacity) + 1, len(path))
        rate = trips[-1] / trips[level]
        return [values[level] * rate for values in sets]

    by_capacity = {c: traffic(c) for c in CAPACITIES}
    values = [by_capacity[c][i] if i < len(accesses) else 0.0 for c in _EACH for i in range(len(_ACCESSES))]
    first_reduce = reduces.index(True) if True in reduces else None
    accumulators = _product(extents[:first_reduce]) if first_reduce is not None else 1.0
    inner_reduce = next_reduce = outer_reduce = 1.0
    if first_reduce is not None:
        run = _run(reduces, first_reduce)
        inner_reduce = _product(extents[first_reduce : first_reduce + run])
        after = first_reduce + run
        spatial_run = _run([not r for r in reduces], after)
        second = after + spatial_run
        next_reduce = _product(extents[second : second + _run(reduces, second)])
        outer_reduce = _product([e for e, r in zip(extents, reduces, strict=True) if r]) / inner_reduce
    vector = _product([e for e, k in zip(extents, kinds, strict=True) if k == "vectorized"])
    step = max((ast.loops[p].unroll_step for p in leaf.path), default=0)
    unrolled, whole = 1.0, bool(path)
    for extent, kind in zip(extents, kinds, strict=True):
        if kind == "vectorized":
            continue
        if kind != "unrolled" and (kind != "serial" or unrolled * extent > step):
            whole = False
            break
        unrolled *= extent
    parallel = [i for i, k in enumerate(kinds) if k == "parallel"]
    launches = trips[-1] / trips[parallel[-1] + 1] if parallel else 0.0
    each_iteration = trips[parallel[0]] if parallel else trips[-1]
    inner_spatial = _product(extents[: _run([not r for r in reduces], 0)])
    visits = trips[-1] / max(sets[0][-1] / element_bytes(leaf.store.buffer.dtype), 1.0)
    magnitudes = [
        *(float(sum(by_capacity[c])) for c in CAPACITIES),
        *values,
        *(float(total[min(n, len(path))]) for n in (1, 2, 3, 4)),
        accumulators,
        inner_reduce,
        next_reduce,
        inner_spatial,
        vector,
        unrolled,
        float(launches),
        float(each_iteration),
        float(visits),
        outer_reduce,
    ]
    return magnitudes, [
        _alignment(vector),
        _alignment(accumulators),
        float(whole),
        float(bool(reduces and reduces[0])),
        float(bool(kinds and kinds[0] == "vectorized")),
    ]


def _working_sets(access: Access, path: list[int], extents: list[float]) -> list[float]:
    """Bytes, in whole cache lines, that an access touches in the innermost n loops, n = 0 ... all."""
    width = element_bytes(access.buffer.dtype)
    shape = [*access.buffer.shape, *([1 << 48] * len(access.indices))]
    indices = access.indices
    if not indices:
        return [float(LINE_BYTES)] * (len(path) + 1)
    sweeps = [_Sweep(float(size)) for _, size in zip(indices, shape, strict=False)]
    # Of the last dimension the lines count, of the others the rows; what does not move stays as it was.
    last, rows = sweeps[-1], [1.0] * (len(sweeps) - 1)
    lines = last.lines(width)
    bytes_by_level = [float(math.prod(rows) * lines * LINE_BYTES)]
    for loop, extent in zip(path, extents, strict=True):
        moved = False
        for i, (index, sweep) in enumerate(zip(indices, sweeps, strict=True)):
            step = abs(float(index.steps.get(loop, 0.0)))
            if not step:
                continue
            moved = True
            sweep.add(step, extent)
            if sweep is last:
                lines = sweep.lines(width)
            else:
                rows[i] = sweep.elements()
        bytes_by_level.append(float(math.prod(rows) * lines * LINE_BYTES) if moved else bytes_by_level[-1])
    return bytes_by_level


@dataclass(slots=True)
class _Sweep:
    """The loops (step, extent) that move one index, and the size of its dimension."""

    size: float
    loops: list[tuple[float, float]] = field(default_factory=list)
    span: float = 1.0
    values: float = 1.0

    def add(self, step: float, extent: float) -> None:
        """One more loop."""
        self.loops.append((step, extent))
        self.span += step * (extent - 1)
        self.values *= extent

    def elements(self) -> float:
        """Different values of the index, at most."""
        return max(min(self.span, self.values, self.size), 1.0)

    def lines(self, width: float) -> float:
        """Cache lines of a row-major last dimension: runs of neighbours, however far apart."""
        run, runs, span = 1.0, 1.0, 1.0
        for step, extent in sorted(self.loops):
            span += step * (extent - 1)
            if step <= run:
                run += step * (extent - 1)
            else:
                runs *= extent
        every = math.ceil(min(span, self.size) * width / LINE_BYTES)
        return float(min(runs * math.ceil(run * width / LINE_BYTES), every))


def _run(flags: list[bool], start: int) -> int:
    """Number of consecutive flags that are set, from ``start`` on."""
    end = start
    while end < len(flags) and flags[end]:
        end += 1
    return end - start


def _product(values: list[float]) -> float:
    return float(math.prod(values))


def _alignment(extent: float) -> float:
    """Trailing zero bits of an extent, at most 6, over 6: vectors are powers of two."""
    whole = int(extent)
    return min((whole & -whole).bit_length() - 1, 6) / 6 if whole else 1.0
