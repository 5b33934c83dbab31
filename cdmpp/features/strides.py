"""Columns of a leaf's accesses that are not vectors of neighbours: gathers, broadcasts, scattered stores."""

from __future__ import annotations

from typing import Any

from cdmpp.features.addresses import LINE_BYTES, Moves
from cdmpp.features.instructions import Code, distinct, values_in_vectors
from cdmpp.features.leaf_tables import PARTS

MAGNITUDES = (
    "gathered_loads",
    "gathered_lines",
    "broadcast_loads",
    "scattered_stores",
    "scattered_lines",
    "vector_stride",
    "vector_store_gathers",
)


@PARTS.part
def strides(m: Moves, c: Code, out: Any) -> None:
    """Columns :data:`MAGNITUDES` of a leaf: accesses that are not a vector of neighbours."""
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
