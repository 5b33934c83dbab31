"""Counts of what a compiler makes of a scheduled leaf: vector instructions, library calls, branches.

Estimates for LLVM behind TVM, found by reading measured programs: small inner loops are unrolled; a loop
along which the store is contiguous is vectorised, by the schedule or by the compiler; lanes of a vector that
cross rows at places that depend on other loops are divided, loaded and inserted one by one; a loop that neither the
store nor any read depends on is run once where all inside it is unrolled; up to 14 accumulators stay in
registers over the reduction around them, unless they are vectors of an odd length (12, 14, 28 floats), which
are stored in pieces and read back whole, at a stall each time. Counts are of a machine with vectors of 8
floats; a narrower one needs a multiple, which is for a model to learn. All is per leaf and sums over leaves.

Further columns: what is computed again although it stays the same, and the code that TVM unrolls; the register tile
(accumulators, operands, the code of the unrolled loops); the leaf's share of parallel work (tasks, their balance over
threads, what runs on one thread).

TVM unrolls a loop when the stores of its whole body, those of other leaves with it, times its iterations are within
``auto_unroll_max_step`` and no loop is left inside; a vectorised store is one store. LLVM then moves a computation out
of a loop that it does not depend on when the body of this loop is straight code that is not too long and calls
nothing. What is left is computed again in every iteration.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cdmpp.features.addresses import LINE_BYTES, Moves
from cdmpp.features.leaf_tables import (
    ALSO_READ,
    ARITHMETIC,
    CALLS,
    INIT,
    LEAF_NUMBERS,
    PARALLEL,
    PARTS,
    PREDICATED,
    REDUCES,
    SERIAL,
    STEP,
    UNROLLED,
    VECTORIZED,
    WEIGHT,
    Tables,
)

#: Floats of a vector, and vectors that accumulators may take.
LANES, REGISTERS = 8, 14
#: Instructions that LLVM unrolls a loop to by itself (its -unroll-threshold is 300, of smaller units); loads
#: beyond which it moves no more of them out of a loop.
UNROLL, MOVED = 150.0, 450.0

CODE_MAGNITUDES = (
    *("vector_ops", "vector_trips", "vector_loads", "vector_stores", "chained_ops", "bodies", "library_calls"),
    *("split_indices", "branches", "all_stores", "odd_updates", "accumulator_vectors", "kept_over", "loads_per_op"),
    *("lanes", "body", "iterations", "hoisted", "inside", "repeats", "repeats_parallel", "task_trips", "regions"),
)
CODE_FLAGS = (
    *("vector_by_schedule", "vector_by_compiler", "contiguous_reads", "gathered_reads", "store_contiguous"),
    *("store_scattered", "accumulates_in_registers", "register_pressure", "promoted", "imbalance_2"),
    *("whole_vectors", "vector_multiple", "odd_rows", "conditional"),
)


class Code(NamedTuple):
    """What the compiler makes of a leaf's loops, by their place in its path."""

    body: int  # the innermost loops that become straight code, vector loops among them
    vector: int  # the loop whose iterations share a vector; -1 for none
    by_schedule: bool  # whether the schedule vectorises it
    lanes: float  # iterations of that loop, 1 without one
    hoisted: float  # iterations that compute the same again and that the compiler saves
    inside: float  # iterations of all loops that do not compute the same again
    # Iterations of serial and of parallel loops that compute the same again.
    repeats: float
    repeats_parallel: float


@PARTS.part
def contiguous_loops(t: Tables, m: Moves, leaf: int, out: Any) -> None:
    """Mark the loops along which a leaf stores neighbours: what the compiler vectorises."""
    start, n = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
    for i in range(n):
        if m.step[i] == m.width[0]:
            out[t.path_loop[start + i]] = 1


@PARTS.part
def compile_leaf(t: Tables, m: Moves, leaf: int, contiguous: Any) -> Code:
    """What the compiler makes of a leaf."""
    start, n = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
    weight = t.leaf_numbers[leaf * LEAF_NUMBERS + WEIGHT]
    step = t.leaf_numbers[leaf * LEAF_NUMBERS + STEP]
    body, size = 0, 1.0
    while body < n:
        kind, extent = t.loop_kind[t.path_loop[start + body]], m.extent[body]
        if kind != VECTORIZED:
            small = size * extent <= max(step, UNROLL / weight)
            if kind != UNROLLED and not (kind == SERIAL and small):
                break
            size *= extent
        body += 1
    vector, by_schedule = _vectorised(t, m, leaf, contiguous, body)
    lanes = m.extent[vector] if vector >= 0 else 1.0
    movable = min(max(step, UNROLL / weight), MOVED)
    hoisted = inside = repeats = parallel = 1.0
    for i in range(n):
        if t.path_needed[start + i]:
            inside *= m.extent[i]
        elif t.loop_kind[t.path_loop[start + i]] == PARALLEL and inside > movable:
            parallel *= m.extent[i]
        else:
            repeats *= m.extent[i]
            if inside <= movable:
                hoisted *= m.extent[i]
    return Code(body, vector, by_schedule, lanes, hoisted, inside, repeats, parallel)


