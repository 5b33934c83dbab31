"""Dependency graph of a step's tasks, and compiled loops over it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cdmpp.utils.jit import jit


class TaskGraph(NamedTuple):
    """Durations and dependencies of tasks.

    Attributes
    ----------
    duration_s : ndarray of float64, shape (tasks,)
    dependencies : ndarray of int64, shape (tasks,)
        Number of tasks that each task waits for.
    first_after, after : ndarray of int64, shapes (tasks + 1,), (edges,)
        Successors of task t: ``after[first_after[t]:first_after[t + 1]]``.
    """

    duration_s: np.ndarray
    dependencies: np.ndarray
    first_after: np.ndarray
    after: np.ndarray


@jit
def run_in_order(
    graph: TaskGraph, first_of: np.ndarray, order: np.ndarray, start_s: np.ndarray, place: np.ndarray
) -> float:
    """Start every task as early as a given order of each rank allows.

    Parameters
    ----------
    graph : TaskGraph
    first_of, order : ndarray of int64, shapes (ranks + 1,), (tasks,)
        Rank r runs ``order[first_of[r]:first_of[r + 1]]``.
    start_s : ndarray of float64, shape (tasks,)
        Filled with start times.
    place : ndarray of int64, shape (tasks,)
        Filled with the position of each task in one topological order of all tasks.

    Returns
    -------
    float
        Makespan in seconds; infinite on a deadlock.
    """
    duration_s, dependencies, first_after, after = graph
    ranks = len(first_of) - 1
    waiting = dependencies.copy()
    ready_s = np.zeros(len(duration_s), np.float64)
    position = first_of[:ranks].copy()
    free_s = np.zeros(ranks, np.float64)
    done, progress = 0, True
    while progress:
        progress = False
        for r in range(ranks):
            while position[r] < first_of[r + 1] and waiting[order[position[r]]] == 0:
                task = order[position[r]]
                position[r] += 1
                place[task] = done
                done += 1
                progress = True
                start_s[task] = max(free_s[r], ready_s[task])
                free_s[r] = start_s[task] + duration_s[task]
                for i in range(first_after[task], first_after[task + 1]):
                    waiting[after[i]] -= 1
                    ready_s[after[i]] = max(ready_s[after[i]], free_s[r])
    if done < len(duration_s):
        return np.inf
    makespan_s = 0.0
    for r in range(ranks):
        makespan_s = max(makespan_s, free_s[r])
    return makespan_s


@jit
def longest_paths_s(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray]:
    """Longest path to each task's start and from its end, in seconds; both of shape (tasks,)."""
    duration_s, dependencies, first_after, after = graph
    tasks = len(duration_s)
    waiting = dependencies.copy()
    head_s = np.zeros(tasks, np.float64)
    tail_s = np.zeros(tasks, np.float64)
    topological = np.empty(tasks, np.int64)
    count = 0
    for t in range(tasks):
        if waiting[t] == 0:
            topological[count] = t
            count += 1
    at = 0
    while at < count:
        task = topological[at]
        at += 1
        for i in range(first_after[task], first_after[task + 1]):
            other = after[i]
            head_s[other] = max(head_s[other], head_s[task] + duration_s[task])
            waiting[other] -= 1
            if waiting[other] == 0:
                topological[count] = other
                count += 1
    for at in range(count - 1, -1, -1):
        task = topological[at]
        for i in range(first_after[task], first_after[task + 1]):
            other = after[i]
            tail_s[task] = max(tail_s[task], duration_s[other] + tail_s[other])
    return head_s, tail_s
