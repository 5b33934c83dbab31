"""Columns of what is computed again although it stays the same, and of the code that TVM unrolls.

TVM unrolls a loop when the stores of its whole body, those of other leaves with it, times its iterations are within
``auto_unroll_max_step`` and no loop is left inside; a vectorised store is one store. LLVM then moves a computation out
of a loop that it does not depend on when the body of this loop is straight code that is not too long and calls
nothing. What is left is computed again in every iteration.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cdmpp.features.addresses import Moves
from cdmpp.features.instructions import LANES, Code
from cdmpp.features.leaf_tables import (
    ALSO_READ,
    ARITHMETIC,
    CALLS,
    LEAF_NUMBERS,
    PARALLEL,
    PARTS,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Tables,
)

#: Reads and stores of a loop's body up to which LLVM moves them out.
MOVED_ACCESSES = 450.0

MAGNITUDES = (
    "straight_stores",
    "straight_accesses",
    "straight_calls",
    "straight_copies",
    "again_inner",
    "again_outer",
    "ops_if_again",
    "ops_if_moved",
    "calls_if_again",
)
FLAGS = ("again_in_body",)


class Straight(NamedTuple):
    """Loops of all programs after unrolling.

    Attributes
    ----------
    copies : of the body of each loop in the code; 0 for a loop that is left
    stores, accesses, calls, code : of one iteration of the loop, with what is unrolled inside; vectors count once
        among stores and accesses and in vectors of 8 floats in ``code``
    """

    copies: Any
    stores: Any
    accesses: Any
    calls: Any
    code: Any


@PARTS.part
def straight(t: Tables) -> Straight:
    """Unroll the loops of all programs."""
    loops, leaves = len(t.loop_extent), len(t.path_at) - 1
    parent = np.full(loops, -1, np.int64)
    stores, accesses = np.zeros(loops), np.zeros(loops)
    calls, code = np.zeros(loops), np.zeros(loops)
    for leaf in range(leaves):
        start, end = t.path_at[leaf], t.path_at[leaf + 1]
        for i in range(start, end - 1):
            # The initial value of a sum leaves loops out: the deepest one named is the loop around.
            parent[t.path_loop[i]] = max(parent[t.path_loop[i]], t.path_loop[i + 1])
        if start == end:
            continue
        own, inner = leaf * LEAF_NUMBERS, t.path_loop[start]
        touched = t.access_at[leaf + 1] - t.access_at[leaf] + t.leaf_numbers[own + ALSO_READ]
        stores[inner] += 1
        accesses[inner] += touched
        calls[inner] += t.leaf_numbers[own + CALLS]
        code[inner] += touched + t.leaf_numbers[own + ARITHMETIC]
    step, left, copies = t.loop_step.copy(), np.zeros(loops, np.int64), np.zeros(loops)
    for loop in range(loops):
        if step[loop] == 0 and parent[loop] >= 0:
            step[loop] = step[parent[loop]]
    for back in range(loops):
        loop = loops - 1 - back
        kind, extent, around = t.loop_kind[loop], t.loop_extent[loop], parent[loop]
        wide = 1.0
        if kind == VECTORIZED:
            copies[loop], wide = 1.0, max(1.0, math.ceil(extent / LANES))
        elif kind == UNROLLED or (kind == SERIAL and not left[loop] and extent * stores[loop] <= step[loop]):
            copies[loop] = extent
        if around >= 0:
            left[around] |= left[loop] or copies[loop] == 0
            times = max(copies[loop], 1.0)
            stores[around] += times * stores[loop]
            accesses[around] += times * accesses[loop]
            calls[around] += times * calls[loop]
            code[around] += times * wide * code[loop]
    return Straight(copies, stores, accesses, calls, code)


@PARTS.part
def straight_code(t: Tables, m: Moves, c: Code, s: Straight, leaf: int, out: Any) -> int:
    """Columns :data:`MAGNITUDES` and :data:`FLAGS` of a leaf; the place of the first loop that is left."""
    start, n = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
    own = leaf * LEAF_NUMBERS
    left, copies = 0, 1.0
    while left < n and s.copies[t.path_loop[start + left]] > 0:
        copies *= s.copies[t.path_loop[start + left]]
        left += 1
    around = t.path_loop[start + left] if left < n else t.path_loop[start + n - 1] if n else -1
    again_inner, again_outer, again_body, moving = 1.0, 1.0, 1.0, True
    for i in range(n):
        needed = t.path_needed[start + i]
        if i < left:
            again_body *= 1.0 if needed else m.extent[i]
            continue
        moving = moving and not needed and t.loop_kind[t.path_loop[start + i]] != PARALLEL
        if not needed:
            if moving:
                again_inner *= m.extent[i]
            else:
                again_outer *= m.extent[i]
    stores = s.stores[around] if around >= 0 else 1.0
    accesses = s.accesses[around] if around >= 0 else 1.0
    calls = s.calls[around] if around >= 0 else 0.0
    trips = m.trips[n] / c.lanes * max(1.0, math.ceil(c.lanes / LANES)) / again_body
    ops = trips * t.leaf_numbers[own + ARITHMETIC]
    moved = again_inner if accesses <= MOVED_ACCESSES and calls == 0 else 1.0
    out[0] = stores
    out[1] = accesses
    out[2] = calls
    out[3] = copies
    out[4] = again_inner
    out[5] = again_outer
    out[6] = ops
    out[7] = ops / moved
    out[8] = m.trips[n] / again_body * t.leaf_numbers[own + CALLS]
    out[9] = again_body > 1
    return left
