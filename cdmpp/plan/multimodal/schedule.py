"""Schedules of a step: from an order of segments, or from an order of the tasks of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.plan.multimodal.task_graph import (
    ALTERNATE,
    BACKWARD_FIRST,
    FORWARD_FIRST,
    FORWARD_ORDER,
    LONGEST_TAIL,
    LONGEST_WAIT,
    REVERSE_ORDER,
    DispatchRule,
    dispatch,
    run_in_order,
)
from cdmpp.plan.multimodal.tasks import Tasks
from cdmpp.utils.jit import jit

_EMPTY = np.empty(0, np.int64)
#: Forward and backward passes alternately: 1F1B where possible.
ALTERNATE_RULE = DispatchRule(LONGEST_WAIT, ALTERNATE)
RULES = tuple(
    DispatchRule(backward_rule, preference)
    for backward_rule in (LONGEST_WAIT, FORWARD_ORDER, REVERSE_ORDER, LONGEST_TAIL)
    for preference in (BACKWARD_FIRST, ALTERNATE, FORWARD_FIRST)
)
#: For memory limits: a task that overtakes may take the memory that another one needs.
STRICT_RULES = tuple(rule._replace(strict=True) for rule in RULES)
#: Rules that every variant of a step is tried with before others.
FIRST_RULES = (
    ALTERNATE_RULE,
    DispatchRule(LONGEST_WAIT, BACKWARD_FIRST, True),
    DispatchRule(FORWARD_ORDER, BACKWARD_FIRST),
    DispatchRule(LONGEST_TAIL, ALTERNATE),
)


@dataclass(frozen=True)
class Schedule:
    """Start times of all tasks.

    Attributes
    ----------
    makespan_s : float
        Infinite on a deadlock.
    start_s : ndarray of float64, shape (tasks,)
    place : ndarray of int64, shape (tasks,)
        Position of each task in a topological order; distinguishes tasks of no duration that start together.
    """

    tasks: Tasks
    makespan_s: float
    start_s: np.ndarray
    place: np.ndarray

    @property
    def orders(self) -> list[list[int]]:
        """Tasks of each rank, in the order in which they run."""
        in_order = np.argsort(self.place)
        rank = self.tasks.rank_of_all[in_order]
        return [in_order[rank == r].tolist() for r in range(self.tasks.ranks)]


def list_schedule(tasks: Tasks, sequence: np.ndarray, rule: DispatchRule, *, limited: bool = True) -> Schedule:
    """List schedule of an order of segments; infinitely long where memory leads to a deadlock.

    Parameters
    ----------
    sequence : ndarray of int64, shape (segments,)
        Segments, most urgent first.
    limited : bool
        False: as if memory were unlimited.
    """
    start_s, place = np.empty(tasks.size), np.empty(tasks.size, np.int64)
    memory = tasks.memory_use(limited)
    makespan_s = dispatch(tasks.graph, tasks.queues, memory, sequence, tasks.paths_s[1], rule, start_s, place)
    return Schedule(tasks, float(makespan_s), start_s, place)


def schedule_orders(tasks: Tasks, orders: Sequence[Sequence[int]]) -> Schedule:
    """Schedule each rank's tasks in a given order, as early as possible; infinitely long on a deadlock."""
    start_s, place = np.empty(tasks.size), np.empty(tasks.size, np.int64)
    first_of = np.cumsum([0, *map(len, orders)])
    flat = np.concatenate([np.array(order, np.int64) for order in orders])
    makespan_s = run_in_order(tasks.graph, first_of, flat, start_s, place)
    return Schedule(tasks, float(makespan_s), start_s, place)


def least_memory_orders(tasks: Tasks) -> list[list[int]]:
    """Orders that hold little memory: backward passes as soon as possible, one unit in flight at a time."""
    graph, half = tasks.graph, tasks.half
    waiting = [int(n) for n in graph.dependencies]
    orders: list[list[int]] = [[] for _ in range(tasks.ranks)]
    backward: list[int] = []

    def run(task: int) -> None:
        orders[int(tasks.rank_of_all[task])].append(task)
        for other in graph.after[graph.first_after[task] : graph.first_after[task + 1]]:
            waiting[other] -= 1
            if not waiting[other] and other >= half:
                backward.append(int(other))

    for segment in sequence_by(tasks, data_order_key(tasks)):
        for t in range(int(tasks.first_task[segment]), int(tasks.first_task[segment + 1])):
            run(t)
            while backward:
                run(backward.pop())
    return orders


