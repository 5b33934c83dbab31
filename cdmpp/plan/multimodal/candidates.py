"""Candidate placements of a step, and its sub-micro-batches and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cdmpp.plan.multimodal.links import ItemLinks
from cdmpp.plan.multimodal.modules import Module, split_evenly
from cdmpp.plan.multimodal.one_f_one_b import improve_cuts
from cdmpp.plan.multimodal.placement import Placement, contiguous, in_segments, segment_counts

#: Most micro-batch counts that are tried for 1F1B.
MAX_COUNTS = 16
#: Passes to simulate for cuts that make 1F1B short: about ten milliseconds compiled, two seconds otherwise.
MAX_CUT_PASSES = 1_000_000


def unit_sizes(modules: Sequence[Module], efficiency: float) -> list[int]:
    """Sub-micro-batch size of each module by PipeWeaver's rule."""
    return [module.efficient_size(efficiency) for module in modules]


def split_batch(batch: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Items of each sub-micro-batch of at most these sizes, by module."""
    return [split_evenly(n, -(-n // size)) if n else () for n, size in zip(batch, sizes, strict=True)]


def task_count(placement: Placement, items: Sequence[Sequence[int]]) -> int:
    """Number of tasks of a step."""
    return 2 * sum(len(units) * len(row) for units, row in zip(items, placement.chunks, strict=True))


def rule_sizes(modules: Sequence[Module]) -> list[list[int]]:
    """Sizes of the rule for every efficiency from 0 to 1, by growing efficiency."""
    rates = [module.sizes / (module.forward_s + module.backward_s) for module in modules]
    shares = sorted({float(share) for row in rates for share in row / row.max()})
    sizes: list[list[int]] = []
    for share in shares:
        at_share = unit_sizes(modules, share)
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
    work = [
        module.work * sum(sum(module.layer_s(n)) for n in units) for module, units in zip(modules, items, strict=True)
    ]
    least = 1e-6 * sum(work)
    return [seconds if seconds else least for seconds in work]
