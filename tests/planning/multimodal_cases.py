"""Small multimodal steps, and a list scheduler and an enumeration of all schedules in plain Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cdmpp.planning.multimodal import Module
from cdmpp.planning.multimodal.modules import links, spread
from cdmpp.planning.multimodal.placement import in_segments
from cdmpp.planning.multimodal.schedule import Rule
from cdmpp.planning.multimodal.tasks import Memory, Tasks, make_tasks


def module(
    name: str, layers: int, forward_s: float, backward_s: float, after: tuple[int, ...] = (), **more: Any
) -> Module:
    """A module whose layers take so long for each item: no gain from larger sub-micro-batches."""
    sizes = np.array([1.0, 2.0, 4.0])
    return Module(name, (1.0,) * layers, sizes, forward_s * sizes, backward_s * sizes, after, **more)


def step(
    modules: Sequence[Module], units: Sequence[int], segments: Sequence[int], ranks: int, memory: Memory | None = None
) -> Tasks:
    """One item in each unit, modules in segments."""
    batch = list(units)
    items = [spread(n, n) if n else () for n in units]
    work = [m.work * n or 1.0 for m, n in zip(modules, units, strict=True)]
    placement = in_segments(modules, segments, work, ranks)
    return make_tasks(modules, placement, items, ranks, memory or Memory(), links(modules, batch))


def before(tasks: Tasks) -> list[list[int]]:
    """The tasks that each waits for."""
    out: list[list[int]] = [[] for _ in range(2 * tasks.half)]
    for t in range(2 * tasks.half):
        for other in tasks.after[tasks.first_after[t] : tasks.first_after[t + 1]].tolist():
            out[other].append(t)
    return out


def slowly(tasks: Tasks, sequence: Sequence[int], rule: Rule) -> float:
    """The makespan of the list schedule, by looking at every task in every turn."""
    half, needs = tasks.half, before(tasks)
    urgency = {}
    for place, segment in enumerate(sequence):
        for t in range(int(tasks.first_task[segment]), int(tasks.first_task[segment + 1])):
            urgency[t] = place
    tail = tasks.ways_s[1]
    turn = {
        int(later): int(earlier)
        for grid in tasks.ids
        for earlier, later in zip(grid[:-1].ravel(), grid[1:].ravel(), strict=True)
    }
    ends: dict[int, float] = {}
    free = [0.0] * tasks.ranks
    last = ["B"] * tasks.ranks
    while len(ends) < 2 * half:
        ready = {
            t: max((ends[n] for n in needs[t]), default=0.0)
            for t in range(2 * half)
            if t not in ends and all(n in ends for n in needs[t])
        }
        # A chunk's units go forward in turn.
        ready = {t: at for t, at in ready.items() if t not in turn or turn[t] in ends}
        starts = {t: max(at, free[int(tasks.rank[t % half])]) for t, at in ready.items()}
        now = min(starts.values())
        rank = min(int(tasks.rank[t % half]) for t, at in starts.items() if at == now)
        mine = [t for t, at in starts.items() if at == now and tasks.rank[t % half] == rank]
        forward = [t for t in mine if t < half]
        backward = [t for t in mine if t >= half]
        keys: dict[int, dict[int, float]] = {
            0: ready,
            1: {t: urgency[t - half] for t in backward},
            2: {t: -urgency[t - half] for t in backward},
            3: {t: -tail[t] for t in backward},
        }
        ahead = not backward or (
            bool(forward) and (rule.preference == 2 or (rule.preference == 1 and last[rank] == "B"))
        )
        task = min(forward, key=urgency.__getitem__) if ahead else min(backward, key=keys[rule.back_rule].__getitem__)
        last[rank] = "F" if ahead else "B"
        ends[task] = now + float(tasks.duration_s[task])
        free[rank] = ends[task]
    return max(ends.values())


def orders(tasks: Tasks) -> Iterator[list[int]]:
    """Every order of the segments in which each comes behind those that it waits for, of a class in turn."""
    classes = len(tasks.classes)

    def go_on(gone: list[int], begun: list[int]) -> Iterator[list[int]]:
        if len(begun) == tasks.segments:
            yield begun
            return
        for c in range(classes):
            segment = int(tasks.first_segment[c]) + gone[c]
            needs = (
                range(int(tasks.need_ptr[segment]), int(tasks.need_ptr[segment + 1]))
                if segment < tasks.first_segment[c + 1]
                else None
            )
            if needs is not None and all(gone[tasks.need_class[i]] >= tasks.need_count[i] for i in needs):
                gone[c] += 1
                yield from go_on(gone, [*begun, segment])
                gone[c] -= 1

    yield from go_on([0] * classes, [])


def shortest(tasks: Tasks) -> float:
    """The shortest of all schedules in which every task starts as early as its rank's order allows.

    A depth-first walk over which task a rank takes next, in any order, with no bound but the best so far.
    """
    needs, total = before(tasks), 2 * tasks.half
    rank = [int(tasks.rank[t % tasks.half]) for t in range(total)]
    duration = tasks.duration_s.tolist()
    tail = tasks.ways_s[1].tolist()
    best = float("inf")
    seen: set[tuple[Any, ...]] = set()

    def go_on(ends: dict[int, float], free: tuple[float, ...]) -> None:
        nonlocal best
        if len(ends) == total:
            best = min(best, max(free))
            return
        ready = [t for t in range(total) if t not in ends and all(n in ends for n in needs[t])]
        for t in ready:
            start = max(free[rank[t]], max((ends[n] for n in needs[t]), default=0.0))
            end = start + duration[t]
            if end + tail[t] >= best:
                continue
            after = {**ends, t: end}
            state = tuple(sorted(after.items()))
            if state not in seen:
                seen.add(state)
                go_on(after, (*free[: rank[t]], end, *free[rank[t] + 1 :]))

    go_on({}, (0.0,) * tasks.ranks)
    return best
