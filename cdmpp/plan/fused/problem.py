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


@dataclass(frozen=True)
class Model:
    """A pipeline-parallel model with equal stages; each micro-batch runs forward through all, then backward."""

    stages: int
    micro_batches: int  # of each replica
    # Seconds of one stage for one micro-batch, > 0.
    forward_s: float
    backward_s: float
    direction: Direction = "down"  # stage 0 of replica 0 is on rank 0 (down) or on the last rank (up)
    # Memory that a stage holds for a micro-batch, from its forward pass to the end of its backward pass, in any unit.
    activation: float = 1.0
    transfer_s: float = 0.0  # from the end of a stage's pass to the start of the next stage's; the gradient's back


@dataclass(frozen=True)
class FusedProblem:
    """Models to schedule on the same ranks.

    A model with fewer stages than ranks has ``ranks / stages`` equal replicas side by side. Stage ``s`` of replica
    ``c`` is on rank ``c * stages + s`` ("down") or ``ranks - 1 - (c * stages + s)`` ("up"). A transfer delays
    only the pass that waits for it.

    A *group* holds the tasks of all micro-batches of one (model, replica, stage, pass). Micro-batches are equal, so
    running a group's tasks in micro-batch order loses nothing: a schedule is a sequence of groups for each rank.
    Task ``i`` of group ``g`` has the number ``offset[g] + i``.

    Raises FieldError: the stages of a model do not divide the ranks.
    Raises InfeasibleError: a single activation is larger than the limit.
    """

    ranks: int
    models: tuple[Model, ...]
    max_activations: float | None = None  # memory limit of each rank, in the unit of ``Model.activation``
    # Models in the order in which every rank runs them, one after the other; None: their passes may be mixed.
    sequence: tuple[int, ...] | None = None

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
    """Arrays that the compiled list scheduler reads, in one direction of time; all but the first two are (groups,)."""

    # Groups of rank r: ``rank_groups[rank_start[r]:rank_start[r + 1]]``.
    rank_groups: np.ndarray
    rank_start: np.ndarray
    rank: np.ndarray
    size: np.ndarray  # number of tasks
    offset: np.ndarray  # number of the first task
    duration: np.ndarray  # seconds of a task
    lag: np.ndarray  # seconds from the end of the same micro-batch's previous task to the start at the earliest
    # Group of the same micro-batch's previous and next task; -1 where there is none.
    before: np.ndarray
    after: np.ndarray
    opens: np.ndarray  # bool: whether a task allocates memory (the forward pass) or frees it
    partner: np.ndarray  # group of the other pass of the same stage
    activation: np.ndarray  # memory that a task allocates or frees
    turn: np.ndarray  # a rank begins a turn when all its tasks of those before have ended


