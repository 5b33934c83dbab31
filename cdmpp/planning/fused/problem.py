"""What a fused pipeline schedules: models, their copies on the ranks, and the tasks as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from cdmpp.errors import FieldError, InfeasibleError

Direction = Literal["down", "up"]


@dataclass(frozen=True)
class Model:
    """A pipeline-parallel model: equal stages, each micro-batch forward through all and back again.

    Attributes
    ----------
    stages : int
    micro_batches : int
        Of each of its copies.
    forward_s, backward_s : float
        Seconds of one stage for one micro-batch, > 0.
    direction : {"down", "up"}
        Stage 0 of copy 0 is on rank 0, or on the last rank.
    activation : float
        Memory that a stage holds for a micro-batch from the start of its forward to the end of its backward
        pass, in any unit.
    """

    stages: int
    micro_batches: int
    forward_s: float
    backward_s: float
    direction: Direction = "down"
    activation: float = 1.0


@dataclass(frozen=True)
class Problem:
    """Models on ranks.

    A model with fewer stages than ranks has ``ranks / stages`` equal copies side by side. Stage ``s`` of copy
    ``c`` is on rank ``c * stages + s`` ("down") or ``ranks - 1 - (c * stages + s)`` ("up"); transfers take no
    time (RLHFuse, section 5: fused pipelines).

    Parameters
    ----------
    ranks : int
    models : sequence of Model
    max_activations : float, optional
        Most that a rank may hold.

    Raises
    ------
    FieldError
        The stages of a model do not divide the ranks.
    InfeasibleError
        A single activation is above the limit.

    Notes
    -----
    Tasks come in *groups*: all micro-batches of one (model, copy, stage, pass). Micro-batches are equal, so
    within a group they run in their order without loss: a schedule is, for each rank, a word of groups.
    Task ``i`` of group ``g`` is number ``offset[g] + i``.
    """

    ranks: int
    models: tuple[Model, ...]
    max_activations: float | None = None

    def __post_init__(self) -> None:
        for at, model in enumerate(self.models):
            if self.ranks % model.stages:
                raise FieldError(
                    f"models.{at}.stages: {model.stages} stages do not divide {self.ranks} ranks",
                    path=f"models.{at}.stages",
                    hint="copies stand side by side and fill the ranks",
                )
        largest = max(model.activation for model in self.models)
        if self.max_activations is not None and self.max_activations < largest:
            raise InfeasibleError(
                f"max_activations: {self.max_activations:g} holds no plan; {largest:g} does",
                path="max_activations",
                hint="a rank holds at least one micro-batch of the model with the largest activations",
            )

    def rank_of(self, model: Model, copy: int, stage: int) -> int:
        """The rank of a stage."""
        place = copy * model.stages + stage
        return place if model.direction == "down" else self.ranks - 1 - place

    def lanes(self) -> list[tuple[int, int]]:
        """(model, copy) of each copy, in order."""
        return [(m, c) for m, model in enumerate(self.models) for c in range(self.ranks // model.stages)]

    @cached_property
    def tasks(self) -> Tasks:
        """The tasks as arrays."""
        return Tasks(self)


class Tasks:
    """Groups of tasks as arrays, one entry a group; see :class:`Problem`.

    Attributes
    ----------
    rank, lane, model, stage, count, offset : ndarray of int64, shape (groups,)
    forward : ndarray of bool, shape (groups,)
    duration, activation : ndarray of float64, shape (groups,)
        Seconds of a task; memory it opens (forward) or closes (backward).
    before, after : ndarray of int64, shape (groups,)
        Group whose task of the same micro-batch comes before, or after; -1: none.
    partner : ndarray of int64, shape (groups,)
        The other pass of the same stage.
    head, tail : ndarray of float64, shape (groups,)
        Seconds of a micro-batch's tasks before, and after.
    group, index : ndarray of int64, shape (tasks,)
    mirror : ndarray of int64, shape (tasks,)
        Number of the task that stands for a task when time runs backwards.
    rank_groups, rank_start : ndarray of int64
        Groups of rank r: ``rank_groups[rank_start[r]:rank_start[r + 1]]``.
    """

    def __init__(self, problem: Problem) -> None:
        rows: list[tuple[float, ...]] = []
        before: list[int] = []
        for lane, (m, copy) in enumerate(problem.lanes()):
            model = problem.models[m]
            base, last = len(rows), model.stages - 1
            for stage in range(model.stages):
                rank = problem.rank_of(model, copy, stage)
                common = (rank, lane, m, stage, model.micro_batches, model.activation)
                rows.append((*common, 1, model.forward_s))
                rows.append((*common, 0, model.backward_s))
                before.append(base + 2 * (stage - 1) if stage else -1)
                before.append(base + 2 * stage + (3 if stage < last else 0))
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        self.rank, self.lane, self.model, self.stage, self.count = (c.astype(np.int64) for c in columns[:5])
        self.activation = columns[5].astype(np.float64)
        self.forward = columns[6].astype(np.bool_)
        self.duration = columns[7].astype(np.float64)
        self.before = np.array(before, np.int64)
        groups = len(rows)
        self.after = np.full(groups, -1, np.int64)
        has = self.before >= 0
        self.after[self.before[has]] = np.arange(groups)[has]
        self.partner = np.arange(groups, dtype=np.int64) ^ 1
        self.offset = np.cumsum(self.count) - self.count
        self.group = np.repeat(np.arange(groups, dtype=np.int64), self.count)
        self.index = np.arange(len(self.group), dtype=np.int64) - self.offset[self.group]
        self.mirror = self.offset[self.group] + self.count[self.group] - 1 - self.index
        self.rank_groups = np.argsort(self.rank, kind="stable")
        self.rank_start = np.searchsorted(self.rank[self.rank_groups], np.arange(problem.ranks + 1))
        self.head, self.tail = self._along(self.before), self._along(self.after)

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self.group)

    def _along(self, link: np.ndarray) -> np.ndarray:
        found = np.zeros(len(link))
        for g in range(len(link)):
            at = link[g]
            while at >= 0:
                found[g] += self.duration[at]
                at = link[at]
        return found

    def peaks(self, start_s: np.ndarray) -> np.ndarray:
        """Most memory that each rank holds; shape (ranks,).

        Parameters
        ----------
        start_s : ndarray, shape (tasks,)
            A valid schedule.
        """
        out = np.zeros(len(self.rank_start) - 1)
        rank = self.rank[self.group]
        change = np.where(self.forward, self.activation, -self.activation)[self.group]
        for r in range(len(out)):
            mine = np.flatnonzero(rank == r)
            out[r] = np.cumsum(change[mine[np.argsort(start_s[mine], kind="stable")]]).max()
        return out


def models_of(rows: Sequence[tuple[int, int, float, float, Direction]]) -> tuple[Model, ...]:
    """Models from (stages, micro_batches, forward_s, backward_s, direction)."""
    return tuple(Model(*row) for row in rows)
