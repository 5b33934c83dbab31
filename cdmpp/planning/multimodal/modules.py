"""The modules of a multimodal model: what a layer costs by the size of the sub-micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cdmpp.compose.costs import interpolate
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
                f"modules.{left[0]}.after: modules wait for each other: {names}",
                path=f"modules.{left[0]}.after",
            )
        left.remove(ready)
        out.append(ready)
    return out


def present(modules: Sequence[Module], items: Sequence[int]) -> list[tuple[int, ...]]:
    """For each module, those with items that it comes after; one without items passes its own on."""
    found: list[tuple[int, ...]] = [()] * len(modules)
    for i in ordered(modules):
        before: set[int] = set()
        for j in modules[i].after:
            before |= {j} if items[j] else set(found[j])
        found[i] = tuple(sorted(before))
    return found
