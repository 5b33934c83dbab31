"""Columns of a leaf's share of parallel work: tasks, their balance over threads, what runs on one thread."""

from __future__ import annotations

import math
from typing import Any

from cdmpp.features.addresses import LINE_BYTES, Moves
from cdmpp.features.leaf_tables import PARALLEL, PARTS, Tables

THREADS = (4, 8, 16, 32)
MAGNITUDES = ("tasks", "task_ops", "serial_ops", "region_ops", "task_store_step")
FLAGS = (*(f"imbalance_{n}" for n in THREADS), "work_share", "shared_lines")


@PARTS.part
def parallel_tasks(t: Tables, m: Moves, leaf: int, ops: float, program_ops: float, regions: float, out: Any) -> None:
    """Columns :data:`MAGNITUDES` and :data:`FLAGS` of a leaf with so many vector operations of its program's."""
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
