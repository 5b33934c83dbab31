"""Choice of memory knobs: which chunks keep, recompute or offload, so that given orders fit the memory.

The memory of a rank depends on the order of its tasks alone, not on their times. So for given orders each rank is a
separate problem: choose a knob for each of its chunks so that every moment fits, with the least added time
(PipeWeaver solves it as an integer program over candidates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.plan.multimodal.modules import Knob, Knobs, chunk_cost
from cdmpp.plan.multimodal.tasks import Tasks

#: Most partial choices that are kept; with fewer the result is exact.
MAX_STATES = 4000
#: Numbers of partial choices among which dominated ones are removed: fewer are not worth it, more take too long.
MIN_DOMINANCE, MAX_DOMINANCE = 100, 1200
#: Moments of a rank among which dominated ones are removed.
MAX_MOMENTS = 400


@dataclass(frozen=True)
class KnobChoice:
    """Knobs of the chunks of one rank, the time that they add, and the peak of the rank's activations."""

    knobs: tuple[Knob, ...]
    added_s: float
    peak_bytes: float


@dataclass(frozen=True)
class KnobProblem:
    """Memory of one rank's order of tasks, by chunk and knob."""

    chunks: list[tuple[int, int]]  # module and chunk
    knobs: tuple[Knob, ...]  # knobs of every chunk
    added_s: list[np.ndarray]  # (knobs,): seconds that each chunk's knob adds to the rank over the step
    uses: list[np.ndarray]  # (knobs, moments): bytes of each chunk at each moment that can be the peak

    def choose(self, available: float) -> KnobChoice | None:
        """Knobs of least added time within ``available`` bytes, or None (dynamic programming with dominance)."""
        if not self.chunks:
            return KnobChoice((), 0.0, 0.0)
        least = [uses.min(axis=0) for uses in self.uses]
        still_needed = np.cumsum(np.array(least)[::-1], axis=0)[::-1]
        added, used = np.zeros(1), np.zeros((1, self.uses[0].shape[1]))
        picks = np.zeros((1, 0), np.int64)
        for i, uses in enumerate(self.uses):
            count = len(uses)
            used = (used[:, None, :] + uses[None, :, :]).reshape(-1, uses.shape[1])
            added = (added[:, None] + self.added_s[i][None, :]).reshape(-1)
            picks = np.concatenate(
                [np.repeat(picks, count, axis=0), np.tile(np.arange(count), len(picks))[:, None]], axis=1
            )
            later = still_needed[i + 1] if i + 1 < len(still_needed) else 0.0
            fits = np.flatnonzero((used + later <= available).all(axis=1))
            if not len(fits):
                return None
            order = fits[np.lexsort((used[fits].max(axis=1), added[fits]))]
            order = order[_undominated(used[order])][:MAX_STATES]
            added, used, picks = added[order], used[order], picks[order]
        return KnobChoice(tuple(self.knobs[pick] for pick in picks[0]), float(added[0]), float(used[0].max()))

    def least_bytes(self) -> float:
        """Least bytes that some choice of knobs needs, by bisection."""
        if not self.uses:
            return 0.0
        high = float(np.sum([uses.min(axis=0) for uses in self.uses], axis=0).max())
        choice = self.choose(float("inf"))
        assert choice is not None
        low, high, peak = high * (1 - 1e-9), max(choice.peak_bytes, high), choice.peak_bytes
        for _ in range(60):
            if peak <= low * (1 + 1e-9) or high - low <= 1e-9 * high:
                break
            middle = (low + high) / 2
            choice = self.choose(middle)
            if choice is None:
                low = middle
            else:
                high = peak = choice.peak_bytes
        return peak


def _undominated(used: np.ndarray) -> np.ndarray:
    """Rows (choices by growing added time) for which no earlier row uses less at every moment."""
    if not MIN_DOMINANCE <= len(used) <= MAX_DOMINANCE:
        return np.arange(len(used))
    dominates = (used[:, None, :] <= used[None, :, :]).all(axis=2)
    return np.flatnonzero(~np.triu(dominates, 1).any(axis=0))


