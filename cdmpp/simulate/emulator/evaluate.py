"""Compiled functions for start, end and memory of the passes of a step, on arrays.

Tasks have numbers 0 to n - 1. Every rank runs its tasks one after the other in a given order; a task starts
when its rank is free and all that it depends on has ended, with a lag (a transfer) where one is given. The
result is unique, whatever order the tasks are visited in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cdmpp.utils.jit import jit

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


@jit
def evaluate(order: Ints, begin: Ints, duration: Floats, deps: Ints, lag: Floats, start: Floats, end: Floats) -> int:
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
    at = begin[:ranks].copy()
    clock = np.zeros(ranks)
    done = 0
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
            at[rank] = place + 1
            done += 1
            waiting = first[task]
            while waiting >= 0:
                stack[top] = waiting
                top += 1
                waiting = after[waiting]
    return done


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