class TaskArrays:
    """Groups of tasks as arrays, one entry per group; see :class:`FusedProblem` and :class:`GroupArrays`.

    ``arrays``, ``mirrored``: the groups, and the same with time reversed. ``head``, ``tail`` (groups,): seconds of a
    micro-batch's tasks and transfers before and after the group's. ``group``, ``index`` (tasks,): group of each task,
    and its micro-batch. ``mirror`` (tasks,): number of the task that takes a task's place when time is reversed.
    """

    def __init__(self, problem: FusedProblem) -> None:
        rows: list[tuple[float, ...]] = []
        chains: list[np.ndarray] = []  # groups in the order in which a micro-batch passes them
        for replica, (m, copy) in enumerate(problem.replicas()):
            model = problem.models[m]
            base, last = len(rows), model.stages - 1
            for stage in range(model.stages):
                rank = problem.rank_of(model, copy, stage)
                common = (rank, replica, m, stage, model.micro_batches, model.activation)
                rows.append((*common, 1, model.forward_s, model.transfer_s if stage else 0.0))
                rows.append((*common, 0, model.backward_s, model.transfer_s if stage < last else 0.0))
            forward = np.arange(base, len(rows), 2)
            chains.append(np.concatenate([forward, forward[::-1] + 1]))
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        self.rank, self.replica, self.model, self.stage, self.count = (c.astype(np.int64) for c in columns[:5])
        self.activation = columns[5].astype(np.float64)
        self.forward = columns[6].astype(np.bool_)
        self.duration, self.lag = (c.astype(np.float64) for c in columns[7:])
        groups = len(rows)
        self.before, self.after = np.full((2, groups), -1, np.int64)
        self.head, self.tail = np.zeros((2, groups))
        for chain in chains:
            self.before[chain[1:]], self.after[chain[:-1]] = chain[:-1], chain[1:]
            ends = np.cumsum(self.lag[chain] + self.duration[chain])
            self.head[chain], self.tail[chain] = ends - self.duration[chain], ends[-1] - ends
        self.partner = np.arange(groups, dtype=np.int64) ^ 1
        self.offset = np.cumsum(self.count) - self.count
        self.group = np.repeat(np.arange(groups, dtype=np.int64), self.count)
        self.index = np.arange(len(self.group), dtype=np.int64) - self.offset[self.group]
        self.mirror = self.offset[self.group] + self.count[self.group] - 1 - self.index
        turn = np.argsort(problem.sequence)[self.model] if problem.sequence else np.zeros(groups, np.int64)
        rank_groups = np.argsort(self.rank, kind="stable")
        rank_start = np.searchsorted(self.rank[rank_groups], np.arange(problem.ranks + 1))
        fields = (self.rank, self.count, self.offset, self.duration, self.lag, self.before, self.after)
        self.arrays = GroupArrays(rank_groups, rank_start, *fields, self.forward, self.partner, self.activation, turn)
        lag = np.where(self.after >= 0, self.lag[self.after], 0.0)
        self.mirrored = self.arrays._replace(
            before=self.after, after=self.before, opens=~self.forward, lag=lag, turn=turn.max() - turn
        )

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self.group)

    def by_rank(self) -> list[np.ndarray]:
        """Task numbers of each rank, growing."""
        rank = self.rank[self.group]
        return [np.flatnonzero(rank == r) for r in range(len(self.arrays.rank_start) - 1)]

    def orders(self, start_s: np.ndarray) -> list[np.ndarray]:
        """Task numbers of each rank by growing start; ``start_s`` of shape (tasks,), in seconds."""
        return [numbers[np.argsort(start_s[numbers], kind="stable")] for numbers in self.by_rank()]

    def earlier(self) -> np.ndarray:
        """The task that must end before each task starts, shape (tasks,); negative for first forward passes."""
        before = self.before[self.group]
        earlier: np.ndarray = np.where(before < 0, -1, self.offset[before] + self.index)
        return earlier

    def held(self, orders: Sequence[Sequence[int] | np.ndarray]) -> list[np.ndarray]:
        """Memory that each rank holds after the start of each of its tasks, run in order."""
        change = np.where(self.forward, self.activation, -self.activation)[self.group]
        return [np.cumsum(change[np.asarray(order, np.int64)]) for order in orders]


def run_orders(problem: FusedProblem, orders: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Start and end (tasks,) in seconds when each rank runs the tasks of its order as early as possible.

    Raises FieldError: deadlock: each rank waits for another.
    """
    tasks = problem.tasks
    later = np.flatnonzero(tasks.earlier() >= 0)
    graph = make_graph([tasks.earlier()[later]], [later], tasks.size)
    graph = graph._replace(duration_s=tasks.duration[tasks.group], lag_s=tasks.lag[tasks.group[graph.after]])
    firsts = np.cumsum([0, *map(len, orders)])
    start_s, place = np.full(tasks.size, np.nan), np.empty(tasks.size, np.int64)
    if np.isinf(run_in_order(graph, firsts, np.concatenate(orders).astype(np.int64), start_s, place)):
        waiting = ((rank, at) for rank, row in enumerate(orders) for at, n in enumerate(row) if np.isnan(start_s[n]))
        rank, at = next(waiting)
        raise FieldError.at(f"order.{rank}.{at}", "never starts: the orders of the ranks are in a deadlock")
    return start_s, start_s + graph.duration_s
