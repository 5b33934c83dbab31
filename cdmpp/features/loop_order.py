"""Columns of the order of a leaf's loops: bytes between levels of a memory hierarchy, tiles, annotations.

Working sets are products of intervals in whole cache lines; data are taken to be reused from one iteration of a
loop to the next where the working set of one iteration fits. Nothing is simulated.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cdmpp.features.addresses import LINE_BYTES, Moves
from cdmpp.features.leaf_tables import LEAF_NUMBERS, PARALLEL, PARTS, SERIAL, STEP, UNROLLED, VECTORIZED, Tables

#: Capacities between which traffic is counted: vector registers, first-level caches, ... of any CPU.
CAPACITIES = (512, 4096, 32768, 262144, 2097152, 16777216)
#: Accesses that get columns of their own at the capacities in ``_EACH``: the store and two reads.
_ACCESSES = ("store", "read_0", "read_1")
_EACH = (512, 32768)

LOOP_MAGNITUDES = (
    *(f"traffic_{c}" for c in CAPACITIES),
    *(f"{a}_traffic_{c}" for c in _EACH for a in _ACCESSES),
    *("working_set_1", "working_set_2", "working_set_3", "working_set_4", "accumulators"),
    *("inner_reduce", "next_reduce", "inner_spatial", "vector_extent", "unrolled_body"),
    *("launches", "iterations_each", "store_visits", "outer_reduce"),
)
LOOP_FLAGS = ("vector_align", "tile_align", "fully_unrolled", "inner_is_reduce", "inner_is_vector")


@PARTS.part
def loop_order(t: Tables, m: Moves, leaf: int, out: Any) -> None:
    """Columns :data:`LOOP_MAGNITUDES` and :data:`LOOP_FLAGS` of a leaf."""
    start, n = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
    accesses = t.access_at[leaf + 1] - t.access_at[leaf]
    trips, extent = m.trips, m.extent
    sets = np.zeros(accesses * (n + 1))
    total = np.zeros(n + 1)
    for a in range(accesses):
        _working_sets(t, leaf, t.access_at[leaf] + a, extent, sets[a * (n + 1) : (a + 1) * (n + 1)])
    for i in range(n + 1):
        for a in range(accesses):
            total[i] += sets[a * (n + 1) + i]
    at = 0
    for capacity in CAPACITIES:
        # The longest run of inner loops whose data fit; the loop around it finds them again.
        level = min(last_within(total, capacity) + 1, n)
        for a in range(accesses):
            out[at] += sets[a * (n + 1) + level] * (trips[n] / trips[level])
        at += 1
    for capacity in _EACH:
        level = min(last_within(total, capacity) + 1, n)
        for a in range(min(accesses, 3)):
            out[at + a] = sets[a * (n + 1) + level] * (trips[n] / trips[level])
        at += 3
    for inner in range(1, 5):
        out[at] = total[min(inner, n)]
        at += 1
    # Runs of loops that are reduced over or not, innermost first.
    spatial = _run(t, start, 0, n, 0)
    accumulators = inner_reduce = next_reduce = outer_reduce = 1.0
    if spatial < n:
        accumulators = trips[spatial]
        after = _run(t, start, spatial, n, 1)
        inner_reduce = _between(extent, spatial, after)
        second = _run(t, start, after, n, 0)
        next_reduce = _between(extent, second, _run(t, start, second, n, 1))
        for i in range(n):
            if t.path_reduces[start + i]:
                outer_reduce *= extent[i]
        outer_reduce = outer_reduce / inner_reduce
    vector = unrolled = 1.0
    whole, open_, innermost, outermost = n > 0, True, -1, -1
    step = t.leaf_numbers[leaf * LEAF_NUMBERS + STEP]
    for i in range(n):
        kind = t.loop_kind[t.path_loop[start + i]]
        if kind == PARALLEL:
            innermost = i if innermost < 0 else innermost
            outermost = i
        if kind == VECTORIZED:
            vector *= extent[i]
        elif open_:
            if kind != UNROLLED and (kind != SERIAL or unrolled * extent[i] > step):
                whole = open_ = False
            else:
                unrolled *= extent[i]
    elements = sets[n] / t.access_width[t.access_at[leaf]]
    out[at] = accumulators
    out[at + 1] = inner_reduce
    out[at + 2] = next_reduce
    out[at + 3] = trips[spatial]
    out[at + 4] = vector
    out[at + 5] = unrolled
    out[at + 6] = trips[n] / trips[outermost + 1] if outermost >= 0 else 0.0
    out[at + 7] = trips[innermost] if innermost >= 0 else trips[n]
    out[at + 8] = trips[n] / max(elements, 1.0)
    out[at + 9] = outer_reduce
    out[at + 10] = _alignment(vector)
    out[at + 11] = _alignment(accumulators)
    out[at + 12] = whole
    out[at + 13] = n > 0 and spatial == 0
    out[at + 14] = n > 0 and t.loop_kind[t.path_loop[start]] == VECTORIZED


@PARTS.part
def last_within(values: Any, bound: float) -> int:
    """Index of the last value that is not above a bound, 0 where all are."""
    index = len(values) - 1
    while index > 0 and values[index] > bound:
        index -= 1
    return index


@PARTS.part
def _working_sets(t: Tables, leaf: int, access: int, extent: Any, out: Any) -> None:
    """Bytes, in whole cache lines, that an access touches in the innermost i loops, i = 0 ... all."""
    n, first = len(extent), t.index_at[access]
    dims, buffer = t.index_at[access + 1] - first, t.access_buffer[access]
    known = t.buffer_at[buffer + 1] - t.buffer_at[buffer]
    if dims == 0:
        out[:] = LINE_BYTES
        return
    width = t.access_width[access]
    step, size = np.zeros(dims * n), np.full(dims, 2.0**48)
    for d in range(dims):
        if d < known:
            size[d] = t.buffer_size[t.buffer_at[buffer] + d]
        for s in range(t.step_at[first + d], t.step_at[first + d + 1]):
            step[d * n + t.step_loop[s]] = abs(t.step_value[s])
    rows, span, values = np.ones(dims), np.ones(dims), np.ones(dims)
    last = dims - 1
    lines = _lines(step[last * n : last * n + n], extent, 0, size[last], width)
    for i in range(n + 1):
        for d in range(dims):
            if i == 0 or step[d * n + i - 1] == 0.0:
                continue
            span[d] += step[d * n + i - 1] * (extent[i - 1] - 1)
            values[d] *= extent[i - 1]
            if d == last:
                lines = _lines(step[last * n : last * n + n], extent, i, size[last], width)
            else:
                rows[d] = max(min(span[d], values[d], size[d]), 1.0)
        product = 1.0
        for d in range(last):
            product *= rows[d]
        out[i] = product * lines * LINE_BYTES


@PARTS.part
def _lines(step: Any, extent: Any, inner: int, size: float, width: float) -> float:
    """Cache lines of a row-major last dimension: runs of neighbours, however far apart."""
    order, count = np.zeros(inner, np.int64), 0
    for loop in range(inner):
        if step[loop] == 0.0:
            continue
        at = count
        while at > 0 and (step[order[at - 1]], extent[order[at - 1]]) > (step[loop], extent[loop]):
            order[at] = order[at - 1]
            at -= 1
        order[at] = loop
        count += 1
    run, runs, span = 1.0, 1.0, 1.0
    for k in range(count):
        loop = order[k]
        span += step[loop] * (extent[loop] - 1)
        if step[loop] <= run:
            run += step[loop] * (extent[loop] - 1)
        else:
            runs *= extent[loop]
    every = math.ceil(min(span, size) * width / LINE_BYTES)
    return min(runs * math.ceil(run * width / LINE_BYTES), float(every))


@PARTS.part
def _run(t: Tables, start: int, first: int, n: int, reduces: int) -> int:
    """End of the run of loops from ``first`` on that are reduced over, or are not."""
    end = first
    while end < n and t.path_reduces[start + end] == reduces:
        end += 1
    return end


@PARTS.part
def _between(extent: Any, first: int, end: int) -> float:
    product = 1.0
    for i in range(first, end):
        product *= extent[i]
    return product


@PARTS.part
def _alignment(extent: float) -> float:
    """Trailing zero bits of an extent, at most 6, over 6: vectors are powers of two."""
    bits = 0
    while bits < 6 and extent % 2.0 ** (bits + 1) == 0.0:
        bits += 1
    return bits / 6
