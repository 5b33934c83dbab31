"""Compiled loops: list scheduling from priorities, following a given order, completing an order."""

from __future__ import annotations

import numpy as np

from cdmpp.compose.jit import jit

#: Which backward pass goes first of those that are ready: the one that waits longest, by the forward order,
#: against it, or the one with most work behind it.
LONGEST_WAIT, FORWARD_ORDER, REVERSE_ORDER, LONGEST_TAIL = 0, 1, 2, 3
#: Which queue goes first where both have something: backward, the one that did not go last, forward.
BACKWARD_FIRST, ALTERNATE, FORWARD_FIRST = 0, 1, 2


@jit
def dispatch(
    half: int,
    ranks: int,
    rank: np.ndarray,
    duration_s: np.ndarray,
    before: np.ndarray,
    first_after: np.ndarray,
    after: np.ndarray,
    first_task: np.ndarray,
    lane_of: np.ndarray,
    lanes: np.ndarray,
    sequence: np.ndarray,
    tail_s: np.ndarray,
    back_rule: int,
    preference: int,
    strict: bool,
    kept: np.ndarray,
    more_forward: np.ndarray,
    more_backward: np.ndarray,
    room: np.ndarray,
    start_s: np.ndarray,
    place: np.ndarray,
) -> float:
    """Dual-queue list scheduling (PipeWeaver): each rank has a forward and a backward queue.

    Parameters
    ----------
    half : int
        Forward tasks; task ``half + t`` is the backward pass of forward task ``t``.
    rank : int64 (half,)
    duration_s : float64 (2·half,)
    before : int64 (2·half,)
        Tasks that each waits for.
    first_after, after : int64 (2·half + 1,), int64
        Who waits for each task: ``after[first_after[t]:first_after[t + 1]]``.
    first_task : int64 (segments + 1,)
        Forward tasks of each segment (one pass of a sub-micro-batch over its ranks).
    lane_of, lanes : int64 (ranks + 1,), int64 (lanes, 3)
        Chunks on each rank: first forward task, distance to the next unit's, and units. A chunk's units go
        forward in turn.
    sequence : int64 (segments,)
        Segments, most urgent first.
    tail_s : float64 (2·half,)
        Longest way from a task's end to the end of the step.
    back_rule, preference : int
        One of the constants above each.
    strict : bool
        Forward tasks of a rank run exactly in ``sequence``; otherwise a ready one overtakes one that is not.
    kept, more_forward, more_backward : float64 (half,)
        Bytes held from forward to backward, and those only while either pass runs.
    room : float64 (ranks,)
        Bytes that a rank has for all these; infinite without a limit.
    start_s, place : float64 (2·half,), int64 (2·half,)
        Filled: starts, and the turn in which each task was placed.

    Returns
    -------
    float
        Makespan in seconds; infinite where ``room`` lets nothing go on.
    """
    tasks = 2 * half
    key = np.empty(half, np.float64)
    turn = np.empty(half, np.int64)
    end_of = np.zeros(ranks + 1, np.int64)
    for t in range(half):
        end_of[rank[t] + 1] += 1
    for r in range(ranks):
        end_of[r + 1] += end_of[r]
    filled = end_of[:ranks].copy()
    for urgency in range(len(sequence)):
        segment = sequence[urgency]
        for t in range(first_task[segment], first_task[segment + 1]):
            key[t] = urgency
            turn[filled[rank[t]]] = t
            filled[rank[t]] += 1
    backward = np.empty(half, np.int64)
    gone = np.zeros(len(lanes), np.int64)
    backwards = np.zeros(ranks, np.int64)
    next_turn = end_of[:ranks].copy()
    left = before.copy()
    ready_s = np.zeros(tasks, np.float64)
    free_s = np.zeros(ranks, np.float64)
    used = np.zeros(ranks, np.float64)
    went_forward = np.zeros(ranks, np.bool_)
    next_s = np.full(ranks, np.inf)
    stale = np.ones(ranks, np.bool_)
    makespan_s = 0.0
    for count in range(tasks):
        chosen = -1
        soonest_s = np.inf
        for r in range(ranks):
            if stale[r]:
                stale[r] = False
                earliest_s = np.inf
                for lane in range(lane_of[r], lane_of[r + 1]):
                    if gone[lane] == lanes[lane, 2]:
                        continue
                    t = lanes[lane, 0] + gone[lane] * lanes[lane, 1]
                    if left[t] > 0:
                        continue
                    if strict and turn[next_turn[r]] != t:
                        continue
                    if ready_s[t] < earliest_s and used[r] + kept[t] + more_forward[t] <= room[r]:
                        earliest_s = ready_s[t]
                for at in range(end_of[r], end_of[r] + backwards[r]):
                    t = backward[at]
                    if ready_s[half + t] < earliest_s and used[r] + more_backward[t] <= room[r]:
                        earliest_s = ready_s[half + t]
                next_s[r] = max(free_s[r], earliest_s)
            if next_s[r] < soonest_s:
                soonest_s = next_s[r]
                chosen = r
        if chosen < 0:
            return np.inf
        r = chosen
        best_forward = -1
        best_key = np.inf
        for lane in range(lane_of[r], lane_of[r + 1]):
            if gone[lane] == lanes[lane, 2]:
                continue
            t = lanes[lane, 0] + gone[lane] * lanes[lane, 1]
            if left[t] > 0:
                continue
            if strict and turn[next_turn[r]] != t:
                continue
            if ready_s[t] <= soonest_s and key[t] < best_key and used[r] + kept[t] + more_forward[t] <= room[r]:
                best_key = key[t]
                best_forward = lane
        best_backward = -1
        best_key = np.inf
        for at in range(end_of[r], end_of[r] + backwards[r]):
            t = backward[at]
            if ready_s[half + t] > soonest_s or used[r] + more_backward[t] > room[r]:
                continue
            if back_rule == 0:
                this = ready_s[half + t]
            elif back_rule == 1:
                this = key[t]
            elif back_rule == 2:
                this = -key[t]
            else:
                this = -tail_s[half + t]
            # Of equals the task of the smaller number, whatever order they came in.
            if this < best_key or (this == best_key and t < backward[best_backward]):
                best_key = this
                best_backward = at
        take_forward = best_backward < 0 or (
            best_forward >= 0 and (preference == 2 or (preference == 1 and not went_forward[r]))
        )
        if take_forward:
            t = lanes[best_forward, 0] + gone[best_forward] * lanes[best_forward, 1]
            gone[best_forward] += 1
            next_turn[r] += 1
            used[r] += kept[t]
            task = t
        else:
            t = backward[best_backward]
            backwards[r] -= 1
            backward[best_backward] = backward[end_of[r] + backwards[r]]
            used[r] -= kept[t]
            task = half + t
        went_forward[r] = take_forward
        start_s[task] = soonest_s
        place[task] = count
        done_s = soonest_s + duration_s[task]
        free_s[r] = done_s
        stale[r] = True
        makespan_s = max(makespan_s, done_s)
        for at in range(first_after[task], first_after[task + 1]):
            other = after[at]
            left[other] -= 1
            ready_s[other] = max(ready_s[other], done_s)
            if left[other] == 0:
                if other < half:
                    o = rank[other]
                else:
                    o = rank[other - half]
                    backward[end_of[o] + backwards[o]] = other - half
                    backwards[o] += 1
                stale[o] = True
    return makespan_s


