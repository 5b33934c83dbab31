"""All columns of the schedule, leaf by leaf, for many programs at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np

from cdmpp.features import cache_lines as lines
from cdmpp.features import instructions as code
from cdmpp.features import loop_order as order
from cdmpp.features import parallel_tasks as tasks
from cdmpp.features import register_tile as tile
from cdmpp.features import reuse as reuses
from cdmpp.features import straight_code as unrolled
from cdmpp.features import strides as stride
from cdmpp.features.addresses import moves, places
from cdmpp.features.cache_lines import cache_lines
from cdmpp.features.instructions import compile_leaf, contiguous_loops, instructions
from cdmpp.features.leaf_tables import PARTS, Tables, plain
from cdmpp.features.loop_order import loop_order
from cdmpp.features.parallel_tasks import parallel_tasks
from cdmpp.features.register_tile import register_tile
from cdmpp.features.reuse import program_bytes, reuse
from cdmpp.features.straight_code import straight, straight_code
from cdmpp.features.strides import strides

_PARTS = (
    (*order.MAGNITUDES, *order.FLAGS),
    (*code.MAGNITUDES, *code.FLAGS),
    (*lines.MAGNITUDES, *lines.FLAGS),
    (*unrolled.MAGNITUDES, *unrolled.FLAGS),
    reuses.MAGNITUDES,
    (*tile.MAGNITUDES, *tile.FLAGS),
    stride.MAGNITUDES,
    (*tasks.MAGNITUDES, *tasks.FLAGS),
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
