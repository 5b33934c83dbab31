"""Schedule features of leaves: additional columns of :mod:`cdmpp.features.leaf`, for programs given as TIR.

The columns of a leaf say how large its loops and accesses are; how fast a scheduled program runs on a CPU
depends as much on the order of the loops. Here, per leaf: the bytes that pass between levels of a memory
hierarchy of stated capacities, what is kept in registers, how the innermost loops are laid out, and what a
compiler makes of it. Nothing is simulated.

The last columns are those of a GPU schedule (:mod:`cdmpp.features.gpu_schedule`), 0 in a program without thread
bindings.

A version adds columns behind those of the versions before, which keep their values: a model reads as many as it was
trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from cdmpp.features import cache_lines, instructions, loop_order, parallel_tasks, register_tile, straight_code
from cdmpp.features import reuse as reuses
from cdmpp.features import strides as stride
from cdmpp.features.ast import CompactAST
from cdmpp.features.gpu_schedule import GPU_COLUMNS, GPU_FLAGS, GPU_WIDTH, gpu_columns
from cdmpp.features.leaf_tables import tables
from cdmpp.features.schedule_columns import ORDER, columns

Array = np.ndarray[Any, np.dtype[np.float32]]

#: The columns that version 3 added, by what they tell.
SCHEDULE_GROUPS: dict[str, tuple[str, ...]] = {
    "repeats": (*straight_code.MAGNITUDES, *straight_code.FLAGS),
    "reuse": reuses.MAGNITUDES,
    "registers": (*register_tile.MAGNITUDES, *register_tile.FLAGS),
    "strides": stride.MAGNITUDES,
    "tasks": (*parallel_tasks.MAGNITUDES, *parallel_tasks.FLAGS),
}
_ADDED = tuple(name for names in SCHEDULE_GROUPS.values() for name in names)
#: Columns of version 2, which counted caches in the middle of the instructions.
_FIRST = (
    *loop_order.MAGNITUDES,
    *instructions.MAGNITUDES[:5],
    *cache_lines.MAGNITUDES[:-4],
    *instructions.MAGNITUDES[5:-2],
    *cache_lines.MAGNITUDES[-4:],
    *instructions.MAGNITUDES[-2:],
    *loop_order.FLAGS,
    *instructions.FLAGS,
    *cache_lines.FLAGS,
)
#: Versions that models may read, with the number of columns of each.
_CPU = (*_FIRST, *_ADDED)
GPU_NAMES = tuple(f"gpu_{name}" for name in GPU_COLUMNS)
SCHEDULE_WIDTHS = {2: len(_FIRST), 3: len(_CPU), 4: len(_CPU) + GPU_WIDTH}
SCHEDULE_VERSION = max(SCHEDULE_WIDTHS)
SCHEDULE_COLUMNS: tuple[str, ...] = (*_CPU, *GPU_NAMES)
SCHEDULE_WIDTH = len(SCHEDULE_COLUMNS)
SCHEDULE_HASHES = {
    version: hashlib.sha256(f"{version}\n{','.join(SCHEDULE_COLUMNS[:width])}".encode()).hexdigest()[:16]
    for version, width in SCHEDULE_WIDTHS.items()
}
SCHEDULE_HASH = SCHEDULE_HASHES[SCHEDULE_VERSION]
#: Columns that are no magnitudes.
SCHEDULE_FLAGS = frozenset(
    name
    for part in (loop_order, instructions, cache_lines, straight_code, register_tile, parallel_tasks)
    for name in part.FLAGS
).union(f"gpu_{name}" for name in GPU_FLAGS)

_PLACES = np.array([ORDER.index(name) for name in _CPU])
_IS_FLAG = np.array([name in SCHEDULE_FLAGS for name in _CPU])


def schedule_matrix(ast: CompactAST) -> Array:
    """Schedule columns of a concrete program.

    Returns
    -------
    ndarray of float32, (leaves, SCHEDULE_WIDTH)
        Magnitudes as log2(1 + x), flags as they are; columns named by :data:`SCHEDULE_COLUMNS`.
    """
    return schedule_matrices([ast])[0]


def schedule_matrices(asts: Sequence[CompactAST]) -> list[Array]:
    """:func:`schedule_matrix` of programs, in order."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        raw = columns(tables(asts))[:, _PLACES]
        scaled = np.where(_IS_FLAG, raw, np.log2(1 + np.maximum(raw, 0))).astype(np.float32)
    scaled = np.concatenate([scaled, np.concatenate([gpu_columns(ast) for ast in asts])], axis=1)
    ends = np.cumsum([len(ast.leaves) for ast in asts])
    return np.split(scaled, ends[:-1])
