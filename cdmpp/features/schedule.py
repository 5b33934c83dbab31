"""Schedule features of leaves: additional columns of :mod:`cdmpp.features.leaf`, for programs given as TIR.

The columns of a leaf say how large its loops and accesses are; how fast a scheduled program runs on a CPU
depends as much on the order of the loops. Here, per leaf: the bytes that pass between levels of a memory
hierarchy of stated capacities, what is kept in registers, how the innermost loops are laid out, and what a
compiler makes of it. Nothing is simulated.

The columns behind them are those of a launch on a GPU (:mod:`cdmpp.features.launch_columns`): a program with thread
bindings has these, any other the former, and the others are 0. The last, ``sure_calls``, is for the physical limits of
predictions: no network reads it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from cdmpp.features.addresses import moves, places
from cdmpp.features.ast import CompactAST, Leaf
from cdmpp.features.cache_lines import (
    LINE_FLAGS,
    LINE_MAGNITUDES,
    REUSE_MAGNITUDES,
    STRIDE_MAGNITUDES,
    cache_lines,
    program_bytes,
    reuse,
    strides,
)
from cdmpp.features.instructions import (
    CODE_FLAGS,
    CODE_MAGNITUDES,
    STRAIGHT_FLAGS,
    STRAIGHT_MAGNITUDES,
    TASK_FLAGS,
    TASK_MAGNITUDES,
    TILE_FLAGS,
    TILE_MAGNITUDES,
    compile_leaf,
    contiguous_loops,
    instructions,
    parallel_tasks,
    register_tile,
    straight,
    straight_code,
)
from cdmpp.features.launch_schema import GPU_COLUMNS, GPU_FLAGS
from cdmpp.features.leaf import unique_elements
from cdmpp.features.leaf_tables import PARTS, Tables, plain, tables
from cdmpp.features.loop_order import LOOP_FLAGS, LOOP_MAGNITUDES, loop_order

Array = np.ndarray[Any, np.dtype[np.float32]]

_PARTS = (
    (*LOOP_MAGNITUDES, *LOOP_FLAGS),
    (*CODE_MAGNITUDES, *CODE_FLAGS),
    (*LINE_MAGNITUDES, *LINE_FLAGS),
    (*STRAIGHT_MAGNITUDES, *STRAIGHT_FLAGS),
    REUSE_MAGNITUDES,
    (*TILE_MAGNITUDES, *TILE_FLAGS),
    STRIDE_MAGNITUDES,
    (*TASK_MAGNITUDES, *TASK_FLAGS),
)
#: Names of the columns of :func:`columns`.
ORDER: tuple[str, ...] = tuple(name for part in _PARTS for name in part)
_WIDTH = len(ORDER)
_CODE, _LINES, _UNROLLED, _REUSE, _TILE, _STRIDE, _TASKS = tuple(accumulate(map(len, _PARTS)))[:-1]
_OPS, _REGIONS = ORDER.index("vector_ops"), ORDER.index("regions")


def columns(t: Tables) -> Any:
    """Columns :data:`ORDER` of every leaf, as they are: (leaves, len(ORDER)) float64."""
    compiled = PARTS.compiled
    return _columns(plain(t)) if compiled is None else compiled(t)


@PARTS.entry
def _entry(sources: int) -> Callable[[Tables], Any]:
    def compiled_columns(t: Tables) -> Any:
        stamp = sources  # noqa: F841 - the compiled function is looked up by it
        return _columns(t)

    return compiled_columns


@PARTS.part
def _columns(t: Tables) -> Any:
    leaves, loops = len(t.path_at) - 1, len(t.loop_extent)
    out = np.zeros((leaves, _WIDTH))
    where, left_loops = places(t), straight(t)
    whole, made = program_bytes(t, where), np.zeros(len(t.buffer_inside))
    contiguous, launched = np.zeros(loops, np.int64), np.zeros(loops, np.int64)
    for program in range(len(t.program_at) - 1):
        first, ops = t.program_at[program], 0.0
        moved = [moves(t, where, leaf) for leaf in range(first, t.program_at[program + 1])]
        for i in range(len(moved)):
            contiguous_loops(t, moved[i], first + i, contiguous)
        for i in range(len(moved)):
            m, leaf, row = moved[i], first + i, out[first + i]
            c = compile_leaf(t, m, leaf, contiguous)
            loop_order(t, m, leaf, row[:_CODE])
            instructions(t, m, c, leaf, launched, row[_CODE:_LINES])
            cache_lines(t, m, leaf, row[_LINES:_UNROLLED])
            left = straight_code(t, m, c, left_loops, leaf, row[_UNROLLED:_REUSE])
            reuse(t, where, m, leaf, whole[program], made, row[_REUSE:_TILE])
            register_tile(t, m, c, left_loops, leaf, left, row[_TILE:_STRIDE])
            strides(m, c, row[_STRIDE:_TASKS])
            ops += row[_OPS]
        for i in range(len(moved)):
            row = out[first + i]
            parallel_tasks(t, moved[i], first + i, row[_OPS], ops, row[_REGIONS], row[_TASKS:])
    return out


#: The columns that version 3 added, by what they tell.
SCHEDULE_GROUPS: dict[str, tuple[str, ...]] = {
    "repeats": (*STRAIGHT_MAGNITUDES, *STRAIGHT_FLAGS),
    "reuse": REUSE_MAGNITUDES,
    "registers": (*TILE_MAGNITUDES, *TILE_FLAGS),
    "strides": STRIDE_MAGNITUDES,
    "tasks": (*TASK_MAGNITUDES, *TASK_FLAGS),
}
_ADDED = tuple(name for names in SCHEDULE_GROUPS.values() for name in names)
#: Columns of version 2, which counted caches in the middle of the instructions.
_FIRST = (
    *LOOP_MAGNITUDES,
    *CODE_MAGNITUDES[:5],
    *LINE_MAGNITUDES[:-4],
    *CODE_MAGNITUDES[5:-2],
    *LINE_MAGNITUDES[-4:],
    *CODE_MAGNITUDES[-2:],
    *LOOP_FLAGS,
    *CODE_FLAGS,
    *LINE_FLAGS,
)
_CPU = (*_FIRST, *_ADDED)
GPU_NAMES = tuple(f"gpu_{name}" for name in GPU_COLUMNS)
#: The columns that networks read, and how many of them come first in every version.
SCHEDULE_VERSION = 8
NETWORK_SCHEDULE_WIDTH, FIRST_WIDTH = len(_CPU) + len(GPU_NAMES), len(_FIRST)
#: The first of the launch's columns.
LAUNCH_FROM = len(_CPU)
SCHEDULE_COLUMNS: tuple[str, ...] = (*_CPU, *GPU_NAMES, "sure_calls")
SCHEDULE_WIDTH = len(SCHEDULE_COLUMNS)
SCHEDULE_HASH = hashlib.sha256(f"{SCHEDULE_VERSION}\n{','.join(SCHEDULE_COLUMNS)}".encode()).hexdigest()[:16]
#: Columns that are no magnitudes.
SCHEDULE_FLAGS = frozenset(
    (*LOOP_FLAGS, *CODE_FLAGS, *LINE_FLAGS, *STRAIGHT_FLAGS, *TILE_FLAGS, *TASK_FLAGS, *(f"gpu_{x}" for x in GPU_FLAGS))
)

_PLACES = np.array([ORDER.index(name) for name in _CPU])
_IS_FLAG = np.array([name in SCHEDULE_FLAGS for name in _CPU])


def schedule_matrices(asts: Sequence[CompactAST]) -> list[Array]:
    """Schedule columns of concrete programs.

    Returns for each program float32, (leaves, SCHEDULE_WIDTH): magnitudes as log2(1 + x), flags as they are; columns
    named by :data:`SCHEDULE_COLUMNS`.
    """
    plain = [ast for ast in asts if not _launched(ast)]
    parts = iter(_cpu_matrices(plain) if plain else [])
    matrices = []
    for ast in asts:
        if _launched(ast):
            if ast.launches is None:
                raise ValueError("the walk of a program with thread bindings recorded no launches: use recorded_ast")
            part = np.zeros((len(ast.leaves), SCHEDULE_WIDTH), dtype=np.float32)
            part[:, LAUNCH_FROM:-1] = ast.launches
            matrices.append(part)
        else:
            matrices.append(next(parts))
    return matrices


def _launched(ast: CompactAST) -> bool:
    return any(loop.kind.startswith(("blockIdx", "threadIdx")) for loop in ast.loops)


def _cpu_matrices(asts: Sequence[CompactAST]) -> list[Array]:
    """:func:`schedule_matrices` of programs without thread bindings."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        raw = columns(tables(asts))[:, _PLACES]
        scaled = np.where(_IS_FLAG, raw, np.log2(1 + np.maximum(raw, 0))).astype(np.float32)
    calls = np.log2([[1.0 + _sure_calls(ast, leaf)] for ast in asts for leaf in ast.leaves]).astype(np.float32)
    launches = np.zeros((len(scaled), len(GPU_NAMES)), dtype=np.float32)
    ends = np.cumsum([len(ast.leaves) for ast in asts])
    return np.split(np.concatenate([scaled, launches, calls], axis=1), ends[:-1])


def _sure_calls(ast: CompactAST, leaf: Leaf) -> float:
    """Calls of the C library that a leaf makes at least: a call is moved out of loops that its arguments do not use.

    Under a condition, elements outside of the buffer are not computed.
    """
    extents = {p: ast.loops[p].extent for p in leaf.path}
    total, trips = 0.0, math.prod(extents.values())
    for reads in leaf.call_reads:
        count = math.prod(extents[p] for p in {p for a in reads for i in a.indices for p in i.steps} & extents.keys())
        if leaf.predicated:
            count = min(count, max((float(unique_elements(a, extents, trips)) for a in reads), default=1.0))
        total += count
    return total