@jit
def follow(
    duration_s: np.ndarray,
    before: np.ndarray,
    first_after: np.ndarray,
    after: np.ndarray,
    first_of: np.ndarray,
    order: np.ndarray,
    start_s: np.ndarray,
    place: np.ndarray,
) -> float:
    """Start every task as early as a given order of each rank allows.

    Parameters
    ----------
    first_of, order : int64 (ranks + 1,), int64 (tasks,)
        Rank r runs ``order[first_of[r]:first_of[r + 1]]``.
    start_s, place : float64 (tasks,), int64 (tasks,)
        Filled, as by :func:`dispatch`.

    Returns
    -------
    float
        Makespan in seconds; infinite where ranks wait for each other.
    """
    ranks = len(first_of) - 1
    left = before.copy()
    ready_s = np.zeros(len(duration_s), np.float64)
    at_of = first_of[:ranks].copy()
    free_s = np.zeros(ranks, np.float64)
    done, moved = 0, True
    while moved:
        moved = False
        for r in range(ranks):
            while at_of[r] < first_of[r + 1] and left[order[at_of[r]]] == 0:
                task = order[at_of[r]]
                at_of[r] += 1
                place[task] = done
                done += 1
                moved = True
                start_s[task] = max(free_s[r], ready_s[task])
                free_s[r] = start_s[task] + duration_s[task]
                for at in range(first_after[task], first_after[task + 1]):
                    other = after[at]
                    left[other] -= 1
                    ready_s[other] = max(ready_s[other], free_s[r])
    if done < len(duration_s):
        return np.inf
    last_s = 0.0
    for r in range(ranks):
        last_s = max(last_s, free_s[r])
    return last_s