@PARTS.part
def _vectorised(t: Tables, m: Moves, leaf: int, contiguous: Any, body: int) -> tuple[int, bool]:
    """The loop whose iterations share a vector, if any, and whether the schedule vectorises it explicitly."""
    start, n = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
    accesses = len(m.width)
    split = np.zeros(n, np.int64)
    for a in range(accesses):
        for i in range(n):
            split[i] |= m.split[a * n + i]
    if t.leaf_numbers[leaf * LEAF_NUMBERS + PREDICATED] == 0:  # a condition in it has TVM write a loop in its place
        for i in range(body - 1, -1, -1):
            if t.loop_kind[t.path_loop[start + i]] == VECTORIZED:
                return i, True
    candidates = body
    if body < n:
        kind = t.loop_kind[t.path_loop[start + body]]
        candidates += kind in (SERIAL, UNROLLED, PARALLEL)
    scalar = t.buffer_inside[t.access_buffer[t.access_at[leaf]]]
    best, largest = -1, 0.0
    for i in range(candidates):
        loop = start + i
        if not t.path_needed[loop] or t.path_reduces[loop] or split[i]:
            continue
        near = m.step[i] == m.width[0]
        along = near or (scalar and contiguous[t.path_loop[loop]] and m.step[i] == 0.0)
        if along and m.extent[i] > largest:
            best, largest = i, m.extent[i]
    return best, False


@PARTS.part
def instructions(t: Tables, m: Moves, c: Code, leaf: int, launched: Any, out: Any) -> None:
    """Columns :data:`CODE_MAGNITUDES` and :data:`CODE_FLAGS`; ``launched`` marks parallel loops counted before."""
    start, n = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
    numbers = leaf * LEAF_NUMBERS
    arithmetic, calls = t.leaf_numbers[numbers + ARITHMETIC], t.leaf_numbers[numbers + CALLS]
    predicated, accesses = t.leaf_numbers[numbers + PREDICATED] > 0, len(m.width)
    all_trips, trips = m.trips[n], m.trips[n] / c.hoisted
    size = m.trips[c.body]
    if c.vector >= c.body:
        size *= c.lanes
    bodies = trips / size
    loads, near, far = 0.0, 0.0, 0.0
    for a in range(1, accesses):
        loads += values_in_vectors(m, c, a, distinct(m, c, a, n), n)
        step = m.step[a * n + c.vector] if c.vector >= 0 else 0.0
        near += 0 < step <= m.width[a] + 1e-6
        far += step > m.width[a] + 1e-6
    loads *= bodies
    stored = values_in_vectors(m, c, 0, distinct(m, c, 0, n), n)
    reduces = t.leaf_numbers[numbers + REDUCES] > 0 and t.leaf_numbers[numbers + INIT] == 0
    odd = reduces and c.by_schedule and whole_vector(c.lanes) != c.lanes
    kept = _kept_over(t, m, c, leaf) if reduces and not odd else 1.0
    vectors = values_in_vectors(m, c, -1, size, n) * bodies
    innermost, outermost = -1, -1
    for i in range(n):
        if t.loop_kind[t.path_loop[start + i]] == PARALLEL:
            innermost = i if innermost < 0 else innermost
            outermost = i
    regions, tasks = 0.0, 1.0
    if innermost >= 0:
        tasks = m.extent[innermost]
        loop = t.path_loop[start + outermost]
        if not launched[loop]:
            launched[loop] = 1
            regions = m.trips[n] / m.trips[outermost + 1]
    split = odd_rows = 0.0
    around = c.body + (c.vector == c.body)
    for a in range(accesses):
        divisions = 0.0
        for i in range(n):
            if i == 0 or i == c.vector or t.loop_kind[t.path_loop[start + i]] == VECTORIZED:
                divisions = max(divisions, float(m.split[a * n + i]))
        odd_rows += divisions > 0
        if divisions > 0:
            # Vectors of the schedule divide all lanes at once, a condition divides again.
            each = min(divisions, 1.0) if c.by_schedule else divisions / (2.0 if predicated else 3.0)
            split += each * trips
        elif around < n:
            split += m.split[a * n + around] / 6 * bodies
    # Loads under a condition of the innermost loop are masked: one test for each vector.
    branches = trips / c.lanes if c.vector == 0 and not reduces else trips
    store_step = m.step[c.vector] if c.vector >= 0 else 0.0
    magnitudes = (
        vectors * arithmetic,
        vectors,
        loads,
        stored * bodies / (kept if stored <= REGISTERS else 1.0),
        vectors / max(1.0, min(stored, 16.0)) if reduces else 0.0,
        bodies,
        calls * trips,
        split,
        branches if predicated else 0.0,
        stored * bodies,
        stored * bodies if odd else 0.0,
        stored,
        kept,
        loads / max(vectors, 1e-9),
        c.lanes,
        m.trips[c.body],
        all_trips / m.trips[c.body],
        c.hoisted,
        c.inside,
        c.repeats,
        c.repeats_parallel,
        m.trips[innermost] if innermost >= 0 else all_trips,
        regions,
    )
    flags = (
        1.0 if c.by_schedule else 0.0,
        1.0 if c.vector >= 0 and not c.by_schedule else 0.0,
        near,
        far,
        1.0 if 0 < store_step <= m.width[0] + 1e-6 else 0.0,
        1.0 if store_step > m.width[0] + 1e-6 else 0.0,
        1.0 if reduces and stored <= REGISTERS else 0.0,
        min(stored / 16, 4.0) if reduces else 0.0,
        1.0 if reduces and c.body < n and t.path_reduces[start + c.body] else 0.0,
        math.ceil(tasks / 2) * 2 / tasks if innermost >= 0 else 2.0,
        1.0 if whole_vector(c.lanes) == c.lanes else 0.0,
        (1.0 if c.lanes % 4 == 0 else 0.0) + (1.0 if c.lanes % 8 == 0 else 0.0),
        odd_rows,
        1.0 if predicated else 0.0,
    )
    for i in range(len(magnitudes)):
        out[i] = magnitudes[i]
    for i in range(len(flags)):
        out[len(magnitudes) + i] = flags[i]


