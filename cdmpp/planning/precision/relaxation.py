"""Lower bounds, and the extremes that no plan passes: least memory, least time.

The limits on memory and time are moved into the objective with multipliers (Lagrangian relaxation). What is
left is a sum of tables over neighbouring operators, which elimination minimises exactly; so for every
multiplier the value is a lower bound, and its minimiser a candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cdmpp.planning.precision.elimination import Elimination, Messages
from cdmpp.planning.precision.pricing import DeviceCosts, Levels, Pricing

#: Consumers of one tensor up to which their shared copies are priced exactly in a bound.
_SHARED_EXACTLY = 3
#: Rounds without a better bound after which the ascent takes half its steps, and where it ends.
_PATIENCE, _LEAST_PACE = 12, 1e-4
_LEAST_S = 1e-12


@dataclass(frozen=True)
class Relaxed:
    """A bound, the plan that reaches it where it keeps the limits, and the tables behind it."""

    bound: float
    levels: Levels
    messages: Messages
    lagrangian: float


class Relaxation:
    """One device's sums of tables.

    Attributes
    ----------
    exact : bool
        Whether a minimum is exact: no table was split, and no tensor has more than three consumers.
    """

    def __init__(self, costs: DeviceCosts) -> None:
        self.costs = costs
        scopes: list[tuple[int, ...]] = [(i,) for i in range(costs.size)]
        scopes += [(edge.producer, edge.consumer) for edge in costs.edges]
        self._shared: list[tuple[tuple[int, ...], np.ndarray]] = []
        self._alone = [np.array(own, dtype=np.float64) for own in costs.own_bytes]
        exact = True
        for kept in costs.kept:
            who = kept.consumers
            if len(who) == 1:
                self._alone[who[0]] = self._alone[who[0]] + kept.elements * costs.element_bytes[who[0]]
            elif len(who) <= _SHARED_EXACTLY:
                self._shared.append((who, _copies(costs, who) * float(kept.elements)))
            else:
                # The mean over the consumers is never more than the sum over their distinct types.
                exact = False
                for i in who:
                    self._alone[i] = self._alone[i] + kept.elements * costs.element_bytes[i] / len(who)
        scopes += [who for who, _ in self._shared]
        self._elimination = Elimination([len(names) for names in costs.dtypes], scopes)
        self.exact = exact and self._elimination.exact

    def minimise(self, error: float, per_byte: float, per_second: np.ndarray) -> Relaxed:
        """Least of error x sensitivity + per_byte x memory + sum(per_second x time of each limit).

        Parameters
        ----------
        error, per_byte : float
        per_second : ndarray, (limits,)
            Weight of each entry of ``costs.after``.
        """
        costs = self.costs
        weights = np.zeros(2 * costs.size)
        np.add.at(weights, costs.after, per_second)
        # A limit counts every slot up to its own.
        slot_weight = np.cumsum(weights[::-1])[::-1]
        count = costs.size
        forward, backward = slot_weight[:count], slot_weight[: count - 1 : -1]
        tables = [
            error * costs.sensitivity[i]
            + per_byte * self._alone[i]
            + forward[i] * costs.forward_s[i]
            + backward[i] * costs.backward_s[i]
            for i in range(count)
        ]
        tables += [
            forward[edge.consumer] * edge.forward_s + backward[edge.producer] * edge.backward_s for edge in costs.edges
        ]
        tables += [per_byte * table for _, table in self._shared]
        least, levels, messages = self._elimination.minimise(tables)
        constant = per_byte * costs.fixed_bytes + float(per_second @ costs.tail_s)
        return Relaxed(least + constant, levels, messages, least)

    def below(
        self,
        relaxed: Relaxed,
        threshold: Callable[[], float],
        constant: float,
        visit: Callable[[Levels], object],
        go_on: Callable[[], bool],
    ) -> bool:
        """Walk through every plan whose relaxed value plus ``constant`` is below a threshold."""
        return self._elimination.enumerate(
            relaxed.messages, relaxed.lagrangian, lambda: threshold() - constant, visit, go_on
        )

    def least_memory(self) -> tuple[Levels, float]:
        """The plan of least memory (bytes), and a bound that no plan passes; equal where exact."""
        # In units of the fixed part, so that rounding stays small.
        found = self.minimise(0.0, 1.0, np.zeros(len(self.costs.after)))
        return found.levels, found.bound


def _copies(costs: DeviceCosts, who: tuple[int, ...]) -> np.ndarray:
    """Bytes of an element for all distinct types among some operators, by their levels."""
    table = np.zeros([len(costs.dtypes[i]) for i in who])
    for at in np.ndindex(*table.shape):
        copies = {costs.dtypes[i][k]: costs.element_bytes[i][k] for i, k in zip(who, at, strict=True)}
        table[at] = sum(copies[dtype] for dtype in sorted(copies))
    return table


@dataclass(frozen=True)
class Ascent:
    """The best bound of an ascent, and the relaxation that gave it."""

    bound: float
    relaxed: Relaxed | None
    #: What was added to the relaxed tables' sum to make the bound.
    constant: float


def ascend(
    relaxation: Relaxation,
    limit_s: float,
    offer: Callable[[Levels], float],
    go_on: Callable[[], bool],
    *,
    error: float = 1.0,
    rounds: int = 400,
) -> Ascent:
    """Raise the multipliers along their subgradients (Polyak's step) while the bound grows.

    Parameters
    ----------
    relaxation : Relaxation
    limit_s : float
        Time limit; without sensitivities (``error`` 0) the unit in which the least time is bounded.
    offer : callable
        Is given every minimiser; returns the best objective known, in the bound's unit.
    go_on : callable
    error : float
        1 to bound the sum of sensitivities under the limits; 0 to bound time / ``limit_s`` under the
        memory limit.
    """
    costs = relaxation.costs
    bounded = np.isfinite(costs.memory_bytes)
    limits = len(costs.after)
    multipliers = np.zeros(limits + 1)
    if not error:
        multipliers[1:] = 1.0 / limits
    best = Ascent(-np.inf, None, 0.0)
    # Limits may be 0, and are no units then.
    second = max(limit_s, _LEAST_S)
    byte = max(costs.memory_bytes, 1.0)
    best_at = multipliers
    direction = np.zeros_like(multipliers)
    pace, stale = 1.0, 0
    for _ in range(rounds):
        per_byte = multipliers[0] / byte if bounded else 0.0
        relaxed = relaxation.minimise(error, per_byte, multipliers[1:] / second)
        paid = float(multipliers[0] * costs.memory_bytes / byte) if bounded else 0.0
        paid += float(multipliers[1:].sum() * limit_s / second) if error else 0.0
        bound = relaxed.bound - paid
        stale += 1
        if bound > best.bound:
            stale = 0 if bound > best.bound + 1e-9 * abs(bound) else stale
            best = Ascent(bound, relaxed, bound - relaxed.lagrangian)
            best_at = multipliers
        upper = offer(relaxed.levels)
        gap = upper - bound
        if gap <= 1e-9 * abs(upper) or pace < _LEAST_PACE or not go_on():
            break
        if stale >= _PATIENCE:
            # Back to the best place, with shorter steps from there.
            pace, stale, direction = pace / 2, 0, np.zeros_like(multipliers)
            multipliers = best_at
            continue
        priced = Pricing(costs, relaxed.levels)
        times = np.cumsum(priced.slots_s)[costs.after] + costs.tail_s
        slope = np.empty(limits + 1)
        slope[0] = (priced.memory_bytes - costs.memory_bytes) / byte if bounded else 0.0
        slope[1:] = (times - limit_s) / second if error else times / second
        if error:
            # A multiplier at zero whose limit is kept stays there, and must not shorten the step.
            slope[(multipliers <= 0) & (slope < 0)] = 0.0
        else:
            slope[1:] -= slope[1:].mean()
        # Some of the last direction takes the zigzag out of the steps (Camerini et al. 1975).
        back = float(slope @ direction)
        direction = slope - (1.5 * back / float(direction @ direction) if back < 0 else 0.0) * direction
        length = float(direction @ direction)
        if length == 0.0:
            break
        multipliers = multipliers + pace * gap / length * direction
        multipliers[0] = max(multipliers[0], 0.0)
        multipliers[1:] = np.maximum(multipliers[1:], 0.0) if error else _simplex(multipliers[1:])
    return best


def _simplex(weights: np.ndarray) -> np.ndarray:
    """The nearest weights that are not negative and sum to 1 (Duchi et al. 2008)."""
    ordered = np.sort(weights)[::-1]
    over = (np.cumsum(ordered) - 1.0) / np.arange(1, len(weights) + 1)
    least: np.ndarray = np.maximum(weights - over[np.nonzero(ordered > over)[0][-1]], 0.0)
    return least
