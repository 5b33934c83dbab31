"""Every design of a small step, each solved exactly: the shortest plan that the request allows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from cdmpp.plan.multimodal.branch_and_bound import MAX_TASKS, ROUNDING, shorten
from cdmpp.plan.multimodal.candidates import split_micro_batches
from cdmpp.plan.multimodal.evaluate import StepDesigns, StepSettings
from cdmpp.plan.multimodal.modules import split_evenly
from cdmpp.plan.multimodal.placement import Chunk, Placement
from cdmpp.plan.multimodal.schedule import Schedule, list_schedule
from cdmpp.plan.multimodal.search import FIRST_RULES
from cdmpp.plan.multimodal.sequence import data_order_key, sequence_by
from cdmpp.plan.multimodal.space import Items, every_cut, layer_seconds, most_segments, place

#: Most designs that are listed, and most that are kept because their quick bound is below the best makespan.
MAX_DESIGNS, MAX_KEPT = 400_000, 60_000
#: Nodes of branch and bound for each design.
MAX_NODES = 50_000
_Row = tuple[Chunk, ...]


def try_all(designs: StepDesigns, best: Schedule, over: Callable[[], bool]) -> tuple[Schedule, bool]:
    """Solve every design of a step, the one of least quick bound first; not with a memory limit.

    Returns
    -------
    Schedule
        ``best`` or a shorter one.
    bool
        Whether no plan that the request allows is shorter.
    """
    step = designs.step
    if np.isfinite(step.memory.limit_bytes):
        return best, False
    rows = _rows(step)
    items = _items(step)
    if rows is None or not items or math.prod(map(len, rows)) * len(items) > MAX_DESIGNS:
        return best, False
    weights = [_Weights(row, module.layers, step.ranks) for row, module in zip(rows, step.modules, strict=True)]
    limit_s = best.makespan_s * (1 - ROUNDING)
    kept: list[tuple[float, int, int]] = []
    for number, units in enumerate(items):
        bounds_s = _bounds_s(step, weights, units)
        below = np.flatnonzero(bounds_s < limit_s)
        kept += zip(bounds_s[below].tolist(), itertools.repeat(number), below.tolist())
        if over() or len(kept) > MAX_KEPT:
            return best, False
    proven = True
    for bound_s, number, at in sorted(kept):
        if bound_s >= best.makespan_s * (1 - ROUNDING):
            break
        if over():
            return best, False
        chosen = np.unravel_index(at, [len(row) for row in rows])
        placement = Placement("segments", tuple(row[int(k)] for row, k in zip(rows, chosen, strict=True)))
        designs.steps += 1
        best, solved = _solve(step, placement, items[number], best)
        proven = proven and solved
    return best, proven


def _solve(step: StepSettings, placement: Placement, items: Items, best: Schedule) -> tuple[Schedule, bool]:
    """The best order of a design if it is shorter, and whether the design is solved."""
    if sum(len(units) * len(row) for units, row in zip(items, placement.chunks, strict=True)) * 2 > MAX_TASKS:
        return best, False
    tasks = step.tasks(placement, items)
    if tasks.bound_s >= best.makespan_s * (1 - ROUNDING):
        return best, True
    sequence = sequence_by(tasks, data_order_key(tasks))
    quick = min((list_schedule(tasks, sequence, rule) for rule in sorted(FIRST_RULES)), key=lambda s: s.makespan_s)
    shorter, solved = shorten(quick, best.makespan_s, MAX_NODES)
    return min(best, shorter, key=lambda schedule: schedule.makespan_s), solved


def _rows(step: StepSettings) -> list[list[_Row]] | None:
    """Different placements of each module; None where there are too many."""
    rows, total = [], 1
    for module, items in zip(step.modules, step.batch, strict=True):
        parts = step.ranks * (most_segments(module, step.ranks) if items else 1)
        total *= math.comb(len(module.layers) + parts - 1, parts - 1) if items else 1
        if total > MAX_DESIGNS:
            return None
        cuts = every_cut(len(module.layers), parts) if items else iter([(0, *[len(module.layers)] * step.ranks)])
        rows.append(list(dict.fromkeys(place((cut,), step.ranks).chunks[0] for cut in cuts)))
    return rows


def _items(step: StepSettings) -> list[Items]:
    """Different sub-micro-batches: every number for each module, and every number of micro-batches of samples."""
    if math.prod(max(n, 1) for n in step.batch) > MAX_DESIGNS:
        return []
    even = itertools.product(
        *([split_evenly(n, count) for count in range(1, n + 1)] if n else [()] for n in step.batch)
    )
    samples = step.batch[step.links.samples]
    by_sample = (tuple(split_micro_batches(step.batch, count, step.links)[0]) for count in range(1, samples + 1))
    return list(dict.fromkeys(itertools.chain(even, by_sample)))


class _Weights:
    """Layers' relative times of each placement of a module by rank; all arrays of shape (placements, ranks).

    Attributes
    ----------
    load : ndarray
    before : ndarray
        In the layers before the rank's first one; infinite where the rank has none.
    """

    def __init__(self, rows: Sequence[_Row], layers: Sequence[float], ranks: int) -> None:
        total = np.concatenate([[0.0], np.cumsum(layers)])
        self.load, self.before = np.zeros((len(rows), ranks)), np.full((len(rows), ranks), np.inf)
        for number, row in enumerate(rows):
            for chunk in row:
                self.load[number, chunk.rank] += total[chunk.first + chunk.layers] - total[chunk.first]
                self.before[number, chunk.rank] = min(self.before[number, chunk.rank], total[chunk.first])


def _bounds_s(step: StepSettings, weights: Sequence[_Weights], items: Items) -> np.ndarray:
    """Bound of each combination of placements, flat, as ``quick_bound_s`` of :mod:`.evaluate`."""
    load, head, tail = np.zeros((1, step.ranks)), np.full((1, step.ranks), np.inf), np.full((1, step.ranks), np.inf)
    for module, weight, units in zip(step.modules, weights, items, strict=True):
        if not units:
            continue
        forward_s, backward_s = (min(module.layer_s(n)[way] for n in set(units)) for way in (0, 1))
        work_s = layer_seconds(module, units)
        load = (load[:, None] + weight.load[None] * work_s).reshape(-1, step.ranks)
        head = np.minimum(head[:, None], weight.before[None] * forward_s).reshape(-1, step.ranks)
        tail = np.minimum(tail[:, None], weight.before[None] * backward_s).reshape(-1, step.ranks)
    bounds: np.ndarray = np.where(load > 0, load + head + tail, 0.0).max(axis=1)
    return bounds
