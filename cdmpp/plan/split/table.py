"""Layers and ranks as arrays, a split of the layers into stages with its costs, and the baseline splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cdmpp.simulate.emulator.emulate import EmulatedStep, Emulator
from cdmpp.simulate.emulator.orders import ScheduleName
from cdmpp.simulate.emulator.stages import Floats, Stage, grid, on_grid


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
    """

    kind: int = 0
    memory_bytes: float = float("inf")


class LayerTable:
    """Sums over runs of layers.

    Parameters
    ----------
    layers : sequence of Layer, length n
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

    def ends(self, most_s: float = np.inf) -> NDArray[np.int64]:
        """Ends of the runs of layers that begin at each layer, shape (n + 1, width); n + 1 behind the last layer.

        ``most_s``: runs that take longer on every kind may be left out.
        """
        both, layers = self.forward_s + self.backward_s, len(self)
        last = [np.searchsorted(row, row * (1 + 1e-12) + most_s, side="right") - 1 for row in both]
        width = layers if most_s == np.inf else max(1, int((np.max(last, axis=0) - np.arange(layers + 1)).max()))
        ends: NDArray[np.int64] = np.arange(layers + 1)[:, None] + np.arange(1, width + 1)
        return np.minimum(ends, layers + 1)

    def times_s(self, kind: int, ends: NDArray[np.int64]) -> Floats:
        """:meth:`time_s` of all runs; infinite behind the last layer."""
        both = np.append(self.forward_s[kind] + self.backward_s[kind], np.inf)
        return np.asarray(both[ends] - both[:-1, None])

    def bytes_held(self, ahead: int, first: int, last: int) -> float:
        """Memory of a rank with these layers and the activations of ``ahead`` micro-batches."""
        held = self._weights[last] - self._weights[first] + self._whole(ahead) * (self._held[last] - self._held[first])
        return float(held + (ahead - 1) * self._input[first])

    def all_bytes_held(self, ahead: int, ends: NDArray[np.int64]) -> Floats:
        """:meth:`bytes_held` of all runs; infinite behind the last layer."""
        both = np.append(self._weights + self._whole(ahead) * self._held, np.inf)
        held: Floats = both[ends] - both[:-1, None] + (ahead - 1) * self._input[:, None]
        return held

    def _whole(self, ahead: int) -> int:
        """Micro-batches that hold all their activations: where they are recomputed, the one that is."""
        return 1 if self.recompute else ahead

    def ahead(self, rank: int, ranks: int) -> int:
        """Most micro-batches whose activations a rank holds at a time under 1F1B."""
        return min(ranks - rank, self.micro_batches)


@dataclass(frozen=True)
class Split:
    """Layers on ranks.

    Attributes
    ----------
    ranks : tuple of Rank
        In the order of the pipeline.
    order : tuple of int
        Index of each of them in the given ranks.
    begin : tuple of int, length ranks + 1
        Stage s holds layers ``begin[s]`` to ``begin[s + 1] - 1``.
    """

    table: LayerTable
    ranks: tuple[Rank, ...]
    order: tuple[int, ...]
    begin: tuple[int, ...]

    @property
    def stage_s(self) -> list[float]:
        """Forward and backward pass of one micro-batch in each stage."""
        return [self.table.time_s(rank.kind, a, b) for rank, a, b in self.runs()]

    @property
    def slowest_s(self) -> float:
        """The longest stage, or transfer between stages."""
        cuts = [float(self.table.transfer_s[b - 1]) for b in self.begin[1:-1]]
        return max(self.stage_s + cuts)

    @property
    def bytes_held(self) -> list[float]:
        """Peak memory of each rank under 1F1B."""
        count = len(self.ranks)
        return [self.table.bytes_held(self.table.ahead(s, count), a, b) for s, (_, a, b) in enumerate(self.runs())]

    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return all(b <= rank.memory_bytes for b, rank in zip(self.bytes_held, self.ranks, strict=True))

    def step(self, emulator: Emulator, schedule: ScheduleName = "1f1b") -> EmulatedStep:
        """A step under a schedule."""
        forward, backward = stage_costs(self)
        stages = [Stage(forward[s], backward[s]) for s in range(len(self.ranks))]
        cuts = [float(self.table.transfer_s[b - 1]) for b in self.begin[1:-1]]
        return emulator.simulate(stages, self.table.micro_batches, schedule, transfer_s=cuts)

    def runs(self) -> Iterator[tuple[Rank, int, int]]:
        """Rank, first layer, and the layer after the last one, of each stage."""
        return zip(self.ranks, self.begin, self.begin[1:], strict=False)


def stage_costs(split: Split) -> tuple[dict[int, float], dict[int, float]]:
    """Costs of the stages for other schedule simulators.

    Returns
    -------
    fwd_costs, bwd_costs : dict of int to float
        Stage index to seconds of one micro-batch; the stages are numbered as in
        ``torch.distributed.pipelining``. Backward costs include weight gradients.
    """
    table = split.table
    forward, backward = (
        {s: float(sums[rank.kind, b] - sums[rank.kind, a]) for s, (rank, a, b) in enumerate(split.runs())}
        for sums in (table.forward_s, table.backward_s)
    )
    return forward, backward


def step_bound_s(split: Split) -> float:
    """Lower bound of all schedules of a split with whole backward passes.

    As :func:`cdmpp.simulate.emulator.bound.lower_bound`: each rank waits for its first micro-batch, runs all its passes
    and waits until the gradients have reached stage 0; and one micro-batch passes all stages twice.
    """
    before = bound_s = 0.0
    for s, time_s in enumerate(split.stage_s):
        bound_s = max(bound_s, before + split.table.micro_batches * time_s)
        before += time_s
        if s + 2 < len(split.begin):
            before += 2 * float(split.table.transfer_s[split.begin[s + 1] - 1])
    return max(bound_s, before)


def equal_count(table: LayerTable, ranks: Sequence[Rank]) -> Split:
    """Baseline: equal numbers of layers on all ranks."""
    begin = [round(len(table) * s / len(ranks)) for s in range(len(ranks) + 1)]
    return Split(table, tuple(ranks), tuple(range(len(ranks))), tuple(begin))


def greedy(table: LayerTable, ranks: Sequence[Rank]) -> Split:
    """Baseline: each rank in turn takes layers up to its share of the remaining time."""
    begin = [0]
    for s, rank in enumerate(ranks[:-1]):
        share_s = table.time_s(rank.kind, begin[-1], len(table)) / (len(ranks) - s)
        last = begin[-1] + 1
        most = len(table) - (len(ranks) - s - 1)
        # The layer that crosses the share is taken if that leaves a smaller difference.
        while last < most and (
            abs(table.time_s(rank.kind, begin[-1], last + 1) - share_s)
            <= abs(table.time_s(rank.kind, begin[-1], last) - share_s)
        ):
            last += 1
        begin.append(last)
    return Split(table, tuple(ranks), tuple(range(len(ranks))), (*begin, len(table)))
