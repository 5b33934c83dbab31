"""Columns of how far apart in memory traffic two uses of the same data are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cdmpp.features.addresses import LINE_BYTES, LINES, Moves, Places
from cdmpp.features.leaf_tables import PARTS, Tables
from cdmpp.features.loop_order import last_within

_ACCESSES = ("store", "read_0", "read_1")
#: Further capacities of caches; between those of :mod:`cdmpp.features.cache_lines`.
BETWEEN = (16384, 131072, 524288, 4194304)
#: Caches that may still hold a program's data from its last run.
WARM = (32768, 524288, 2097152, 16777216)

MAGNITUDES = (
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
    """Columns :data:`MAGNITUDES` of a leaf; ``made`` has the bytes of the leaf that last wrote each buffer."""
    n, accesses = len(m.extent), len(m.width)
    total = level_bytes(m)
    for a in range(min(accesses, 3)):
        found = 0
        for i in range(n):
            if m.step[a * n + i] == 0.0:
                out[a * 3 + (0 if found == 0 else 2)] = total[i]
                if found == 0:
                    out[a * 3 + 1] = m.extent[i]
                found += 1
                if found == 2:
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
