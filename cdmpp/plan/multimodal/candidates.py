"""Candidate placements of a step, its sub-micro-batches and micro-batches, and 1F1B of contiguous placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cdmpp.plan.base.task_graph import TaskGraph, make_graph, run_in_order
from cdmpp.plan.multimodal.modules import ItemLinks, Module, split_evenly, topological_order
from cdmpp.plan.multimodal.placement import (
    Placement,
    contiguous,
    contiguous_at,
    contiguous_cuts,
    in_segments,
    move_layer,
    segment_counts,
)
from cdmpp.plan.multimodal.tasks import Tasks
from cdmpp.simulate.emulator.orders import one_f_one_b

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
    modules: Sequence[Module], items: Sequence[Sequence[int]], counts: Sequence[int], ranks: int
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
    even, early = (in_segments(modules, counts, work_s, ranks, lead) for lead in (0.0, lead_s))
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

    Returns
    -------
    items, micro_batches : list of tuple of int
        Items and micro-batch of each unit, by module.
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


def one_f_one_b_orders(tasks: Tasks, micro_batch: Sequence[Sequence[int]]) -> list[list[int]]:
    """1F1B order of each rank's tasks for a contiguous placement.

    Rank r of P runs ``min(P - 1 - r, micro-batches)`` forward passes, then forward and backward passes alternately.

    ``micro_batch`` has the micro-batch of each unit, by module.
    """
    ranks, half = tasks.ranks, tasks.half
    count = 1 + max(max(units) for units in micro_batch if len(units))
    stages: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(ranks)]
    for i, _ in tasks.classes:
        for unit, row in enumerate(tasks.ids[i]):
            for t in row.tolist():
                stages[int(tasks.rank[t])][micro_batch[i][unit]].append(t)
    orders = []
    for passes, stage in zip(one_f_one_b(ranks, ranks, count), stages, strict=True):
        order: list[int] = []
        for kind, _, m in passes:
            order += stage[m] if kind == "F" else [half + t for t in reversed(stage[m])]
        orders.append(order)
    return orders


def improve_cuts(
    modules: Sequence[Module], placement: Placement, items: Sequence[np.ndarray], ranks: int, max_passes: int
) -> tuple[Placement, float, int]:
    """Improve a contiguous placement by the makespan of 1F1B rather than by its slowest stage.

    With few or unequal micro-batches the most even cut is not the best: filling and draining the pipeline counts as
    much as its pace. Layers are moved between two stages as long as that shortens 1F1B.

    Parameters
    ----------
    placement : Placement
        Contiguous placement to start from.
    items : sequence of ndarray of int64, shape (micro-batches,)
        Items of each module in each micro-batch; 0 where it has none.
    max_passes : int
        Passes to simulate altogether.

    Returns
    -------
    placement : Placement
    makespan_s : float
        Makespan of 1F1B whose stages pass a micro-batch on as a whole.
    remaining : int
        Passes of ``max_passes`` that are left.
    """
    count = len(items[0])
    forward, backward = [], []
    for i in topological_order(modules):
        costs = {int(n): modules[i].layer_s(int(n)) if n else (0.0, 0.0) for n in set(items[i].tolist())}
        seconds = np.array([costs[int(n)] for n in items[i]]).T
        layers = np.array(modules[i].layers)[:, None]
        forward.append(layers * seconds[0])
        backward.append(layers * seconds[1])
    zeros = np.zeros((1, count))
    forward_total_s = np.cumsum(np.concatenate([zeros, *forward]), axis=0)
    backward_total_s = np.cumsum(np.concatenate([zeros, *backward]), axis=0)
    cuts = contiguous_cuts(placement, ranks)
    graph, order = _whole_micro_batches(ranks, count)
    first_of = np.arange(ranks + 1) * 2 * count
    start_s, place = np.empty(order.size), np.empty(order.size, np.int64)

    def makespan_s(at: np.ndarray) -> float:
        passes_s = [np.diff(total_s[at], axis=0).ravel() for total_s in (forward_total_s, backward_total_s)]
        timed = graph._replace(duration_s=np.concatenate(passes_s))
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

    Returns
    -------
    graph : TaskGraph
        Forward pass of micro-batch m on rank r as task r * count + m, then the backward passes; without durations.
    order : ndarray of int64, shape (ranks, 2 * count)
    """
    forward = np.arange(ranks * count).reshape(ranks, count)
    backward = forward + forward.size
    sources = [forward[:-1].ravel(), backward[1:].ravel(), forward[-1]]
    targets = [forward[1:].ravel(), backward[:-1].ravel(), backward[-1]]
    graph = make_graph(np.zeros(2 * forward.size), sources, targets)
    m, warm_up = np.arange(count), np.minimum(ranks - 1 - np.arange(ranks), count)[:, None]
    order = np.empty((ranks, 2 * count), np.int64)
    # ``warm_up`` forward passes, forward and backward alternately, ``warm_up`` backward passes.
    np.put_along_axis(order, np.where(m < warm_up, m, 2 * m - warm_up), forward, axis=1)
    np.put_along_axis(order, np.where(m < count - warm_up, warm_up + 2 * m + 1, count + m), backward, axis=1)
    return graph, order


def rank_pairs(ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs of different ranks, neighbours first: most of the gain of a move of layers is there."""
    for distance in range(1, ranks):
        for a in range(ranks):
            for b in (a - distance, a + distance):
                if 0 <= b < ranks:
                    yield a, b
