"""A search's stream of candidates: other orders of the same passes, many thousands a second."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cdmpp.emulator.emulate import durations, holdings
from cdmpp.emulator.evaluate import Ints, evaluate, evaluate_again, peaks
from cdmpp.emulator.reuse import Reuse
from cdmpp.emulator.stages import Table
from cdmpp.emulator.structure import Structure


class Candidates:
    """Evaluates orders of the passes of one structure.

    Parameters
    ----------
    structure : Structure
        Its order is the first candidate. Nothing may be offloaded: copies follow the order.
    costs : Table
    classes : sequence of int
        Class of every micro-batch.
    transfer_s : float or sequence of float
    reuse : bool, keyword
        Whether an order that was seen is looked up, and one that was not starts from what it has in common
        with the one before it. The answers are the same to the last bit.

    Raises
    ------
    ValueError
        A stage is offloaded.

    Attributes
    ----------
    orders : Reuse
        Whole orders that were found, and that were not.
    kept, run : int
        Passes taken over from the candidate before, and passes simulated.
    """

    def __init__(
        self,
        structure: Structure,
        costs: Table,
        classes: Sequence[int],
        transfer_s: float | Sequence[float] = 0.0,
        *,
        reuse: bool = True,
    ) -> None:
        if len(structure.begin) != structure.ranks + 1:
            raise ValueError("copies to the host follow the order of the passes: build a structure for each")
        self.structure, self.reuse = structure, reuse
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
        """Seconds of the step under an order; infinite where its ranks wait for each other in a circle.

        Parameters
        ----------
        order : int32, shape (places,)
            Task numbers as in :class:`cdmpp.emulator.structure.Structure`: each rank's passes in another
            order, at the same places.
        """
        if not self.reuse:
            return self._all(order)
        found: float = self.orders.find(order.tobytes(), lambda: self._rest(order))
        return found

    def peak_bytes(self, order: Ints) -> float:
        """The most that a rank holds under an order."""
        peak = np.empty(self.structure.ranks)
        peaks(order, self.structure.begin, *self._holds, self._resident, peak)
        return float(peak.max())

    def _all(self, order: Ints) -> float:
        begin, deps = self.structure.begin, self.structure.deps
        ran = evaluate(order, begin, self._duration, deps, self._lag, self._turn, self.start_s, self.end_s)
        return float(self.end_s.max()) if ran == len(order) else float("inf")

    def _rest(self, order: Ints) -> float:
        begin, deps = self.structure.begin, self.structure.deps
        ran, kept = evaluate_again(
            order, self._before, begin, self._duration, deps, self._lag, self._turn, self.start_s, self.end_s
        )  # fmt: skip
        self._before[:] = order
        self.kept += kept
        self.run += ran - kept
        return float(self.end_s.max()) if ran == len(order) else float("inf")
