"""Fast evaluation of many orders of the same passes, for searches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from cdmpp.simulate.emulator.arrays import durations, holdings
from cdmpp.simulate.emulator.evaluate import Ints, evaluate, evaluate_again, latest, peaks
from cdmpp.simulate.emulator.reuse import Reuse
from cdmpp.simulate.emulator.stages import Table
from cdmpp.simulate.emulator.structure import Structure

#: Fewest passes for which it is faster to reuse the common part of two orders.
LARGE = 2048


class Candidates:
    """Evaluates orders of the passes of one structure.

    Parameters
    ----------
    structure : Structure
        Its order is the first candidate. No stage may be offloaded, because copies depend on the order.
    costs : Table
    classes : sequence of int
        Class of every micro-batch.
    transfer_s : float or sequence of float
    resume : bool, optional
        Whether the common part with the order before is reused. Default: for at least ``LARGE`` passes; fewer
        passes are simulated in the time that this takes.
    remember : bool
        Whether results of earlier orders are looked up. A lookup takes as long as about 256 passes.

    Raises
    ------
    ValueError
        A stage is offloaded.

    Attributes
    ----------
    orders : Reuse
        Hits and misses of whole orders.
    kept, run : int
        Reused passes, and simulated passes.

    Notes
    -----
    Results are equal to the last bit with all settings.
    """

    def __init__(
        self,
        structure: Structure,
        costs: Table,
        classes: Sequence[int],
        transfer_s: float | Sequence[float] = 0.0,
        *,
        resume: bool | None = None,
        remember: bool = False,
    ) -> None:
        if len(structure.begin) != structure.ranks + 1:
            raise ValueError("copies to the host follow the order of the passes: build a structure for each")
        self.structure, self.remember = structure, remember
        self.resume = len(structure.order) >= LARGE if resume is None else resume
        self.orders = Reuse(most=1 << 16)
        self.kept = self.run = 0
        self._duration, self._lag, _ = durations(structure, costs, classes, transfer_s)
        self._holds = holdings(structure, costs, classes)
        self._resident = np.zeros(structure.ranks)
        np.add.at(self._resident, structure.rank_of, costs.resident)
        self._before = structure.order.copy()
        self._turn = np.full_like(structure.order, len(structure.order))
        self.start_s = np.full_like(self._duration, -1.0)
        self.end_s = np.full_like(self._duration, -1.0)

    def makespan_s(self, order: Ints) -> float:
        """Seconds of the step under an order; infinite where its ranks wait for each other.

        Parameters
        ----------
        order : int32, shape (places,)
            Task numbers as in :class:`cdmpp.simulate.emulator.structure.Structure`: each rank's passes in another
            order, at the same places.
        """
        simulate = self._rest if self.resume else self._all
        if not self.remember:
            return simulate(order)
        makespan_s: float = self.orders.find(order.tobytes(), partial(simulate, order))
        return makespan_s

    def peak_bytes(self, order: Ints) -> float:
        """Largest peak memory of a rank under an order."""
        peak = np.empty(self.structure.ranks)
        peaks(order, self.structure.begin, *self._holds, self._resident, peak)
        return float(peak.max())

    def _all(self, order: Ints) -> float:
        begin = self.structure.begin
        evaluate(order, begin, self._duration, self.structure.deps, self._lag, self._turn, self.start_s, self.end_s)
        return float(latest(order, begin, self.end_s))

    def _rest(self, order: Ints) -> float:
        begin, before = self.structure.begin, self._before
        ran, kept = evaluate_again(
            order, before, begin, self._duration, self.structure.deps, self._lag, self._turn, self.start_s, self.end_s
        )
        before[:] = order
        self.kept += kept
        self.run += ran - kept
        return float(latest(order, begin, self.end_s))
