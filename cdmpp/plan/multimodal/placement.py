"""Placement of layers on ranks: segments over all ranks, or modules one after the other (contiguous)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.plan.multimodal.modules import Module, topological_order
from cdmpp.utils.jit import jit

#: Most segments that the proportional rule gives a module: more add little overlap and many tasks.
MAX_SEGMENTS = 4
#: Most parts times squared layers that are cut by dynamic programming: above, it would take longer than most budgets.
MAX_CUT_CELLS = 250_000_000
#: Cuts of each module's layers into ``segments * ranks`` parts, from 0 to its layers; parts may be empty.
Cuts = tuple[tuple[int, ...], ...]
#: Items of each sub-micro-batch, by module.
Items = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Chunk:
    """Layers ``first`` to ``first + layers - 1`` of a module on a rank, as part of a segment."""

    segment: int
    rank: int
    first: int
    layers: int


@dataclass(frozen=True)
class Placement:
    """Chunks of each module in the order of the forward pass.

    Attributes
    ----------
    name : str
        "segments" or "contiguous".
    chunks : tuple of tuple of Chunk
        By module.
    """

    name: str
    chunks: tuple[tuple[Chunk, ...], ...]

    def segments(self, module: int) -> int:
        """Number of segments of a module."""
        return self.chunks[module][-1].segment + 1


def balanced_cuts(weights: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Cut a chain of layers into contiguous parts of least sum of squares of load + part.

    Squares rather than the largest part alone: they also balance the parts that are not the largest. Dynamic
    programming over cuts, O(parts · layers²). Above :data:`MAX_CUT_CELLS` the layers are cut in proportion, and
    the loads are ignored.

    Parameters
    ----------
    weights : ndarray of float64, shape (layers,)
        Seconds of each layer.
    load : ndarray of float64, shape (parts,)
        Seconds of work that each part's rank already has: of equal layers, the odd ones go to the least loaded.

    Returns
    -------
    ndarray of int64, shape (parts + 1,)
        Cuts, from 0 to ``layers``; parts may be empty.
    """
    total = np.concatenate([[0.0], np.cumsum(weights)])
    parts = len(load)
    if parts * len(weights) ** 2 > MAX_CUT_CELLS:
        targets = total[-1] * np.arange(parts + 1) / parts
        nearest: np.ndarray = np.searchsorted((total[:-1] + total[1:]) / 2, targets)
        return nearest
    cuts = np.zeros(parts + 1, np.int64)
    _cut(total, np.asarray(load, np.float64), cuts)
    return cuts


@jit
def _cut(total: np.ndarray, load: np.ndarray, cuts: np.ndarray) -> None:
    """Fill ``cuts`` (see :func:`balanced_cuts`); ``total`` are the prefix sums of the weights."""
    count, parts = len(total), len(load)
    best = np.full(count, np.inf)
    best[0] = 0.0
    choice = np.zeros((parts, count), np.int64)
    for part in range(parts):
        now = np.full(count, np.inf)
        for last in range(count):
            for first in range(last, -1, -1):
                alone = (load[part] + total[last] - total[first]) ** 2
                if alone > now[last]:  # longer parts are larger still
                    break
                value = best[first] + alone
                if value <= now[last]:
                    now[last] = value
                    choice[part, last] = first
        best = now
    cuts[parts] = count - 1
    for part in range(parts - 1, -1, -1):
        cuts[part] = choice[part, cuts[part + 1]]


