"""Columns of the memory that a leaf's loops touch: lines of caches, their sets, pages.

Further columns: how far apart in memory traffic two uses of the same data are; accesses that are not vectors of
neighbours (gathers, broadcasts, scattered stores).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cdmpp.features.addresses import IN_PAGES, IN_SETS, LINE_BYTES, LINES, SETS, Moves, Places
from cdmpp.features.instructions import Code, distinct, values_in_vectors
from cdmpp.features.leaf_tables import PARTS, Tables
from cdmpp.features.loop_order import last_within

#: Caches whose traffic is counted with their sets, and entries of translation buffers.
CACHES = (4096, 32768, 1048576, 16777216)
_EACH = (32768, 1048576)
_ACCESSES = ("store", "read_0", "read_1")
PAGES = (64, 1024)
#: Bytes of an intermediate that TVM puts on the stack.
STACK = 1024

LINE_MAGNITUDES = (
    *(f"lines_{c}" for c in CACHES),
    *(f"{a}_lines_{c}" for c in _EACH for a in _ACCESSES),
    *(f"pages_{p}" for p in PAGES),
    "compact_store_bytes",
    "intermediate_bytes",
    "footprint",
    "footprint_in_sets",
)
LINE_FLAGS = ("set_conflict", "on_stack")


@PARTS.part
def cache_lines(t: Tables, m: Moves, leaf: int, out: Any) -> None:
    """Columns :data:`LINE_MAGNITUDES` and :data:`LINE_FLAGS` of a leaf."""
    n, accesses = len(m.extent), len(m.width)
    lines, crowded = np.zeros(n + 1), np.zeros(accesses * (n + 1))
    pages = np.zeros(n + 1)
    for i in range(n + 1):
        for a in range(accesses):
            level = (a * (n + 1) + i) * 3
            lines[i] += m.levels[level + LINES]
            pages[i] += m.levels[level + IN_PAGES]
            crowded[a * (n + 1) + i] = in_sets(m.levels[level + LINES], m.levels[level + IN_SETS])
        lines[i] *= LINE_BYTES
    column = len(CACHES)
    for at, capacity in enumerate(CACHES):
        # The longest run of inner loops whose data fit; the loop around it finds them again.
        fits = last_within(lines, capacity)
        for a in range(accesses):
            level = min(fits, last_within(crowded[a * (n + 1) : (a + 1) * (n + 1)], capacity)) + 1
            level = min(level, n)
            count = m.levels[(a * (n + 1) + level) * 3 + LINES] * m.trips[n] / m.trips[level]
            out[at] += count
            if capacity in _EACH and a < len(_ACCESSES):
                out[column + a] = count
        if capacity in _EACH:
            column += len(_ACCESSES)
    at = column
    for entries in PAGES:
        level = min(last_within(pages, entries) + 1, n)
        misses = 0.0
        for a in range(accesses):
            misses += m.levels[(a * (n + 1) + level) * 3 + IN_PAGES] * m.trips[n] / m.trips[level]
        out[at] = misses if pages[n] > entries else 0.0
        at += 1
    inside, footprint, footprint_in_sets = 0.0, 0.0, 0.0
    for a in range(accesses):
        if t.buffer_inside[t.access_buffer[t.access_at[leaf] + a]]:
            inside += m.size[a]
        footprint += m.levels[(a * (n + 1) + n) * 3 + LINES]
        footprint_in_sets += crowded[a * (n + 1) + n]
    store, stored_inside = m.size[0], t.buffer_inside[t.access_buffer[t.access_at[leaf]]]
    whole = n * 3
    out[at] = store
    out[at + 1] = inside - (store if stored_inside else 0.0)
    out[at + 2] = footprint * LINE_BYTES
    out[at + 3] = footprint_in_sets
    out[at + 4] = math.log2(SETS / m.levels[whole + IN_SETS]) if m.levels[whole + LINES] > SETS else 0.0
    out[at + 5] = stored_inside and store <= STACK


@PARTS.part
def in_sets(lines: float, sets: float) -> float:
    """Bytes of a cache that lines need when they fall in so many of its sets."""
    return lines * LINE_BYTES * (max(1.0, SETS / sets) if lines > 2 else 1.0)


#: Further capacities of caches; between those of :mod:`cdmpp.features.cache_lines`.
BETWEEN = (16384, 131072, 524288, 4194304)
#: Caches that may still hold a program's data from its last run.
WARM = (32768, 524288, 2097152, 16777216)

REUSE_MAGNITUDES = (
    *(f"{a}_reuse_{what}" for a in _ACCESSES for what in ("bytes", "times", "far_bytes")),
    *(f"lines_{c}" for c in BETWEEN),
    *(f"warm_lines_{c}" for c in WARM),
    "pages_2048",
    "producer_bytes",
    "program_bytes",
)


@PARTS.part
def program_bytes(t: Tables, where: Places) -> Any:
    """Bytes of all buffers of each program, as small as they are laid out."""
    programs = len(t.program_at) - 1
    seen, total = np.zeros(len(t.buffer_inside), np.int64), np.zeros(programs)
    for program in range(programs):
        for leaf in range(t.program_at[program], t.program_at[program + 1]):
            for access in range(t.access_at[leaf], t.access_at[leaf + 1]):
                buffer = t.access_buffer[access]
                if seen[buffer]:
                    continue
                seen[buffer] = 1
                size = t.access_width[access]
                for d in range(max(where.count[buffer], 0)):
                    size *= where.size[t.buffer_at[buffer] + d]
                total[program] += size
    return total


@PARTS.part
def level_bytes(m: Moves) -> Any:
    """Bytes in whole lines that the innermost i loops touch, i = 0 ... all."""
    n, accesses = len(m.extent), len(m.width)
    total = np.zeros(n + 1)
    for i in range(n + 1):
        for a in range(accesses):
            total[i] += m.levels[(a * (n + 1) + i) * 3 + LINES]
        total[i] *= LINE_BYTES
    return total


@PARTS.part
def reuse(t: Tables, where: Places, m: Moves, leaf: int, whole: float, made: Any, out: Any) -> None:
    """Columns :data:`REUSE_MAGNITUDES` of a leaf; ``made`` has the bytes of the leaf that last wrote each buffer."""
    n, accesses = len(m.extent), len(m.width)
    total = level_bytes(m)
    for a in range(min(accesses, 3)):
        reused = 0
        for i in range(n):
            if m.step[a * n + i] == 0.0:
                out[a * 3 + (0 if reused == 0 else 2)] = total[i]
                if reused == 0:
                    out[a * 3 + 1] = m.extent[i]
                reused += 1
                if reused == 2:
                    break
    at = 9
    for capacity in BETWEEN:
        level = min(last_within(total, capacity) + 1, n)
        out[at] = total[level] / LINE_BYTES * m.trips[n] / m.trips[level]
        at += 1
    for capacity in WARM:
        level = min(last_within(total, capacity) + 1, n)
        # Half of what is a little too large for a cache is still there.
        cold = min(max(math.log2(max(whole, 1.0) / capacity) + 0.5, 0.0), 1.0)
        out[at] = cold * total[level] / LINE_BYTES * m.trips[n] / m.trips[level]
        at += 1
    pages = np.zeros(n + 1)
    for i in range(n + 1):
        for a in range(accesses):
            pages[i] += m.levels[(a * (n + 1) + i) * 3 + 2]
    level = min(last_within(pages, 2048) + 1, n)
    out[at] = pages[level] * m.trips[n] / m.trips[level] if pages[n] > 2048 else 0.0
    for a in range(1, accesses):
        buffer = t.access_buffer[t.access_at[leaf] + a]
        if t.buffer_inside[buffer]:
            out[at + 1] = max(out[at + 1], made[buffer] + total[n - min(where.fixed[buffer], n)])
    out[at + 2] = whole
    buffer = t.access_buffer[t.access_at[leaf]]
    if t.buffer_inside[buffer]:
        made[buffer] = total[n - min(where.fixed[buffer], n)]


STRIDE_MAGNITUDES = (
    *("gathered_loads", "gathered_lines", "broadcast_loads", "scattered_stores"),
    *("scattered_lines", "vector_stride", "vector_store_gathers"),
)


@PARTS.part
def strides(m: Moves, c: Code, out: Any) -> None:
    """Columns :data:`STRIDE_MAGNITUDES` of a leaf: accesses that are not a vector of neighbours."""
    n = len(m.extent)
    size = m.trips[c.body] * (c.lanes if c.vector >= c.body else 1.0)
    bodies = m.trips[n] / c.hoisted / size
    if c.vector < 0:
        return
    vectors = values_in_vectors(m, c, -1, size, n) * bodies
    gathers = 0.0
    for a in range(len(m.width)):
        step, elements = m.step[a * n + c.vector], distinct(m, c, a, n) * bodies
        lines = min(elements, elements * step / LINE_BYTES)
        if step > m.width[a] + 1e-6:
            out[5] = max(out[5], step)
            if a > 0:
                out[0] += elements
                out[1] += lines
                gathers += 1
            else:
                out[3] += elements
                out[4] += lines
        elif step == 0.0 and a > 0:
            out[2] += elements
    if 0.0 < m.step[c.vector] <= m.width[0] + 1e-6:
        out[6] = gathers * vectors