def sequence_by(tasks: Tasks, key: np.ndarray, prefix: np.ndarray = _EMPTY) -> np.ndarray:
    """Segments by growing ``key``, each after those that it depends on.

    Parameters
    ----------
    key : ndarray of float64, shape (segments,)
    prefix : ndarray of int64, shape (fixed places,)
        Class of each of the first places.

    Returns
    -------
    ndarray of int64, shape (segments,)
    """
    sequence = np.empty(tasks.segments, np.int64)
    complete(prefix, tasks.first_segment, tasks.need_ptr, tasks.need_class, tasks.need_count, key, sequence)
    return sequence


@jit
def complete(
    prefix: np.ndarray,
    first_segment: np.ndarray,
    need_ptr: np.ndarray,
    need_class: np.ndarray,
    need_count: np.ndarray,
    key: np.ndarray,
    sequence: np.ndarray,
) -> None:
    """Complete an order of segments: always the allowed class whose next segment has the least key.

    Parameters
    ----------
    prefix : ndarray of int64, shape (fixed places,)
        Class (segment of a module) of each of the first places.
    first_segment : ndarray of int64, shape (classes + 1,)
        Segments of a class, one for each sub-micro-batch, in order.
    need_ptr, need_class, need_count : ndarray of int64
        Segment s is allowed once class ``need_class[i]`` has occurred ``need_count[i]`` times, for i from
        ``need_ptr[s]`` to ``need_ptr[s + 1]``.
    key : ndarray of float64, shape (segments,)
    sequence : ndarray of int64, shape (segments,)
        Filled with the segments in order.
    """
    classes = len(first_segment) - 1
    done = np.zeros(classes, np.int64)
    for place in range(len(sequence)):
        chosen = -1
        if place < len(prefix):
            chosen = prefix[place]
        else:
            least = np.inf
            for c in range(classes):
                segment = first_segment[c] + done[c]
                if segment >= first_segment[c + 1] or key[segment] >= least:
                    continue
                allowed = True
                for i in range(need_ptr[segment], need_ptr[segment + 1]):
                    if done[need_class[i]] < need_count[i]:
                        allowed = False
                        break
                if allowed:
                    least = key[segment]
                    chosen = c
        sequence[place] = first_segment[chosen] + done[chosen]
        done[chosen] += 1


def data_order_key(tasks: Tasks) -> np.ndarray:
    """Key that orders segments by their share of the step's items: related segments of all modules come together.

    Returns
    -------
    ndarray of float64, shape (segments,)
    """
    key = np.empty(tasks.segments)
    for c, (i, _) in enumerate(tasks.classes):
        before = np.concatenate([[0], np.cumsum(tasks.items[i])[:-1]])
        key[tasks.first_segment[c] : tasks.first_segment[c + 1]] = before / sum(tasks.items[i])
    # Classes are in topological order: ties go to the earlier module.
    return key + 1e-9 * np.repeat(np.arange(len(tasks.classes)), np.diff(tasks.first_segment))


def initial_keys(tasks: Tasks) -> list[np.ndarray]:
    """Keys that a search starts from: by share of the step, by module, by class; each of shape (segments,)."""
    by_share = data_order_key(tasks)
    modules = np.repeat([i for i, _ in tasks.classes], np.diff(tasks.first_segment))
    place = {i: at for at, i in enumerate(dict.fromkeys(i for i, _ in tasks.classes))}
    by_module = np.array([place[int(i)] for i in modules], dtype=np.float64)
    by_class = np.repeat(np.arange(len(tasks.classes)), np.diff(tasks.first_segment)).astype(np.float64)
    return [by_share, by_share + by_module, by_share + by_class]


def allowed_classes(tasks: Tasks, prefix: list[int]) -> list[int]:
    """Classes that may follow a beginning of an order, given as the class of each place."""
    done = [0] * len(tasks.classes)
    for c in prefix:
        done[c] += 1
    allowed = []
    for c in range(len(done)):
        segment = int(tasks.first_segment[c]) + done[c]
        if segment < tasks.first_segment[c + 1] and all(
            done[tasks.need_class[i]] >= tasks.need_count[i]
            for i in range(int(tasks.need_ptr[segment]), int(tasks.need_ptr[segment + 1]))
        ):
            allowed.append(c)
    return allowed
