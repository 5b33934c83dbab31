"""Models of a fused pipeline, their replicas on the ranks, the tasks as arrays, and the times of a given order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.base.task_graph import make_graph, run_in_order

Direction = Literal["down", "up"]
Pass = Literal["F", "B"]


@dataclass(frozen=True)
class Model:
    """A pipeline-parallel model with equal stages; each micro-batch runs forward through all, then backward.

    Attributes
    ----------
    micro_batches : int
        Number of micro-batches of each replica.
    forward_s, backward_s : float
        Seconds of one stage for one micro-batch, > 0.
    direction : {"down", "up"}
        Stage 0 of replica 0 is on rank 0 (down) or on the last rank (up).
    activation : float
        Memory that a stage holds for a micro-batch, from the start of its forward pass to the end of its backward
        pass, in any unit.
    """

    stages: int
    micro_batches: int
    forward_s: float
    backward_s: float
    direction: Direction = "down"
    activation: float = 1.0


@dataclass(frozen=True)
class FusedProblem:
    """Models to schedule on the same ranks.

    A model with fewer stages than ranks has ``ranks / stages`` equal replicas side by side. Stage ``s`` of replica
    ``c`` is on rank ``c * stages + s`` ("down") or ``ranks - 1 - (c * stages + s)`` ("up"). Transfers take no time
    (RLHFuse, section 5: fused pipelines).

    Parameters
    ----------
    max_activations : float, optional
        Memory limit of each rank, in the unit of ``Model.activation``.

    Raises
    ------
    FieldError
        The stages of a model do not divide the ranks.
    InfeasibleError
        A single activation is larger than the limit.

    Notes
    -----
    A *group* holds the tasks of all micro-batches of one (model, replica, stage, pass). Micro-batches are equal, so
    running a group's tasks in micro-batch order loses nothing: a schedule is a sequence of groups for each rank.
    Task ``i`` of group ``g`` has the number ``offset[g] + i``.
    """

    ranks: int
    models: tuple[Model, ...]
    max_activations: float | None = None

    def __post_init__(self) -> None:
        for index, model in enumerate(self.models):
            if self.ranks % model.stages:
                raise FieldError.at(
                    f"models.{index}.stages",
                    f"{model.stages} stages do not divide {self.ranks} ranks",
                    hint="the replicas of a model fill the ranks side by side",
                )
        largest = max(model.activation for model in self.models)
        if self.max_activations is not None and self.max_activations < largest:
            raise InfeasibleError.at(
                "max_activations",
                f"{self.max_activations:g} is too small; at least {largest:g} is needed",
                hint="a rank holds at least one micro-batch of the model with the largest activations",
            )

    def rank_of(self, model: Model, copy: int, stage: int) -> int:
        """Rank of a stage of a replica."""
        place = copy * model.stages + stage
        return place if model.direction == "down" else self.ranks - 1 - place

    def replicas(self) -> list[tuple[int, int]]:
        """(model, copy) of each replica, model by model."""
        return [(m, c) for m, model in enumerate(self.models) for c in range(self.ranks // model.stages)]

    @cached_property
    def tasks(self) -> TaskArrays:
        """The tasks as arrays."""
        return TaskArrays(self)


class GroupArrays(NamedTuple):
    """Arrays that the compiled list scheduler reads, in one direction of time.

    Attributes
    ----------
    rank_groups, rank_start : ndarray of int64
        Groups of rank r: ``rank_groups[rank_start[r]:rank_start[r + 1]]``.
    rank, size, offset : ndarray of int64, shape (groups,)
        Rank, number of tasks, and number of the first task.
    duration : ndarray of float64, shape (groups,)
        Seconds of a task.
    before, after : ndarray of int64, shape (groups,)
        Group of the same micro-batch's previous and next task; -1 where there is none.
    opens : ndarray of bool, shape (groups,)
        Whether a task allocates memory (the forward pass) or frees it.
    partner : ndarray of int64, shape (groups,)
        Group of the other pass of the same stage.
    activation : ndarray of float64, shape (groups,)
        Memory that a task allocates or frees.
    """

    rank_groups: np.ndarray
    rank_start: np.ndarray
    rank: np.ndarray
    size: np.ndarray
    offset: np.ndarray
    duration: np.ndarray
    before: np.ndarray
    after: np.ndarray
    opens: np.ndarray
    partner: np.ndarray
    activation: np.ndarray


class TaskArrays:
    """Groups of tasks as arrays, one entry per group; see :class:`FusedProblem` and :class:`GroupArrays`.

    Attributes
    ----------
    arrays, mirrored : GroupArrays
        The groups, and the same with time reversed.
    rank, replica, model, stage, count, offset, before, after : ndarray of int64, shape (groups,)
    forward : ndarray of bool, shape (groups,)
    duration, activation : ndarray of float64, shape (groups,)
    head, tail : ndarray of float64, shape (groups,)
        Seconds of a micro-batch's tasks before and after the group's.
    partner : ndarray of int64, shape (groups,)
    group, index : ndarray of int64, shape (tasks,)
        Group of each task, and its micro-batch.
    mirror : ndarray of int64, shape (tasks,)
        Number of the task that takes a task's place when time is reversed.
    """

    def __init__(self, problem: FusedProblem) -> None:
        rows: list[tuple[float, ...]] = []
        before: list[int] = []
        for replica, (m, copy) in enumerate(problem.replicas()):
            model = problem.models[m]
            base, last = len(rows), model.stages - 1
            for stage in range(model.stages):
                rank = problem.rank_of(model, copy, stage)
                common = (rank, replica, m, stage, model.micro_batches, model.activation)
                rows.append((*common, 1, model.forward_s))
                rows.append((*common, 0, model.backward_s))
                before.append(base + 2 * (stage - 1) if stage else -1)
                before.append(base + 2 * stage + (3 if stage < last else 0))
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        self.rank, self.replica, self.model, self.stage, self.count = (c.astype(np.int64) for c in columns[:5])
        self.activation = columns[5].astype(np.float64)
        self.forward = columns[6].astype(np.bool_)
        self.duration = columns[7].astype(np.float64)
        self.before = np.array(before, np.int64)
        groups = len(rows)
        self.after = np.full(groups, -1, np.int64)
        has_previous = self.before >= 0
        self.after[self.before[has_previous]] = np.arange(groups)[has_previous]
        self.partner = np.arange(groups, dtype=np.int64) ^ 1
        self.offset = np.cumsum(self.count) - self.count
        self.group = np.repeat(np.arange(groups, dtype=np.int64), self.count)
        self.index = np.arange(len(self.group), dtype=np.int64) - self.offset[self.group]
        self.mirror = self.offset[self.group] + self.count[self.group] - 1 - self.index
        self.head, self.tail = self._sum_along(self.before), self._sum_along(self.after)
        rank_groups = np.argsort(self.rank, kind="stable")
        self.arrays = GroupArrays(
            rank_groups=rank_groups,
            rank_start=np.searchsorted(self.rank[rank_groups], np.arange(problem.ranks + 1)),
            rank=self.rank,
            size=self.count,
            offset=self.offset,
            duration=self.duration,
            before=self.before,
            after=self.after,
            opens=self.forward,
            partner=self.partner,
            activation=self.activation,
        )
        self.mirrored = self.arrays._replace(before=self.after, after=self.before, opens=~self.forward)

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self.group)

    def _sum_along(self, link: np.ndarray) -> np.ndarray:
        """Seconds of all groups that are reached from each group by following ``link``; shape (groups,)."""
        seconds = np.zeros(len(link))
        for g in range(len(link)):
            at = link[g]
            while at >= 0:
                seconds[g] += self.duration[at]
                at = link[at]
        return seconds

    def by_rank(self) -> list[np.ndarray]:
        """Task numbers of each rank, growing."""
        rank = self.rank[self.group]
        return [np.flatnonzero(rank == r) for r in range(len(self.arrays.rank_start) - 1)]

    def memory_change(self) -> np.ndarray:
        """Memory that a task of each group allocates (> 0) or frees (< 0); shape (groups,)."""
        return np.where(self.forward, self.activation, -self.activation)

    def peaks(self, start_s: np.ndarray) -> np.ndarray:
        """Peak memory of each rank; shape (ranks,).

        Parameters
        ----------
        start_s : ndarray, shape (tasks,)
            Start of each task in a valid schedule, in seconds.
        """
        change = self.memory_change()[self.group]
        return np.array(
            [
                np.cumsum(change[numbers[np.argsort(start_s[numbers], kind="stable")]]).max()
                for numbers in self.by_rank()
            ]
        )


class FusedTask(NamedTuple):
    """A forward or backward pass of one micro-batch through one stage of a model's replica."""

    model: int
    copy: int
    stage: int
    way: Pass
    micro_batch: int


