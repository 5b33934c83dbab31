"""A split of layers into stages, its costs, and the baseline splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cdmpp.plan.split.table import LayerTable, Rank
from cdmpp.simulate.emulator.emulate import Emulator, Step
from cdmpp.simulate.emulator.orders import ScheduleName
from cdmpp.simulate.emulator.stages import Stage


@dataclass(frozen=True)
class Split:
    """Layers on ranks.

    Attributes
    ----------
    table : LayerTable
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

    def step(self, emulator: Emulator, schedule: ScheduleName = "1f1b") -> Step:
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

    Parameters
    ----------
    split : Split

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

    As :func:`cdmpp.simulate.emulator.emulate.lower_bound`: each rank waits for its first micro-batch, runs all its
    passes and waits until the gradients have reached stage 0; and one micro-batch passes all stages twice.
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
