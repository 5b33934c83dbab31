"""Exact solution of small steps by branch and bound: a shorter schedule, or the proof that there is none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cdmpp.plan.multimodal.graph import TaskGraph
from cdmpp.plan.multimodal.schedule import Schedule, schedule_orders
from cdmpp.plan.multimodal.tasks import Tasks
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.utils.jit import COMPILED, jit

#: Largest step that is solved exactly, and nodes of the trees of all its variants.
MAX_TASKS, MAX_NODES = 64, 500_000
#: Nodes per second, at the slowest: what is started ends within the budget.
_NODES_PER_S = 2e6 if COMPILED else 5e3
#: Relative difference of a makespan and a bound that are equal: sums of the same seconds in another order.
ROUNDING = 1e-12


@jit
def branch_and_bound(
    ranks: int, rank: np.ndarray, graph: TaskGraph, tail_s: np.ndarray, limit_s: float, nodes: int, order: np.ndarray
) -> tuple[float, bool, int]:
    """Shortest active schedule (Giffler and Thompson 1960) among those shorter than ``limit_s``.

    Parameters
    ----------
    ranks : int
    rank : ndarray of int64, shape (tasks,)
    graph : TaskGraph
    tail_s : ndarray of float64, shape (tasks,)
        Longest path from each task's end to the end of the step.
    limit_s : float
    nodes : int
        Most nodes to visit.
    order : ndarray of int64, shape (tasks,)
        Filled with the tasks in the order of their choice, if a shorter schedule was found.

    Returns
    -------
    best_s : float
        Makespan in seconds; ``limit_s`` if no shorter schedule was found.
    complete : bool
        Whether the tree was searched completely.
    nodes : int
        Nodes that are left.
    """
    duration_s, dependencies, first_after, after = graph
    tasks = len(duration_s)
    waiting = np.empty((tasks + 1, tasks), np.int64)
    ready_s = np.zeros((tasks + 1, tasks), np.float64)
    free_s = np.zeros((tasks + 1, ranks), np.float64)
    end_s = np.zeros(tasks + 1, np.float64)
    branches = np.empty((tasks + 1, tasks), np.int64)
    branch_count = np.full(tasks + 1, -1, np.int64)
    chosen = np.empty(tasks, np.int64)
    placed = np.zeros(tasks, np.bool_)
    waiting[0] = dependencies
    best_s = limit_s
    depth = 0
    while depth >= 0:
        if branch_count[depth] < 0:  # a new node: its bound, then its branches
            branch_count[depth] = 0
            if depth == tasks:
                if end_s[depth] < best_s * (1 - ROUNDING):
                    best_s = end_s[depth]
                    order[:] = chosen
            else:
                bound_s = 0.0
                soonest_s = np.inf
                branch_rank = -1
                for r in range(ranks):
                    work_s = 0.0
                    least_start_s = np.inf
                    least_tail_s = np.inf
                    for t in range(tasks):
                        if rank[t] == r and not placed[t]:
                            start_s = max(free_s[depth, r], ready_s[depth, t])
                            bound_s = max(bound_s, start_s + duration_s[t] + tail_s[t])
                            work_s += duration_s[t]
                            least_start_s = min(least_start_s, start_s)
                            least_tail_s = min(least_tail_s, tail_s[t])
                            if waiting[depth, t] == 0 and start_s + duration_s[t] < soonest_s:
                                soonest_s = start_s + duration_s[t]
                                branch_rank = r
                    if work_s > 0.0:
                        bound_s = max(bound_s, least_start_s + work_s + least_tail_s)
                if bound_s < best_s * (1 - ROUNDING):
                    for t in range(tasks):
                        if rank[t] == branch_rank and not placed[t] and waiting[depth, t] == 0:
                            start_s = max(free_s[depth, branch_rank], ready_s[depth, t])
                            if start_s < soonest_s or start_s + duration_s[t] <= soonest_s:
                                # Sorted by tail; the longest one, at the end, is visited first.
                                place = branch_count[depth]
                                while place > 0 and (
                                    duration_s[branches[depth, place - 1]] + tail_s[branches[depth, place - 1]]
                                    > duration_s[t] + tail_s[t]
                                ):
                                    branches[depth, place] = branches[depth, place - 1]
                                    place -= 1
                                branches[depth, place] = t
                                branch_count[depth] += 1
        if branch_count[depth] == 0:
            branch_count[depth] = -1
            depth -= 1
            if depth >= 0:
                placed[chosen[depth]] = False
            continue
        nodes -= 1
        if nodes < 0:
            return best_s, False, 0
        branch_count[depth] -= 1
        task = branches[depth, branch_count[depth]]
        chosen[depth] = task
        placed[task] = True
        depth += 1
        waiting[depth] = waiting[depth - 1]
        ready_s[depth] = ready_s[depth - 1]
        free_s[depth] = free_s[depth - 1]
        r = rank[task]
        done_s = max(free_s[depth, r], ready_s[depth, task]) + duration_s[task]
        free_s[depth, r] = done_s
        end_s[depth] = max(end_s[depth - 1], done_s)
        for i in range(first_after[task], first_after[task + 1]):
            waiting[depth, after[i]] -= 1
            ready_s[depth, after[i]] = max(ready_s[depth, after[i]], done_s)
    return best_s, True, nodes


def shorten(best: Schedule, limit_s: float, nodes: int) -> tuple[Schedule, bool]:
    """A shorter schedule of the same tasks, or ``best``, by branch and bound of at most so many nodes.

    Returns
    -------
    Schedule
    bool
        Whether no order of these tasks is shorter than the schedule and ``limit_s``.
    """
    tasks = best.tasks
    if tasks.bound_s >= min(best.makespan_s, limit_s) * (1 - ROUNDING):
        return best, True
    if tasks.size > MAX_TASKS or tasks.limited:
        return best, False
    order = np.full(tasks.size, -1, np.int64)
    limit_s = min(limit_s, best.makespan_s)
    _, complete, _ = branch_and_bound(
        tasks.ranks, tasks.rank_of_all, tasks.graph, tasks.paths_s[1], limit_s, nodes, order
    )
    if order[0] >= 0:
        best = schedule_orders(tasks, [order[tasks.rank_of_all[order] == r].tolist() for r in range(tasks.ranks)])
    return best, bool(complete)


def solve_exactly(variants: Sequence[Tasks], best: Schedule, control: SearchControl) -> tuple[Schedule, bool]:
    """Search small variants without a memory limit for a schedule shorter than ``best``.

    Returns
    -------
    Schedule
        ``best`` or a shorter one.
    bool
        Whether no schedule of any variant is shorter.
    """
    proven, nodes = True, MAX_NODES
    for tasks in sorted(variants, key=lambda variant: variant.bound_s):
        if tasks.bound_s >= best.makespan_s * (1 - ROUNDING):
            continue
        if tasks.size > MAX_TASKS or tasks.limited or control.expired:
            proven = False
            continue
        order = np.full(tasks.size, -1, np.int64)
        nodes = int(min(nodes, control.left_s * _NODES_PER_S))
        _, complete, nodes = branch_and_bound(
            tasks.ranks, tasks.rank_of_all, tasks.graph, tasks.paths_s[1], best.makespan_s, nodes, order
        )
        proven = proven and bool(complete)
        if order[0] >= 0:
            orders = [order[tasks.rank_of_all[order] == r].tolist() for r in range(tasks.ranks)]
            best = min(best, schedule_orders(tasks, orders), key=lambda schedule: schedule.makespan_s)
    return best, proven
