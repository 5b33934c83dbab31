"""Memory addresses of a scheduled program's accesses: byte strides of loops, cache lines, cache sets, pages.

Capacity is not all there is to a cache. Rows whose distance is a power of two share a few of its sets: a
column of a 1024 x 1024 matrix, 64 KB of lines, does not fit a cache of 2 MB twice over. So the lines of an
access are counted together with the sets that they fall in. Intermediate tensors lie as TVM's
CompactBufferAllocation leaves them: as large as one iteration of the loops around producer and consumers
needs, and at the same place in every iteration.

Functions on :class:`~cdmpp.features.leaf_tables.Tables`, in the subset of Python that numba compiles.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cdmpp.features.leaf_tables import LEAF_NUMBERS, PARALLEL, PARTS, PREDICATED, VECTORIZED, Tables

LINE_BYTES = 64
PAGE_BYTES = 4096
#: First-level caches have as many sets as a page has lines; of larger ones a page spreads over as many.
SETS = PAGE_BYTES // LINE_BYTES
#: Numbers of :func:`touched`.
LINES, IN_SETS, IN_PAGES = 0, 1, 2


class Places(NamedTuple):
    """Memory layout of buffers."""

    size: Any  # elements per dimension after compaction, in the places of Tables.buffer_size
    count: Any  # dimensions of each buffer that all its accesses index
    # Number of outermost loops around all accesses of a buffer that the program allocates: each of their iterations
    # finds it at the same place; 0 for arguments.
    fixed: Any


@PARTS.part
def places(t: Tables) -> Places:
    """Layouts of the buffers of all programs; arguments have their declared layout."""
    buffers, leaves = len(t.buffer_inside), len(t.path_at) - 1
    fixed, common = np.full(buffers, -1, np.int64), np.zeros(buffers, np.int64)
    for leaf in range(leaves):
        for access in range(t.access_at[leaf], t.access_at[leaf + 1]):
            buffer = t.access_buffer[access]
            if not t.buffer_inside[buffer]:
                continue
            depth = t.path_at[leaf + 1] - t.path_at[leaf]
            if fixed[buffer] < 0:
                fixed[buffer], common[buffer] = depth, leaf
                continue
            other, same = common[buffer], 0
            while same < min(depth, fixed[buffer]) and (
                t.path_loop[t.path_at[leaf + 1] - 1 - same] == t.path_loop[t.path_at[other + 1] - 1 - same]
            ):
                same += 1
            fixed[buffer] = same
    size, count = np.zeros(len(t.buffer_size), np.float64), np.full(buffers, -1, np.int64)
    for leaf in range(leaves):
        start, depth = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
        for access in range(t.access_at[leaf], t.access_at[leaf + 1]):
            buffer = t.access_buffer[access]
            if not t.buffer_inside[buffer]:
                continue
            first, index = t.buffer_at[buffer], t.index_at[access]
            dims = min(t.index_at[access + 1] - index, t.buffer_at[buffer + 1] - first)
            count[buffer] = dims if count[buffer] < 0 else min(dims, count[buffer])
            for d in range(dims):
                span, whole = 1.0, t.buffer_size[first + d]
                for s in range(t.step_at[index + d], t.step_at[index + d + 1]):
                    if t.step_loop[s] < depth - fixed[buffer]:
                        span += abs(t.step_value[s]) * (t.loop_extent[t.path_loop[start + t.step_loop[s]]] - 1)
                if t.index_indirect[index + d] or span > whole:
                    span = whole
                size[first + d] = max(size[first + d], span)
    for buffer in range(buffers):
        if not t.buffer_inside[buffer]:
            fixed[buffer] = 0
            count[buffer] = t.buffer_at[buffer + 1] - t.buffer_at[buffer]
            for d in range(t.buffer_at[buffer], t.buffer_at[buffer + 1]):
                size[d] = t.buffer_size[d]
    return Places(size, count, fixed)


class Moves(NamedTuple):
    """How the accesses of one leaf move: the n loops of its path, innermost first."""

    # Extents of the loops, and iterations of the innermost 0, 1, ... n.
    extent: Any
    trips: Any
    width: Any  # bytes of an element, for each access
    # Bytes that one iteration of a loop moves an access, forwards or back; 0 where it stays: access * n + loop.
    step: Any
    # Divisions that the index needs because the loop crosses rows of the buffer at odd places, in sixths of a division
    # by a number that is no power of two: 6 or, by a shift, 2 for each dimension.
    split: Any
    size: Any  # bytes of the whole buffer
    levels: Any  # lines, sets and pages that the innermost i loops touch: (access * (n + 1) + i) * 3


@PARTS.part
def moves(t: Tables, where: Places, leaf: int) -> Moves:
    """Moves of a leaf's accesses."""
    start, n = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
    first, accesses = t.access_at[leaf], t.access_at[leaf + 1] - t.access_at[leaf]
    predicated = t.leaf_numbers[leaf * LEAF_NUMBERS + PREDICATED] > 0
    extent, trips = np.ones(n, np.float64), np.ones(n + 1, np.float64)
    for i in range(n):
        extent[i] = t.loop_extent[t.path_loop[start + i]]
        trips[i + 1] = trips[i] * extent[i]
    width, size = np.zeros(accesses, np.float64), np.zeros(accesses, np.float64)
    step = np.zeros(accesses * n, np.float64)
    split = np.zeros(accesses * n, np.int64)
    levels = np.zeros(accesses * (n + 1) * 3, np.float64)
    for a in range(accesses):
        width[a] = t.access_width[first + a]
        size[a] = _move(
            t,
            where,
            first + a,
            start,
            predicated,
            n,
            extent,
            width[a],
            step[a * n : a * n + n],
            split[a * n : a * n + n],
            levels[a * (n + 1) * 3 : (a + 1) * (n + 1) * 3],
        )
    return Moves(extent, trips, width, step, split, size, levels)