@jit
def longest_ways(
    duration_s: np.ndarray, before: np.ndarray, first_after: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Longest way to each task's start and from its end, in seconds, were there a rank for each task."""
    tasks = len(duration_s)
    left = before.copy()
    head_s = np.zeros(tasks, np.float64)
    tail_s = np.zeros(tasks, np.float64)
    topological = np.empty(tasks, np.int64)
    count = 0
    for t in range(tasks):
        if left[t] == 0:
            topological[count] = t
            count += 1
    at = 0
    while at < count:
        task = topological[at]
        at += 1
        for a in range(first_after[task], first_after[task + 1]):
            other = after[a]
            head_s[other] = max(head_s[other], head_s[task] + duration_s[task])
            left[other] -= 1
            if left[other] == 0:
                topological[count] = other
                count += 1
    for at in range(count - 1, -1, -1):
        task = topological[at]
        for a in range(first_after[task], first_after[task + 1]):
            other = after[a]
            tail_s[task] = max(tail_s[task], duration_s[other] + tail_s[other])
    return head_s, tail_s


@jit
def complete(
    begun: np.ndarray,
    first_segment: np.ndarray,
    need_ptr: np.ndarray,
    need_class: np.ndarray,
    need_count: np.ndarray,
    key: np.ndarray,
    sequence: np.ndarray,
) -> None:
    """Finish an order of segments: always the class that may go on whose next segment has the least key.

    Parameters
    ----------
    begun : int64 (classes so far,)
        The beginning: the class (segment of a module) of each place.
    first_segment : int64 (classes + 1,)
        Segments of a class, one for each sub-micro-batch, in its order.
    need_ptr, need_class, need_count : int64
        Segment s may come once class ``need_class[i]`` has come ``need_count[i]`` times, for i from
        ``need_ptr[s]`` to ``need_ptr[s + 1]``.
    key : float64 (segments,)
    sequence : int64 (segments,)
        Filled.
    """
    classes = len(first_segment) - 1
    gone = np.zeros(classes, np.int64)
    for place in range(len(sequence)):
        chosen = -1
        if place < len(begun):
            chosen = begun[place]
        else:
            least = np.inf
            for c in range(classes):
                segment = first_segment[c] + gone[c]
                if segment >= first_segment[c + 1] or key[segment] >= least:
                    continue
                allowed = True
                for i in range(need_ptr[segment], need_ptr[segment + 1]):
                    if gone[need_class[i]] < need_count[i]:
                        allowed = False
                        break
                if allowed:
                    least = key[segment]
                    chosen = c
        sequence[place] = first_segment[chosen] + gone[chosen]
        gone[chosen] += 1


@jit
def preemptive_s(head_s: np.ndarray, duration_s: np.ndarray, tail_s: np.ndarray) -> float:
    """End of the last tail of one machine's tasks, were they interruptible (Jackson's preemptive schedule).

    Parameters
    ----------
    head_s, duration_s, tail_s : float64 (tasks,)
        By growing head.
    """
    count = len(head_s)
    left = duration_s.copy()
    heap = np.empty(count, np.int64)  # of tasks whose head has passed, the longest tail first
    size = at = 0
    now_s = bound_s = 0.0
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
        if at < count and now_s + left[task] > head_s[at]:
            left[task] -= head_s[at] - now_s
            now_s = head_s[at]
            continue
        now_s += left[task]
        bound_s = max(bound_s, now_s + tail_s[task])
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
    return bound_s
