"""Times and memory of a fixed order of passes, in plain Python that shares no code with the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from cdmpp.errors import FieldError
from cdmpp.plan.fused.problem import Problem

Pass = Literal["F", "B"]


class Task(NamedTuple):
    """A forward or backward pass of one micro-batch through one stage of a model's replica."""

    model: int
    copy: int
    stage: int
    way: Pass
    micro_batch: int


def all_tasks(problem: Problem) -> list[list[Task]]:
    """Tasks of each rank, in no particular order."""
    tasks: list[list[Task]] = [[] for _ in range(problem.ranks)]
    ways: tuple[Pass, Pass] = ("F", "B")
    for m, copy in problem.replicas():
        model = problem.models[m]
        for stage in range(model.stages):
            tasks[problem.rank_of(model, copy, stage)] += [
                Task(m, copy, stage, way, i) for way in ways for i in range(model.micro_batches)
            ]
    return tasks


def predecessor(problem: Problem, task: Task) -> Task | None:
    """The task that must end before this one starts; None for the first stage's forward pass."""
    last = problem.models[task.model].stages - 1
    if task.way == "F":
        return task._replace(stage=task.stage - 1) if task.stage else None
    return task._replace(way="F") if task.stage == last else task._replace(stage=task.stage + 1)


def duration_s(problem: Problem, task: Task) -> float:
    """Duration of a task in seconds."""
    model = problem.models[task.model]
    return model.forward_s if task.way == "F" else model.backward_s


def run_order(problem: Problem, order: Sequence[Sequence[Task]]) -> dict[Task, tuple[float, float]]:
    """Start and end of every task in seconds when each rank runs its tasks in order, as early as possible.

    Parameters
    ----------
    order : sequence of sequence of Task
        Tasks of each rank.

    Raises
    ------
    FieldError
        Deadlock: each rank waits for another.
    """
    times: dict[Task, tuple[float, float]] = {}
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
            raise FieldError(f"{path}: never starts: the orders of the ranks are in a deadlock", path=path)
    return times


def peaks(problem: Problem, order: Sequence[Sequence[Task]]) -> list[float]:
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


def makespan_s(times: Mapping[Task, tuple[float, float]]) -> float:
    """End of the last task, in seconds."""
    return max(end for _, end in times.values())
