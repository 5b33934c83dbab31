"""One schedule of a step's tasks, and the ways to one: from priorities, from a rank's order, 1F1B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.planning.multimodal.dispatch import (
    ALTERNATE,
    BACKWARD_FIRST,
    FORWARD_FIRST,
    FORWARD_ORDER,
    LONGEST_TAIL,
    LONGEST_WAIT,
    REVERSE_ORDER,
    complete,
    dispatch,
    follow,
)
from cdmpp.planning.multimodal.tasks import Tasks

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class Rule:
    """How the dispatcher chooses besides the order of segments; the constants are dispatch's."""

    back_rule: int
    preference: int
    strict: bool = False


RULES = tuple(
    Rule(back, preference)
    for back in (LONGEST_WAIT, FORWARD_ORDER, REVERSE_ORDER, LONGEST_TAIL)
    for preference in (BACKWARD_FIRST, ALTERNATE, FORWARD_FIRST)
)
#: Under a memory limit: to run ahead may take the memory that another needs to go on.
STRICT_RULES = tuple(Rule(rule.back_rule, rule.preference, True) for rule in RULES)


@dataclass(frozen=True)
class Schedule:
    """Starts of all tasks.

    Attributes
    ----------
    makespan_s : float
    start_s : ndarray (tasks,)
    place : ndarray (tasks,)
        Counts the tasks in an order in which none comes before one that it waits for; tells tasks of no
        duration apart that start together.
    """

    tasks: Tasks
    makespan_s: float
    start_s: np.ndarray
    place: np.ndarray

    @property
    def orders(self) -> list[list[int]]:
        """Tasks of each rank in the order in which they run."""
        in_turn = np.argsort(self.place)
        rank = np.concatenate([self.tasks.rank, self.tasks.rank])[in_turn]
        return [in_turn[rank == r].tolist() for r in range(self.tasks.ranks)]


def sequence_of(tasks: Tasks, key: np.ndarray, begun: np.ndarray = _NOTHING) -> np.ndarray:
    """Segments by ``key`` (segments,), least first, each behind those that it waits for."""
    sequence = np.empty(tasks.segments, np.int64)
    complete(begun, tasks.first_segment, tasks.need_ptr, tasks.need_class, tasks.need_count, key, sequence)
    return sequence


def dispatched(tasks: Tasks, sequence: np.ndarray, rule: Rule, *, limited: bool = True) -> Schedule:
    """The list schedule of an order of segments; infinitely long where the memory lets nothing go on.

    ``limited`` False: as if there were memory without end.
    """
    room = tasks.room if limited else np.full(tasks.ranks, np.inf)
    start_s, place = np.empty(2 * tasks.half), np.empty(2 * tasks.half, np.int64)
    makespan_s = dispatch(
        tasks.half,
        tasks.ranks,
        tasks.rank,
        tasks.duration_s,
        tasks.before,
        tasks.first_after,
        tasks.after,
        tasks.first_task,
        *tasks.lanes,
        sequence,
        tasks.ways_s[1],
        rule.back_rule,
        rule.preference,
        rule.strict,
        tasks.kept,
        tasks.more_forward,
        tasks.more_backward,
        room,
        start_s,
        place,
    )
    return Schedule(tasks, float(makespan_s), start_s, place)


def followed(tasks: Tasks, orders: Sequence[Sequence[int]]) -> Schedule:
    """Every task as early as these orders allow; infinitely long where the ranks wait for each other."""
    start_s, place = np.empty(2 * tasks.half), np.empty(2 * tasks.half, np.int64)
    first_of = np.cumsum([0, *map(len, orders)])
    flat = np.concatenate([np.array(order, np.int64) for order in orders])
    makespan_s = follow(tasks.duration_s, tasks.before, tasks.first_after, tasks.after, first_of, flat, start_s, place)
    return Schedule(tasks, float(makespan_s), start_s, place)


def natural_key(tasks: Tasks) -> np.ndarray:
    """Segments by their place in the step: a unit's, and those of its share of other modules, together."""
    key = np.empty(tasks.segments)
    for c, (i, _) in enumerate(tasks.classes):
        begun = np.concatenate([[0], np.cumsum(tasks.items[i])[:-1]])
        key[tasks.first_segment[c] : tasks.first_segment[c + 1]] = begun / sum(tasks.items[i])
    # Classes are in the order of data: of equal shares the earlier module goes first.
    return key + 1e-9 * np.repeat(np.arange(len(tasks.classes)), np.diff(tasks.first_segment))


def start_keys(tasks: Tasks) -> list[np.ndarray]:
    """Orders to begin a search with: by share of the step, by module, by class."""
    natural = natural_key(tasks)
    modules = np.repeat([i for i, _ in tasks.classes], np.diff(tasks.first_segment))
    place = {i: at for at, i in enumerate(dict.fromkeys(i for i, _ in tasks.classes))}
    by_module = np.array([place[int(i)] for i in modules], dtype=np.float64)
    classes = np.repeat(np.arange(len(tasks.classes)), np.diff(tasks.first_segment)).astype(np.float64)
    return [natural, natural + by_module, natural + classes]


def one_f_one_b(tasks: Tasks, micro_batch: Sequence[Sequence[int]]) -> list[list[int]]:
    """The 1F1B order of each rank for modules packed one behind the other.

    Rank r of P runs ``min(P - 1 - r, micro-batches)`` forward passes, then forward and backward in turn.

    Parameters
    ----------
    micro_batch : sequence of sequence of int
        The micro-batch of each unit, by module.
    """
    ranks, half = tasks.ranks, tasks.half
    count = 1 + max(max(each) for each in micro_batch if len(each))
    stages: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(ranks)]
    for i, _ in tasks.classes:
        for unit, row in enumerate(tasks.ids[i]):
            for t in row.tolist():
                stages[int(tasks.rank[t])][micro_batch[i][unit]].append(t)
    out = []
    for r, stage in enumerate(stages):
        ahead = min(ranks - 1 - r, count)
        order = [t for m in range(ahead) for t in stage[m]]
        for m in range(count):
            if ahead + m < count:
                order += stage[ahead + m]
            order += [half + t for t in reversed(stage[m])]
        out.append(order)
    return out


def lean_orders(tasks: Tasks) -> list[list[int]]:
    """Orders that hold least: a unit's backward pass as soon as it can be, one unit in motion at a time."""
    waiting = [int(n) for n in tasks.before]
    half = tasks.half
    out: list[list[int]] = [[] for _ in range(tasks.ranks)]
    backward: list[int] = []

    def run(task: int) -> None:
        out[int(tasks.rank[task if task < half else task - half])].append(task)
        for other in tasks.after[tasks.first_after[task] : tasks.first_after[task + 1]]:
            waiting[other] -= 1
            if not waiting[other] and other >= half:
                backward.append(int(other))

    for segment in sequence_of(tasks, natural_key(tasks)):
        for t in range(int(tasks.first_task[segment]), int(tasks.first_task[segment + 1])):
            run(t)
            while backward:
                run(backward.pop())
    return out
