"""Linear constraints of one device's choice of types: columns and rows of a mixed-integer program.

- ``x[i][k]``, binary: operator i computes in its type k; one type for each operator.
- For each edge and pair of types a column in [0, 1], whose sums over either end are the ends' ``x``. It is 1 for
  the chosen pair, so a cast costs its table entry. These equations make the linear relaxation tight.
- For each shared tensor and type a column that is at least the ``x`` of every consumer in that type: its copy.
- For each exchange the time at which its gradients are ready: the time of the one before plus the slots between.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cdmpp.plan.precision.pricing import DeviceCosts, Levels

Terms = tuple[np.ndarray, np.ndarray]
_INF = float("inf")


class LinearProgram:
    """Columns and rows of one device; starts with ``x`` and one row per operator.

    Parameters
    ----------
    costs : DeviceCosts

    Attributes
    ----------
    x : list of ndarray of int
        Column numbers by operator and level.
    cost, upper : list of float
        Objective and upper bound of each column; lower bounds are 0.
    rows : list of (indexes, values)
    row_lower, row_upper : list of float
    """

    def __init__(self, costs: DeviceCosts) -> None:
        self.costs = costs
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.rows: list[Terms] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []
        self.x = [self.columns(len(names)) for names in costs.dtypes]
        for columns in self.x:
            self.row(columns, np.ones(len(columns)), 1.0, 1.0)

    def columns(self, count: int, upper: float = 1.0) -> np.ndarray:
        """Add columns without cost; their numbers."""
        first = len(self.cost)
        self.cost += [0.0] * count
        self.upper += [upper] * count
        return np.arange(first, first + count)

    def row(self, index: np.ndarray, values: np.ndarray, lower: float, upper: float) -> None:
        """Add lower <= sum of values x columns <= upper; every column at most once."""
        self.rows.append((index, values))
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def levels(self, values: np.ndarray) -> Levels:
        """Level of each operator with the largest value."""
        return [int(np.argmax(values[columns])) for columns in self.x]

    def lowest_levels(self, values: np.ndarray) -> Levels:
        """Lowest level of each operator with a positive value: a fractional solution rounded down."""
        return [int(np.argmax(values[columns] > 1e-6)) for columns in self.x]

    def memory(self) -> list[Terms]:
        """Terms of the bytes above ``fixed_bytes``; adds the columns of shared copies."""
        costs = self.costs
        terms = [(columns, own) for columns, own in zip(self.x, costs.own_bytes, strict=True)]
        for kept in costs.kept:
            if len(kept.consumers) == 1:
                i = kept.consumers[0]
                terms.append((self.x[i], kept.elements * costs.element_bytes[i]))
                continue
            copies: dict[str, int] = {}
            for i in kept.consumers:
                for level, dtype in enumerate(costs.dtypes[i]):
                    if dtype not in copies:
                        copies[dtype] = int(self.columns(1)[0])
                        size = kept.elements * costs.element_bytes[i][level]
                        terms.append((np.array([copies[dtype]]), np.array([size])))
                    self.row(np.array([copies[dtype], self.x[i][level]]), np.array([1.0, -1.0]), 0.0, _INF)
        return terms

    def limit_memory(self, margin: float = 0.0) -> None:
        """Add the row of the memory limit, reduced by a share ``margin``, where there is a limit."""
        if np.isfinite(self.costs.memory_bytes):
            available = self.costs.memory_bytes * (1.0 - margin) - self.costs.fixed_bytes
            unit = max(available, 1.0)
            index, size = _added(self.memory())
            self.row(index, size / unit, -_INF, available / unit)

    def ends(self, unit_s: float) -> list[int]:
        """Add a column for the end of the last slot before each entry of ``costs.after``, in units of time."""
        costs, slots = self.costs, self._slots()
        columns = [0] * len(costs.after)
        previous, first = -1, 0
        for entry in np.argsort(costs.after, kind="stable"):
            end = int(self.columns(1, _INF)[0])
            # In seconds; the ends are in units.
            terms: list[Terms] = [(np.array([end]), np.array([-unit_s]))]
            if previous >= 0:
                terms.append((np.array([previous]), np.array([unit_s])))
            for slot in slots[first : costs.after[entry] + 1]:
                terms += slot
            index, seconds = _added(terms)
            self.row(index, seconds / unit_s, -_INF, 0.0)
            columns[entry] = previous = end
            first = int(costs.after[entry]) + 1
        return columns

    def _slots(self) -> list[list[Terms]]:
        """Terms of the seconds of each slot of the queue; adds the columns of edges."""
        costs, x = self.costs, self.x
        slots: list[list[Terms]] = [[] for _ in range(2 * costs.size)]
        for i in range(costs.size):
            slots[i].append((x[i], costs.forward_s[i]))
            slots[costs.backward_slot(i)].append((x[i], costs.backward_s[i]))
        for edge in costs.edges:
            if not (edge.forward_s.any() or edge.backward_s.any()):
                continue
            producer, consumer = x[edge.producer], x[edge.consumer]
            pairs = self.columns(edge.forward_s.size).reshape(edge.forward_s.shape)
            for column, group in [*zip(producer, pairs, strict=True), *zip(consumer, pairs.T, strict=True)]:
                self.row(np.append(group, column), np.append(np.ones(len(group)), -1.0), 0.0, 0.0)
            slots[edge.consumer].append((pairs, edge.forward_s))
            slots[costs.backward_slot(edge.producer)].append((pairs, edge.backward_s))
        return slots


def _added(terms: Sequence[Terms]) -> Terms:
    """One term for each column: coefficients of the same column are added."""
    index = np.concatenate([np.ravel(columns) for columns, _ in terms])
    values = np.concatenate([np.ravel(coefficients) for _, coefficients in terms])
    columns, inverse = np.unique(index, return_inverse=True)
    return columns, np.bincount(inverse, values, len(columns))
