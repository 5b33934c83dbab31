"""Columns of a leaf's register tile: accumulators, operands, the code of the unrolled loops."""

from __future__ import annotations

import math
from typing import Any

from cdmpp.features.addresses import Moves
from cdmpp.features.instructions import LANES, Code, distinct, values_in_vectors
from cdmpp.features.leaf_tables import ARITHMETIC, INIT, LEAF_NUMBERS, PARTS, REDUCES, Tables
from cdmpp.features.straight_code import Straight

#: Instructions that stay decoded, and vector registers.
DECODED, VECTOR_REGISTERS = 1536.0, 16.0

MAGNITUDES = (
    "tile_rows",
    "tile_columns",
    "live_vectors",
    "spilled",
    "body_code",
    "straight_code",
    "fetched_code",
    "left_iterations",
    "vector_ops_4",
)
FLAGS = ("tail_8", "tail_4")


@PARTS.part
def register_tile(t: Tables, m: Moves, c: Code, s: Straight, leaf: int, left: int, out: Any) -> None:
    """Columns :data:`MAGNITUDES` and :data:`FLAGS` of a leaf; ``left`` is the place of the first loop that is left."""
    start, n = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
    own = leaf * LEAF_NUMBERS
    rows = columns = loads = 0.0
    for a in range(1, len(m.width)):
        elements = distinct(m, c, a, n)
        vectors = values_in_vectors(m, c, a, elements, n)
        loads += vectors
        if c.vector < 0 or m.step[a * n + c.vector] == 0.0:
            rows = max(rows, elements)
        else:
            columns = max(columns, vectors)
    stored = values_in_vectors(m, c, 0, distinct(m, c, 0, n), n)
    reduces = t.leaf_numbers[own + REDUCES] > 0 and t.leaf_numbers[own + INIT] == 0
    live = stored + min(columns, rows if rows > 0 else columns) + 1 if reduces else min(stored, 4.0)
    size = m.trips[c.body] * (c.lanes if c.vector >= c.body else 1.0)
    bodies = m.trips[n] / c.hoisted / size
    each = values_in_vectors(m, c, -1, size, n) * t.leaf_numbers[own + ARITHMETIC]
    around = t.path_loop[start + left] if left < n else t.path_loop[start + n - 1] if n else -1
    code = s.code[around] if around >= 0 else each
    iterations = m.trips[n] / m.trips[left]
    out[0] = rows
    out[1] = columns
    out[2] = live
    out[3] = max(live - VECTOR_REGISTERS, 0.0) * bodies
    out[4] = each + loads + stored
    out[5] = code
    out[6] = iterations * max(code - DECODED, 0.0)
    out[7] = iterations
    vectors_4 = size / c.lanes * max(1.0, math.ceil(c.lanes / 4) * 4 / 4) if c.vector >= 0 else size
    out[8] = vectors_4 * bodies * t.leaf_numbers[own + ARITHMETIC]
    out[9] = c.lanes % LANES / LANES if c.vector >= 0 else 0.0
    out[10] = c.lanes % 4 / 4 if c.vector >= 0 else 0.0
