"""All schedules of small steps, by branch and bound: a shorter one, or the proof that there is none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.jit import COMPILED, jit
from cdmpp.planning.multimodal.schedule import Schedule, followed
from cdmpp.planning.multimodal.search import ROUNDING
from cdmpp.planning.multimodal.tasks import Tasks

#: Tasks of a step that is tried, and nodes of the trees of its variants.
MAX_TASKS, MAX_NODES = 64, 500_000
#: Nodes a second, at the slowest: what is begun ends within the budget.
_RATE = 2e6 if COMPILED else 5e3


@jit
def branch_and_bound(
    ranks: int,
    rank: np.ndarray,
    duration_s: np.ndarray,
    before: np.ndarray,
    first_after: np.ndarray,
    after: np.ndarray,
    tail_s: np.ndarray,
    limit_s: float,
    nodes: int,
    order: np.ndarray,
) -> tuple[float, bool, int]:
    """The shortest of the active schedules (Giffler and Thompson 1960) that are shorter than ``limit_s``.

    Parameters
    ----------
    rank, duration_s, before, tail_s : (tasks,)
        As in :func:`cdmpp.planning.multimodal.dispatch.dispatch`, of forward and backward tasks.
    nodes : int
        Choices that may be tried.
    order : int64 (tasks,)
        Filled with the tasks in the order of their choice, if a shorter schedule was found.

    Returns
    -------
    best_s : float
        ``limit_s`` if none was found.
    complete : bool
        Whether there is no shorter one than that.
    nodes : int
        Choices that are left.
    """
    tasks = len(duration_s)
    left = np.empty((tasks + 1, tasks), np.int64)
    ready_s = np.zeros((tasks + 1, tasks), np.float64)
    free_s = np.zeros((tasks + 1, ranks), np.float64)
    end_s = np.zeros(tasks + 1, np.float64)
    open_ = np.empty((tasks + 1, tasks), np.int64)
    opens = np.full(tasks + 1, -1, np.int64)
    chosen = np.empty(tasks, np.int64)
    placed = np.zeros(tasks, np.bool_)
    left[0] = before
    best_s = limit_s
    depth = 0
    while depth >= 0:
        if opens[depth] < 0:  # a new node: its bound, then what it may choose between
            opens[depth] = 0
            if depth == tasks:
                if end_s[depth] < best_s * (1 - 1e-12):
                    best_s = end_s[depth]
                    order[:] = chosen
            else:
                bound_s = 0.0
                soonest_s = np.inf
                at_rank = -1
                for r in range(ranks):
                    work_s = 0.0
                    head_s = np.inf
                    rest_s = np.inf
                    for t in range(tasks):
                        if rank[t] == r and not placed[t]:
                            start_s = max(free_s[depth, r], ready_s[depth, t])
                            bound_s = max(bound_s, start_s + duration_s[t] + tail_s[t])
                            work_s += duration_s[t]
                            head_s = min(head_s, start_s)
                            rest_s = min(rest_s, tail_s[t])
                            if left[depth, t] == 0 and start_s + duration_s[t] < soonest_s:
                                soonest_s = start_s + duration_s[t]
                                at_rank = r
                    if work_s > 0.0:
                        bound_s = max(bound_s, head_s + work_s + rest_s)
                if bound_s < best_s * (1 - 1e-12):
                    for t in range(tasks):
                        if rank[t] == at_rank and not placed[t] and left[depth, t] == 0:
                            start_s = max(free_s[depth, at_rank], ready_s[depth, t])
                            if start_s < soonest_s or start_s + duration_s[t] <= soonest_s:
                                # The longest tail is taken first: from the end of the list.
                                place = opens[depth]
                                while place > 0 and (
                                    duration_s[open_[depth, place - 1]] + tail_s[open_[depth, place - 1]]
                                    > duration_s[t] + tail_s[t]
                                ):
                                    open_[depth, place] = open_[depth, place - 1]
                                    place -= 1
                                open_[depth, place] = t
                                opens[depth] += 1
        if opens[depth] == 0:
            opens[depth] = -1
            depth -= 1
            if depth >= 0:
                placed[chosen[depth]] = False
            continue
        nodes -= 1
        if nodes < 0:
            return best_s, False, 0
        opens[depth] -= 1
        task = open_[depth, opens[depth]]
        chosen[depth] = task
        placed[task] = True
        depth += 1
        left[depth] = left[depth - 1]
        ready_s[depth] = ready_s[depth - 1]
        free_s[depth] = free_s[depth - 1]
        r = rank[task]
        done_s = max(free_s[depth, r], ready_s[depth, task]) + duration_s[task]
        free_s[depth, r] = done_s
        end_s[depth] = max(end_s[depth - 1], done_s)
        for at in range(first_after[task], first_after[task + 1]):
            other = after[at]
            left[depth, other] -= 1
            ready_s[depth, other] = max(ready_s[depth, other], done_s)
    return best_s, True, nodes


def best_of_all(variants: Sequence[Tasks], best: Schedule, watch: SearchControl) -> tuple[Schedule, bool]:
    """The shortest schedule of small variants without a memory limit.

    Returns
    -------
    Schedule
        ``best`` or a shorter one.
    bool
        Whether no schedule of any variant is shorter.
    """
    proven, nodes = True, MAX_NODES
    for tasks in sorted(variants, key=lambda each: each.bound_s):
        if tasks.bound_s >= best.makespan_s * (1 - ROUNDING):
            continue
        if 2 * tasks.half > MAX_TASKS or np.isfinite(tasks.room).any() or watch.expired:
            proven = False
            continue
        rank = np.concatenate([tasks.rank, tasks.rank])
        order = np.full(2 * tasks.half, -1, np.int64)
        nodes = int(min(nodes, watch.left_s * _RATE))
        _, complete, nodes = branch_and_bound(
            tasks.ranks,
            rank,
            tasks.duration_s,
            tasks.before,
            tasks.first_after,
            tasks.after,
            tasks.ways_s[1],
            best.makespan_s,
            nodes,
            order,
        )
        proven = proven and bool(complete)
        if order[0] >= 0:
            found = followed(tasks, [order[rank[order] == r].tolist() for r in range(tasks.ranks)])
            best = found if found.makespan_s < best.makespan_s else best
    return best, proven