@PARTS.part
def _move(
    t: Tables,
    where: Places,
    access: int,
    start: int,
    predicated: bool,
    n: int,
    extent: Any,
    width: float,
    step: Any,
    split: Any,
    levels: Any,
) -> float:
    """Fill in one access of the path that begins at ``start``; the bytes of its buffer."""
    buffer, index = t.access_buffer[access], t.index_at[access]
    first, known = t.buffer_at[buffer], where.count[buffer]
    indices = t.index_at[access + 1] - index
    movable = n - where.fixed[buffer]
    straight = _straight(t, where, access, n)
    # Of each dimension that moves: bytes between neighbours, size, and its steps, the last dimension first.
    total = t.step_at[index + indices] - t.step_at[index]
    pitches, sizes, ends = np.zeros(indices), np.zeros(indices), np.zeros(indices + 1, np.int64)
    loops, steps = np.zeros(total, np.int64), np.zeros(total)
    dims, kept, pitch = 0, 0, width
    shape = max(known, indices)
    for back in range(indices):
        d = indices - 1 - back
        # Dimensions and sizes are matched from the last one on; a buffer with fewer sizes than indices ends in ones.
        place = shape - 1 - back
        whole = where.size[first + place] if place < known else 1.0
        begin = kept
        for s in range(t.step_at[index + d], t.step_at[index + d + 1]):
            loop, value = t.step_loop[s], abs(t.step_value[s])
            if loop >= movable or value == 0.0:
                continue
            if not straight[loop]:
                crossed = _crossed(t, start, index + d, s, extent[loop], predicated)
                split[loop] += crossed
                if crossed == 0 and value % 1.0 != 0.0:
                    # A quotient that stays the same, perhaps beside a remainder that moves.
                    if value * extent[loop] <= 1 + 1e-9:
                        continue
                    value = max(float(math.floor(value)), value % 1.0)
            loops[kept], steps[kept] = loop, value
            kept += 1
        if whole > 1 and kept > begin:
            pitches[dims], sizes[dims] = pitch, whole
            for s in range(begin, kept):
                loop = loops[s]
                if straight[loop]:
                    step[loop] = max(step[loop], steps[s] * pitch)
                else:
                    step[loop] += steps[s] * pitch
            dims += 1
            ends[dims] = kept
        else:
            kept = begin
        pitch *= whole
    for i in range(n + 1):
        if i > 0 and step[i - 1] == 0.0:
            for k in range(3):
                levels[i * 3 + k] = levels[(i - 1) * 3 + k]
            continue
        _touched(i, dims, pitches, sizes, ends, loops, steps, extent, width, levels[i * 3 : i * 3 + 3])
    return pitch


