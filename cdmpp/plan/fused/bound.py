"""Lower bounds of the makespan of a fused pipeline."""

from __future__ import annotations

import heapq

import numpy as np

from cdmpp.plan.fused.problem import Problem


def lower_bound_s(problem: Problem) -> float:
    """Lower bound of the makespan of every schedule, in seconds.

    Each rank is relaxed to one machine with preemption. A task is released when its micro-batch and those before it
    can have reached the stage at the earliest; its tail is what its micro-batch and those after it still need
    afterwards. Jackson's rule (largest tail first) solves this relaxation exactly. The result is at least each of
    the usual bounds: a model's own (M + P - 1) (f + b), the work of a rank between the earliest first task and the
    shortest tail, and the total work over the ranks. With a memory limit, :func:`memory_bound_s` holds as well.

    Notes
    -----
    A task's release assumes no order of passes. Micro-batch ``i`` (counted from 0) of a stage cannot start its
    forward pass before ``i`` others have run theirs there. Its backward pass cannot end on the last stage before
    ``i + 1`` micro-batches have run both passes there. Tails follow the same argument in reversed time.
    """
    tasks = problem.tasks
    head, tail = heads_and_tails(problem)
    duration = tasks.duration[tasks.group]
    work = max(_preemptive_makespan_s(head[r], duration[r], tail[r]) for r in tasks.by_rank())
    return max(work, memory_bound_s(problem))


def memory_bound_s(problem: Problem) -> float:
    """Lower bound of the makespan from the memory limit, in seconds; 0 without a limit.

    A rank needs the total time for which it must hold its micro-batches, divided by how many it may hold.
    """
    if problem.max_activations is None:
        return 0.0
    limit = problem.max_activations
    sizes = {model.activation for model in problem.models}
    if len(sizes) == 1:
        size = sizes.pop()
        limit = size * max(np.floor(limit / size * (1 + 1e-9)), 1.0)
    tasks = problem.tasks
    bound = 0.0
    for r in range(problem.ranks):
        groups = np.flatnonzero((tasks.rank == r) & tasks.forward)
        # A micro-batch is held at least until it has been to the last stage and back.
        held_s = tasks.tail[groups] - tasks.tail[tasks.partner[groups]] + tasks.duration[groups]
        total = float((tasks.count[groups] * tasks.activation[groups] * held_s).sum())
        bound = max(bound, float(tasks.head[groups].min() + total / limit + tasks.tail[tasks.partner[groups]].min()))
    return bound


def heads_and_tails(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Seconds that must pass before each task starts, and after it ends; both of shape (tasks,)."""
    tasks = problem.tasks
    head, tail = np.empty(tasks.size), np.empty(tasks.size)
    for g in range(len(tasks.count)):
        model = problem.models[tasks.model[g]]
        f, b, m = model.forward_s, model.backward_s, model.micro_batches
        stage, last = int(tasks.stage[g]), model.stages - 1
        earlier = np.arange(m)
        later = m - 1 - earlier
        numbers = slice(tasks.offset[g], tasks.offset[g] + m)
        if tasks.forward[g]:
            head[numbers] = (stage + earlier) * f
            # At the last stage, both passes of this micro-batch and of the later ones follow.
            on_last = b + later * b + later * f if stage == last else (later + 1) * (f + b)
            tail[numbers] = on_last + max(last - 1 - stage, 0) * f + last * b
        else:
            on_last = (earlier + 1) * f + earlier * b if stage == last else (earlier + 1) * (f + b)
            head[numbers] = last * f + on_last + max(last - 1 - stage, 0) * b
            tail[numbers] = (stage + later) * b
    return head, tail


def _preemptive_makespan_s(head: np.ndarray, duration: np.ndarray, tail: np.ndarray) -> float:
    """Latest end plus tail of Jackson's preemptive schedule on one machine, in seconds."""
    by_head = np.argsort(head, kind="stable")
    ready: list[list[float]] = []  # [-tail, remaining duration]
    now, makespan, at = 0.0, 0.0, 0
    while at < len(by_head) or ready:
        if not ready:
            now = max(now, float(head[by_head[at]]))
        while at < len(by_head) and head[by_head[at]] <= now:
            task = by_head[at]
            heapq.heappush(ready, [-float(tail[task]), float(duration[task])])
            at += 1
        first = ready[0]
        until = float(head[by_head[at]]) if at < len(by_head) else np.inf
        if now + first[1] <= until:
            now += first[1]
            makespan = max(makespan, now - first[0])
            heapq.heappop(ready)
        else:
            first[1] -= until - now
            now = until
    return makespan
