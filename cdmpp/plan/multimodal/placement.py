"""Placement of layers on ranks, candidate placements, and sub-micro-batches of a step.

Segments lie over all ranks, from any of them on and round the ranks, or modules one after the other (contiguous).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.plan.base.task_graph import TaskGraph, make_graph, run_in_order
from cdmpp.plan.multimodal.modules import ItemLinks, Module, split_evenly, topological_order
from cdmpp.utils.jit import jit

#: Most segments that the proportional rule gives a module: more add little overlap and many tasks.
MAX_SEGMENTS = 4
#: Most parts times squared layers that are cut by dynamic programming (tens of milliseconds), and least blocks a part.
MAX_CUT_CELLS, MIN_BLOCKS = 25_000_000, 4
#: Cuts of each module's layers into ``segments * ranks`` parts, from 0 to its layers; parts may be empty. Empty parts
#: before these, fewer than ranks, are for the ranks before its first one.
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
    """Chunks of each module in the order of the forward pass."""

    chunks: tuple[tuple[Chunk, ...], ...]

    def segments(self, module: int) -> int:
        """Number of segments of a module."""
        return self.chunks[module][-1].segment + 1


def balanced_cuts(weights: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Cut a chain of layers into contiguous parts of least sum of squares of load + part.

    Squares rather than the largest part alone: they also balance the parts that are not the largest. Dynamic
    programming over cuts, O(parts · layers²). Above :data:`MAX_CUT_CELLS` blocks of layers are cut instead; with
    fewer than :data:`MIN_BLOCKS` of these for each part, the layers are cut in proportion, and loads are ignored.

    ``weights`` (shape (layers,)): seconds of each layer. ``load`` (shape (parts,)): seconds of work that each part's
    rank already has: of equal layers, the odd ones go to the least loaded.
    Returns cuts, from 0 to ``layers``; parts may be empty (shape (parts + 1,)).
    """
    total = np.concatenate([[0.0], np.cumsum(weights)])
    parts = len(load)
    block = math.ceil(len(weights) / math.sqrt(MAX_CUT_CELLS / parts))
    if block > 1 and len(weights) < MIN_BLOCKS * block * parts:
        targets = total[-1] * np.arange(parts + 1) / parts
        nearest: np.ndarray = np.searchsorted((total[:-1] + total[1:]) / 2, targets)
        return nearest
    cuts, begins = np.zeros(parts + 1, np.int64), np.append(np.arange(0, len(weights), block), len(weights))
    _cut(total[begins], np.asarray(load, np.float64), cuts)
    result: np.ndarray = begins[cuts]
    return result


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
    most = [max(1, min(MAX_SEGMENTS, len(module.layers) // ranks)) for module in modules]
    return [
        min(max(round(seconds / min(latency_s)), 1), limit) if module.segments is None else module.segments
        for module, seconds, limit in zip(modules, latency_s, most, strict=True)
    ]


def in_segments(
    modules: Sequence[Module],
    counts: Sequence[int],
    work_s: Sequence[float],
    ranks: int,
    lead_s: float = 0.0,
    starts: Sequence[int] | None = None,
) -> Placement:
    """Distribute every module over all ranks, ``counts`` times.

    ``counts``: segments of each module. ``work_s``: seconds of the whole step in each module: the weights by which the
    ranks are balanced. ``lead_s``: seconds by which a rank starts later or ends earlier than the one before it: the odd
    layers go to the first ranks rather than to the last. ``starts``: rank of each module's first part; default: 0.
    """
    load = np.arange(ranks) * lead_s
    cuts_of: list[np.ndarray] = []
    totals: list[np.ndarray] = []
    for module, count, seconds, start in zip(modules, counts, work_s, starts or [0] * len(modules), strict=True):
        weights = np.array(module.layers) * (seconds / module.work)
        # Segments of a module are balanced among themselves: they start from the same loads.
        cuts = balanced_cuts(weights, np.tile(np.roll(load, -start), count) / count)
        cuts = np.concatenate([np.zeros(start, np.int64), cuts])
        cuts_of.append(cuts)
        totals.append(np.concatenate([[0.0], np.cumsum(weights)]))
        load += work_by_rank(cuts, totals[-1], ranks)
    _level(cuts_of, totals, load)
    return place(tuple(tuple(cuts.tolist()) for cuts in cuts_of), ranks)


def _level(cuts_of: list[np.ndarray], totals: list[np.ndarray], load: np.ndarray) -> None:
    """Move layers from the most to the least loaded rank while that balances the ranks; in place.

    A layer moves between two chunks of a module by moving all cuts between them by one. So the odd layers of one
    segment go where another segment or module has none.

    ``cuts_of``, ``totals``: cuts of each module, and prefix sums of its layers' seconds. ``load`` (shape (ranks,)):
    seconds of work of each rank.
    """
    ranks = len(load)
    for _ in range(2 * ranks):
        low, high = int(load.argmin()), int(load.argmax())
        best_value, best = float((load**2).sum()) * (1 - 1e-9), None
        for i, cuts in enumerate(cuts_of):
            count = len(cuts) - 1
            for target in range(low if low >= count % ranks else low + ranks, count, ranks):
                for source in range(high, count, ranks):
                    moved = move_layer(cuts, source, target)
                    if (np.diff(moved) < 0).any():
                        continue
                    new_load = load + work_by_rank(moved, totals[i], ranks) - work_by_rank(cuts, totals[i], ranks)
                    value = float((new_load**2).sum())
                    if value < best_value:
                        best_value, best = value, (i, moved, new_load)
        if best is None:
            return
        i, cuts_of[i], load[:] = best


def work_by_rank(cuts: Sequence[int] | np.ndarray, totals: np.ndarray, ranks: int) -> np.ndarray:
    """Work of each rank in the parts of a module; ``totals``: prefix sums of the layers' work."""
    work = np.diff(totals[np.asarray(cuts)])
    return np.bincount(np.arange(len(work)) % ranks, weights=work, minlength=ranks)


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

    ``work_s``: seconds of the whole step in each module.
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
    return Placement(tuple(chunks))


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
    return Placement(tuple(rows))


def cuts_of(placement: Placement, ranks: int) -> Cuts:
    """Cuts of a placement."""
    rows = []
    for chunks in placement.chunks:
        first, end = chunks[0].rank, chunks[-1].segment * ranks + chunks[-1].rank + 1
        parts = -(-(end - first) // ranks) * ranks
        layers = np.zeros(parts if end <= parts else first + parts, np.int64)
        for chunk in chunks:
            layers[chunk.segment * ranks + chunk.rank] = chunk.layers
        rows.append((0, *np.cumsum(layers).tolist()))
    return tuple(rows)


def every_row(layers: int, ranks: int, segments: int, starts: Iterable[int]) -> list[tuple[Chunk, ...]]:
    """Every way to put a module's layers on ranks in so many segments, the first one on one of ``starts``."""
    parts = range(segments * ranks)
    part_of = [(0, *rest) for rest in itertools.combinations_with_replacement(parts, layers - 1)]
    inner = [[*(bisect.bisect_left(of, part) for part in parts), layers] for of in part_of]
    return list(dict.fromkeys(place(((*[0] * start, *cut),), ranks).chunks[0] for start in starts for cut in inner))


#: Most micro-batch counts that are tried for 1F1B.
MAX_COUNTS = 16
#: Passes to simulate for cuts that make 1F1B short: about ten milliseconds compiled, two seconds otherwise.
MAX_CUT_PASSES = 1_000_000


def split_batch(batch: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Items of each sub-micro-batch of at most these sizes, by module."""
    return [split_evenly(n, -(-n // size)) if n else () for n, size in zip(batch, sizes, strict=True)]


def task_count(placement: Placement, items: Sequence[Sequence[int]]) -> int:
    """Number of tasks of a step."""
    return 2 * sum(len(units) * len(row) for units, row in zip(items, placement.chunks, strict=True))


def rule_sizes(modules: Sequence[Module]) -> list[list[int]]:
    """Sizes of the rule for every efficiency from 0 to 1, by growing efficiency."""
    rates = [module.items_per_s for module in modules]
    shares = sorted({float(share) for row in rates for share in row / row.max()})
    sizes: list[list[int]] = []
    for share in shares:
        at_share = [module.efficient_size(share) for module in modules]
        if at_share not in sizes:
            sizes.append(at_share)
    return sizes


def rule_placement(modules: Sequence[Module], batch: Sequence[int], sizes: Sequence[int], ranks: int) -> Placement:
    """Placement of PipeWeaver's rule for sub-micro-batches of these sizes."""
    work_s = _work_s(modules, split_batch(batch, sizes))
    return in_segments(modules, segment_counts(modules, sizes, ranks), work_s, ranks)


def segment_placements(
    modules: Sequence[Module],
    items: Sequence[Sequence[int]],
    counts: Sequence[int],
    ranks: int,
    starts: Sequence[int] | None = None,
) -> list[Placement]:
    """Placements in so many segments, balanced for these sub-micro-batches: evenly, and with more on the first ranks.

    A rank waits for the one before it at least for a chunk of the quickest unit, forward and backward.
    """
    work_s = _work_s(modules, items)
    lead_s = min(
        module.work * sum(module.layer_s(max(units))) / (ranks * k)
        for module, units, k in zip(modules, items, counts, strict=True)
        if units
    )
    even, early = (in_segments(modules, counts, work_s, ranks, lead, starts) for lead in (0.0, lead_s))
    return [even] if early == even else [even, early]


def contiguous_placements(
    modules: Sequence[Module], batch: Sequence[int], ranks: int, links: ItemLinks, over: Callable[[], bool]
) -> list[Placement]:
    """Contiguous placements: cut evenly for one micro-batch and for many, and cut for the shortest 1F1B.

    Once ``over`` returns True, no further numbers of micro-batches are tried.
    """
    even: list[Placement] = []
    improved: list[tuple[float, int, Placement]] = []
    remaining = MAX_CUT_PASSES
    for number, count in enumerate(micro_batch_counts(batch[links.samples])):
        if number and over():
            break
        items, micro_batches = split_micro_batches(batch, count, links)
        placement = contiguous(modules, _work_s(modules, items), ranks)
        if placement not in even:
            even.append(placement)
        grid = [np.zeros(count, np.int64) for _ in modules]
        for row, units, places in zip(grid, items, micro_batches, strict=True):
            row[list(places)] = units
        placement, makespan_s, remaining = improve_cuts(modules, placement, grid, ranks, remaining)
        improved.append((makespan_s, number, placement))
    shortest = min(improved)[2]
    placements = [even[0], even[-1]] if len(even) > 1 else even
    return placements if shortest in placements else [*placements, shortest]


def micro_batch_counts(samples: int) -> list[int]:
    """Numbers of micro-batches for 1F1B, from one to one per sample."""
    return sorted({round(count) for count in np.geomspace(1, samples, MAX_COUNTS)})


def split_micro_batches(
    batch: Sequence[int], count: int, links: ItemLinks
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Divide the samples, with the items that belong to them, into ``count`` micro-batches.

    Returns ``items, micro_batches``: items and micro-batch of each unit, by module.
    """
    micro_batch_of_sample = np.repeat(np.arange(count), split_evenly(batch[links.samples], count))
    items, micro_batches = [], []
    for i in range(len(batch)):
        numbers, sizes = np.unique(micro_batch_of_sample[links.sample_of(i, batch)], return_counts=True)
        items.append(tuple(sizes.tolist()))
        micro_batches.append(tuple(numbers.tolist()))
    return items, micro_batches


def _work_s(modules: Sequence[Module], items: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of all units in each module; a little for a module without items, so that its layers are distributed."""
    work = [module.work * module.units_s(units) for module, units in zip(modules, items, strict=True)]
    least = 1e-6 * sum(work)
    return [seconds if seconds else least for seconds in work]


def improve_cuts(
    modules: Sequence[Module], placement: Placement, items: Sequence[np.ndarray], ranks: int, max_passes: int
) -> tuple[Placement, float, int]:
    """Improve a contiguous placement by the makespan of 1F1B rather than by its slowest stage.

    With few or unequal micro-batches the most even cut is not the best: filling and draining the pipeline counts as
    much as its pace. Layers are moved between two stages as long as that shortens 1F1B.

    ``placement``: contiguous placement to start from. ``items`` (shape (micro-batches,)): items of each module in each
    micro-batch; 0 where it has none. ``max_passes``: passes to simulate altogether.
    Returns the placement; ``makespan_s``: makespan of 1F1B whose stages pass a micro-batch on as a whole;
    ``remaining``: passes of ``max_passes`` that are left.
    """
    count, order_of = len(items[0]), topological_order(modules)
    layers = [len(modules[i].layers) for i in order_of]
    # Relative times of the layers before each cut, by module, and the module of each layer.
    before = np.zeros((len(modules), sum(layers) + 1))
    for number, (i, begin) in enumerate(zip(order_of, np.cumsum([0, *layers]), strict=False)):
        before[number, begin + 1 : begin + 1 + layers[number]] = modules[i].layers
    before, module_of = np.cumsum(before, axis=1), np.repeat(np.arange(len(modules)), layers)
    seconds = np.zeros((3, len(modules), count))  # of a layer forward and backward, and of a transfer
    for number, i in enumerate(order_of):
        costs = {
            n: (*modules[i].layer_s(n), modules[i].transfer_s(n)) if n else (0.0,) * 3 for n in {*items[i].tolist()}
        }
        seconds[:, number] = np.array([costs[n] for n in items[i].tolist()]).T
    cuts, rank = contiguous_cuts(placement, ranks), np.tile(np.repeat(np.arange(ranks), count), 2)
    graph, order = _whole_micro_batches(ranks, count)
    first_of = np.arange(ranks + 1) * 2 * count
    start_s, place = np.empty(order.size), np.empty(order.size, np.int64)

    def makespan_s(at: np.ndarray) -> float:
        weights = np.diff(before[:, at], axis=1).T
        timed = graph._replace(duration_s=np.concatenate([(weights @ seconds[way]).ravel() for way in (0, 1)]))
        if seconds[2].any():
            timed = timed.with_transfers(rank, seconds[2][module_of[at[1:] - 1]].ravel())
        return float(run_in_order(timed, first_of, order.ravel(), start_s, place))

    # With many ranks and few micro-batches the time is that of waiting ranks, which are visited in each round.
    passes = 2 * ranks * max(count, ranks // 32)
    best_s, remaining = makespan_s(cuts), max_passes - passes
    moves = rank_pairs(ranks)
    while remaining >= passes and (pair := next(moves, None)) is not None:
        source, target = pair
        if cuts[source + 1] == cuts[source]:
            continue
        moved = move_layer(cuts, source, target)
        remaining -= passes
        moved_s = makespan_s(moved)
        if moved_s < best_s * (1 - 1e-9):
            best_s, cuts, moves = moved_s, moved, rank_pairs(ranks)
    return contiguous_at(modules, cuts), best_s, remaining


def _whole_micro_batches(ranks: int, count: int) -> tuple[TaskGraph, np.ndarray]:
    """Passes of a pipeline whose stages pass a micro-batch on as a whole, and their 1F1B order by rank.

    Returns ``graph``: forward pass of micro-batch m on rank r as task r * count + m, then the backward passes; without
    durations; ``order``: shape (ranks, 2 * count).
    """
    forward = np.arange(ranks * count).reshape(ranks, count)
    backward = forward + forward.size
    sources = [forward[:-1].ravel(), backward[1:].ravel(), forward[-1]]
    targets = [forward[1:].ravel(), backward[:-1].ravel(), backward[-1]]
    graph = make_graph(sources, targets, 2 * forward.size)
    order = np.empty((ranks, 2 * count), np.int64)
    first, second = one_f_one_b_places(np.arange(ranks)[:, None], np.arange(count), ranks, count)
    np.put_along_axis(order, first, forward, axis=1)
    np.put_along_axis(order, second, backward, axis=1)
    return graph, order


def one_f_one_b_places(rank: np.ndarray, micro_batch: np.ndarray, ranks: int, count: int) -> tuple[Any, Any]:
    """Places of the forward and of the backward pass in a rank's 1F1B order of ``count`` micro-batches.

    Rank r of P runs ``min(P - 1 - r, count)`` forward passes, then forward and backward passes alternately.
    """
    warm_up = np.minimum(ranks - 1 - rank, count)
    backward = np.where(micro_batch < count - warm_up, warm_up + 2 * micro_batch + 1, count + micro_batch)
    return np.where(micro_batch < warm_up, micro_batch, 2 * micro_batch - warm_up), backward


def rank_pairs(ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs of different ranks, neighbours first: most of the gain of a move of layers is there."""
    for distance in range(1, ranks):
        for a in range(ranks):
            for b in (a - distance, a + distance):
                if 0 <= b < ranks:
                    yield a, b