@PARTS.part
def values_in_vectors(m: Moves, c: Code, access: int, values: float, n: int) -> float:
    """Instructions for so many values of the body: fewer where neighbours share a vector; -1 for arithmetic."""
    if c.vector < 0:
        return values
    if access >= 0:
        step = m.step[access * n + c.vector]
        if step == 0.0 or step > m.width[access] + 1e-6 or m.split[access * n + c.vector]:
            return values
    return values / c.lanes * max(1.0, whole_vector(c.lanes) / LANES)


@PARTS.part
def distinct(m: Moves, c: Code, access: int, n: int) -> float:
    """Elements that an access addresses in one body."""
    product = 1.0
    for i in range(n):
        if (i < c.body or i == c.vector) and m.step[access * n + i] > 0:
            product *= m.extent[i]
    return product


@PARTS.part
def _kept_over(t: Tables, m: Moves, c: Code, leaf: int) -> float:
    """Iterations of the reduction right around the body, over which accumulators can stay."""
    start, n, kept = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf], 1.0
    for i in range(c.body, n):
        if t.path_reduces[start + i]:
            kept *= m.extent[i]
        elif i != c.vector:
            break
    return kept


@PARTS.part
def whole_vector(extent: float) -> float:
    """The next power of two: what a vector of an odd length is widened to."""
    power = 1.0
    while power < extent:
        power *= 2.0
    return power


#: Reads and stores of a loop's body up to which LLVM moves them out.
MOVED_ACCESSES = 450.0

STRAIGHT_MAGNITUDES = (
    *("straight_stores", "straight_accesses", "straight_calls", "straight_copies", "again_inner"),
    *("again_outer", "ops_if_again", "ops_if_moved", "calls_if_again"),
)
STRAIGHT_FLAGS = ("again_in_body",)


