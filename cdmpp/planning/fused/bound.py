"""How fast a fused pipeline can be at best."""

from __future__ import annotations

import heapq

import numpy as np

from cdmpp.planning.fused.problem import Problem


def lower_bound_s(problem: Problem) -> float:
    """A makespan that no schedule falls below, in seconds.

    Each rank by itself, with preemption allowed: a task is released when the micro-batches up to its own can
    have come to it at the earliest, and after it runs what they still need to the end. Jackson's rule
    (largest tail first) solves that relaxation exactly. It is never below the bounds in use for fused
    pipelines: a model's own (M + P - 1) (f + b), the work of a rank between the earliest first task and the
    shortest tail, and the total work over the ranks. Where memory is limited, a rank also needs the time for
    which its micro-batches have to be held, over how many it may hold.

    Notes
    -----
    A task's release does not assume an order of passes: micro-batch ``i`` (counted from 0) of a stage cannot
    start its forward pass before ``i`` others did theirs there. Its backward pass cannot end on the last
    stage before ``i + 1`` micro-batches did both of theirs there. Tails are the same in reversed time.
    """
    tasks = problem.tasks
    head, tail = heads_and_tails(problem)
    rank = tasks.rank[tasks.group]
    duration = tasks.duration[tasks.group]
    by_rank = [np.flatnonzero(rank == r) for r in range(problem.ranks)]
    work = max(_one_machine(head[mine], duration[mine], tail[mine]) for mine in by_rank)
    return max(work, held_bound_s(problem))


def held_bound_s(problem: Problem) -> float:
    """The makespan that the memory limit asks for; 0 without one."""
    if problem.max_activations is None:
        return 0.0
    limit = problem.max_activations
    sizes = {model.activation for model in problem.models}
    if len(sizes) == 1:
        size = sizes.pop()
        limit = size * max(np.floor(limit / size * (1 + 1e-9)), 1.0)
    tasks = problem.tasks
    found = 0.0
    for r in range(problem.ranks):
        mine = np.flatnonzero((tasks.rank == r) & tasks.forward)
        # A micro-batch is held until it has been to the last stage and back, at least.
        least = tasks.tail[mine] - tasks.tail[tasks.partner[mine]] + tasks.duration[mine]
        held = float((tasks.count[mine] * tasks.activation[mine] * least).sum())
        found = max(found, float(tasks.head[mine].min() + held / limit + tasks.tail[tasks.partner[mine]].min()))
    return found


def heads_and_tails(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Seconds that must pass before each task, and after it; both of shape (tasks,)."""
    tasks = problem.tasks
    head, tail = np.empty(tasks.size), np.empty(tasks.size)
    for g in range(len(tasks.count)):
        model = problem.models[tasks.model[g]]
        f, b, m = model.forward_s, model.backward_s, model.micro_batches
        stage, last = int(tasks.stage[g]), model.stages - 1
        earlier = np.arange(m)
        later = m - 1 - earlier
        here = slice(tasks.offset[g], tasks.offset[g] + m)
        if tasks.forward[g]:
            head[here] = (stage + earlier) * f
            # What follows: at the last stage, both passes of this micro-batch and of the later ones.
            through = b + later * b + later * f if stage == last else (later + 1) * (f + b)
            tail[here] = through + max(last - 1 - stage, 0) * f + last * b
        else:
            through = (earlier + 1) * f + earlier * b if stage == last else (earlier + 1) * (f + b)
            head[here] = last * f + through + max(last - 1 - stage, 0) * b
            tail[here] = (stage + later) * b
    return head, tail


def _one_machine(head: np.ndarray, duration: np.ndarray, tail: np.ndarray) -> float:
    """Latest end + tail of Jackson's preemptive schedule on one machine."""
    by_head = np.argsort(head, kind="stable")
    waiting: list[list[float]] = []
    now, worst, at = 0.0, 0.0, 0
    while at < len(by_head) or waiting:
        if not waiting:
            now = max(now, float(head[by_head[at]]))
        while at < len(by_head) and head[by_head[at]] <= now:
            task = by_head[at]
            heapq.heappush(waiting, [-float(tail[task]), float(duration[task])])
            at += 1
        first = waiting[0]
        until = float(head[by_head[at]]) if at < len(by_head) else np.inf
        if now + first[1] <= until:
            now += first[1]
            worst = max(worst, now - first[0])
            heapq.heappop(waiting)
        else:
            first[1] -= until - now
            now = until
    return worst
