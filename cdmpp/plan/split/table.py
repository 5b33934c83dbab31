"""Layers and ranks as arrays: time and memory of any run of layers on any kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cdmpp.simulate.emulator.stages import Floats, grid, on_grid


@dataclass(frozen=True)
class Layer:
    """One layer, which is not cut.

    Attributes
    ----------
    forward_s, backward_s : tuple of float
        Seconds of one micro-batch on each kind of device.
    activation_bytes : float
        For one micro-batch, between its forward and its backward pass.
    weight_bytes : float
        Weights, gradients and optimizer states.
    transfer_s : float
        Seconds to send the output to another rank, and again for its gradient.
    name : str
    boundary_bytes : float
        Input of the layer for one micro-batch.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_bytes: float = 0.0
    weight_bytes: float = 0.0
    transfer_s: float = 0.0
    name: str = ""
    boundary_bytes: float = 0.0


@dataclass(frozen=True)
class Rank:
    """A device of the pipeline.

    Attributes
    ----------
    kind : int
        Index into the costs of a layer.
    memory_bytes : float
    """

    kind: int = 0
    memory_bytes: float = float("inf")


class LayerTable:
    """Sums over runs of layers.

    Parameters
    ----------
    layers : sequence of Layer, length n
    micro_batches : int
    recompute : bool
        Whether a stage keeps only its input of a waiting micro-batch. The time of recomputing is part of the layers'
        ``backward_s``.

    Attributes
    ----------
    forward_s, backward_s : float64, shape (kinds, n + 1)
        Sums over the first layers, rounded to a common grid so that their differences are exact.
    transfer_s : float64, shape (n,)
    """

    def __init__(self, layers: Sequence[Layer], micro_batches: int, *, recompute: bool = False) -> None:
        self.layers, self.micro_batches = list(layers), micro_batches
        kinds = len(layers[0].forward_s)
        costs = np.array([[layer.forward_s, layer.backward_s] for layer in layers]).transpose(1, 2, 0)
        transfer = np.array([layer.transfer_s for layer in layers])
        horizon_s = micro_batches * float(costs.sum() + 2 * transfer.sum())
        costs = on_grid(costs, grid(horizon_s))
        self.transfer_s: Floats = on_grid(transfer, grid(horizon_s))
        sums = np.zeros((2, kinds, len(layers) + 1))
        sums[:, :, 1:] = np.cumsum(costs, axis=2)
        self.forward_s: Floats
        self.backward_s: Floats
        self.forward_s, self.backward_s = sums
        self._weights = np.concatenate(([0.0], np.cumsum([layer.weight_bytes for layer in layers])))
        self._held = np.concatenate(([0.0], np.cumsum([layer.activation_bytes for layer in layers])))
        self.recompute = recompute
        self._input = np.array([*(layer.boundary_bytes if recompute else 0.0 for layer in layers), 0.0])

    def __len__(self) -> int:
        return len(self.layers)

    def time_s(self, kind: int, first: int, last: int) -> float:
        """Forward and backward pass of layers ``first`` to ``last - 1``."""
        both = self.forward_s[kind] + self.backward_s[kind]
        return float(both[last] - both[first])

    def times_s(self, kind: int) -> Floats:
        """:meth:`time_s` of all runs, shape (n + 1, n + 1); infinite for runs without a layer."""
        both = self.forward_s[kind] + self.backward_s[kind]
        return np.where(_runs(len(self)), both[None, :] - both[:, None], np.inf)

    def bytes_held(self, ahead: int, first: int, last: int) -> float:
        """Memory of a rank with these layers and the activations of ``ahead`` micro-batches."""
        held = self._weights[last] - self._weights[first] + self._whole(ahead) * (self._held[last] - self._held[first])
        return float(held + (ahead - 1) * self._input[first])

    def all_bytes_held(self, ahead: int) -> Floats:
        """:meth:`bytes_held` of all runs, shape (n + 1, n + 1)."""
        both: Floats = self._weights + self._whole(ahead) * self._held
        held: Floats = both[None, :] - both[:, None] + (ahead - 1) * self._input[:, None]
        return held

    def _whole(self, ahead: int) -> int:
        """Micro-batches that hold all their activations: where they are recomputed, the one that is."""
        return 1 if self.recompute else ahead

    def ahead(self, rank: int, ranks: int) -> int:
        """Most micro-batches whose activations a rank holds at a time under 1F1B."""
        return min(ranks - rank, self.micro_batches)


def _runs(layers: int) -> NDArray[np.bool_]:
    at = np.arange(layers + 1)
    return np.greater(at[None, :], at[:, None])
