"""QSync's allocator, and plans with one type everywhere: baselines, and the start of the exact search."""

from __future__ import annotations

import heapq

from cdmpp.plan.precision.pricing import DeviceCosts, Levels, Pricing, uniform
from cdmpp.programs.elements import BASIC_DTYPES


def heap(costs: DeviceCosts, start: Levels, limit_s: float) -> Levels:
    """Raise one operator by one level at a time, largest reduction of the error first.

    A raise that breaks a limit is rejected, and its operator is not tried again. No raise is taken back, so the
    order decides.

    Parameters
    ----------
    costs : DeviceCosts
    start : list of int
        Levels within the limits.
    limit_s : float
        Time limit of an iteration.
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
