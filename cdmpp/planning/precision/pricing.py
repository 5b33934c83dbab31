"""What a choice of element types costs one device: time, memory, and the error it adds.

Operators are in topological order. A device has one compute queue: forward passes in that order, then the
backward passes in the reverse order, so an operator has two slots in it. A cast stands in the slot of whoever
receives: the consumer's forward slot for a tensor, the producer's backward slot for its gradient. Choosing
another type for an operator changes the casts on both of its sides; QSync's code re-prices its successors
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Levels = list[int]


@dataclass(frozen=True)
class Edge:
    """A tensor that one operator hands to another, and what its casts cost.

    Attributes
    ----------
    producer, consumer : int
    forward_s, backward_s : ndarray, (producer levels, consumer levels)
        Cast of the tensor before the consumer; of its gradient before the producer.
    """

    producer: int
    consumer: int
    forward_s: np.ndarray
    backward_s: np.ndarray


@dataclass(frozen=True)
class Kept:
    """A tensor that its consumers keep for their backward passes, each in its own type.

    Consumers that read it in the same type share one copy.

    Attributes
    ----------
    consumers : tuple of int
    elements : int
    """

    consumers: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class DeviceCosts:
    """Everything about one device; all lists are by operator, all arrays in them by level.

    Attributes
    ----------
    name : str
    workers : int
        Devices like this one; each adds its own error to the mean of the gradients.
    dtypes : list of tuple of str
        The levels of each operator, fewest bits first.
    element_bytes : list of ndarray
    forward_s, backward_s : list of ndarray
        Slots without the casts of neighbours; with those of the operator's own weights.
    sensitivity : list of ndarray
        Error that the level adds.
    own_bytes : list of ndarray
        Low-precision copy of the weights, and what the operator keeps besides its inputs.
    edges, kept : tuple
    fixed_bytes : float
        What no choice changes: master weights, gradients, optimizer, workspace.
    memory_bytes : float
        Limit; infinite where there is none.
    after : ndarray of int, (limits,)
        Slots after which something outside this queue has to be waited for.
    tail_s : ndarray, (limits,)
        How long that then takes: iteration time = max(time of slot + tail).
    """

    name: str
    workers: int
    dtypes: list[tuple[str, ...]]
    element_bytes: list[np.ndarray]
    forward_s: list[np.ndarray]
    backward_s: list[np.ndarray]
    sensitivity: list[np.ndarray]
    own_bytes: list[np.ndarray]
    edges: tuple[Edge, ...]
    kept: tuple[Kept, ...]
    fixed_bytes: float
    memory_bytes: float
    after: np.ndarray
    tail_s: np.ndarray

    @property
    def size(self) -> int:
        """How many operators there are."""
        return len(self.dtypes)

    def backward_slot(self, operator: int) -> int:
        """Where an operator's backward pass stands in the queue; its forward pass stands at its number."""
        return 2 * self.size - 1 - operator


class Pricing:
    """The figures of one choice of levels, and of its neighbours.

    Parameters
    ----------
    costs : DeviceCosts
    levels : sequence of int
        The level of each operator.

    Notes
    -----
    :meth:`change` prices anew what an operator's level touches, from the same tables and in the same order
    as the constructor; sums are formed over all slots. So its figures equal a full pricing to the last bit.
    """

    def __init__(self, costs: DeviceCosts, levels: Sequence[int]) -> None:
        self.costs = costs
        self.levels: Levels = list(levels)
        count = costs.size
        self._into: list[list[Edge]] = [[] for _ in range(count)]
        self._out: list[list[Edge]] = [[] for _ in range(count)]
        for edge in costs.edges:
            self._into[edge.consumer].append(edge)
            self._out[edge.producer].append(edge)
        self._kept_by: list[list[int]] = [[] for _ in range(count)]
        for number, kept in enumerate(costs.kept):
            for consumer in kept.consumers:
                self._kept_by[consumer].append(number)
        self.slots_s = np.zeros(2 * count)
        self._own = np.zeros(count)
        self._shared = np.zeros(len(costs.kept))
        self._added = np.zeros(count)
        for i in range(count):
            self._price_operator(i)
            self._price_forward(i)
            self._price_backward(i)
        for number in range(len(costs.kept)):
            self._price_kept(number)

    def change(self, operator: int, level: int) -> None:
        """Give an operator another level."""
        self.levels[operator] = level
        self._price_operator(operator)
        self._price_forward(operator)
        self._price_backward(operator)
        for edge in self._out[operator]:
            self._price_forward(edge.consumer)
        for edge in self._into[operator]:
            self._price_backward(edge.producer)
        for number in self._kept_by[operator]:
            self._price_kept(number)

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration as far as this device decides it."""
        ends = np.cumsum(self.slots_s)
        return float(np.max(ends[self.costs.after] + self.costs.tail_s))

    @property
    def memory_bytes(self) -> float:
        """Bytes at the peak, which is the end of the forward pass."""
        return float(self.costs.fixed_bytes + self._own.sum() + self._shared.sum())

    @property
    def sensitivity(self) -> float:
        """Sum of the errors that the levels add, on one worker."""
        return float(self._added.sum())

    def within(self, limit_s: float) -> bool:
        """Whether memory and time limits are kept."""
        return bool(self.memory_bytes <= self.costs.memory_bytes and self.iteration_s <= limit_s)

    @property
    def casts_s(self) -> float:
        """Seconds of an iteration that go into casts between neighbours."""
        at = self.levels
        return float(
            sum(
                edge.forward_s[at[edge.producer], at[edge.consumer]]
                + edge.backward_s[at[edge.producer], at[edge.consumer]]
                for edge in self.costs.edges
            )
        )

    def _price_operator(self, i: int) -> None:
        self._own[i] = self.costs.own_bytes[i][self.levels[i]]
        self._added[i] = self.costs.sensitivity[i][self.levels[i]]

    def _price_forward(self, i: int) -> None:
        at = self.levels
        seconds = self.costs.forward_s[i][at[i]]
        for edge in self._into[i]:
            seconds = seconds + edge.forward_s[at[edge.producer], at[i]]
        self.slots_s[i] = seconds

    def _price_backward(self, i: int) -> None:
        at = self.levels
        seconds = self.costs.backward_s[i][at[i]]
        for edge in self._out[i]:
            seconds = seconds + edge.backward_s[at[i], at[edge.consumer]]
        self.slots_s[self.costs.backward_slot(i)] = seconds

    def _price_kept(self, number: int) -> None:
        kept, costs = self.costs.kept[number], self.costs
        copies = {costs.dtypes[i][self.levels[i]]: costs.element_bytes[i][self.levels[i]] for i in kept.consumers}
        self._shared[number] = kept.elements * sum(copies[dtype] for dtype in sorted(copies))


def lowest(costs: DeviceCosts) -> Levels:
    """Fewest bits everywhere."""
    return [0] * costs.size


def uniform(costs: DeviceCosts, dtype: str) -> Levels:
    """One type everywhere; where an operator does not have it, its next one with more bits, or its last."""
    bits = {"int8": 8, "float16": 16, "bfloat16": 16, "float32": 32}
    found: Levels = []
    for names in costs.dtypes:
        higher = [k for k, name in enumerate(names) if bits[name] >= bits[dtype]]
        found.append(names.index(dtype) if dtype in names else higher[0] if higher else len(names) - 1)
    return found
