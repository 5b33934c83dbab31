"""The time of a scheduled program as the sum of its leaves' times.

A program runs its leaves one after the other, so their times add up. Each of a leaf's counts
(:mod:`cdmpp.features.instructions`: vector instructions, cache lines, library calls, ...) has a cost, which the leaf's
token adjusts within bounds. The program's time is the sum over leaves plus a constant. Costs of instructions that can
overlap are combined by a power mean, the others add up. The counts are of a CPU: a program with thread bindings has no
such time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cdmpp.features.schedule import SCHEDULE_COLUMNS
from cdmpp.features.schema import WIDTH
from cdmpp.model.nn.constants import (
    ADD,
    CALL_CYCLES,
    CYCLE_S,
    OVERLAP,
    PEAK_CENTRE,
    PEAK_LOG,
    POWER,
    REACH,
    THREADS,
    UNITS_LOG,
    VECTOR_FLOPS,
)


class LeafTimes(nn.Module):
    """Computes the log of a program's seconds from tokens and counts of its leaves.

    Parameters
    ----------
    width : int
        Columns of a token.
    inputs : int
        Number of standardised inputs of a query.
    leaf_width : int
        Columns of a leaf.
    """

    _columns: Tensor
    _base: Tensor

    def __init__(self, width: int, inputs: int, leaf_width: int) -> None:
        super().__init__()
        place = WIDTH + SCHEDULE_COLUMNS.index(THREADS)
        self._threads = place if leaf_width > place else None
        names = (*OVERLAP, *ADD)
        places = [WIDTH + SCHEDULE_COLUMNS.index(name) for name in names]
        self.register_buffer("_columns", torch.tensor(places), persistent=False)
        base = [math.log(cost) for cost in (*OVERLAP.values(), *ADD.values())]
        self.register_buffer("_base", torch.tensor(base), persistent=False)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.costs = nn.Linear(width, len(names) + 1)
        self.call = nn.Linear(inputs, 1)
        for layer in (self.costs, self.call):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def scheduled(self, leaves: Tensor) -> Tensor:
        """Mask of the programs with schedule columns, (rows,); ``leaves`` as in :meth:`forward`."""
        return self._counted(leaves).any(dim=1)

    def _counted(self, leaves: Tensor) -> Tensor:
        """Mask of the leaves with counts of a CPU, (rows, leaves)."""
        counted = leaves[:, :, self._columns[0]] > 0
        return counted if self._threads is None else counted & (leaves[:, :, self._threads] == 0)

    def forward(self, leaves: Tensor, tokens: Tensor, mask: Tensor | None, inputs: Tensor, logs: Tensor) -> Tensor:
        """Log seconds of programs, and an indicator of a schedule.

        Parameters
        ----------
        leaves : (rows, leaves, columns), unscaled
        tokens : (rows, leaves, width)
        mask : (rows, leaves) bool, True for real leaves; None when all are
        inputs : (rows, .), standardised
        logs : (rows, len(DEVICE_LOGS))

        Returns
        -------
        (rows, 2)
            Natural logarithm of seconds and 1; two zeros for a program without schedule columns.
        """
        counts = torch.exp2(leaves[:, :, self._columns].clamp(0.0, 60.0)) - 1
        real = self._counted(leaves)
        real = real if mask is None else real & mask
        known = real.any(dim=1)
        token = self.norm(tokens)
        moved = self.costs(token + nn.functional.silu(self.hidden(token)))
        moved = REACH * torch.tanh(moved / REACH)
        each = counts * torch.exp(moved[:, :, :-1] + self._base)
        # Vector arithmetic scales with the device's peak, everything else with the number of its units.
        cycle = math.log(CYCLE_S) - logs[:, UNITS_LOG] * math.log(2.0)
        vector = math.log(VECTOR_FLOPS) - (logs[:, PEAK_LOG] + PEAK_CENTRE) * math.log(2.0)
        first = each[:, :, :1] * torch.exp(vector - cycle)[:, None, None]
        overlap = torch.cat((first, each[:, :, 1 : len(OVERLAP)]), dim=2)
        together = (overlap.clamp_max(1e12).pow(POWER).sum(dim=2) + 1e-9).pow(1 / POWER)
        cycles = (together + each[:, :, len(OVERLAP) :].sum(dim=2)) * torch.exp(moved[:, :, -1])
        call = CALL_CYCLES * torch.exp(self.call(inputs)[:, 0].clamp(-REACH, 2 * REACH))
        seconds = torch.log(torch.where(real, cycles, 0.0).sum(dim=1) + call) + cycle
        return torch.stack((torch.where(known, seconds, 0.0), known.to(seconds.dtype)), dim=1)
