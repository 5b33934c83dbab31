"""Compiled list scheduling of a step's tasks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cdmpp.plan.base.task_graph import TaskGraph
from cdmpp.utils.jit import jit

#: Backward rules: of the ready backward passes, run first the one that has waited longest, the first in the forward
#: order, the last in the forward order, or the one with the longest tail.
LONGEST_WAIT, FORWARD_ORDER, REVERSE_ORDER, LONGEST_TAIL = 0, 1, 2, 3
#: Preference of a rank whose queues both have a ready task: backward, alternately, forward.
BACKWARD_FIRST, ALTERNATE, FORWARD_FIRST = 0, 1, 2


class DispatchRule(NamedTuple):
    """How a rank chooses among its ready tasks, besides the order of segments."""

    # one of the constants above each
    backward_rule: int
    preference: int
    # forward tasks of a rank run exactly in the order of segments; otherwise a ready one may overtake
    strict: bool = False


class RankQueues(NamedTuple):
    """Forward tasks by segment and by rank."""

    rank: np.ndarray  # shape (forward tasks,)
    # (segments + 1,): forward tasks of each segment (one pass of a sub-micro-batch over its ranks)
    first_task: np.ndarray
    # lanes (chunks of layers) of each rank: first forward task, distance to the next sub-micro-batch's task, and number
    # of sub-micro-batches. The forward tasks of a lane run in their order.
    first_lane: np.ndarray
    lanes: np.ndarray


class MemoryUse(NamedTuple):
    """Bytes of each task, and of each rank."""

    kept: np.ndarray  # (forward tasks,): held from the start of the forward pass to the end of the backward pass
    # (forward tasks,): held in addition while the forward or the backward pass runs
    extra_forward: np.ndarray
    extra_backward: np.ndarray
    available: np.ndarray  # (ranks,): bytes of each rank for all of these; infinite without a limit


@jit
def dispatch(
    graph: TaskGraph,
    queues: RankQueues,
    memory: MemoryUse,
    sequence: np.ndarray,
    tail_s: np.ndarray,
    rule: DispatchRule,
    start_s: np.ndarray,
    place: np.ndarray,
) -> float:
    """List-schedule forward and backward tasks; each rank has a queue for either.

    ``graph``: forward tasks 0 to n - 1, and the backward task of forward task t as n + t. ``sequence`` (shape
    (segments,)): segments, most urgent first. ``tail_s`` (shape (tasks,)): longest path from each task's end to the end
    of the step. ``start_s`` (shape (tasks,)): filled with start times in seconds. ``place`` (shape (tasks,)): filled
    with the position at which each task was scheduled.
    Returns makespan in seconds; infinite where memory leads to a deadlock.
    """
    duration_s, dependencies, first_after, after, lag_s = graph
    rank, first_task, first_lane, lanes = queues
    kept, extra_forward, extra_backward, available = memory
    backward_rule, preference, strict = rule
    ranks, half, tasks = len(available), len(rank), len(duration_s)
    key = np.empty(half, np.float64)
    turn = np.empty(half, np.int64)
    begin = np.zeros(ranks + 1, np.int64)
    for t in range(half):
        begin[rank[t] + 1] += 1
    for r in range(ranks):
        begin[r + 1] += begin[r]
    filled = begin[:ranks].copy()
    for urgency in range(len(sequence)):
        segment = sequence[urgency]
        for t in range(first_task[segment], first_task[segment + 1]):
            key[t] = urgency
            turn[filled[rank[t]]] = t
            filled[rank[t]] += 1
    backward_queue = np.empty(half, np.int64)
    backward_count = np.zeros(ranks, np.int64)
    forward_done = np.zeros(len(lanes), np.int64)
    # Lanes and places in the backward queue that may run next on each rank; computed again when the rank has changed.
    open_lanes = np.empty(len(lanes), np.int64)
    open_backward = np.empty(half, np.int64)
    open_lane_count = np.zeros(ranks, np.int64)
    open_backward_count = np.zeros(ranks, np.int64)
    next_turn = begin[:ranks].copy()
    waiting = dependencies.copy()
    ready_s = np.zeros(tasks, np.float64)
    free_s = np.zeros(ranks, np.float64)
    used = np.zeros(ranks, np.float64)
    ran_forward = np.zeros(ranks, np.bool_)
    next_s = np.full(ranks, np.inf)
    changed = np.ones(ranks, np.bool_)
    makespan_s = 0.0
    for count in range(tasks):
        r = -1
        soonest_s = np.inf
        for candidate in range(ranks):
            if changed[candidate]:
                changed[candidate] = False
                earliest_s = np.inf
                open_lane_count[candidate] = 0
                for lane in range(first_lane[candidate], first_lane[candidate + 1]):
                    if forward_done[lane] == lanes[lane, 2]:
                        continue
                    t = lanes[lane, 0] + forward_done[lane] * lanes[lane, 1]
                    if waiting[t] > 0 or (strict and turn[next_turn[candidate]] != t):
                        continue
                    if used[candidate] + kept[t] + extra_forward[t] <= available[candidate]:
                        open_lanes[first_lane[candidate] + open_lane_count[candidate]] = lane
                        open_lane_count[candidate] += 1
                        earliest_s = min(earliest_s, ready_s[t])
                open_backward_count[candidate] = 0
                for at in range(begin[candidate], begin[candidate] + backward_count[candidate]):
                    t = backward_queue[at]
                    if used[candidate] + extra_backward[t] <= available[candidate]:
                        open_backward[begin[candidate] + open_backward_count[candidate]] = at
                        open_backward_count[candidate] += 1
                        earliest_s = min(earliest_s, ready_s[half + t])
                next_s[candidate] = max(free_s[candidate], earliest_s)
            if next_s[candidate] < soonest_s:
                soonest_s = next_s[candidate]
                r = candidate
        if r < 0:
            return np.inf
        best_lane = -1
        best_key = np.inf
        for i in range(first_lane[r], first_lane[r] + open_lane_count[r]):
            lane = open_lanes[i]
            t = lanes[lane, 0] + forward_done[lane] * lanes[lane, 1]
            if ready_s[t] <= soonest_s and key[t] < best_key:
                best_key = key[t]
                best_lane = lane
        best_backward = -1
        best_key = np.inf
        for i in range(begin[r], begin[r] + open_backward_count[r]):
            at = open_backward[i]
            t = backward_queue[at]
            if ready_s[half + t] > soonest_s:
                continue
            if backward_rule == LONGEST_WAIT:
                this = ready_s[half + t]
            elif backward_rule == FORWARD_ORDER:
                this = key[t]
            elif backward_rule == REVERSE_ORDER:
                this = -key[t]
            else:
                this = -tail_s[half + t]
            # Ties: the task of smaller number, whatever the order of the queue.
            if this < best_key or (this == best_key and t < backward_queue[best_backward]):
                best_key = this
                best_backward = at
        prefers_forward = preference == FORWARD_FIRST or (preference == ALTERNATE and not ran_forward[r])
        run_forward = best_backward < 0 or (best_lane >= 0 and prefers_forward)
        if run_forward:
            task = lanes[best_lane, 0] + forward_done[best_lane] * lanes[best_lane, 1]
            forward_done[best_lane] += 1
            next_turn[r] += 1
            used[r] += kept[task]
        else:
            t = backward_queue[best_backward]
            backward_count[r] -= 1
            backward_queue[best_backward] = backward_queue[begin[r] + backward_count[r]]
            used[r] -= kept[t]
            task = half + t
        ran_forward[r] = run_forward
        start_s[task] = soonest_s
        place[task] = count
        free_s[r] = soonest_s + duration_s[task]
        changed[r] = True
        makespan_s = max(makespan_s, free_s[r])
        for i in range(first_after[task], first_after[task + 1]):
            other = after[i]
            waiting[other] -= 1
            ready_s[other] = max(ready_s[other], free_s[r] + lag_s[i])
            if waiting[other] == 0:
                if other < half:
                    changed[rank[other]] = True
                else:
                    owner = rank[other - half]
                    backward_queue[begin[owner] + backward_count[owner]] = other - half
                    backward_count[owner] += 1
                    changed[owner] = True
    return makespan_s
