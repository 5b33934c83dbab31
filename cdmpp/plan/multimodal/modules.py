"""Modules of a multimodal model, and the cost of a layer by size of the sub-micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.plan.base.batch_curve import interpolate

#: Share of the peak items per second that PipeWeaver's sub-micro-batches reach.
EFFICIENCY = 0.95


@dataclass(frozen=True)
class Module:
    """One module: a chain of layers that are distributed over all ranks.

    Attributes
    ----------
    name : str
    layers : tuple of float
        Time of each layer relative to the curves; 1.0 for layers that are all alike.
    sizes : ndarray of float64, shape (points,)
        Sub-micro-batch sizes (items) of the curves, growing.
    forward_s, backward_s : ndarray of float64, shape (points,)
        Seconds of a layer of relative time 1 at those sizes.
    after : tuple of int
        Indices of the modules whose output it takes.
    activation_bytes : float
        Bytes that a layer keeps for an item between forward and backward pass.
    boundary_bytes : float
        Bytes kept for an item at the input of a chunk of layers that recomputes the rest.
    weight_bytes : float
        Bytes of a layer's weights, gradients and optimizer states.
    segments : int or None
        Number of segments (passes over all ranks); None: in proportion to its latency.
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
        """Sum of the layers' relative times."""
        return float(sum(self.layers))

    @cached_property
    def _layer_cache(self) -> dict[int, tuple[float, float]]:
        return {}

    def layer_s(self, items: int) -> tuple[float, float]:
        """Forward and backward seconds of a layer of relative time 1."""
        if items not in self._layer_cache:
            self._layer_cache[items] = (
                float(interpolate(self.sizes, self.forward_s, items)),
                float(interpolate(self.sizes, self.backward_s, items)),
            )
        return self._layer_cache[items]

    @cached_property
    def _items_per_s(self) -> np.ndarray:
        rates: np.ndarray = self.sizes / (self.forward_s + self.backward_s)
        return rates

    @property
    def peak_items_per_s(self) -> float:
        """Items per second of a layer at the best size."""
        return float(self._items_per_s.max())

    def efficiency(self, items: int) -> float:
        """Items per second at this size, as a share of the best size's."""
        return float(items / sum(self.layer_s(items)) / self._items_per_s.max())

    def efficient_size(self, efficiency: float) -> int:
        """Smallest size with this share of the peak items per second (PipeWeaver's rule, which uses 0.95)."""
        rates = self._items_per_s
        # A share of 1 must find the peak itself, despite rounding.
        return int(self.sizes[np.flatnonzero(rates >= efficiency * rates.max() * (1 - 1e-12))[0]])


def split_evenly(items: int, parts: int) -> tuple[int, ...]:
    """Divide ``items`` into ``parts`` that differ by at most one, larger ones first."""
    size, over = divmod(items, parts)
    return tuple(size + (part < over) for part in range(parts))


def topological_order(modules: Sequence[Module]) -> list[int]:
    """Indices of the modules, each after those whose output it takes.

    Raises
    ------
    FieldError
        The modules form a cycle.
    """
    return sort_topologically([module.name for module in modules], [module.after for module in modules])


def sort_topologically(names: Sequence[str], after: Sequence[Sequence[int]]) -> list[int]:
    """Indices in topological order; ``after``: for each name the indices that come before it.

    Raises
    ------
    FieldError
        There is a cycle.
    """
    remaining, order = list(range(len(names))), list[int]()
    while remaining:
        ready = next((i for i in remaining if all(j in order for j in after[i])), None)
        if ready is None:
            cycle = ", ".join(names[i] for i in remaining)
            path = f"modules.{remaining[0]}.after"
            raise FieldError(f"{path}: modules wait for each other: {cycle}", path=path)
        remaining.remove(ready)
        order.append(ready)
    return order