def all_tasks(problem: FusedProblem) -> list[list[FusedTask]]:
    """Tasks of each rank, in no particular order."""
    tasks: list[list[FusedTask]] = [[] for _ in range(problem.ranks)]
    ways: tuple[Pass, Pass] = ("F", "B")
    for m, copy in problem.replicas():
        model = problem.models[m]
        for stage in range(model.stages):
            tasks[problem.rank_of(model, copy, stage)] += [
                FusedTask(m, copy, stage, way, i) for way in ways for i in range(model.micro_batches)
            ]
    return tasks


def predecessor(problem: FusedProblem, task: FusedTask) -> FusedTask | None:
    """The task that must end before this one starts; None for the first stage's forward pass."""
    last = problem.models[task.model].stages - 1
    if task.way == "F":
        return task._replace(stage=task.stage - 1) if task.stage else None
    return task._replace(way="F") if task.stage == last else task._replace(stage=task.stage + 1)


def duration_s(problem: FusedProblem, task: FusedTask) -> float:
    """Duration of a task in seconds."""
    model = problem.models[task.model]
    return model.forward_s if task.way == "F" else model.backward_s


def run_order(problem: FusedProblem, order: Sequence[Sequence[FusedTask]]) -> dict[FusedTask, tuple[float, float]]:
    """Start and end of every task in seconds when each rank runs its tasks in order, as early as possible.

    Parameters
    ----------
    order : sequence of sequence of FusedTask
        Tasks of each rank.

    Raises
    ------
    FieldError
        Deadlock: each rank waits for another.
    """
    times: dict[FusedTask, tuple[float, float]] = {}
    position = [0] * len(order)
    free_s = [0.0] * len(order)
    remaining = sum(map(len, order))
    while remaining:
        before = remaining
        for rank, row in enumerate(order):
            while position[rank] < len(row):
                task = row[position[rank]]
                earlier = predecessor(problem, task)
                if earlier is not None and earlier not in times:
                    break
                start_s = max(free_s[rank], times[earlier][1] if earlier is not None else 0.0)
                free_s[rank] = start_s + duration_s(problem, task)
                times[task] = (start_s, free_s[rank])
                position[rank] += 1
                remaining -= 1
        if remaining == before:
            rank = next(r for r, row in enumerate(order) if position[r] < len(row))
            path = f"order.{rank}.{position[rank]}"
            raise FieldError.at(path, "never starts: the orders of the ranks are in a deadlock")
    return times


def run_numbers(problem: FusedProblem, orders: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every task as :func:`run_order`, with task numbers in valid orders; shapes (tasks,)."""
    tasks = problem.tasks
    before = tasks.before[tasks.group]
    later = np.flatnonzero(before >= 0)
    earlier = tasks.offset[before[later]] + tasks.index[later]
    graph = make_graph(tasks.duration[tasks.group], [earlier], [later])
    firsts = np.cumsum([0, *map(len, orders)])
    start_s, place = np.empty(tasks.size), np.empty(tasks.size, np.int64)
    run_in_order(graph, firsts, np.concatenate(orders), start_s, place)
    return start_s, start_s + graph.duration_s


def peaks(problem: FusedProblem, order: Sequence[Sequence[FusedTask]]) -> list[float]:
    """Peak memory of each rank when it runs its tasks in order."""
    result = []
    for row in order:
        held = peak = 0.0
        for task in row:
            size = problem.models[task.model].activation
            held += size if task.way == "F" else -size
            peak = max(peak, held)
        result.append(peak)
    return result