@PARTS.part
def _straight(t: Tables, where: Places, access: int, n: int) -> Any:
    """Loops that move the address evenly through several dimensions: a fused loop, taken apart again just as
    the buffer is laid out. No division is left of it."""
    buffer, index = t.access_buffer[access], t.index_at[access]
    first, known = t.buffer_at[buffer], where.count[buffer]
    indices = t.index_at[access + 1] - index
    movable = n - where.fixed[buffer]
    parts, least, highest = np.zeros(n, np.int64), np.zeros(n), np.zeros(n)
    pitch, shape = 1.0, max(known, indices)
    for back in range(indices):
        d, place = indices - 1 - back, shape - 1 - back
        whole = where.size[first + place] if place < known else 1.0
        for s in range(t.step_at[index + d], t.step_at[index + d + 1]):
            loop, value = t.step_loop[s], abs(t.step_value[s]) * pitch
            if value == 0.0 or whole <= 1 or loop >= movable:
                continue
            least[loop] = value if parts[loop] == 0 else min(least[loop], value)
            highest[loop] = max(highest[loop], value)
            parts[loop] += 1
        pitch *= whole
    straight = np.zeros(n, np.int64)
    for loop in range(n):
        straight[loop] = parts[loop] > 1 and highest[loop] - least[loop] <= 1e-6 * highest[loop]
    return straight


@PARTS.part
def _crossed(t: Tables, start: int, index: int, s: int, extent: float, predicated: bool) -> int:
    """:attr:`Moves.split` of one loop in one index.

    LLVM knows the elements of a vector or of an unrolled loop that starts at a multiple, and vectorises serial loops in
    whole vectors that do not cross one.
    """
    crosses, static = t.step_crosses[s], t.step_static[s]
    serial = predicated or t.loop_kind[t.path_loop[start + t.step_loop[s]]] != VECTORIZED
    odd = extent > crosses and (not serial or crosses % 8.0 != 0.0)
    if extent > crosses and not odd:
        for other in range(t.step_at[index], t.step_at[index + 1]):
            odd = odd or t.loop_kind[t.path_loop[start + t.step_loop[other]]] == PARALLEL
    if odd or (extent > max(static, 32.0) and serial):
        return 2 if t.step_shifts[s] else 6
    return 0


@PARTS.part
def _touched(
    inner: int,
    dims: int,
    pitches: Any,
    sizes: Any,
    ends: Any,
    loops: Any,
    steps: Any,
    extent: Any,
    width: float,
    out: Any,
) -> None:
    """Cache lines, sets of :data:`SETS` among them, and pages that the ``inner`` innermost loops touch."""
    distances, counts, rows = np.zeros(dims), np.zeros(dims), 0
    for d in range(dims):
        span, values, smallest = 1.0, 1.0, np.inf
        for s in range(ends[d], ends[d + 1]):
            loop = loops[s]
            if loop < inner:
                span += steps[s] * (extent[loop] - 1)
                values *= extent[loop]
                smallest = min(smallest, steps[s])
        count = min(span, values, sizes[d])
        if count > 1:
            distance = pitches[d] * max(smallest, 1.0) if values <= span else pitches[d]
            at = rows
            while at > 0 and (distances[at - 1], counts[at - 1]) > (distance, count):
                distances[at], counts[at] = distances[at - 1], counts[at - 1]
                at -= 1
            distances[at], counts[at] = distance, count
            rows += 1
    run, runs, sets, span, pages = width, 1.0, 1.0, width, 1.0
    for r in range(rows):
        distance, count = distances[r], counts[r]
        span += distance * (count - 1)
        if runs == 1.0 and (distance <= run or distance < LINE_BYTES):
            run += distance * (count - 1)
            continue
        runs *= count
        sets *= min(count, PAGE_BYTES / math.gcd(int(np.rint(distance) % PAGE_BYTES), PAGE_BYTES))
        if distance >= PAGE_BYTES:
            pages *= count
    of_run = max(1.0, run / LINE_BYTES)
    lines = runs * of_run
    if pages == 1.0:
        pages = max(min(span / PAGE_BYTES, lines), 1.0)
    out[LINES] = lines
    out[IN_SETS] = min(float(SETS), sets * of_run, lines)
    out[IN_PAGES] = min(pages, lines)
