"""Designs of a step that a request allows: cuts of the layers, and sub-micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from cdmpp.plan.multimodal.modules import Module
from cdmpp.plan.multimodal.placement import Chunk, Placement

#: Most segments of a module.
MOST_SEGMENTS = 16
#: Cuts of each module's layers into ``segments * ranks`` parts, from 0 to its layers; parts may be empty.
Cuts = tuple[tuple[int, ...], ...]
#: Items of each sub-micro-batch, by module.
Items = tuple[tuple[int, ...], ...]


def most_segments(module: Module, ranks: int) -> int:
    """Most segments of a module: those that the request gives, or as many as have a layer on each rank."""
    if module.segments is not None:
        return module.segments
    return max(1, min(MOST_SEGMENTS, len(module.layers) // ranks))


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


def layer_seconds(module: Module, units: Sequence[int]) -> float:
    """Seconds of all sub-micro-batches in a layer of relative time 1, forward and backward."""
    return sum(sum(module.layer_s(n)) for n in units)
