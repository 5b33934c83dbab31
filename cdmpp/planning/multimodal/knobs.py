"""Memory knobs: which chunks keep, recompute or offload, so that a given order of tasks fits.

What a rank holds at any moment follows from the order of its tasks alone, not from their times. So for a
given order each rank is a small problem of its own: choose a knob for each of its chunks so that the bytes
at every task fit, with the least added time (PipeWeaver solves it as an integer program over candidates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.planning.multimodal.tasks import Knob, Knobs, Tasks, chunk_figures

#: Partial choices that are kept at most; exact below it.
MAX_STATES = 4000
#: Numbers of partial choices between which those that others undercut are looked for.
FEW, MANY = 100, 1200


@dataclass(frozen=True)
class Choice:
    """Knobs of the chunks of one rank, and what they come to."""

    knobs: tuple[Knob, ...]
    added_s: float
    peak_bytes: float


@dataclass(frozen=True)
class RankMemory:
    """What a rank's order of tasks asks of its memory, by chunk and knob.

    Attributes
    ----------
    chunks : list of (int, int)
        Module and chunk.
    options : list of list of Knob
        What each may be.
    added_s : list of ndarray (options,)
        Seconds that a chunk's knob adds to the rank over the step.
    uses : list of ndarray (options, moments)
        Bytes at each moment that can be the fullest.
    """

    chunks: list[tuple[int, int]]
    options: list[list[Knob]]
    added_s: list[np.ndarray]
    uses: list[np.ndarray]

    def choose(self, room: float) -> Choice | None:
        """Least added time within ``room`` bytes (dynamic programming with dominance); None: nothing fits."""
        if not self.chunks:
            return Choice((), 0.0, 0.0)
        least = [uses.min(axis=0) for uses in self.uses]
        rest = np.cumsum(np.array(least)[::-1], axis=0)[::-1]
        added, used = np.zeros(1), np.zeros((1, self.uses[0].shape[1]))
        picks = np.zeros((1, 0), np.int64)
        for at, uses in enumerate(self.uses):
            count = len(uses)
            used = (used[:, None, :] + uses[None, :, :]).reshape(-1, uses.shape[1])
            added = (added[:, None] + self.added_s[at][None, :]).reshape(-1)
            picks = np.concatenate(
                [np.repeat(picks, count, axis=0), np.tile(np.arange(count), len(picks))[:, None]], axis=1
            )
            behind = rest[at + 1] if at + 1 < len(rest) else 0.0
            fits = np.flatnonzero((used + behind <= room).all(axis=1))
            if not len(fits):
                return None
            order = fits[np.lexsort((used[fits].max(axis=1), added[fits]))]
            order = order[_undominated(used[order])][:MAX_STATES]
            added, used, picks = added[order], used[order], picks[order]
        knobs = tuple(self.options[at][pick] for at, pick in enumerate(picks[0]))
        return Choice(knobs, float(added[0]), float(used[0].max()))

    def leanest(self) -> float:
        """Bytes without which no choice of knobs fits this order."""
        if not self.uses:
            return 0.0
        high = float(np.sum([uses.min(axis=0) for uses in self.uses], axis=0).max())
        found = self.choose(float("inf"))
        assert found is not None
        low, high, peak = high * (1 - 1e-9), max(found.peak_bytes, high), found.peak_bytes
        for _ in range(60):
            if peak <= low * (1 + 1e-9) or high - low <= 1e-9 * high:
                break
            middle = (low + high) / 2
            found = self.choose(middle)
            if found is None:
                low = middle
            else:
                high = peak = found.peak_bytes
        return peak


def _undominated(used: np.ndarray) -> np.ndarray:
    """Rows (of choices by added time) that no row before them undercuts everywhere."""
    if not FEW <= len(used) <= MANY:  # few: not worth it; many: too dear
        return np.arange(len(used))
    under = (used[:, None, :] <= used[None, :, :]).all(axis=2)
    return np.flatnonzero(~np.triu(under, 1).any(axis=0))


def rank_memory(tasks: Tasks, rank: int, order: Sequence[int]) -> RankMemory:
    """What rank's ``order`` of tasks asks of its memory, whatever knobs ``tasks`` has now."""
    chunks = [
        (i, at)
        for i, row in enumerate(tasks.placement.chunks)
        for at, chunk in enumerate(row)
        if chunk.rank == rank and chunk.layers and len(tasks.items[i])
    ]
    place = {each: g for g, each in enumerate(chunks)}
    moments = _moments(tasks, place, order)
    options: list[list[Knob]] = []
    added: list[np.ndarray] = []
    uses: list[np.ndarray] = []
    for g, (i, at) in enumerate(chunks):
        module, chunk = tasks.modules[i], tasks.placement.chunks[i][at]
        sizes = tasks.items[i]
        layers = (chunk.first, chunk.layers)

        seconds, bytes_at = [], []
        for knob in tasks.memory.knobs:
            one = chunk_figures(module, layers, 1, knob, tasks.memory)
            seconds.append(sum(_pass_s(tasks, i, layers, n, knob) - _pass_s(tasks, i, layers, n) for n in sizes))
            bytes_at.append(
                moments[:, g] * one[2]
                + np.where(moments[:, -3] == g, moments[:, -2] * one[3] + moments[:, -1] * one[4], 0.0)
            )
        options.append(list(tasks.memory.knobs))
        added.append(np.array(seconds))
        uses.append(np.array(bytes_at).reshape(len(seconds), len(moments)))
    return RankMemory(chunks, options, added, uses)


