"""Search for mixes of several generation pools: their units, the division of the samples, and the training stage."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from cdmpp.plan.rl.candidates import candidate_sizes, pareto_front
from cdmpp.plan.rl.dispatch import Dispatcher
from cdmpp.plan.rl.mixture import MixDispatcher
from cdmpp.plan.rl.problem import RlProblem
from cdmpp.plan.rl.sizes import MIXED, PoolSizes, coarse_to_fine
from cdmpp.predict.requests.budget import SearchControl

#: Most combinations of units that are tried before the search goes on around the best.
MOST_COMBINATIONS = 256

#: Units of each pool that generates, in the order of the pools; 0: the pool is not used.
Units = tuple[int, ...]


def search_mixes(
    problem: RlProblem, dispatchers: dict[int, Dispatcher], control: SearchControl
) -> tuple[list[PoolSizes], bool]:
    """Pareto front of the mixes, and whether all combinations of units were tried.

    If all combinations of units are few (:data:`MOST_COMBINATIONS`), all are tried. Otherwise some numbers of each
    pool are combined, and the best combination is varied in halving steps.

    Parameters
    ----------
    problem : RlProblem
    dispatchers : dict of int to Dispatcher
        By index of the generation pool, on the search steps.
    control : SearchControl
        The first combination, all units, is tried in any case.
    """
    sizing = problem.sizing
    pools = list(dispatchers)
    most = tuple(sizing.pools[pool].units for pool in pools)
    mixed = MixDispatcher(dispatchers)
    priced = any(pool.price_per_hour > 0 for pool in sizing.pools)
    front: list[PoolSizes] = []
    values: dict[Units, float] = {}

    def value(units: Units) -> float:
        nonlocal front
        if units not in values:
            used = [(pool, count) for pool, count in zip(pools, units, strict=True) if count]
            mix = mixed.divide([pool for pool, _ in used], [count for _, count in used], lambda: control.expired)
            candidates = [
                sizes for sizes in candidate_sizes(sizing, MIXED, mixed, mix) if _trains_beside(problem, sizes)
            ]
            front = pareto_front(front + candidates, priced)
            values[units] = min((sizes.value(problem.objective) for sizes in candidates), default=float("inf"))
        return values[units]

    for units in _combinations(problem, most):
        if values and control.expired:
            return front, False
        value(units)
    if not values or _all_fit(most) or sizing.generation_units is not None:
        return front, _all_fit(most)
    best = min(values, key=lambda units: values[units])
    step = max(most) // 4
    while step:
        before = best
        for index, sign in product(range(len(pools)), (-1, 1)):
            count = min(max(best[index] + sign * step, 0), most[index])
            units = (*best[:index], count, *best[index + 1 :])
            if not _allowed(problem, units) or units in values:
                continue
            if control.expired:
                return front, False
            if value(units) < values[best]:
                best = units
        if best == before:
            step //= 2
    return front, False


def _all_fit(most: Units) -> bool:
    return prod(count + 1 for count in most) <= MOST_COMBINATIONS


def _trains_beside(problem: RlProblem, sizes: PoolSizes) -> bool:
    return not problem.sizing.trains or sizes.training is not None


def _allowed(problem: RlProblem, units: Units) -> bool:
    """Whether at least two pools generate, with the fixed number of units if there is one."""
    fixed = problem.sizing.generation_units
    return sum(count > 0 for count in units) >= 2 and (fixed is None or sum(units) == fixed)


def _combinations(problem: RlProblem, most: Units) -> Iterator[Units]:
    """Combinations of units: all units first, then coarse to fine."""
    for_time_alone = not problem.sizing.trains and problem.objective == "time" and problem.slack == 0
    if for_time_alone and _allowed(problem, most):
        # No other stage needs the units, and more instances are not slower.
        yield most
        return
    orders = [[*coarse_to_fine(count), 0] for count in most]
    if not _all_fit(most):
        levels = max(int(MOST_COMBINATIONS ** (1 / len(most))), 2)
        orders = [[count, 0, *order[1 : levels - 1]] for count, order in zip(most, orders, strict=True)]
    fixed = problem.sizing.generation_units
    if fixed is not None:
        # The last pool has what is left.
        orders[-1] = [-1]
    for ranks in sorted(product(*map(range, map(len, orders))), key=lambda ranks: (max(ranks), sum(ranks))):
        units = tuple(order[rank] for order, rank in zip(orders, ranks, strict=True))
        if fixed is not None:
            units = (*units[:-1], fixed - sum(units[:-1]))
        if _allowed(problem, units) and 0 <= units[-1] <= most[-1]:
            yield units
