"""Links between the items of a step's modules: which item's data goes to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cdmpp.plan.multimodal.modules import Module, topological_order


@dataclass(frozen=True)
class ItemLink:
    """Data transfer between items of two modules.

    Each item of ``single`` belongs to one item of ``other``: item j of n to item floor(j·N/n) of N.

    Attributes
    ----------
    single, other : int
        Indices of the modules.
    forward : bool
        In the forward pass data goes from ``single`` to ``other``; otherwise from ``other`` to ``single``.
    """

    single: int
    other: int
    forward: bool

    def pairs(self, single: Sequence[int], other: Sequence[int]) -> np.ndarray:
        """Pairs of sub-micro-batches that share items.

        Parameters
        ----------
        single, other : sequence of int
            Items of each sub-micro-batch of the two modules.

        Returns
        -------
        ndarray of int64, shape (pairs, 2)
            Sub-micro-batches of ``single`` and of ``other``, growing.
        """
        return _pairs(tuple(single), tuple(other))


@lru_cache(maxsize=4096)
def _pairs(single: tuple[int, ...], other: tuple[int, ...]) -> np.ndarray:
    """:meth:`ItemLink.pairs`; cached because a search repeats the same calls."""
    other_items = np.arange(sum(single)) * sum(other) // max(1, sum(single))
    single_units = np.repeat(np.arange(len(single)), single)
    other_units = np.searchsorted(np.cumsum(other), other_items, side="right")
    pairs = np.unique(np.stack([single_units, other_units], axis=1), axis=0)
    pairs.flags.writeable = False
    return pairs


@dataclass(frozen=True)
class ItemLinks:
    """Links between the items of a step.

    Attributes
    ----------
    samples : int
        Module whose items are the samples of the step; each item of another module belongs to one of them.
    all : tuple of ItemLink
        Links on the path to the samples come first.
    """

    samples: int
    all: tuple[ItemLink, ...]

    def sample_of(self, module: int, batch: Sequence[int]) -> np.ndarray:
        """Sample of each item of a module; ndarray of int64, shape (items,), growing."""
        items, at = np.arange(batch[module]), module
        while at != self.samples:
            link = next((link for link in self.all if link.single == at), None)
            if link is None:  # no data goes between it and the samples
                return items * batch[self.samples] // max(1, batch[module])
            items = items * batch[link.other] // max(1, batch[at])
            at = link.other
        return items


def link_items(modules: Sequence[Module], batch: Sequence[int], samples: int | None = None) -> ItemLinks:
    """Derive the links between the items of a step.

    Parameters
    ----------
    modules : sequence of Module
    batch : sequence of int
        Items of each module. Data passes through a module without items to the next.
    samples : int, optional
        Module whose items are the samples. Default (also where it has no items): the module that exchanges data with
        most others, the last of these in topological order. An image belongs to one sequence; a sequence may have
        no image.
    """
    sources: list[set[int]] = [set() for _ in modules]
    order = topological_order(modules)
    for i in order:
        for j in modules[i].after:
            sources[i] |= {j} if batch[j] else sources[j]
    neighbours: list[set[int]] = [set() for _ in modules]
    for i in order:
        if batch[i]:
            for j in sources[i]:
                neighbours[i].add(j)
                neighbours[j].add(i)
    if samples is None or not batch[samples]:
        samples = max((i for i in order if batch[i]), key=lambda i: (len(neighbours[i]), order.index(i)))
    distance = {samples: 0}
    queue = [samples]
    for i in queue:
        for j in sorted(neighbours[i]):
            if j not in distance:
                distance[j] = distance[i] + 1
                queue.append(j)
    links = []
    for i in order:
        for j in sorted(sources[i]) if batch[i] else ():
            towards_samples = distance.get(j, 0) >= distance.get(i, 0)
            links.append(ItemLink(j, i, True) if towards_samples else ItemLink(i, j, False))
    links.sort(key=lambda link: distance.get(link.other, 0))
    return ItemLinks(samples, tuple(links))
