"""Time, memory and added error of a choice of element types on one device, and simple choices: QSync's, one type.

Operators are in topological order. A device has one compute queue: the forward passes in that order, then the
backward passes in the reverse order. So an operator has two slots. A cast is part of the receiver's slot: of the
consumer's forward slot for a tensor, of the producer's backward slot for its gradient. Another type for an
operator changes the casts on both of its sides; QSync's code updates only those to its successors.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.programs.elements import BASIC_DTYPES

Levels = list[int]


@dataclass(frozen=True)
class Edge:
    """A tensor that one operator passes to another, and the cost of its casts."""

    producer: int
    consumer: int
    # (producer levels, consumer levels): seconds to cast the tensor before the consumer, and its gradient before the
    # producer.
    forward_s: np.ndarray
    backward_s: np.ndarray


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that its consumers keep for their backward passes, each in the type that it reads.

    Consumers that read the same type share one copy.
    """

    consumers: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class DeviceCosts:
    """Cost tables of one device; lists are by operator, the arrays in them by level."""

    name: str
    workers: int  # number of equal devices; each adds its error to the mean of the gradients
    dtypes: list[tuple[str, ...]]  # levels of each operator, fewest bits first
    element_bytes: list[np.ndarray]  # bytes of one element
    # Seconds of the slots, without casts between neighbours, with casts of the operator's weights.
    forward_s: list[np.ndarray]
    backward_s: list[np.ndarray]
    sensitivity: list[np.ndarray]  # error that a level adds
    own_bytes: list[np.ndarray]  # low-precision copy of the weights, and tensors kept besides the inputs
    edges: tuple[Edge, ...]
    kept: tuple[KeptTensor, ...]
    fixed_bytes: float  # bytes that do not depend on the choice: master weights, gradients, optimizer, workspace
    memory_bytes: float  # memory limit; infinite where there is none
    after: np.ndarray  # (ends,): slots that are followed by work outside this queue: exchanges, the optimizer step
    tail_s: np.ndarray  # (ends,): seconds of that work. Iteration time = max(end of slot + tail).

    @property
    def size(self) -> int:
        """Number of operators."""
        return len(self.dtypes)

    def backward_slot(self, operator: int) -> int:
        """Slot of an operator's backward pass; the slot of its forward pass is its index."""
        return 2 * self.size - 1 - operator


class Pricing:
    """Figures of one choice of levels; a change of one operator updates them.

    :meth:`change` computes again the entries that depend on the operator, from the same tables and in the same
    order as the constructor; sums are formed over all entries. So its figures equal those of a new object to the
    last bit.
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
        """Bytes at the peak: the end of the forward pass."""
        return float(self.costs.fixed_bytes + self._own.sum() + self._shared.sum())

    @property
    def sensitivity(self) -> float:
        """Sum of the errors that the levels add, on one worker."""
        return float(self._added.sum())

    def within(self, limit_s: float) -> bool:
        """Whether memory and iteration time are within their limits."""
        return bool(self.memory_bytes <= self.costs.memory_bytes and self.iteration_s <= limit_s)

    @property
    def casts_s(self) -> float:
        """Seconds of an iteration spent on casts between neighbours."""
        pairs = [(edge, (self.levels[edge.producer], self.levels[edge.consumer])) for edge in self.costs.edges]
        return float(sum(edge.forward_s[pair] + edge.backward_s[pair] for edge, pair in pairs))

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
    """Fewest bits for every operator."""
    return [0] * costs.size


def uniform(costs: DeviceCosts, dtype: str) -> Levels:
    """One type everywhere; an operator without it takes its next type with more bits, or its last."""
    bits = {"int8": 8, "float16": 16, "bfloat16": 16, "float32": 32}
    levels: Levels = []
    for names in costs.dtypes:
        higher = [k for k, name in enumerate(names) if bits[name] >= bits[dtype]]
        levels.append(names.index(dtype) if dtype in names else higher[0] if higher else len(names) - 1)
    return levels


def heap(costs: DeviceCosts, start: Levels, limit_s: float) -> Levels:
    """Raise one operator by one level at a time, largest reduction of the error first.

    A raise that breaks a limit is rejected, and its operator is not tried again. No raise is taken back, so the
    order decides. ``start``: levels within the limits.
    """
    priced = Pricing(costs, start)
    candidates: list[tuple[float, int]] = []

    def push(i: int) -> None:
        level = priced.levels[i]
        if level + 1 < len(costs.dtypes[i]):
            reduction = float(costs.sensitivity[i][level] - costs.sensitivity[i][level + 1])
            if reduction > 0:
                heapq.heappush(candidates, (-reduction, i))

    for i in range(costs.size):
        push(i)
    while candidates:
        _, i = heapq.heappop(candidates)
        level = priced.levels[i]
        priced.change(i, level + 1)
        if priced.within(limit_s):
            push(i)
        else:
            priced.change(i, level)
    return list(priced.levels)


def fastest_uniform(costs: DeviceCosts, default: Levels) -> Levels:
    """The fastest plan of one type that fits into the memory; ``default`` where none fits."""
    plans = [Pricing(costs, uniform(costs, dtype)) for dtype in BASIC_DTYPES]
    fitting = [plan for plan in plans if plan.memory_bytes <= costs.memory_bytes]
    return min(fitting, key=lambda plan: plan.iteration_s).levels if fitting else default


def best_simple(costs: DeviceCosts, heap_levels: Levels, limit_s: float) -> Levels:
    """The heap's plan, or one type everywhere where that is within the limits and adds less error."""
    plans = [Pricing(costs, heap_levels), *(Pricing(costs, uniform(costs, dtype)) for dtype in BASIC_DTYPES)]
    return min((plan for plan in plans if plan.within(limit_s)), key=lambda plan: plan.sensitivity).levels
