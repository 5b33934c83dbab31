"""Columns of the memory that a leaf's loops touch: lines of caches, their sets, pages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cdmpp.features.addresses import IN_PAGES, IN_SETS, LINE_BYTES, LINES, SETS, Moves
from cdmpp.features.leaf_tables import PARTS, Tables
from cdmpp.features.loop_order import last_within

#: Caches whose traffic is counted with their sets, and entries of translation buffers.
CACHES = (4096, 32768, 1048576, 16777216)
_EACH = (32768, 1048576)
_ACCESSES = ("store", "read_0", "read_1")
PAGES = (64, 1024)
#: Bytes of an intermediate that TVM puts on the stack.
STACK = 1024

MAGNITUDES = (
    *(f"lines_{c}" for c in CACHES),
    *(f"{a}_lines_{c}" for c in _EACH for a in _ACCESSES),
    *(f"pages_{p}" for p in PAGES),
    "compact_store_bytes",
    "intermediate_bytes",
    "footprint",
    "footprint_in_sets",
)
FLAGS = ("set_conflict", "on_stack")


@PARTS.part
def cache_lines(t: Tables, m: Moves, leaf: int, out: Any) -> None:
    """Columns :data:`MAGNITUDES` and :data:`FLAGS` of a leaf."""
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
    each = len(CACHES)
    for at, capacity in enumerate(CACHES):
        # The longest run of inner loops whose data fit; the loop around it finds them again.
        fits = last_within(lines, capacity)
        for a in range(accesses):
            level = min(fits, last_within(crowded[a * (n + 1) : (a + 1) * (n + 1)], capacity)) + 1
            level = min(level, n)
            count = m.levels[(a * (n + 1) + level) * 3 + LINES] * m.trips[n] / m.trips[level]
            out[at] += count
            if capacity in _EACH and a < len(_ACCESSES):
                out[each + a] = count
        if capacity in _EACH:
            each += len(_ACCESSES)
    at = each
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
