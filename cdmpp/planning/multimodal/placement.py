"""Which rank holds which layers: segments over all ranks, or modules packed one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.compose.jit import jit
from cdmpp.planning.multimodal.modules import Module, ordered

#: Segments that the proportional rule gives a module at most: more add little overlap and many tasks.
MAX_SEGMENTS = 4


@dataclass(frozen=True)
class Chunk:
    """Layers ``first`` to ``first + layers - 1`` of a module on a rank, as part of a segment."""

    segment: int
    rank: int
    first: int
    layers: int


@dataclass(frozen=True)
class Placement:
    """Chunks of each module in the order in which data goes through them forward.

    Attributes
    ----------
    name : str
        "segments" or "contiguous", for the answer.
    chunks : tuple of tuple of Chunk
        By module.
    """

    name: str
    chunks: tuple[tuple[Chunk, ...], ...]

    def segments(self, module: int) -> int:
        """Segments of a module."""
        return self.chunks[module][-1].segment + 1


def balanced(weights: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Cut a chain into ``len(load)`` contiguous parts so that the sum of squares of load + part is least.

    Parameters
    ----------
    weights : ndarray (layers,)
    load : ndarray (parts,)
        What each part's rank has to do already: with equal layers the odd ones go where least is done.

    Returns
    -------
    ndarray (parts + 1,)
        Cuts, from 0 to ``layers``; parts may be empty.

    Notes
    -----
    Dynamic programming over cuts, O(parts · layers²). Squares rather than the slowest part alone: they also
    even out the parts that are not the slowest.
    """
    total = np.concatenate([[0.0], np.cumsum(weights)])
    cuts = np.zeros(len(load) + 1, np.int64)
    _cut(total, np.asarray(load, np.float64), cuts)
    return cuts


