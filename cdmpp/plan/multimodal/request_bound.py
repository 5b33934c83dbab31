"""Lower bound of a step for every placement, sub-micro-batch count and order that a request allows.

The bound uses only what all plans share. Each layer is on one rank. The ``n`` items of a module are in ``m``
sub-micro-batches, which take at least the convex envelope of the curve. A rank starts after the layers before its
first layer and ends before the backward passes of the same layers. Counts are searched by branch and bound over
ranges of counts, so that efficient sub-micro-batches (few) and short ones (many) are not assumed at the same time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cdmpp.plan.base.batch_curve import interpolate
from cdmpp.plan.multimodal.modules import ItemLinks, Module, split_evenly, topological_order

#: Most ranges of counts that are examined; with fewer the bound is the best of its kind.
MAX_RANGES = 300
#: Most sums of layers that are listed for the loads that a rank can have.
MAX_LOADS = 4096
#: Most numbers of micro-batches that are examined one by one; of more samples, what holds for all of them is used.
MAX_SPLITS = 2048
#: Most layers for which the bound of one segment on each rank is computed; it takes memory for the square of them.
MAX_LAYERS = 2048
#: Cells of the tables for one such bound from which on the budget is checked meanwhile: tens of milliseconds.
_LARGE = 2**22
#: Cells that take as long as an item of a division of the samples.
_SPLIT_CELLS = 64
_ROUNDING = 1e-12


def request_bound_s(
    modules: Sequence[Module],
    batch: Sequence[int],
    ranks: int,
    links: ItemLinks,
    over: Callable[[], bool] | None = None,
) -> float:
    """Lower bound of the makespan in seconds.

    It holds for all cuts of layers, numbers of segments, orders and memory knobs. The sub-micro-batches of a module
    are of even size, in any number, or those of any number of micro-batches of samples. For many layers and ranks,
    ``over`` ends the computation with a looser bound.
    """
    active = [i for i in topological_order(modules) if batch[i]]
    curves = {i: _Curve(modules[i], batch[i]) for i in active}
    cells = max(len(modules[i].layers) for i in active) ** 2 * ranks
    if over is None or max(cells, batch[links.samples] ** 2 * _SPLIT_CELLS) < _LARGE:
        over = lambda: False  # noqa: E731
    bound = _CountBound(modules, batch, ranks, links, active, over)

    def of(ranges: Sequence[tuple[int, int]], *, precise: bool) -> float:
        parts = [curves[i].within(low, high) for i, (low, high) in zip(active, ranges, strict=True)]
        return bound.of(parts, precise=precise)

    least_s = _least(of, [(1, batch[i]) for i in active], over)
    if batch[links.samples] > MAX_SPLITS:
        return min(least_s, of([(1, batch[i]) for i in active], precise=True))
    for split in _sample_splits(batch, links):
        if over():
            return min(least_s, of([(1, batch[i]) for i in active], precise=False))
        parts = [curves[i].of(split[i]) for i in active]
        if bound.of(parts, precise=False) < least_s:
            least_s = min(least_s, bound.of(parts, precise=True))
    return least_s


class _Part(NamedTuple):
    """Least seconds of a layer of relative time 1: of all items, and of one sub-micro-batch forward, back and sent."""

    work_s: float
    forward_s: float
    backward_s: float
    transfer_s: float
    least_items: int


class _Curve:
    """Costs of a module's layer by items of a sub-micro-batch, and lower bounds for any number of these."""

    def __init__(self, module: Module, items: int) -> None:
        self.items = items
        sizes = np.arange(1, items + 1)
        self.forward_s = np.asarray(interpolate(module.sizes, module.forward_s, sizes))
        self.backward_s = np.asarray(interpolate(module.sizes, module.backward_s, sizes))
        self.both_s = self.forward_s + self.backward_s
        transfer_s = np.zeros(items) if module.transfer is None else np.asarray(interpolate(*module.transfer, sizes))
        #: Least seconds of a sub-micro-batch of at least n + 1 items.
        self._forward_from = np.minimum.accumulate(self.forward_s[::-1])[::-1]
        self._backward_from = np.minimum.accumulate(self.backward_s[::-1])[::-1]
        self._transfer_from = np.minimum.accumulate(transfer_s[::-1])[::-1]
        #: Least seconds of all items in m + 1 sub-micro-batches of whatever sizes.
        self._work_s = sizes * np.interp(items / sizes, *_lower_envelope(self.both_s))

    def within(self, low: int, high: int) -> _Part:
        """Bounds for ``low`` to ``high`` sub-micro-batches of even size."""
        least = self.items // high
        work_s = float(self._work_s[low - 1 : high].min())
        rows = (self._forward_from, self._backward_from, self._transfer_from)
        forward_s, backward_s, transfer_s = (float(seconds[least - 1]) for seconds in rows)
        return _Part(work_s, forward_s, backward_s, transfer_s, least)

    def of(self, units: np.ndarray) -> _Part:
        """Costs of given sub-micro-batches."""
        at = units - 1
        forward_s, backward_s = float(self.forward_s[at].min()), float(self.backward_s[at].min())
        least = int(at.min())
        return _Part(float(self.both_s[at].sum()), forward_s, backward_s, float(self._transfer_from[least]), least + 1)