def _pass_s(tasks: Tasks, i: int, layers: tuple[int, int], items: int, knob: Knob = "keep") -> float:
    forward_s, backward_s, *_ = chunk_figures(tasks.modules[i], layers, items, knob, tasks.memory)
    return forward_s + backward_s


def _moments(tasks: Tasks, place: dict[tuple[int, int], int], order: Sequence[int]) -> np.ndarray:
    """Items in flight of each chunk at each task, the task's chunk, and its items forward or backward."""
    where: dict[int, tuple[int, int]] = {}
    for i, grid in enumerate(tasks.ids):
        for unit in range(grid.shape[0]):
            for at in range(grid.shape[1]):
                if (i, at) in place:
                    where[int(grid[unit, at])] = (place[i, at], tasks.items[i][unit])
    flying = [0] * len(place)
    rows: list[list[int]] = []
    for task in order:
        forward = task < tasks.half
        known = where.get(int(task) if forward else int(task) - tasks.half)
        if known is None:  # a chunk without layers
            continue
        g, size = known
        if forward:
            flying[g] += size
        rows.append([*flying, g, size if forward else 0, 0 if forward else size])
        if not forward:
            flying[g] -= size
    if not rows:
        return np.zeros((1, len(place) + 3))
    unique = np.unique(np.array(rows), axis=0)
    if len(unique) > 400:
        return unique
    # A moment that another of the same pass has at least as much of everything of is never the fullest.
    alike = (unique[:, None, -3] == unique[None, :, -3]) & ((unique[:, None, -2] > 0) == (unique[None, :, -2] > 0))
    under = (unique[:, None, :] <= unique[None, :, :]).all(axis=2) & alike
    np.fill_diagonal(under, False)
    kept: np.ndarray = unique[~under.any(axis=1)]
    return kept


def choose_knobs(tasks: Tasks, orders: Sequence[Sequence[int]]) -> Knobs | None:
    """Knobs of least added time under which these orders of the ranks fit; None: none do."""
    knobs = [list(row) for row in _kept(tasks)]
    if "keep" in tasks.memory.knobs:
        kept = peaks_bytes(tasks.with_knobs(_kept(tasks)), orders)
        if max(kept) <= tasks.memory.limit_bytes:
            return _kept(tasks)
    for rank, order in enumerate(orders):
        memory = rank_memory(tasks, rank, order)
        chosen = memory.choose(float(tasks.room[rank]))
        if chosen is None:
            return None
        for (i, at), knob in zip(memory.chunks, chosen.knobs, strict=True):
            knobs[i][at] = knob
    return tuple(tuple(row) for row in knobs)


def leanest_bytes(tasks: Tasks, orders: Sequence[Sequence[int]]) -> float:
    """The smallest limit under which some knobs let these orders fit on every rank."""
    return max(
        float(tasks.static_bytes[rank]) + rank_memory(tasks, rank, order).leanest() for rank, order in enumerate(orders)
    )


def peaks_bytes(tasks: Tasks, orders: Sequence[Sequence[int]]) -> list[float]:
    """Peak of each rank, weights included, with the knobs that ``tasks`` has."""
    out = []
    for rank, order in enumerate(orders):
        tasks_of = np.array(order, np.int64)
        forward = tasks_of < tasks.half
        t = np.where(forward, tasks_of, tasks_of - tasks.half)
        # A backward pass gives back at its end what its forward pass took at its start.
        held = np.cumsum(np.where(forward, tasks.kept[t], -tasks.kept[t]))
        held += np.where(forward, tasks.more_forward[t], tasks.kept[t] + tasks.more_backward[t])
        out.append(float(tasks.static_bytes[rank] + max(held.max(initial=0.0), 0.0)))
    return out


def _kept(tasks: Tasks) -> Knobs:
    return tuple(tuple("keep" for _ in row) for row in tasks.placement.chunks)
