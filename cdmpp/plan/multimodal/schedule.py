"""Schedules of a step's tasks: from an order of segments, or from an order of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.plan.multimodal.dispatch import (
    ALTERNATE,
    BACKWARD_FIRST,
    FORWARD_FIRST,
    FORWARD_ORDER,
    LONGEST_TAIL,
    LONGEST_WAIT,
    REVERSE_ORDER,
    DispatchRule,
    dispatch,
)
from cdmpp.plan.multimodal.graph import run_in_order
from cdmpp.plan.multimodal.sequence import data_order_key, sequence_by
from cdmpp.plan.multimodal.tasks import Tasks

RULES = tuple(
    DispatchRule(backward_rule, preference)
    for backward_rule in (LONGEST_WAIT, FORWARD_ORDER, REVERSE_ORDER, LONGEST_TAIL)
    for preference in (BACKWARD_FIRST, ALTERNATE, FORWARD_FIRST)
)
#: For memory limits: a task that overtakes may take the memory that another one needs.
STRICT_RULES = tuple(rule._replace(strict=True) for rule in RULES)


@dataclass(frozen=True)
class Schedule:
    """Start times of all tasks.

    Attributes
    ----------
    tasks : Tasks
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
    rule : DispatchRule
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