def segment_counts(modules: Sequence[Module], sizes: Sequence[int], ranks: int) -> list[int]:
    """Segments of each module, in proportion to the latency of its sub-micro-batch (PipeWeaver)."""
    latency_s = [module.work * sum(module.layer_s(size)) for module, size in zip(modules, sizes, strict=True)]
    least = min(latency_s)
    counts = []
    for module, seconds in zip(modules, latency_s, strict=True):
        max_segments = max(1, min(MAX_SEGMENTS, len(module.layers) // ranks))
        counts.append(
            module.segments if module.segments is not None else min(max(round(seconds / least), 1), max_segments)
        )
    return counts


def in_segments(
    modules: Sequence[Module], counts: Sequence[int], work_s: Sequence[float], ranks: int, lead_s: float = 0.0
) -> Placement:
    """Distribute every module over all ranks, ``counts`` times.

    Parameters
    ----------
    counts : sequence of int
        Segments of each module.
    work_s : sequence of float
        Seconds of the whole step in each module: the weights by which the ranks are balanced.
    lead_s : float
        Seconds by which a rank starts later or ends earlier than the one before it: the odd layers go to the first
        ranks rather than to the last.
    """
    load = np.arange(ranks) * lead_s
    cuts_of: list[np.ndarray] = []
    totals: list[np.ndarray] = []
    for module, count, seconds in zip(modules, counts, work_s, strict=True):
        weights = np.array(module.layers) * (seconds / module.work)
        # Segments of a module are balanced among themselves: they start from the same loads.
        cuts = balanced_cuts(weights, np.tile(load, count) / count)
        cuts_of.append(cuts)
        totals.append(np.concatenate([[0.0], np.cumsum(weights)]))
        for chunk in range(ranks * count):
            load[chunk % ranks] += weights[cuts[chunk] : cuts[chunk + 1]].sum()
    _level(cuts_of, totals, load)
    return Placement(
        "segments",
        tuple(
            tuple(
                Chunk(chunk // ranks, chunk % ranks, int(cuts[chunk]), int(cuts[chunk + 1] - cuts[chunk]))
                for chunk in range(len(cuts) - 1)
            )
            for cuts in cuts_of
        ),
    )


def _level(cuts_of: list[np.ndarray], totals: list[np.ndarray], load: np.ndarray) -> None:
    """Move layers from the most to the least loaded rank while that balances the ranks; in place.

    A layer moves between two chunks of a module by moving all cuts between them by one. So the odd layers of one
    segment go where another segment or module has none.

    Parameters
    ----------
    cuts_of, totals : list of ndarray
        Cuts of each module, and prefix sums of its layers' seconds.
    load : ndarray of float64, shape (ranks,)
        Seconds of work of each rank.
    """
    ranks = len(load)
    for _ in range(2 * ranks):
        low, high = int(load.argmin()), int(load.argmax())
        best_value, best = float((load**2).sum()) * (1 - 1e-9), None
        for i, cuts in enumerate(cuts_of):
            count = len(cuts) - 1
            for target in range(low, count, ranks):
                for source in range(high, count, ranks):
                    moved = move_layer(cuts, source, target)
                    if (np.diff(moved) < 0).any():
                        continue
                    change = np.diff(totals[i][moved]) - np.diff(totals[i][cuts])
                    new_load = load + change.reshape(-1, ranks).sum(axis=0)
                    value = float((new_load**2).sum())
                    if value < best_value:
                        best_value, best = value, (i, moved, new_load)
        if best is None:
            return
        i, cuts_of[i], load[:] = best


def contiguous_cuts(placement: Placement, ranks: int) -> np.ndarray:
    """Cuts of a contiguous placement, shape (ranks + 1,): the layers of all modules before each rank."""
    layers = np.zeros(ranks, np.int64)
    for row in placement.chunks:
        for chunk in row:
            layers[chunk.rank] += chunk.layers
    return np.concatenate([[0], np.cumsum(layers)])


def move_layer(cuts: np.ndarray, source: int, target: int) -> np.ndarray:
    """Cuts after one layer moved from part ``source`` to part ``target``, by moving all cuts between them by one."""
    moved = cuts.copy()
    if target < source:
        moved[target + 1 : source + 1] += 1
    else:
        moved[source + 1 : target + 1] -= 1
    return moved


def contiguous(modules: Sequence[Module], work_s: Sequence[float], ranks: int) -> Placement:
    """Modules one after the other, cut into as many stages as there are ranks (the conventional placement).

    Parameters
    ----------
    work_s : sequence of float
        Seconds of the whole step in each module.
    """
    order = topological_order(modules)
    weights = np.concatenate([np.array(modules[i].layers) * (work_s[i] / modules[i].work) for i in order])
    return contiguous_at(modules, balanced_cuts(weights, np.zeros(ranks)))


def contiguous_at(modules: Sequence[Module], cuts: np.ndarray) -> Placement:
    """Contiguous placement of the layers of all modules, in topological order, with these cuts, shape (ranks + 1,)."""
    chunks: list[tuple[Chunk, ...]] = [()] * len(modules)
    begin = 0
    for i in topological_order(modules):
        end = begin + len(modules[i].layers)
        parts = []
        for rank in range(len(cuts) - 1):
            first, last = max(begin, int(cuts[rank])), min(end, int(cuts[rank + 1]))
            if last > first:
                parts.append(Chunk(0, rank, first - begin, last - first))
        chunks[i] = tuple(parts)
        begin = end
    return Placement("contiguous", tuple(chunks))


def place(cuts: Cuts, ranks: int) -> Placement:
    """Placement with these cuts. Empty parts are left out, and segments are counted by the passes over the ranks."""
    rows = []
    for module in cuts:
        chunks: list[Chunk] = []
        for part, (first, last) in enumerate(itertools.pairwise(module)):
            if last > first:
                rank = part % ranks
                segment = 0 if not chunks else chunks[-1].segment + (rank <= chunks[-1].rank)
                chunks.append(Chunk(segment, rank, first, last - first))
        rows.append(tuple(chunks))
    return Placement("segments", tuple(rows))


def cuts_of(placement: Placement, ranks: int) -> Cuts:
    """Cuts of a placement."""
    rows = []
    for chunks in placement.chunks:
        layers = np.zeros((chunks[-1].segment + 1) * ranks, np.int64)
        for chunk in chunks:
            layers[chunk.segment * ranks + chunk.rank] = chunk.layers
        rows.append((0, *np.cumsum(layers).tolist()))
    return tuple(rows)


def every_cut(layers: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every cut of a chain of layers into so many parts, empty ones included."""
    if parts == 1:
        yield (0, layers)
        return
    for cut in every_cut(layers, parts - 1):
        for last in range(cut[-2], layers + 1):
            yield (*cut[:-1], last, layers)
