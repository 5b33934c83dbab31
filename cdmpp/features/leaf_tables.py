"""Leaves of many programs as flat arrays: what the columns of the schedule are computed from.

Python objects cost a microsecond each time they are looked at, compiled loops over numbers a nanosecond. So a
population's compact ASTs are written down once, leaf by leaf, and everything behind it
(:mod:`cdmpp.features.schedule`) reads numbers. Entry i of a list that belongs to item j stands between ``j_at[i]``
and ``j_at[i + 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cdmpp.features.ast import OPERATIONS, CompactAST
from cdmpp.features.leaf import element_bytes
from cdmpp.utils.jit import LazyJit

Array = np.ndarray[Any, np.dtype[Any]]

#: Functions on :class:`Tables`, written in the subset of Python that numba compiles.
PARTS = LazyJit()
#: Kinds of loops, as numbers.
SERIAL, PARALLEL, VECTORIZED, UNROLLED, OTHER = range(5)
_KINDS = {"serial": SERIAL, "parallel": PARALLEL, "vectorized": VECTORIZED, "unrolled": UNROLLED}
#: Numbers of a leaf, in order.
(ARITHMETIC, WEIGHT, STEP, INIT, PREDICATED, CALLS, REDUCES, ALSO_READ, COMPUTED) = range(9)
LEAF_NUMBERS = 9
_NEVER = (np.inf, np.inf, True)
_O = {name: i for i, name in enumerate(OPERATIONS)}
_ARITHMETIC = tuple(
    _O[name]
    for name in (
        *("float_add", "float_mul", "float_compare", "float_div", "select"),
        *("float_cast", "int_add", "int_mul", "int_compare"),
    )
)


class Tables(NamedTuple):
    """Numbers of programs, float64 or int64, one dimension each."""

    program_at: Any  # first leaf of each program, and the number of leaves
    loop_at: Any  # first loop of each program, and the number of loops
    # Of each loop; the step is its own ``auto_unroll_max_step``.
    loop_extent: Any
    loop_kind: Any
    loop_step: Any
    leaf_numbers: Any  # :data:`LEAF_NUMBERS` numbers for each leaf
    # Loops of each leaf of more than one iteration, innermost first; whether the leaf sums over the loop; whether
    # anything in it depends on the loop.
    path_at: Any
    path_loop: Any
    path_reduces: Any
    path_needed: Any
    # Accesses of each leaf, its store first; bytes of an element.
    access_at: Any
    access_buffer: Any
    access_width: Any
    # Indices of each access, the first dimension first.
    index_at: Any
    index_indirect: Any
    # Steps of each index; the loop by its place in the leaf's path.
    step_at: Any
    step_loop: Any
    step_value: Any
    # Of each step, its :attr:`AffineRange.crossings`; inf for never.
    step_crosses: Any
    step_static: Any
    step_shifts: Any
    # Buffers of each program: declared sizes; whether the program allocates it.
    buffer_at: Any
    buffer_size: Any
    buffer_inside: Any


_REALS = frozenset(
    ("loop_extent", "leaf_numbers", "access_width", "step_value", "step_crosses", "step_static", "buffer_size")
)


def tables(asts: Sequence[CompactAST]) -> Tables:
    """Write programs down as numbers."""
    t = Tables(*([] for _ in Tables._fields))
    for start in (t.path_at, t.access_at, t.index_at, t.step_at, t.buffer_at):
        start.append(0)
    for ast in asts:
        t.program_at.append(len(t.path_at) - 1)
        _program(t, ast)
    t.program_at.append(len(t.path_at) - 1)
    t.loop_at.append(len(t.loop_extent))
    arrays = (
        np.array(values, dtype=np.float64 if name in _REALS else np.int64)
        for name, values in zip(Tables._fields, t, strict=True)
    )
    return Tables(*arrays)


def plain(t: Tables) -> Tables:
    """The same as lists, which plain Python reads faster than arrays."""
    return Tables(*(array.tolist() for array in t))


def _program(t: Tables, ast: CompactAST) -> None:
    loops, first = ast.loops, len(t.loop_extent)
    t.loop_at.append(first)
    for loop in loops:
        t.loop_extent.append(loop.extent)
        t.loop_kind.append(_KINDS.get(loop.kind, OTHER))
        t.loop_step.append(loop.unroll_step)
    buffers: dict[int, int] = {}
    for leaf in ast.leaves:
        place: dict[int, int] = {}
        step = 0
        for p in reversed(leaf.path):
            loop = loops[p]
            step = max(step, loop.unroll_step)
            if loop.extent > 1:
                place[p] = len(place)
                t.path_loop.append(first + p)
                t.path_reduces.append(p in leaf.reduce_loops)
        needed = [p in leaf.reduce_loops for p in place]
        for access in (leaf.store, *leaf.reads):
            buffer = access.buffer
            key = id(buffer)
            if key not in buffers:
                buffers[key] = len(t.buffer_inside)
                t.buffer_inside.append(not buffer.is_parameter)
                t.buffer_size.extend(buffer.shape)
                t.buffer_at.append(len(t.buffer_size))
            t.access_buffer.append(buffers[key])
            t.access_width.append(element_bytes(buffer.dtype))
            for index in access.indices:
                for p, value in index.steps.items():
                    at = place.get(p)
                    if at is not None:
                        needed[at] = True
                        t.step_loop.append(at)
                        t.step_value.append(value)
                        crosses, static, shifts = index.crossings.get(p, _NEVER)
                        t.step_crosses.append(crosses)
                        t.step_static.append(static)
                        t.step_shifts.append(shifts)
                t.step_at.append(len(t.step_loop))
                t.index_indirect.append(index.indirect)
            t.index_at.append(len(t.index_indirect))
        t.access_at.append(len(t.access_buffer))
        t.path_needed.extend(needed)
        t.path_at.append(len(t.path_loop))
        _numbers(t.leaf_numbers, leaf, step)


def _numbers(out: list[float], leaf: Any, step: int) -> None:
    counts = leaf.counts
    total = sum(counts[i] for i in _ARITHMETIC)
    compares = counts[_O["float_compare"]] + counts[_O["int_compare"]]
    reduces, predicated = bool(leaf.reduce_loops), leaf.predicated > 0
    weight = len(leaf.reads) + total + 2.0 * compares + 10.0 * leaf.library_calls
    out += (
        # A multiplication and the addition of its result are one.
        max(float(total - counts[_O["float_fma"]]), 1.0),
        # What the compiler takes one evaluation for when it decides on unrolling.
        max(weight + (0.0 if reduces else 1.0) + 4.0 * predicated, 1.0),
        step,
        leaf.is_init,
        predicated,
        leaf.library_calls,
        reduces,
        leaf.store.also_read,
        sum(counts) - counts[_O["float_fma"]],
    )