def knob_problem(tasks: Tasks, rank: int, order: Sequence[int]) -> KnobProblem:
    """The choice of knobs for one rank's ``order`` of tasks; the present knobs of ``tasks`` do not matter."""
    chunks = [
        (i, c)
        for i, row in enumerate(tasks.placement.chunks)
        for c, chunk in enumerate(row)
        if chunk.rank == rank and chunk.layers and len(tasks.items[i])
    ]
    moments = _moments(tasks, {chunk: g for g, chunk in enumerate(chunks)}, order)
    in_flight, chunk_of, forward_items, backward_items = moments[:, :-3], *moments[:, -3:].T
    added: list[np.ndarray] = []
    uses: list[np.ndarray] = []
    for g, (i, c) in enumerate(chunks):
        module, chunk = tasks.modules[i], tasks.placement.chunks[i][c]
        layers = (chunk.first, chunk.layers)
        seconds, bytes_at = [], []
        for knob in tasks.memory.knobs:
            costs = [chunk_cost(module, layers, n, knob, tasks.memory) for n in tasks.items[i]]
            plain = [chunk_cost(module, layers, n, "keep", tasks.memory) for n in tasks.items[i]]
            seconds.append(
                sum(
                    (cost.forward_s + cost.backward_s) - (keep.forward_s + keep.backward_s)
                    for cost, keep in zip(costs, plain, strict=True)
                )
            )
            item = chunk_cost(module, layers, 1, knob, tasks.memory)
            extra = forward_items * item.extra_forward_bytes + backward_items * item.extra_backward_bytes
            bytes_at.append(in_flight[:, g] * item.kept_bytes + np.where(chunk_of == g, extra, 0.0))
        added.append(np.array(seconds))
        uses.append(np.array(bytes_at).reshape(len(seconds), len(moments)))
    return KnobProblem(chunks, tasks.memory.knobs, added, uses)


def _moments(tasks: Tasks, number: dict[tuple[int, int], int], order: Sequence[int]) -> np.ndarray:
    """Memory state at each task of a rank, dominated states removed.

    ``number``: column of each (module, chunk).
    Returns items in flight of each chunk; the task's chunk; its items in a forward and in a backward pass (shape
    (moments, chunks + 3)).
    """
    chunk_and_items = {
        int(grid[unit, c]): (number[i, c], tasks.items[i][unit])
        for i, grid in enumerate(tasks.ids)
        for unit in range(grid.shape[0])
        for c in range(grid.shape[1])
        if (i, c) in number
    }
    in_flight = [0] * len(number)
    rows: list[list[int]] = []
    for task in order:
        forward = task < tasks.half
        entry = chunk_and_items.get(int(task) if forward else int(task) - tasks.half)
        if entry is None:  # a chunk without layers
            continue
        g, items = entry
        if forward:
            in_flight[g] += items
        rows.append([*in_flight, g, items if forward else 0, 0 if forward else items])
        if not forward:
            in_flight[g] -= items
    if not rows:
        return np.zeros((1, len(number) + 3))
    states = np.unique(np.array(rows), axis=0)
    if len(states) > MAX_MOMENTS:
        return states
    # A state is dominated by one of the same pass that has at least as much of everything.
    same_pass = (states[:, None, -3] == states[None, :, -3]) & ((states[:, None, -2] > 0) == (states[None, :, -2] > 0))
    dominated = (states[:, None, :] <= states[None, :, :]).all(axis=2) & same_pass
    np.fill_diagonal(dominated, False)
    kept: np.ndarray = states[~dominated.any(axis=1)]
    return kept


def choose_knobs(tasks: Tasks, orders: Sequence[Sequence[int]]) -> Knobs | None:
    """Knobs of least added time under which these orders of the ranks fit; None where none do."""
    keep = tasks.uniform_knobs("keep")
    kept = tasks.with_knobs(keep)
    if "keep" in tasks.memory.knobs and max(peak_bytes(kept, orders)) <= tasks.memory.limit_bytes:
        return keep
    knobs = [list(row) for row in keep]
    for rank, order in enumerate(orders):
        problem = knob_problem(tasks, rank, order)
        choice = problem.choose(float(tasks.available_bytes[rank]))
        if choice is None:
            return None
        for (i, c), knob in zip(problem.chunks, choice.knobs, strict=True):
            knobs[i][c] = knob
    return tuple(tuple(row) for row in knobs)


def least_bytes(tasks: Tasks, orders: Sequence[Sequence[int]]) -> float:
    """The smallest memory limit under which some knobs let these orders fit on every rank, in bytes."""
    return max(
        float(tasks.static_bytes[rank]) + knob_problem(tasks, rank, order).least_bytes()
        for rank, order in enumerate(orders)
    )


def peak_bytes(tasks: Tasks, orders: Sequence[Sequence[int]]) -> list[float]:
    """Peak memory of each rank, weights included, with the knobs of ``tasks``."""
    peaks = []
    for rank, order in enumerate(orders):
        numbers = np.array(order, np.int64)
        forward = numbers < tasks.half
        t = np.where(forward, numbers, numbers - tasks.half)
        # A backward pass frees at its end what its forward pass allocated at its start.
        held = np.cumsum(np.where(forward, tasks.kept[t], -tasks.kept[t]))
        held += np.where(forward, tasks.extra_forward[t], tasks.kept[t] + tasks.extra_backward[t])
        peaks.append(float(tasks.static_bytes[rank] + max(held.max(initial=0.0), 0.0)))
    return peaks
