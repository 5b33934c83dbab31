"""Lower bound of schedules whose tasks each run on one rank: Jackson's preemptive schedule of every rank."""

from __future__ import annotations

import numpy as np

from cdmpp.utils.jit import jit


def lower_bound_s(
    rank: np.ndarray, ranks: int, duration_s: np.ndarray, head_s: np.ndarray, tail_s: np.ndarray
) -> float:
    """Jackson's preemptive bound of each rank, and the critical path.

    Each task has a head (longest path to it) and a tail (longest path from it). On one rank, the preemptive schedule
    that always runs the released task with the longest tail is optimal, so no schedule without preemption is shorter
    (Carlier 1982).

    Parameters
    ----------
    rank : ndarray of int64, shape (tasks,)
    duration_s, head_s, tail_s : ndarray of float64, shape (tasks,)
    """
    bound_s = float((head_s + duration_s + tail_s).max())
    for r in range(ranks):
        tasks = np.flatnonzero(rank == r)
        tasks = tasks[np.argsort(head_s[tasks], kind="stable")]
        bound_s = max(bound_s, float(preemptive_makespan_s(head_s[tasks], duration_s[tasks], tail_s[tasks])))
    return bound_s


@jit
def preemptive_makespan_s(head_s: np.ndarray, duration_s: np.ndarray, tail_s: np.ndarray) -> float:
    """Makespan of Jackson's preemptive schedule of one machine, tails included, in seconds.

    Parameters
    ----------
    head_s, duration_s, tail_s : ndarray of float64, shape (tasks,)
        Sorted by growing head.
    """
    count = len(head_s)
    remaining_s = duration_s.copy()
    heap = np.empty(count, np.int64)  # released tasks, the longest tail first
    size = at = 0
    now_s = makespan_s = 0.0
    while at < count or size > 0:
        if size == 0:
            now_s = max(now_s, head_s[at])
        while at < count and head_s[at] <= now_s:
            place = size
            size += 1
            while place > 0 and tail_s[heap[(place - 1) // 2]] < tail_s[at]:
                heap[place] = heap[(place - 1) // 2]
                place = (place - 1) // 2
            heap[place] = at
            at += 1
        task = heap[0]
        if at < count and now_s + remaining_s[task] > head_s[at]:
            remaining_s[task] -= head_s[at] - now_s
            now_s = head_s[at]
            continue
        now_s += remaining_s[task]
        makespan_s = max(makespan_s, now_s + tail_s[task])
        size -= 1
        last = heap[size]
        place = 0
        while 2 * place + 1 < size:
            child = 2 * place + 1
            if child + 1 < size and tail_s[heap[child + 1]] > tail_s[heap[child]]:
                child += 1
            if tail_s[heap[child]] <= tail_s[last]:
                break
            heap[place] = heap[child]
            place = child
        heap[place] = last
    return makespan_s
