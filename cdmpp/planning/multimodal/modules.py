"""The modules of a multimodal model: what a layer costs by the size of the sub-micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cdmpp.compose.pricing import interpolate
from cdmpp.errors import FieldError


@dataclass(frozen=True)
class Module:
    """One module: a chain of layers that all ranks share.

    Attributes
    ----------
    name : str
    layers : tuple of float
        Each layer's time relative to the curves; 1.0 for layers that are all alike.
    sizes : ndarray (points,)
        Sub-micro-batch sizes (items) of the curves, growing.
    forward_s, backward_s : ndarray (points,)
        Seconds of a layer of relative time 1 at those sizes.
    after : tuple of int
        Modules (indices) whose output it takes.
    activation_bytes : float
        What a layer keeps of an item between forward and backward.
    boundary_bytes : float
        What is kept of an item at the input of a chunk of layers that recomputes the rest.
    weight_bytes : float
        Of a layer: weights, gradients, optimizer.
    segments : int or None
        Segments (passes over all ranks); None: in proportion to its latency.
    """

    name: str
    layers: tuple[float, ...]
    sizes: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    after: tuple[int, ...] = ()
    activation_bytes: float = 0.0
    boundary_bytes: float = 0.0
    weight_bytes: float = 0.0
    segments: int | None = None

    @cached_property
    def work(self) -> float:
        """Its layers, in layers of relative time 1."""
        return float(sum(self.layers))

    @cached_property
    def _known(self) -> dict[int, tuple[float, float]]:
        return {}

    @property
    def largest(self) -> int:
        """Largest sub-micro-batch that the curves know."""
        return int(self.sizes[-1])

    def layer_s(self, items: int) -> tuple[float, float]:
        """Forward and backward seconds of a layer of relative time 1."""
        if items not in self._known:
            self._known[items] = (
                float(interpolate(self.sizes, self.forward_s, items)),
                float(interpolate(self.sizes, self.backward_s, items)),
            )
        return self._known[items]

    def efficiency(self, items: int) -> float:
        """Items a second at this size, as a share of the best of all sizes."""
        at = self.sizes / (self.forward_s + self.backward_s)
        return float(items / sum(self.layer_s(items)) / at.max())

    def sub_batch(self, share: float) -> int:
        """The smallest size that keeps ``share`` of the peak efficiency (PipeWeaver's rule, 0.95 there)."""
        at = self.sizes / (self.forward_s + self.backward_s)
        # A share of 1 must find the peak itself, whatever the rounding.
        return int(self.sizes[np.flatnonzero(at >= share * at.max() * (1 - 1e-12))[0]])


def spread(items: int, parts: int) -> tuple[int, ...]:
    """``items`` in ``parts`` that differ by one at most, larger ones first."""
    each, over = divmod(items, parts)
    return tuple(each + (part < over) for part in range(parts))


def ordered(modules: Sequence[Module]) -> list[int]:
    """Indices of the modules, each behind those it comes after.

    Raises
    ------
    FieldError
        They wait for each other.
    """
    left, out = list(range(len(modules))), list[int]()
    while left:
        ready = next((i for i in left if all(j in out for j in modules[i].after)), None)
        if ready is None:
            names = ", ".join(modules[i].name for i in left)
            raise FieldError(
                f"modules.{left[0]}.after: modules wait for each other: {names}", path=f"modules.{left[0]}.after"
            )
        left.remove(ready)
        out.append(ready)
    return out


@dataclass(frozen=True)
class Link:
    """Data that goes from items of one module to items of another.

    Each item of ``single`` belongs to one item of ``other``: item j of n to item floor(j·N/n) of N.
    ``forward`` says whether data goes from ``single`` to ``other`` in the forward pass, or the other way.
    """

    single: int
    other: int
    forward: bool

    def pairs(self, single: Sequence[int], other: Sequence[int]) -> np.ndarray:
        """Units of both modules that share items, by the items of their units: (pairs, 2), growing."""
        theirs = np.arange(sum(single)) * sum(other) // max(1, sum(single))
        mine = np.repeat(np.arange(len(single)), single)
        units = np.searchsorted(np.cumsum(other), theirs, side="right")
        return np.unique(np.stack([mine, units], axis=1), axis=0)


@dataclass(frozen=True)
class Links:
    """How the items of a step's modules belong together.

    Attributes
    ----------
    samples : int
        Module whose items are the samples of the step; items of the others belong to one of them each.
    all : tuple of Link
    """

    samples: int
    all: tuple[Link, ...]

    def sample_of(self, module: int, batch: Sequence[int]) -> np.ndarray:
        """The sample to which each item of a module belongs, (items,) growing."""
        items, at = np.arange(batch[module]), module
        while at != self.samples:
            link = next((each for each in self.all if each.single == at), None)
            if link is None:  # nothing goes between it and the samples
                return items * batch[self.samples] // max(1, batch[module])
            items = items * batch[link.other] // max(1, batch[at])
            at = link.other
        return items


def links(modules: Sequence[Module], batch: Sequence[int], samples: int | None = None) -> Links:
    """How the items of a step belong together.

    Parameters
    ----------
    batch : sequence of int
        Items of each module. Through a module without items data goes on to the next.
    samples : int, optional
        The module whose items are the samples. Default (also where it has no items): the one that exchanges
        data with most others, the last of these in the order of data. An image belongs to one sequence; a
        sequence may have none.
    """
    behind: list[set[int]] = [set() for _ in modules]
    order = ordered(modules)
    for i in order:
        for j in modules[i].after:
            behind[i] |= {j} if batch[j] else behind[j]
    near: list[set[int]] = [set() for _ in modules]
    for i in order:
        if batch[i]:
            for j in behind[i]:
                near[i].add(j)
                near[j].add(i)
    if samples is None or not batch[samples]:
        samples = max((i for i in order if batch[i]), key=lambda i: (len(near[i]), order.index(i)))
    far = {samples: 0}
    queue = [samples]
    for i in queue:
        for j in sorted(near[i]):
            if j not in far:
                far[j] = far[i] + 1
                queue.append(j)
    out = []
    for i in order:
        for j in sorted(behind[i]) if batch[i] else ():
            before = far.get(j, 0) >= far.get(i, 0)
            out.append(Link(j, i, True) if before else Link(i, j, False))
    # The way to the samples comes first.
    out.sort(key=lambda link: far.get(link.other, 0))
    return Links(samples, tuple(out))
