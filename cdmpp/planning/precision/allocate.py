"""Choosing the types: QSync's heap, and what closes the distance to the best plan.

The heap (QSync's allocator) raises, from the lowest precision that fits, always the operator whose raise
takes away most error, and keeps the raise where memory and time allow. It never takes one back, so the order
decides; here exchanges of pairs, the relaxation's candidates and a branch and bound over its tables follow.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.planning.precision.pricing import DeviceCosts, Levels, Pricing, uniform
from cdmpp.planning.precision.relaxation import Relaxation, ascend
from cdmpp.programs.operators import DTYPE_BYTES

#: A plan this close to its bound counts as proven best.
CLOSE = 1e-9
#: Nodes of the branch and bound before chance takes over.
_TREE = 50_000
#: Steps that the neighbourhood of one candidate may take, in full and at a glance, and how much worse than
#: the best a candidate may be.
_NEAR, _GLANCE, _FAR = 3000, 60, 2.0


class Steps:
    """Counts steps and says when to end.

    Parameters
    ----------
    of : SearchControl or Steps
        What this is a part of: its end is this one's end.
    most : int, optional
        Steps that may be taken.
    until_s : float, optional
        Spent time of the watch at which these steps end.
    """

    def __init__(self, of: SearchControl | Steps, most: int | None = None, until_s: float | None = None) -> None:
        self.taken = 0
        self._of, self._most, self._until_s = of, most, until_s

    def go_on(self) -> bool:
        """Take a step, if there is one left."""
        if self._most is not None and self.taken >= self._most:
            return False
        if isinstance(self._of, Steps):
            if not self._of.go_on():
                return False
        elif self._of.expired or (self._until_s is not None and self._of.spent_s > self._until_s):
            return False
        self.taken += 1
        return True


@dataclass
class Found:
    """A device's plan.

    Attributes
    ----------
    levels : list of int
    objective, bound : float
        Sum of sensitivities on one worker, and what no plan within the limits passes.
    heap : list of int
        The heap's plan alone.
    proven : bool
        The search is complete: nothing better exists.
    """

    levels: Levels
    objective: float
    bound: float
    heap: Levels = field(default_factory=list)
    proven: bool = False


def heap(costs: DeviceCosts, start: Levels, limit_s: float) -> Levels:
    """QSync's allocator: raise one operator by one level at a time, largest reduction first.

    A raise that breaks a limit is rejected, and its operator not tried again.
    """
    priced = Pricing(costs, start)
    waiting: list[tuple[float, int]] = []

    def push(i: int) -> None:
        level = priced.levels[i]
        if level + 1 < len(costs.dtypes[i]):
            gain = float(costs.sensitivity[i][level] - costs.sensitivity[i][level + 1])
            if gain > 0:
                heapq.heappush(waiting, (-gain, i))

    for i in range(costs.size):
        push(i)
    while waiting:
        _, i = heapq.heappop(waiting)
        level = priced.levels[i]
        priced.change(i, level + 1)
        if priced.within(limit_s):
            push(i)
        else:
            priced.change(i, level)
    return list(priced.levels)


def improve(costs: DeviceCosts, start: Levels, limit_s: float, go_on: Callable[[], bool]) -> Levels:
    """Raise single operators, and exchange a raise for a smaller lowering, while either reduces the error."""
    priced = Pricing(costs, start)
    while go_on():
        # Largest gain first: positive where the level adds less error than the present one.
        now = priced.levels
        moves = sorted(
            (float(costs.sensitivity[i][level] - costs.sensitivity[i][now[i]]), i, level)
            for i in range(costs.size)
            for level in range(len(costs.dtypes[i]))
            if level != now[i]
        )
        if not _take_first(priced, moves, limit_s, go_on):
            break
    return list(priced.levels)


def _take_first(
    priced: Pricing, moves: list[tuple[float, int, int]], limit_s: float, go_on: Callable[[], bool]
) -> bool:
    raises = [move for move in moves if move[0] < 0]
    others = [move for move in moves if move[0] >= 0]
    for _, i, level in raises:
        if not go_on():
            return False
        before = priced.levels[i]
        priced.change(i, level)
        if priced.within(limit_s):
            return True
        priced.change(i, before)
    for gain, i, level in raises:
        before = priced.levels[i]
        priced.change(i, level)
        for loss, j, other in others:
            if gain + loss >= -CLOSE * abs(gain):
                break
            if j == i:
                continue
            if not go_on():
                break
            was = priced.levels[j]
            priced.change(j, other)
            if priced.within(limit_s):
                return True
            priced.change(j, was)
        priced.change(i, before)
    return False


def simple(costs: DeviceCosts, start: Levels, limit_s: float) -> Found:
    """The heap's plan, or one type everywhere where that is better: what :func:`search` begins with.

    ``start`` keeps the limits.
    """
    levels = heap(costs, start, limit_s)
    every = [Pricing(costs, levels), *(Pricing(costs, uniform(costs, dtype)) for dtype in DTYPE_BYTES)]
    best = min((one for one in every if one.within(limit_s)), key=lambda one: one.sensitivity)
    floor = float(sum(np.min(row) for row in costs.sensitivity))
    return Found(best.levels, best.sensitivity, floor, levels)


def search(
    costs: DeviceCosts,
    first: Found,
    limit_s: float,
    steps: Steps,
    report: Callable[[Found], None] = lambda found: None,
    seed: int = 0,
) -> Found:
    """The least sum of sensitivities within the limits.

    Parameters
    ----------
    costs : DeviceCosts
    first : Found
        Of :func:`simple`.
    limit_s : float
        Of the iteration.
    steps : Steps
    report : callable
        Hears of every better plan.
    """
    best = replace(first)

    tried: set[tuple[int, ...]] = set()

    def offer(levels: Levels, near: int = _NEAR) -> float:
        """Take a plan that keeps the limits, and what is near it, if better."""
        if tuple(levels) in tried:
            return best.objective
        tried.add(tuple(levels))
        priced = Pricing(costs, levels)
        # Far from the best there is nothing near that is better.
        if priced.sensitivity <= _FAR * best.objective and priced.within(limit_s):
            better = improve(costs, levels, limit_s, Steps(steps, near).go_on)
            objective = Pricing(costs, better).sensitivity
            if objective < best.objective:
                best.levels, best.objective = better, objective
                report(best)
        return best.objective

    def close() -> bool:
        return best.objective - best.bound <= CLOSE * abs(best.objective)

    if not close() and steps.go_on():
        relaxation = Relaxation(costs)
        # The bound first: its candidates get a short look around.
        ascent = ascend(relaxation, limit_s, lambda levels: offer(levels, _GLANCE), steps.go_on)
        best.bound = float(min(max(best.bound, ascent.bound), best.objective))
        report(best)
        offer(best.levels)
        offer(first.levels)
        if not close() and ascent.relaxed is not None:
            tree = Steps(steps, _TREE)
            if relaxation.below(
                ascent.relaxed, lambda: best.objective * (1.0 - CLOSE), ascent.constant, offer, tree.go_on
            ):
                best.bound = best.objective
    chance = np.random.default_rng(seed)
    while not close() and steps.go_on():
        offer(_shaken(costs, best.levels, chance))
    best.proven = close()
    return best


def _shaken(costs: DeviceCosts, levels: Levels, chance: np.random.Generator) -> Levels:
    """The plan with a few operators lowered: room for other raises."""
    shaken = list(levels)
    for i in chance.choice(costs.size, size=min(int(chance.integers(1, 5)), costs.size), replace=False):
        shaken[i] = int(chance.integers(0, shaken[i] + 1))
    return shaken


@dataclass(frozen=True)
class Fastest:
    """The shortest iteration within the memory limit that was found, and a bound that none passes."""

    levels: Levels
    iteration_s: float
    bound_s: float


def fastest(costs: DeviceCosts, start: Levels, go_on: Callable[[], bool], enough_s: float = 0.0) -> Fastest:
    """The shortest iteration of one device within its memory; ends early once below ``enough_s``.

    ``start`` keeps the memory limit.
    """
    levels, seconds = list(start), Pricing(costs, start).iteration_s
    unit = max(seconds, 1e-12)

    def offer(at: Levels) -> float:
        nonlocal levels, seconds
        priced = Pricing(costs, at)
        if priced.iteration_s < seconds and priced.memory_bytes <= costs.memory_bytes:
            levels, seconds = list(at), priced.iteration_s
        return seconds / unit

    def wanted() -> bool:
        return seconds > enough_s and go_on()

    ascent = ascend(Relaxation(costs), unit, offer, wanted, error=0.0, rounds=60)
    priced, moved = Pricing(costs, levels), True
    while moved and seconds > enough_s:
        moved = False
        for i, level in [(i, k) for i, names in enumerate(costs.dtypes) for k in range(len(names))]:
            before = priced.levels[i]
            if level == before:
                continue
            if not wanted():
                break
            priced.change(i, level)
            if priced.memory_bytes <= costs.memory_bytes and priced.iteration_s < seconds:
                levels, seconds, moved = list(priced.levels), priced.iteration_s, True
            else:
                priced.change(i, before)
    return Fastest(levels, seconds, min(ascent.bound * unit, seconds))


def exhaustive(costs: DeviceCosts, limit_s: float) -> tuple[Levels, float] | None:
    """The best of all choices, tried one and all; None where none keeps the limits. For small problems.

    Raises
    ------
    ValueError
        There are more than a million choices.
    """
    shape = [len(names) for names in costs.dtypes]
    total = int(np.prod([float(n) for n in shape]))
    if total > 1_000_000:
        raise ValueError(f"{total} choices are too many to try")
    best: tuple[Levels, float] | None = None
    for block in _blocks(total, shape):
        slots, memory, added = _price_all(costs, block)
        times = (np.cumsum(slots, axis=1)[:, costs.after] + costs.tail_s).max(axis=1)
        # Sums in another order than Pricing's: the last bits may differ at a limit.
        slack = 1 + 1e-12
        kept = (times <= limit_s * slack) & (memory <= costs.memory_bytes * slack)
        if kept.any():
            at = int(np.argmin(np.where(kept, added, np.inf)))
            if best is None or added[at] < best[1]:
                best = (block[at].tolist(), float(added[at]))
    return best


def _blocks(total: int, shape: list[int], rows: int = 32768) -> Iterator[np.ndarray]:
    for first in range(0, total, rows):
        numbers = np.arange(first, min(first + rows, total))
        yield np.stack(np.unravel_index(numbers, shape), axis=1)


def _price_all(costs: DeviceCosts, block: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots (choices, 2 x operators), memory and sensitivity of many choices at once."""
    slots = np.zeros((len(block), 2 * costs.size))
    memory = np.full(len(block), costs.fixed_bytes)
    added = np.zeros(len(block))
    for i in range(costs.size):
        at = block[:, i]
        slots[:, i] += costs.forward_s[i][at]
        slots[:, costs.backward_slot(i)] += costs.backward_s[i][at]
        memory += costs.own_bytes[i][at]
        added += costs.sensitivity[i][at]
    for edge in costs.edges:
        pair = block[:, edge.producer], block[:, edge.consumer]
        slots[:, edge.consumer] += edge.forward_s[pair]
        slots[:, costs.backward_slot(edge.producer)] += edge.backward_s[pair]
    for kept in costs.kept:
        names = sorted({name for i in kept.consumers for name in costs.dtypes[i]})
        for name in names:
            used = np.zeros(len(block), dtype=bool)
            size = 0.0
            for i in kept.consumers:
                if name in costs.dtypes[i]:
                    level = costs.dtypes[i].index(name)
                    used |= block[:, i] == level
                    size = float(costs.element_bytes[i][level])
            memory += kept.elements * size * used
    return slots, memory, added
