"""Exhaustive search over all choices of types, for small precision problems."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cdmpp.plan.precision.pricing import DeviceCosts, Levels

MAX_CHOICES = 1_000_000
_BLOCK = 32768


def best_levels(costs: DeviceCosts, limit_s: float) -> tuple[Levels, float]:
    """Levels of the smallest error within the limits, and that error."""
    best: tuple[Levels, float] | None = None
    for block in _all_choices(costs):
        slots, memory, errors = price_all(costs, block)
        times = (np.cumsum(slots, axis=1)[:, costs.after] + costs.tail_s).max(axis=1)
        # The sums are formed in another order than in Pricing: their last bits may differ at a limit.
        slack = 1 + 1e-12
        within = (times <= limit_s * slack) & (memory <= costs.memory_bytes * slack)
        if within.any():
            row = int(np.argmin(np.where(within, errors, np.inf)))
            if best is None or errors[row] < best[1]:
                best = (block[row].tolist(), float(errors[row]))
    assert best is not None, "no choice is within the limits"
    return best


def _all_choices(costs: DeviceCosts) -> Iterator[np.ndarray]:
    shape = [len(names) for names in costs.dtypes]
    total = int(np.prod([float(n) for n in shape]))
    assert total <= MAX_CHOICES, f"{total} choices are too many to try"
    for first in range(0, total, _BLOCK):
        numbers = np.arange(first, min(first + _BLOCK, total))
        yield np.stack(np.unravel_index(numbers, shape), axis=1)


def price_all(costs: DeviceCosts, block: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots (choices, 2 x operators), memory (choices,) and error (choices,) of many choices at once."""
    slots = np.zeros((len(block), 2 * costs.size))
    memory = np.full(len(block), costs.fixed_bytes)
    errors = np.zeros(len(block))
    for i in range(costs.size):
        levels = block[:, i]
        slots[:, i] += costs.forward_s[i][levels]
        slots[:, costs.backward_slot(i)] += costs.backward_s[i][levels]
        memory += costs.own_bytes[i][levels]
        errors += costs.sensitivity[i][levels]
    for edge in costs.edges:
        pair = block[:, edge.producer], block[:, edge.consumer]
        slots[:, edge.consumer] += edge.forward_s[pair]
        slots[:, costs.backward_slot(edge.producer)] += edge.backward_s[pair]
    for kept in costs.kept:
        for name in sorted({name for i in kept.consumers for name in costs.dtypes[i]}):
            used = np.zeros(len(block), dtype=bool)
            size = 0.0
            for i in kept.consumers:
                if name in costs.dtypes[i]:
                    level = costs.dtypes[i].index(name)
                    used |= block[:, i] == level
                    size = float(costs.element_bytes[i][level])
            memory += kept.elements * size * used
    return slots, memory, errors
