"""Compiled functions for start, end and memory of the passes of a step, on arrays; reuse of stretches that repeat.

Tasks have numbers 0 to n - 1. Every rank runs its tasks one after the other in a given order; a task starts
when its rank is free and all that it depends on has ended, with a lag (a transfer) where one is given. The
result is unique, whatever order the tasks are visited in.

:class:`Frames` cuts a step into frames, from which dependences point only backwards. A frame that is built as an
earlier one, whose passes take as long, and that waits for what ended later by one and the same time, runs as that
one, later by that time. In the steady state of a schedule this holds for frame after frame. Times lie on a grid
(:func:`cdmpp.simulate.emulator.stages.grid`), so that adding that time is exact: the answer is the one of
:func:`evaluate`, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cdmpp.simulate.emulator.stages import Floats, Ints
from cdmpp.simulate.emulator.structure import Structure
from cdmpp.utils.jit import jit


@jit
def evaluate(order: Ints, begin: Ints, duration: Floats, deps: Ints, lag: Floats, start: Floats, end: Floats) -> int:
    """Fill in ``start`` and ``end`` of every task under given orders; -1 where a task is not ordered or cannot run.

    ``order[begin[r]:begin[r + 1]]`` are the tasks of rank r, each at most once. ``duration`` (tasks,): seconds.
    ``deps`` (tasks, k): tasks that have to end before; -1 for none. ``lag`` (tasks, k): seconds between the end of such
    a task and the start.

    Returns the number of tasks that ran: fewer than in ``order`` if the orders wait for each other in a circle. The
    time is O(places x k): a rank that has to wait is woken by the task that it waits for.
    """
    ranks = begin.shape[0] - 1
    start[:] = -1.0
    end[:] = -1.0
    at = begin[:ranks].copy()
    clock = np.zeros(ranks)
    done = 0
    # A rank waits for one task at a time: the ranks that wait for a task are a list linked through `after`.
    first = np.full(duration.shape[0], -1, np.int32)
    after = np.full(ranks, -1, np.int32)
    stack = np.empty(ranks, np.int32)
    for rank in range(ranks):
        stack[ranks - 1 - rank] = rank
    top = ranks
    while top > 0:
        top -= 1
        rank = int(stack[top])
        while at[rank] < begin[rank + 1]:
            place = at[rank]
            task = order[place]
            ready = clock[rank]
            missing = -1
            for k in range(deps.shape[1]):
                before = deps[task, k]
                if before < 0:
                    continue
                if end[before] < 0.0:
                    missing = before
                    break
                ready = max(ready, end[before] + lag[task, k])
            if missing >= 0:
                after[rank] = first[missing]
                first[missing] = rank
                break
            start[task] = ready
            end[task] = ready + duration[task]
            clock[rank] = end[task]
            at[rank] = place + 1
            done += 1
            waiting = first[task]
            while waiting >= 0:
                stack[top] = waiting
                top += 1
                waiting = after[waiting]
    return done


@jit
def peaks(order: Ints, begin: Ints, at_start: Floats, at_end: Floats, resident: Floats, peak: Floats) -> None:
    """Fill in the peak memory of each rank, with orders as in :func:`evaluate`.

    ``at_start``, ``at_end`` (tasks,): what a task takes when it starts and (negative: gives back) when it ends, such as
    bytes. ``resident`` (ranks,): held all the time. A rank does one thing at a time, so that the order alone decides.
    """
    for rank in range(begin.shape[0] - 1):
        held = resident[rank]
        highest = held
        for place in range(begin[rank], begin[rank + 1]):
            task = order[place]
            held += at_start[task]
            highest = max(highest, held)
            held += at_end[task]
        peak[rank] = highest


#: Structures whose frames are held.
_MOST = 32


@dataclass(frozen=True)
class Cut:
    """A structure cut into frames."""

    tasks: Ints  # (places,): frame after frame, in an order in which they can be simulated
    begin: Ints  # (frames + 1,)
    refs: Ints  # (places, 4): what a task waits for: the pass before it on its rank, and its dependences; -1 for none
    # Tasks of earlier frames that a frame waits for, frame after frame, in an order that frames of one shape share.
    outside: Ints
    outside_begin: Ints
    reach: Ints  # (frames,): how many frames back these lie at most
    # (frames,): equal for frames with equal passes (but for the micro-batch) that wait for equal passes as many frames
    # back.
    shape: Ints


@dataclass
class Frames:
    """Simulates steps frame by frame."""

    # Frames that were moved there from an earlier one, and frames that were simulated.
    hits: int = 0
    misses: int = 0
    _cuts: dict[int, tuple[Structure, Cut]] = field(default_factory=dict, repr=False)

    def run(self, structure: Structure, duration: Floats, lag: Floats, step: float, start: Floats, end: Floats) -> int:
        """As :func:`cdmpp.simulate.emulator.evaluate.evaluate`; ``step`` is the grid that times lie on."""
        known = self._cuts.get(id(structure))
        if known is None:
            zero, unit = np.zeros_like(lag), np.ones_like(duration)
            ran = evaluate(structure.order, structure.begin, unit, structure.deps, zero, start, end)
            if ran < len(structure.order):
                return ran
            known = structure, cut_into_frames(structure, start)
            if len(self._cuts) >= _MOST:
                del self._cuts[next(iter(self._cuts))]
            self._cuts[id(structure)] = known  # keeps the structure alive, so that its id is unique
        cut = known[1]
        # Times as whole numbers below 2^40, for the table's keys.
        scale = 2.0**-12 / step if step > 0 else 0.0
        arrays = cut.tasks, cut.begin, cut.refs, cut.outside, cut.outside_begin, cut.reach, cut.shape
        moved = _run(*arrays, duration, lag, scale, start, end)
        self.hits += moved
        self.misses += len(cut.reach) - moved
        return len(structure.order)


def cut_into_frames(structure: Structure, level: Floats) -> Cut:
    """Cut a structure where a new round of passes begins.

    ``level``: start of each task if all took one second: what it waits for has a lower one.
    """
    row = np.repeat(np.arange(len(structure.begin) - 1), np.diff(structure.begin))
    width = (3 if structure.split.any() else 2) * (structure.stages // structure.ranks or 1)
    round_of = (level // width).astype(np.int32)
    by = np.lexsort((row, level[structure.order], round_of[structure.order]))
    tasks = structure.order[by]
    refs = np.full((structure.tasks, 4), -1, np.int32)
    refs[structure.order[1:], 0] = structure.order[:-1]
    refs[structure.order[structure.begin[:-1][np.diff(structure.begin) > 0]], 0] = -1
    refs[:, 1:] = structure.deps
    refs = refs[tasks]
    new = np.diff(round_of[tasks]) > 0
    begin = np.concatenate(([0], np.flatnonzero(new) + 1, [len(tasks)])).astype(np.int32)
    frame = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
    frame_of, place = np.zeros(structure.tasks, np.int32), np.zeros(structure.tasks, np.int32)
    frame_of[tasks], place[tasks] = frame, np.arange(len(tasks)) - begin[frame]
    far = np.where(refs >= 0, frame[:, None] - frame_of[refs], -1)
    where = np.where(refs >= 0, place[refs], -1)
    built = np.concatenate((tasks[:, None] // structure.micro_batches, far, where), axis=1).astype(np.int32)
    shapes: dict[bytes, int] = {}
    outside, shape = [], []
    for low, high in pairwise(begin):
        shape.append(shapes.setdefault(built[low:high].tobytes(), len(shapes)))
        at = far[low:high] > 0
        _, first = np.unique(far[low:high][at] * len(tasks) + where[low:high][at], return_index=True)
        outside.append(refs[low:high][at][first])
    outside_begin = np.concatenate(([0], np.cumsum([len(tasks_outside) for tasks_outside in outside]))).astype(np.int32)
    reach = np.array([far[low:high].max() for low, high in pairwise(begin)], np.int32)
    return Cut(tasks, begin, refs, np.concatenate(outside), outside_begin, reach, np.array(shape, np.int32))


@jit
def _as_long(tasks: Ints, begin: Ints, frame: int, other: int, duration: Floats) -> bool:
    """Whether the passes of two frames of equal shape have equal durations."""
    shift = begin[other] - begin[frame]
    for at in range(begin[frame], begin[frame + 1]):  # noqa: SIM110 (numba compiles no generator)
        if duration[tasks[at]] != duration[tasks[at + shift]]:
            return False
    return True


@jit
def _run(
    tasks: Ints,
    begin: Ints,
    refs: Ints,
    outside: Ints,
    outside_begin: Ints,
    reach: Ints,
    shape: Ints,
    duration: Floats,
    lag: Floats,
    scale: float,
    start: Floats,
    end: Floats,
) -> int:
    """Simulate frame after frame; return the number of reused ones."""
    start[:] = -1.0
    end[:] = -1.0
    moved = 0
    frames = reach.shape[0]
    slots = 64
    while slots < 2 * frames:
        slots *= 2
    table = np.full(slots, -1, np.int32)
    # The last `streak` frames lie `back` frames and the time `later` after their like.
    streak, back = 0, 0
    later = 0.0
    for frame in range(frames):
        low, high = begin[frame], begin[frame + 1]
        like = -1
        if back > 0 and streak >= reach[frame] and shape[frame] == shape[frame - back]:
            # What it waits for has been moved as a whole: it is later by the same time.
            if _as_long(tasks, begin, frame, frame - back, duration):
                like = frame - back
        elif outside_begin[frame + 1] > outside_begin[frame]:
            out, count = outside_begin[frame], outside_begin[frame + 1] - outside_begin[frame]
            base = end[outside[out]]
            key = int(shape[frame])
            for at in range(out + 1, out + count):
                key = (key * 31 + int((end[outside[at]] - base) * scale)) & 0x7FFFFFFF
            slot = (key ^ (key >> 15)) & (slots - 1)
            while like < 0 and table[slot] >= 0:
                other = table[slot]
                slot = (slot + 1) & (slots - 1)
                if shape[other] != shape[frame] or not _as_long(tasks, begin, frame, other, duration):
                    continue
                like = other
                out_other = outside_begin[other]
                later = base - end[outside[out_other]]
                for at in range(1, count):
                    if end[outside[out + at]] - end[outside[out_other + at]] != later:
                        like = -1
                        break
            streak, back = 0, frame - like
            if like < 0:
                table[slot] = frame
        if like >= 0:
            shift = begin[like] - low
            for at in range(low, high):
                start[tasks[at]] = start[tasks[at + shift]] + later
                end[tasks[at]] = end[tasks[at + shift]] + later
            moved += 1
            streak += 1
            continue
        streak, back = 0, 0
        for at in range(low, high):
            task = tasks[at]
            ready = 0.0
            for k in range(4):
                before = refs[at, k]
                if before >= 0:
                    ready = max(ready, end[before] + (lag[task, k - 1] if k > 0 else 0.0))
            start[task] = ready
            end[task] = ready + duration[task]
    return moved