class Straight(NamedTuple):
    """Loops of all programs after unrolling."""

    copies: Any  # of the body of each loop in the code; 0 for a loop that is left
    # Of one iteration of the loop, with what is unrolled inside; vectors count once among stores and accesses, and in
    # vectors of 8 floats in ``code``.
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
        numbers, inner = leaf * LEAF_NUMBERS, t.path_loop[start]
        touched = t.access_at[leaf + 1] - t.access_at[leaf] + t.leaf_numbers[numbers + ALSO_READ]
        stores[inner] += 1
        accesses[inner] += touched
        calls[inner] += t.leaf_numbers[numbers + CALLS]
        code[inner] += touched + t.leaf_numbers[numbers + ARITHMETIC]
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
    """Columns :data:`STRAIGHT_MAGNITUDES` and :data:`STRAIGHT_FLAGS`; returns the index of the first loop left."""
    start, n = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
    numbers = leaf * LEAF_NUMBERS
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
    ops = trips * t.leaf_numbers[numbers + ARITHMETIC]
    moved = again_inner if accesses <= MOVED_ACCESSES and calls == 0 else 1.0
    out[0] = stores
    out[1] = accesses
    out[2] = calls
    out[3] = copies
    out[4] = again_inner
    out[5] = again_outer
    out[6] = ops
    out[7] = ops / moved
    out[8] = m.trips[n] / again_body * t.leaf_numbers[numbers + CALLS]
    out[9] = again_body > 1
    return left


#: Instructions that stay decoded, and vector registers.
DECODED, VECTOR_REGISTERS = 1536.0, 16.0

TILE_MAGNITUDES = (
    *("tile_rows", "tile_columns", "live_vectors", "spilled", "body_code"),
    *("straight_code", "fetched_code", "left_iterations", "vector_ops_4"),
)
TILE_FLAGS = ("tail_8", "tail_4")


@PARTS.part
def register_tile(t: Tables, m: Moves, c: Code, s: Straight, leaf: int, left: int, out: Any) -> None:
    """Columns :data:`TILE_MAGNITUDES` and :data:`TILE_FLAGS`; ``left`` is the index of the first loop that is left."""
    start, n = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
    numbers = leaf * LEAF_NUMBERS
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
    reduces = t.leaf_numbers[numbers + REDUCES] > 0 and t.leaf_numbers[numbers + INIT] == 0
    live = stored + min(columns, rows if rows > 0 else columns) + 1 if reduces else min(stored, 4.0)
    size = m.trips[c.body] * (c.lanes if c.vector >= c.body else 1.0)
    bodies = m.trips[n] / c.hoisted / size
    arithmetic = values_in_vectors(m, c, -1, size, n) * t.leaf_numbers[numbers + ARITHMETIC]
    around = t.path_loop[start + left] if left < n else t.path_loop[start + n - 1] if n else -1
    code = s.code[around] if around >= 0 else arithmetic
    iterations = m.trips[n] / m.trips[left]
    out[0] = rows
    out[1] = columns
    out[2] = live
    out[3] = max(live - VECTOR_REGISTERS, 0.0) * bodies
    out[4] = arithmetic + loads + stored
    out[5] = code
    out[6] = iterations * max(code - DECODED, 0.0)
    out[7] = iterations
    vectors_4 = size / c.lanes * max(1.0, math.ceil(c.lanes / 4) * 4 / 4) if c.vector >= 0 else size
    out[8] = vectors_4 * bodies * t.leaf_numbers[numbers + ARITHMETIC]
    out[9] = c.lanes % LANES / LANES if c.vector >= 0 else 0.0
    out[10] = c.lanes % 4 / 4 if c.vector >= 0 else 0.0


THREADS = (4, 8, 16, 32)
TASK_MAGNITUDES = ("tasks", "task_ops", "serial_ops", "region_ops", "task_store_step")
TASK_FLAGS = (*(f"imbalance_{n}" for n in THREADS), "work_share", "shared_lines")


@PARTS.part
def parallel_tasks(t: Tables, m: Moves, leaf: int, ops: float, program_ops: float, regions: float, out: Any) -> None:
    """Columns :data:`TASK_MAGNITUDES` and :data:`TASK_FLAGS`; ``ops`` are the leaf's vector operations."""
    start, n = t.path_at[leaf], t.path_at[leaf + 1] - t.path_at[leaf]
    tasks, at = 1.0, -1
    for i in range(n):
        if t.loop_kind[t.path_loop[start + i]] == PARALLEL:
            tasks, at = m.extent[i], i
            break
    out[0] = tasks if at >= 0 else 0.0
    out[1] = ops / tasks
    out[2] = ops if at < 0 else 0.0
    out[3] = ops / max(regions, 1.0) if at >= 0 else 0.0
    out[4] = m.step[at] if at >= 0 else 0.0
    k = 5
    for threads in THREADS:
        # The longest share of whole tasks over an equal share.
        out[k] = math.ceil(tasks / threads) * threads / tasks if at >= 0 else float(threads)
        k += 1
    out[k] = ops / max(program_ops, 1e-9)
    out[k + 1] = at >= 0 and 0.0 < m.step[at] < LINE_BYTES