def _lower_envelope(seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Corners of the largest convex function below ``seconds`` at 1, 2, ...: sizes and seconds."""
    corners: list[tuple[float, float]] = []
    for point in zip(range(1, len(seconds) + 1), seconds.tolist(), strict=True):
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (point[0] - x0) < (point[1] - y0) * (x1 - x0):
                break
            corners.pop()
        corners.append((float(point[0]), point[1]))
    x, y = np.array(corners).T
    return x, y


def _sample_splits(batch: Sequence[int], links: ItemLinks) -> Iterator[list[np.ndarray]]:
    """Sub-micro-batches of every number of micro-batches, where they are not of even size."""
    samples = batch[links.samples]
    sample_of = [links.sample_of(i, batch) for i in range(len(batch))]
    for count in range(1, samples + 1):
        micro_batch = np.repeat(np.arange(count), split_evenly(samples, count))
        items = [np.bincount(micro_batch[of]) if len(of) else np.empty(0, np.int64) for of in sample_of]
        items = [units[units > 0] for units in items]
        if any(len(units) and units.max() - units.min() > 1 for units in items):
            yield items


def _least(of: Callable[..., float], whole: list[tuple[int, int]], over: Callable[[], bool]) -> float:
    """Least bound of all counts: ranges are halved, the one of least bound first."""
    number = itertools.count()
    heap: list[tuple[float, int, bool, list[tuple[int, int]]]] = [
        (of(whole, precise=False), next(number), False, whole)
    ]
    for _ in range(MAX_RANGES):
        if over():
            break
        bound_s, _, precise, ranges = heap[0]
        if not precise:
            heapq.heapreplace(heap, (max(bound_s, of(ranges, precise=True)), next(number), True, ranges))
            continue
        wide = max(range(len(ranges)), key=lambda i: ranges[i][1] / ranges[i][0])
        low, high = ranges[wide]
        if low == high:
            break
        heapq.heappop(heap)
        middle = max(low, math.isqrt(low * high))
        for part in ((low, middle), (middle + 1, high)):
            halved = [*ranges[:wide], part, *ranges[wide + 1 :]]
            heapq.heappush(heap, (max(bound_s, of(halved, precise=False)), next(number), False, halved))
    return heap[0][0]


class _CountBound:
    """Bound of the makespan for given costs of the modules' sub-micro-batches."""

    def __init__(
        self,
        modules: Sequence[Module],
        batch: Sequence[int],
        ranks: int,
        links: ItemLinks,
        active: Sequence[int],
        over: Callable[[], bool],
    ) -> None:
        self.ranks, self.active, self.over = ranks, list(active), over
        self.layers = [np.array(modules[i].layers) for i in active]
        self.before = [np.concatenate([[0.0], np.cumsum(layers)[:-1]]) for layers in self.layers]
        self.work = [modules[i].work for i in active]
        number = {i: at for at, i in enumerate(active)}
        #: For each module, the modules whose output it takes, and the items of a sub-micro-batch that is sure to.
        self.sources: list[list[tuple[int, int]]] = [[] for _ in active]
        for link in links.all:
            if link.forward:
                sure = -(-batch[link.other] // batch[link.single])
                self.sources[number[link.other]].append((number[link.single], sure))
            else:
                self.sources[number[link.single]].append((number[link.other], 1))
        self.one_segment = len(self.active) == 1 and modules[self.active[0]].most_segments(ranks) == 1
        self.one_segment = self.one_segment and len(self.layers[0]) <= MAX_LAYERS
        alike = all((layers == layers[0]).all() for layers in self.layers)
        self.list_loads = alike and math.prod(len(layers) + 1 for layers in self.layers) <= MAX_LOADS

    def of(self, parts: Sequence[_Part], *, precise: bool) -> float:
        """Lower bound in seconds; ``precise``: also by what whole layers a rank can have."""
        head, tail = [0.0] * len(parts), [0.0] * len(parts)
        for i, part in enumerate(parts):  # in topological order
            for j, sure in self.sources[i]:
                if part.least_items >= sure:
                    head[i] = max(head[i], head[j] + parts[j].forward_s * self.work[j])
                    tail[i] = max(tail[i], tail[j] + parts[j].backward_s * self.work[j])
        bound_s = max(
            h + t + (part.forward_s + part.backward_s) * work
            for h, t, part, work in zip(head, tail, parts, self.work, strict=True)
        )
        seconds = np.concatenate([layers * part.work_s for layers, part in zip(self.layers, parts, strict=True)])
        # Each used rank has a first layer: the q-th rank starts no sooner than after the layers before the q-th, and
        # after a transfer from the rank of the layer before its first one.
        sent = []
        for part, layers, sources in zip(parts, self.layers, self.sources, strict=True):
            first_s = max((parts[j].transfer_s for j, sure in sources if part.least_items >= sure), default=0.0)
            sent.append(np.array([first_s] + [part.transfer_s] * (len(layers) - 1)))
        rows = list(zip(head, tail, parts, self.before, sent, strict=True))
        heads = np.concatenate([h + p.forward_s * b + s for h, _, p, b, s in rows])
        tails = np.concatenate([t + p.backward_s * b + s for _, t, p, b, s in rows])
        idle_s = _idle_s(heads, tails)[: self.ranks]
        used = len(idle_s)
        total_s = float(seconds.sum())
        bound_s = max(bound_s, float(((total_s + np.cumsum(idle_s)) / np.arange(1, used + 1)).min()))
        # Some rank has so many layers.
        bound_s = max(bound_s, float(np.sort(seconds)[: -(-len(seconds) // self.ranks)].sum()), float(seconds.max()))
        if precise and self.one_segment:
            both_s = parts[0].forward_s + parts[0].backward_s
            bound_s = max(bound_s, _one_segment_s(self.layers[0], parts[0], both_s, self.ranks, self.over))
        if precise and self.list_loads:
            loads = np.zeros(1)
            for layers, part in zip(self.layers, parts, strict=True):
                loads = np.add.outer(loads, np.arange(len(layers) + 1) * (layers[0] * part.work_s)).ravel()
            bound_s = max(bound_s, _packing_s(np.sort(loads), idle_s, total_s, bound_s))
        return bound_s


def _idle_s(heads: np.ndarray, tails: np.ndarray) -> np.ndarray:
    """Least sum of head and tail of the rank that has the q-th least; shape (layers,).

    Different ranks have different layers. Where one order sorts both heads and tails, a rank's first layer has the
    least of both.
    """
    order = np.lexsort((tails, heads))
    if (np.diff(tails[order]) >= 0).all():
        sums: np.ndarray = heads[order] + tails[order]
        return sums
    largest: np.ndarray = np.maximum(np.sort(heads), np.sort(tails))
    return largest


def _one_segment_s(layers: np.ndarray, part: _Part, both_s: float, ranks: int, over: Callable[[], bool]) -> float:
    """Least makespan of all cuts of one module's layers into one chunk for each rank, in order; 0 if ``over``."""
    before = np.concatenate([[0.0], np.cumsum(layers)])
    # A chunk from layer a to layer b: its work, after and before the passes of the layers before it.
    chunk_s = (before[None, :] - before[:, None]) * part.work_s + before[:, None] * both_s
    chunk_s[np.tril_indices(len(before))] = np.inf
    best, least_s = np.where(np.arange(len(before)) == 0, 0.0, np.inf), math.inf
    for used in range(min(ranks, len(layers))):
        if over():
            return 0.0
        best = np.maximum(best[:, None], chunk_s + 2 * used * part.transfer_s).min(axis=0)
        least_s = min(least_s, float(best[-1]))
    return least_s


def _packing_s(loads: np.ndarray, idle_s: np.ndarray, total_s: float, low_s: float) -> float:
    """Least makespan in which ranks of these idle times can have all layers, if each has one of ``loads``."""
    enough_s = total_s * (1 - _ROUNDING)

    def fits(makespan_s: float) -> bool:
        room = np.searchsorted(loads, (makespan_s - idle_s) * (1 + _ROUNDING), side="right")
        return float(np.where(room > 0, loads[room - 1], 0.0).sum()) >= enough_s

    low, high = low_s, max(low_s, total_s + float(idle_s[0]))
    if fits(low):
        return low
    while high - low > _ROUNDING * high and low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if fits(middle) else (middle, high)
    # The least makespan is one of the sums of a load and an idle time.
    at = np.minimum(np.searchsorted(loads, (low - idle_s) * (1 - _ROUNDING)), len(loads) - 1)
    sums = loads[at] + idle_s
    sums = sums[sums >= low * (1 - _ROUNDING)]
    return max(low_s, float(sums.min()) if len(sums) else low)
