"""Compiled functions for start, end and memory of the passes of a step, on arrays.

Tasks have numbers 0 to n - 1. Every rank runs its tasks one after the other in a given order; a task starts
when its rank is free and all that it depends on has ended, with a lag (a transfer) where one is given. The
result is unique, whatever order the tasks are visited in.

A search that changes one order a little calls :func:`evaluate_again`: what the change cannot reach is kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cdmpp.utils.jit import jit

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


@jit
def _run(
    order: Ints,
    begin: Ints,
    duration: Floats,
    deps: Ints,
    lag: Floats,
    at: Ints,
    clock: Floats,
    turn: Ints,
    done: int,
    start: Floats,
    end: Floats,
) -> int:
    """Continue from the position of each rank; return the number of ended tasks."""
    ranks = at.shape[0]
    # A rank waits for one task at a time: the ranks that wait for a task are a list linked through `after`.
    first = np.full(duration.shape[0], -1, np.int32)
    after = np.full(ranks, -1, np.int32)
    stack = np.empty(ranks, np.int32)
    for rank in range(ranks):
        stack[ranks - 1 - rank] = rank
    top = ranks
    while top > 0:
        top -= 1
        rank = int(stack[top])
        while at[rank] < begin[rank + 1]:
            place = at[rank]
            task = order[place]
            ready = clock[rank]
            missing = -1
            for k in range(deps.shape[1]):
                before = deps[task, k]
                if before < 0:
                    continue
                if end[before] < 0.0:
                    missing = before
                    break
                ready = max(ready, end[before] + lag[task, k])
            if missing >= 0:
                after[rank] = first[missing]
                first[missing] = rank
                break
            start[task] = ready
            end[task] = ready + duration[task]
            clock[rank] = end[task]
            turn[place] = done
            at[rank] = place + 1
            done += 1
            waiting = first[task]
            while waiting >= 0:
                stack[top] = waiting
                top += 1
                waiting = after[waiting]
    return done


@jit
def evaluate(
    order: Ints, begin: Ints, duration: Floats, deps: Ints, lag: Floats, turn: Ints, start: Floats, end: Floats
) -> int:
    """Start and end of every task under given orders.

    Parameters
    ----------
    order : int32, shape (places,)
        Task numbers, rank after rank; each task at most once.
    begin : int32, shape (ranks + 1,)
        ``order[begin[r]:begin[r + 1]]`` belongs to rank r.
    duration : float64, shape (tasks,)
        Seconds, not negative.
    deps : int32, shape (tasks, k)
        Tasks that have to end before; -1 for none.
    lag : float64, shape (tasks, k)
        Seconds between the end of such a task and the start.
    turn : int32, shape (places,); filled
        When each place was visited; :func:`evaluate_again` takes it.
    start, end : float64, shape (tasks,); filled
        Seconds; -1 where a task is not ordered or cannot run.

    Returns
    -------
    int
        Tasks that ran. Fewer than places: the orders wait for each other in a circle.

    Notes
    -----
    O(places x k): a rank that has to wait is woken by the task that it waits for.
    """
    ranks = begin.shape[0] - 1
    start[:] = -1.0
    end[:] = -1.0
    turn[:] = order.shape[0]
    at = begin[:ranks].copy()
    clock = np.zeros(ranks)
    return _run(order, begin, duration, deps, lag, at, clock, turn, 0, start, end)


@jit
def evaluate_again(
    order: Ints,
    before: Ints,
    begin: Ints,
    duration: Floats,
    deps: Ints,
    lag: Floats,
    turn: Ints,
    start: Floats,
    end: Floats,
) -> tuple[int, int]:
    """As :func:`evaluate`, from the results for other orders of the same tasks.

    Parameters
    ----------
    order : int32, shape (places,)
    before : int32, shape (places,)
        The orders that ``turn``, ``start`` and ``end`` belong to, with the same ``begin``, durations and
        dependences; they may be ones that could not run.
    turn, start, end
        Of ``before``; overwritten with those of ``order``.

    Returns
    -------
    ran, kept : int
        Tasks that ran, and how many of these were taken over.
    """
    ranks = begin.shape[0] - 1
    kept = order.shape[0]
    for rank in range(ranks):
        for place in range(begin[rank], begin[rank + 1]):
            if order[place] != before[place] or turn[place] >= order.shape[0]:
                kept = min(kept, turn[place])
                break
    # `order.shape[0]` marks places that were never reached: then all tasks that ran can be kept.
    at = np.empty(ranks, np.int32)
    clock = np.zeros(ranks)
    done = 0
    for rank in range(ranks):
        place = begin[rank]
        while place < begin[rank + 1] and turn[place] < kept:
            place += 1
        at[rank] = place
        done += place - begin[rank]
        if place > begin[rank]:
            clock[rank] = end[order[place - 1]]
        while place < begin[rank + 1]:
            start[before[place]] = -1.0
            end[before[place]] = -1.0
            turn[place] = order.shape[0]
            place += 1
    return _run(order, begin, duration, deps, lag, at, clock, turn, done, start, end), done


@jit
def latest(order: Ints, begin: Ints, end: Floats) -> float:
    """End of the last rank in seconds; infinite where a rank could not run all its tasks.

    Parameters
    ----------
    order, begin, end
        As :func:`evaluate` takes and fills them.
    """
    peak = 0.0
    for rank in range(begin.shape[0] - 1):
        if begin[rank + 1] > begin[rank]:
            last = end[order[begin[rank + 1] - 1]]
            if last < 0.0:
                return np.inf
            peak = max(peak, last)
    return peak


@jit
def peaks(order: Ints, begin: Ints, at_start: Floats, at_end: Floats, resident: Floats, peak: Floats) -> None:
    """Peak memory of each rank.

    Parameters
    ----------
    order, begin
        As in :func:`evaluate`.
    at_start, at_end : float64, shape (tasks,)
        What a task takes when it starts and (negative: gives back) when it ends, such as bytes.
    resident : float64, shape (ranks,)
        Held all the time.
    peak : float64, shape (ranks,); filled

    Notes
    -----
    A rank does one thing at a time, so that the order alone decides, and not when things happen.
    """
    for rank in range(begin.shape[0] - 1):
        held = resident[rank]
        most = held
        for place in range(begin[rank], begin[rank + 1]):
            task = order[place]
            held += at_start[task]
            most = max(most, held)
            held += at_end[task]
        peak[rank] = most
