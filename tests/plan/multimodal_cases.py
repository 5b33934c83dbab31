"""Small multimodal steps, and reference implementations in plain Python: list scheduling, all orders, all schedules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cdmpp.plan.multimodal import Module, StepSolution, plan_steps
from cdmpp.plan.multimodal.dispatch import (
    ALTERNATE,
    FORWARD_FIRST,
    FORWARD_ORDER,
    LONGEST_TAIL,
    LONGEST_WAIT,
    REVERSE_ORDER,
    DispatchRule,
)
from cdmpp.plan.multimodal.modules import MemoryOptions, link_items, split_evenly
from cdmpp.plan.multimodal.placement import Chunk, in_segments
from cdmpp.plan.multimodal.tasks import Tasks, make_tasks


def module(
    name: str, layers: int, forward_s: float, backward_s: float, after: tuple[int, ...] = (), **more: Any
) -> Module:
    """A module whose layers take these seconds per item: larger sub-micro-batches gain nothing."""
    sizes = np.array([1.0, 2.0, 4.0])
    return Module(name, (1.0,) * layers, sizes, forward_s * sizes, backward_s * sizes, after, **more)


def step(
    modules: Sequence[Module],
    units: Sequence[int],
    segments: Sequence[int],
    ranks: int,
    memory: MemoryOptions | None = None,
) -> Tasks:
    """A step with one item in each unit, and modules in segments."""
    items = [split_evenly(n, n) if n else () for n in units]
    work = [m.work * n or 1.0 for m, n in zip(modules, units, strict=True)]
    placement = in_segments(modules, segments, work, ranks)
    return make_tasks(modules, placement, items, ranks, memory or MemoryOptions(), link_items(modules, list(units)))


def rows_of(layers: int, ranks: int) -> list[tuple[Chunk, ...]]:
    """Every way to put layers on ranks in turn: a layer stays in the part of the one before, or goes to a later rank.

    The parts go round the ranks as often as each layer needs to have a part. A part may be on the rank of the last one.
    """
    rows = []
    for start, *steps in itertools.product(range(ranks), *[range(ranks + 1)] * (layers - 1)):
        if sum(steps) >= -(-layers // ranks) * ranks:
            continue
        row = [Chunk(0, start, 0, 1)]
        for layer, step in enumerate(steps, 1):
            last, rank = row[-1], (row[-1].rank + step) % ranks
            if step:
                row.append(Chunk(last.segment + (rank <= last.rank), rank, layer, 1))
            else:
                row[-1] = replace(last, layers=last.layers + 1)
        rows.append(tuple(row))
    return rows


def plan_step(modules: Sequence[Module], batch: Sequence[int], ranks: int, **options: Any) -> StepSolution:
    """The plan of a single step."""
    (solution,) = plan_steps(modules, [batch], ranks, **options)
    return solution


def predecessors(tasks: Tasks) -> list[dict[int, float]]:
    """Tasks that each task waits for, and the seconds of the transfer after each."""
    needs: list[dict[int, float]] = [{} for _ in range(tasks.size)]
    sent_s = {
        int(t): module.transfer_s(items)
        for module, grid, units in zip(tasks.modules, tasks.ids, tasks.items, strict=True)
        for row, items in zip(grid, units, strict=True)
        for t in row
    }
    graph, rank, half = tasks.graph, tasks.rank_of_all, tasks.half
    for t in range(tasks.size):
        for other in graph.after[graph.first_after[t] : graph.first_after[t + 1]].tolist():
            needs[other][t] = 0.0 if rank[t] == rank[other] else sent_s[t if t < half else other - half]
    return needs


def reference_makespan_s(tasks: Tasks, sequence: Sequence[int], rule: DispatchRule) -> float:
    """Makespan of the list schedule, by examining every task at every decision."""
    half, needs = tasks.half, predecessors(tasks)
    urgency = {}
    for place, segment in enumerate(sequence):
        for t in range(int(tasks.first_task[segment]), int(tasks.first_task[segment + 1])):
            urgency[t] = place
    tail = tasks.paths_s[1]
    previous_unit = {
        int(later): int(earlier)
        for grid in tasks.ids
        for earlier, later in zip(grid[:-1].ravel(), grid[1:].ravel(), strict=True)
    }
    ends: dict[int, float] = {}
    free = [0.0] * tasks.ranks
    last = ["B"] * tasks.ranks
    while len(ends) < tasks.size:
        ready = {
            t: max((ends[n] + lag for n, lag in needs[t].items()), default=0.0)
            for t in range(tasks.size)
            if t not in ends and all(n in ends for n in needs[t])
        }
        # The units of a chunk run forward in order.
        ready = {t: at for t, at in ready.items() if t not in previous_unit or previous_unit[t] in ends}
        starts = {t: max(at, free[int(tasks.rank_of_all[t])]) for t, at in ready.items()}
        now = min(starts.values())
        rank = min(int(tasks.rank_of_all[t]) for t, at in starts.items() if at == now)
        startable = [t for t, at in starts.items() if at == now and tasks.rank_of_all[t] == rank]
        forward = [t for t in startable if t < half]
        backward = [t for t in startable if t >= half]
        keys: dict[int, dict[int, float]] = {
            LONGEST_WAIT: ready,
            FORWARD_ORDER: {t: urgency[t - half] for t in backward},
            REVERSE_ORDER: {t: -urgency[t - half] for t in backward},
            LONGEST_TAIL: {t: -tail[t] for t in backward},
        }
        prefers_forward = rule.preference == FORWARD_FIRST or (rule.preference == ALTERNATE and last[rank] == "B")
        run_forward = not backward or (bool(forward) and prefers_forward)
        key = keys[rule.backward_rule]
        task = min(forward, key=urgency.__getitem__) if run_forward else min(backward, key=key.__getitem__)
        last[rank] = "F" if run_forward else "B"
        ends[task] = now + float(tasks.duration_s[task])
        free[rank] = ends[task]
    return max(ends.values())


def all_sequences(tasks: Tasks) -> Iterator[list[int]]:
    """Every order of the segments in which each follows those that it depends on, those of a class in order."""
    classes = len(tasks.classes)

    def extend(done: list[int], prefix: list[int]) -> Iterator[list[int]]:
        if len(prefix) == tasks.segments:
            yield prefix
            return
        for c in range(classes):
            segment = int(tasks.first_segment[c]) + done[c]
            if segment >= tasks.first_segment[c + 1]:
                continue
            needs = range(int(tasks.need_ptr[segment]), int(tasks.need_ptr[segment + 1]))
            if all(done[tasks.need_class[i]] >= tasks.need_count[i] for i in needs):
                done[c] += 1
                yield from extend(done, [*prefix, segment])
                done[c] -= 1

    yield from extend([0] * classes, [])


def optimal_makespan_s(tasks: Tasks) -> float:
    """Least makespan of all schedules in which every task starts as early as its rank's order allows.

    A depth-first search over which task a rank runs next, in any order, with no bound but the best so far.
    """
    needs = predecessors(tasks)
    rank = tasks.rank_of_all.tolist()
    duration = tasks.duration_s.tolist()
    tail = tasks.paths_s[1].tolist()
    best = float("inf")
    seen: set[tuple[Any, ...]] = set()

    def extend(ends: dict[int, float], free: tuple[float, ...]) -> None:
        nonlocal best
        if len(ends) == tasks.size:
            best = min(best, max(free))
            return
        ready = [t for t in range(tasks.size) if t not in ends and all(n in ends for n in needs[t])]
        for t in ready:
            start = max(free[rank[t]], max((ends[n] + lag for n, lag in needs[t].items()), default=0.0))
            end = start + duration[t]
            if end + tail[t] >= best:
                continue
            extended = {**ends, t: end}
            state = tuple(sorted(extended.items()))
            if state not in seen:
                seen.add(state)
                extend(extended, (*free[: rank[t]], end, *free[rank[t] + 1 :]))

    extend({}, (0.0,) * tasks.ranks)
    return best