@jit
def _cut(total: np.ndarray, load: np.ndarray, cuts: np.ndarray) -> None:
    count, parts = len(total), len(load)
    best = np.full(count, np.inf)
    best[0] = 0.0
    choice = np.zeros((parts, count), np.int64)
    for part in range(parts):
        now = np.full(count, np.inf)
        for last in range(count):
            for first in range(last, -1, -1):
                alone = (load[part] + total[last] - total[first]) ** 2
                if alone > now[last]:  # and so are all longer ones
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
    out = []
    for module, seconds in zip(modules, latency_s, strict=True):
        most = max(1, min(MAX_SEGMENTS, len(module.layers) // ranks))
        out.append(module.segments if module.segments is not None else min(max(round(seconds / least), 1), most))
    return out


def in_segments(
    modules: Sequence[Module], counts: Sequence[int], work_s: Sequence[float], ranks: int, lead_s: float = 0.0
) -> Placement:
    """Every module over all ranks, ``counts`` times.

    Parameters
    ----------
    work_s : sequence of float
        Seconds of the whole step in each module: what weighs when the ranks are balanced.
    lead_s : float
        By how much a rank starts later or ends earlier than the one before it: the odd layers go to the first
        ranks rather than to the last.
    """
    load = np.arange(ranks) * lead_s
    chains: list[np.ndarray] = []
    weighed: list[np.ndarray] = []
    for module, count, seconds in zip(modules, counts, work_s, strict=True):
        weights = np.array(module.layers) * (seconds / module.work)
        # Segments of a module are balanced among themselves: their loads start from the same figures.
        cuts = balanced(weights, np.tile(load, count) / count)
        chains.append(cuts)
        weighed.append(np.concatenate([[0.0], np.cumsum(weights)]))
        for at in range(ranks * count):
            load[at % ranks] += weights[cuts[at] : cuts[at + 1]].sum()
    _level(chains, weighed, load)
    return Placement(
        "segments",
        tuple(
            tuple(
                Chunk(at // ranks, at % ranks, int(cuts[at]), int(cuts[at + 1] - cuts[at]))
                for at in range(len(cuts) - 1)
            )
            for cuts in chains
        ),
    )


def _level(chains: list[np.ndarray], weighed: list[np.ndarray], load: np.ndarray) -> None:
    """Move layers from the fullest rank to the emptiest while that makes the ranks more alike; in place.

    A layer moves between two chunks of a module by moving all cuts between them by one: the odd layers of
    one segment then go where another segment or module has none.
    """
    ranks = len(load)
    for _ in range(2 * ranks):
        low, high = int(load.argmin()), int(load.argmax())
        best, chosen = float((load**2).sum()) * (1 - 1e-9), None
        for i, cuts in enumerate(chains):
            count = len(cuts) - 1
            for to in range(low, count, ranks):
                for source in range(high, count, ranks):
                    moved = cuts.copy()
                    if to < source:
                        moved[to + 1 : source + 1] += 1
                    else:
                        moved[source + 1 : to + 1] -= 1
                    if (np.diff(moved) < 0).any():
                        continue
                    change = np.diff(weighed[i][moved]) - np.diff(weighed[i][cuts])
                    other = load + change.reshape(-1, ranks).sum(axis=0)
                    value = float((other**2).sum())
                    if value < best:
                        best, chosen = value, (i, moved, other)
        if chosen is None:
            return
        i, chains[i], load[:] = chosen


def contiguous(modules: Sequence[Module], work_s: Sequence[float], ranks: int) -> Placement:
    """Modules one behind the other, cut into as many stages as there are ranks (the conventional layout)."""
    order = ordered(modules)
    weights = np.concatenate([np.array(modules[i].layers) * (work_s[i] / modules[i].work) for i in order])
    return _cut_at(modules, balanced(weights, np.zeros(ranks)))


def recut(
    modules: Sequence[Module], placement: Placement, items: Sequence[np.ndarray], ranks: int, most: int
) -> tuple[Placement, float, int]:
    """A contiguous placement whose 1F1B step is short rather than its slowest stage.

    With few micro-batches, or unlike ones, the best cut is not the most even one: filling and draining the
    pipeline counts as much as its pace. Layers are moved between two stages as long as that helps.

    Parameters
    ----------
    placement : Placement
        Contiguous: where it begins.
    items : sequence of ndarray (micro-batches,)
        Of each module in each micro-batch; 0 where it has none.
    most : int
        Passes to simulate altogether.

    Returns
    -------
    placement : Placement
    makespan_s : float
        Of 1F1B whose stages pass a micro-batch on as a whole.
    left : int
        Of ``most``.
    """
    count = len(items[0])
    forward, backward = [], []
    for i in ordered(modules):
        known = {int(n): modules[i].layer_s(int(n)) if n else (0.0, 0.0) for n in set(items[i].tolist())}
        seconds = np.array([known[int(n)] for n in items[i]]).T
        layers = np.array(modules[i].layers)[:, None]
        forward.append(layers * seconds[0])
        backward.append(layers * seconds[1])
    none = np.zeros((1, count))
    ahead_s = np.cumsum(np.concatenate([none, *forward]), axis=0)
    back_s = np.cumsum(np.concatenate([none, *backward]), axis=0)
    layers_on = np.zeros(ranks, np.int64)
    for row in placement.chunks:
        for chunk in row:
            layers_on[chunk.rank] += chunk.layers
    cuts = np.concatenate([[0], np.cumsum(layers_on)])

    def takes_s(at: np.ndarray) -> float:
        return float(_one_f_one_b_s(np.diff(ahead_s[at], axis=0), np.diff(back_s[at], axis=0)))

    each = 2 * ranks * count
    best, left = takes_s(cuts), most - each
    # Neighbours first: most of what there is to gain is there.
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    moves = sorted(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    fruitless, at = 0, 0
    while fruitless < len(moves) and left >= each:
        source, to = moves[at]
        at = (at + 1) % len(moves)
        fruitless += 1
        if cuts[source + 1] == cuts[source]:
            continue
        moved = cuts.copy()
        if to < source:
            moved[to + 1 : source + 1] += 1
        else:
            moved[source + 1 : to + 1] -= 1
        left -= each
        value = takes_s(moved)
        if value < best * (1 - 1e-9):
            best, cuts, fruitless, at = value, moved, 0, 0
    return _cut_at(modules, cuts), best, left


@jit
def _one_f_one_b_s(forward_s: np.ndarray, backward_s: np.ndarray) -> float:
    """Makespan of 1F1B in seconds; what each rank's passes take, both (ranks, micro-batches)."""
    ranks, count = forward_s.shape
    # Ends of the passes; below 0 before they ran.
    ahead = np.full((ranks, count), -1.0)
    back = np.full((ranks, count), -1.0)
    free = np.zeros(ranks)
    place = np.zeros(ranks, np.int64)
    left = 2 * ranks * count
    while left > 0:
        for r in range(ranks):
            warm = min(ranks - 1 - r, count)
            while place[r] < 2 * count:
                # ``warm`` forward passes, forward and backward in turn, and the last ``warm`` backward.
                at = place[r] - warm
                in_turn = 2 * (count - warm)
                if at < 0 or (at < in_turn and at % 2 == 0):
                    m = place[r] if at < 0 else warm + at // 2
                    ready = ahead[r - 1, m] if r > 0 else 0.0
                    if ready < 0.0:
                        break
                    free[r] = max(free[r], ready) + forward_s[r, m]
                    ahead[r, m] = free[r]
                else:
                    m = at // 2 if at < in_turn else place[r] - count
                    ready = back[r + 1, m] if r < ranks - 1 else ahead[r, m]
                    if ready < 0.0:
                        break
                    free[r] = max(free[r], ready) + backward_s[r, m]
                    back[r, m] = free[r]
                place[r] += 1
                left -= 1
    return float(free.max())


def _cut_at(modules: Sequence[Module], cuts: np.ndarray) -> Placement:
    """The contiguous placement of the layers of all modules, one behind the other, cut there."""
    chunks: list[tuple[Chunk, ...]] = [()] * len(modules)
    begin = 0
    for i in ordered(modules):
        end = begin + len(modules[i].layers)
        parts = []
        for rank in range(len(cuts) - 1):
            first, last = max(begin, int(cuts[rank])), min(end, int(cuts[rank + 1]))
            if last > first:
                parts.append(Chunk(0, rank, first - begin, last - first))
        chunks[i] = tuple(parts)
        begin = end
    return Placement("contiguous", tuple(chunks))
