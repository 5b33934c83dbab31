"""Tasks on ranks: topological order, times of given orders, longest paths, and a lower bound."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import numpy as np

from cdmpp.utils.jit import jit


def sort_topologically(after: Sequence[Iterable[int]]) -> tuple[list[int], list[int]]:
    """Indices, each after those that it waits for, and a cycle (empty: there is none).

    Of the indices that are ready, the lowest comes first. With a cycle the order lacks what waits for it.
    """
    sorter = TopologicalSorter(dict(enumerate(after)))
    cycle: list[int] = []
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = error.args[1]
    order: list[int] = []
    ready = list(sorter.get_ready())
    heapq.heapify(ready)
    while ready:
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
        for index in sorter.get_ready():
            heapq.heappush(ready, index)
    return order, cycle


class TaskGraph(NamedTuple):
    """Durations and dependencies of tasks, and transfers between them; arrays of int64, seconds of float64."""

    duration_s: np.ndarray  # (tasks,)
    dependencies: np.ndarray  # (tasks,): number of tasks that each task waits for
    # (tasks + 1,), (edges,): successors of task t: ``after[first_after[t]:first_after[t + 1]]``.
    first_after: np.ndarray
    after: np.ndarray
    # (edges,): from the end of a task to the start of its successor at the earliest: a transfer between ranks, which
    # delays no other task.
    lag_s: np.ndarray

    def with_transfers(self, rank: np.ndarray, transfer_s: np.ndarray) -> TaskGraph:
        """The same graph with transfers between ranks.

        ``rank`` (tasks,). ``transfer_s`` (forward tasks,): sending the output of forward task t to another rank, and
        its gradient back to backward task n + t.
        """
        half, source = len(transfer_s), np.repeat(np.arange(len(rank)), np.diff(self.first_after))
        output = np.where(source < half, source, self.after - half)  # unused where both passes are on one rank
        return self._replace(lag_s=np.where(rank[source] != rank[self.after], transfer_s[output], 0.0))


def make_graph(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], tasks: int) -> TaskGraph:
    """The graph in which each target waits for the source at the same place; without durations and transfers."""
    source, target = np.concatenate(sources), np.concatenate(targets)
    return TaskGraph(
        lag_s=np.zeros(len(source)),
        duration_s=np.zeros(tasks),
        dependencies=np.bincount(target, minlength=tasks),
        first_after=np.concatenate([[0], np.cumsum(np.bincount(source, minlength=tasks))]),
        after=target[np.argsort(source, kind="stable")],
    )


@jit
def run_in_order(
    graph: TaskGraph, first_of: np.ndarray, order: np.ndarray, start_s: np.ndarray, place: np.ndarray
) -> float:
    """Start every task as early as a given order of each rank allows; the makespan in seconds, infinite on a deadlock.

    ``first_of`` (ranks + 1,), ``order`` (tasks,): rank r runs ``order[first_of[r]:first_of[r + 1]]``. ``start_s``
    (tasks,) is filled with start times, ``place`` (tasks,) with positions in one topological order of all tasks.
    """
    duration_s, dependencies, first_after, after, lag_s = graph
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
                    ready_s[after[i]] = max(ready_s[after[i]], free_s[r] + lag_s[i])
    if done < len(duration_s):
        return np.inf
    makespan_s = 0.0
    for r in range(ranks):
        makespan_s = max(makespan_s, free_s[r])
    return makespan_s


@jit
def longest_paths_s(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray]:
    """Longest path to each task's start and from its end, in seconds; both of shape (tasks,)."""
    duration_s, dependencies, first_after, after, lag_s = graph
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
            head_s[other] = max(head_s[other], head_s[task] + duration_s[task] + lag_s[i])
            waiting[other] -= 1
            if waiting[other] == 0:
                topological[count] = other
                count += 1
    for at in range(count - 1, -1, -1):
        task = topological[at]
        for i in range(first_after[task], first_after[task + 1]):
            other = after[i]
            tail_s[task] = max(tail_s[task], lag_s[i] + duration_s[other] + tail_s[other])
    return head_s, tail_s


def jackson_bound_s(
    rank: np.ndarray, ranks: int, duration_s: np.ndarray, head_s: np.ndarray, tail_s: np.ndarray
) -> float:
    """Jackson's preemptive bound of each rank, and the critical path.

    Each task has a head (longest path to it) and a tail (longest path from it). On one rank, the preemptive schedule
    that always runs the released task with the longest tail is optimal, so no schedule without preemption is shorter
    (Carlier 1982). All arrays are (tasks,).
    """
    bound_s = float((head_s + duration_s + tail_s).max())
    for r in range(ranks):
        tasks = np.flatnonzero(rank == r)
        tasks = tasks[np.argsort(head_s[tasks], kind="stable")]
        bound_s = max(bound_s, float(preemptive_makespan_s(head_s[tasks], duration_s[tasks], tail_s[tasks])))
    return bound_s


@jit
def preemptive_makespan_s(head_s: np.ndarray, duration_s: np.ndarray, tail_s: np.ndarray) -> float:
    """Makespan of Jackson's preemptive schedule of one machine, tails included; arrays (tasks,) by growing head."""
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
