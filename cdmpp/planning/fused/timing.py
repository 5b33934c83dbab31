"""Times of a fixed order, and the check of an answer: plain Python that shares nothing with the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from cdmpp.errors import FieldError
from cdmpp.planning.fused.problem import Problem

Pass = Literal["F", "B"]


class Task(NamedTuple):
    """A pass of one micro-batch through one stage of a model's copy."""

    model: int
    copy: int
    stage: int
    way: Pass
    micro_batch: int


def all_tasks(problem: Problem) -> list[list[Task]]:
    """The tasks of each rank, in no particular order."""
    out: list[list[Task]] = [[] for _ in range(problem.ranks)]
    for m, copy in problem.lanes():
        model = problem.models[m]
        for stage in range(model.stages):
            ways: tuple[Pass, Pass] = ("F", "B")
            out[problem.rank_of(model, copy, stage)] += [
                Task(m, copy, stage, way, i) for way in ways for i in range(model.micro_batches)
            ]
    return out


def needed(problem: Problem, task: Task) -> Task | None:
    """The task that has to be over before this one."""
    last = problem.models[task.model].stages - 1
    if task.way == "F":
        return task._replace(stage=task.stage - 1) if task.stage else None
    return task._replace(way="F") if task.stage == last else task._replace(stage=task.stage + 1)


def duration_s(problem: Problem, task: Task) -> float:
    """Seconds of a task."""
    model = problem.models[task.model]
    return model.forward_s if task.way == "F" else model.backward_s


def run_order(problem: Problem, order: Sequence[Sequence[Task]]) -> dict[Task, tuple[float, float]]:
    """Start and end of every task when each rank takes its tasks in order, each as soon as it can.

    Raises
    ------
    FieldError
        No rank can go on: each waits for another.
    """
    times: dict[Task, tuple[float, float]] = {}
    at = [0] * len(order)
    free = [0.0] * len(order)
    left = sum(map(len, order))
    while left:
        before = left
        for rank, row in enumerate(order):
            while at[rank] < len(row):
                task = row[at[rank]]
                earlier = needed(problem, task)
                if earlier is not None and earlier not in times:
                    break
                start = max(free[rank], times[earlier][1] if earlier is not None else 0.0)
                free[rank] = start + duration_s(problem, task)
                times[task] = (start, free[rank])
                at[rank] += 1
                left -= 1
        if left == before:
            rank = next(r for r, row in enumerate(order) if at[r] < len(row))
            raise FieldError(
                f"order.{rank}.{at[rank]}: waits for ever: the orders of the ranks lock each other",
                path=f"order.{rank}.{at[rank]}",
            )
    return times


def peaks(problem: Problem, order: Sequence[Sequence[Task]]) -> list[float]:
    """Most memory that each rank holds when it runs its tasks in order."""
    out = []
    for row in order:
        held = most = 0.0
        for task in row:
            size = problem.models[task.model].activation
            held += size if task.way == "F" else -size
            most = max(most, held)
        out.append(most)
    return out


def makespan_s(times: Mapping[Task, tuple[float, float]]) -> float:
    """End of the last task."""
    return max(end for _, end in times.values())
