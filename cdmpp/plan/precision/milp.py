"""Best types of one device by mixed-integer programming: smallest error, memory or time.

The solver compares sums up to a tolerance. So levels that it finds count only where :class:`Pricing` finds them
within the limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cdmpp.plan.precision.highs import Effort, branch, relax
from cdmpp.plan.precision.linear import LinearProgram
from cdmpp.plan.precision.pricing import DeviceCosts, Levels, Pricing, lowest
from cdmpp.plan.precision.qsync import heap
from cdmpp.predict.requests.budget import SearchControl

#: Relative difference below which an objective and its bound count as equal.
CLOSE = 1e-9
#: Objective of the known solution in the solver's units, and the solver's tolerance in them.
_SCALE, _TOLERANCE = 1000.0, 1e-6
#: Times that an error is minimised: again where levels break a limit by rounding, or where the error falls below
#: this share of the known one, so that the tolerance is no longer small.
_ROUNDS, _FAR = 8, 1e-3
#: Share by which limits are reduced after levels broke one by rounding: more than the solver's tolerance.
_MARGIN = 1e-8
#: Unit of time where all costs are 0.
_SMALLEST_S = 1e-12
#: Relative effort of the search for levels within the limits, which comes first.
_START_S, _START_NODES = 10.0, 2000


@dataclass
class Solution:
    """Best levels known, their objective, and its lower bound.

    Attributes
    ----------
    levels : list of int
    objective, bound : float
        Error, bytes or seconds.
    """

    levels: Levels
    objective: float
    bound: float

    @property
    def proven(self) -> bool:
        """Whether no levels have a smaller objective."""
        return self.objective - self.bound <= CLOSE * abs(self.objective)

    def offer(self, levels: Levels, objective: float) -> None:
        """Take levels where they are better."""
        if objective < self.objective:
            self.levels, self.objective = list(levels), objective

    def raise_bound(self, bound: float) -> None:
        """Take a lower bound where it is better."""
        self.bound = min(max(self.bound, bound), self.objective)


def minimise_error(
    costs: DeviceCosts,
    start: Levels,
    limit_s: float,
    effort: Effort,
    report: Callable[[Solution], None] = lambda solution: None,
) -> Solution:
    """The smallest sum of sensitivities within the limits.

    Parameters
    ----------
    costs : DeviceCosts
    start : list of int
        Levels within the limits.
    limit_s : float
        Time limit of an iteration.
    effort : Effort
    report : callable
        Called with the solution whenever its levels or its bound may have improved.
    """
    search = ErrorSearch(costs, start, limit_s, report)
    search.relax(effort)
    search.branch_and_bound(effort)
    return search.best


class ErrorSearch:
    """The steps of :func:`minimise_error`, whose parameters it has; ``best`` is the solution so far.

    In the program errors count from ``floor``, the least error of each operator.
    """

    def __init__(self, costs: DeviceCosts, start: Levels, limit_s: float, report: Callable[[Solution], None]) -> None:
        self.costs, self.limit_s, self.report = costs, limit_s, report
        self.floor = float(sum(np.min(errors) for errors in costs.sensitivity))
        self.best = Solution(list(start), Pricing(costs, start).sensitivity, self.floor)

    def relax(self, effort: Effort) -> None:
        """Bound by the linear relaxation; round its solution down, and raise operators from there by the heap.

        It takes a fraction of the time of the branch and bound, and the plan is within 1 % on most networks.
        """
        if self.best.proven or effort.left_s <= 0.0:
            return
        program, unit = self._program(0.0)
        outcome = relax(program, effort)
        if outcome.values is None:
            return
        for levels in (program.levels(outcome.values), program.lowest_levels(outcome.values)):
            if Pricing(self.costs, levels).within(self.limit_s):
                self._offer(heap(self.costs, levels, self.limit_s))
        self._raise_bound(unit, outcome.bound)
        self.report(self.best)

    def branch_and_bound(self, effort: Effort) -> None:
        """Improve the plan until it is proven, or the effort is spent."""
        best, margin = self.best, 0.0
        for _ in range(_ROUNDS):
            if best.proven or effort.left_s <= 0.0:
                break
            known = best.objective - self.floor
            optimal, within = self._branch(margin, effort)
            if not optimal:
                break
            if not within:
                if margin:
                    break
                margin = _MARGIN
            elif best.objective - self.floor >= _FAR * known:
                if not margin:
                    best.bound = best.objective
                break
        if best.proven:  # the difference is rounding
            best.bound = best.objective
        self.report(best)

    def _branch(self, margin: float, effort: Effort) -> tuple[bool, bool]:
        """Branch and bound with limits reduced by ``margin``; whether it finished, and within the limits."""
        program, unit = self._program(margin)

        def listen(values: np.ndarray | None, bound: float) -> bool:
            if values is not None:
                self._offer(program.levels(values))
            if not margin:
                self._raise_bound(unit, bound)
            self.report(self.best)
            return False

        outcome = branch(program, self.best.levels, effort, listen)
        within = outcome.values is not None and self._offer(program.levels(outcome.values))
        if not margin:
            self._raise_bound(unit, outcome.bound)
        return outcome.optimal, within

    def _raise_bound(self, unit: float, bound: float) -> None:
        """Take a bound of the solver, less its tolerance; it is infinite before there is one."""
        if np.isfinite(bound):
            self.best.raise_bound(self.floor + unit * (bound - _TOLERANCE))

    def _offer(self, levels: Levels) -> bool:
        """Take levels where they are better and within the limits; whether they are within."""
        priced = Pricing(self.costs, levels)
        within = priced.within(self.limit_s)
        if within:
            self.best.offer(levels, priced.sensitivity)
        return within

    def _program(self, margin: float) -> tuple[LinearProgram, float]:
        """The program, and the error of one unit of its objective."""
        known = self.best.objective - self.floor
        unit = known / _SCALE
        program = LinearProgram(self.costs)
        for columns, errors in zip(program.x, self.costs.sensitivity, strict=True):
            for column, error in zip(columns, errors - np.min(errors), strict=True):
                if error > known * (1.0 + CLOSE):
                    program.upper[column] = 0.0  # worse than the known solution, whatever the others
                else:
                    program.cost[column] = float(error / unit)
        program.limit_memory(margin)
        limit_s = self.limit_s * (1.0 - margin)
        unit_s = max(limit_s, _SMALLEST_S)
        for end, tail_s in zip(program.ends(unit_s), self.costs.tail_s, strict=True):
            program.upper[end] = max(float((limit_s - tail_s) / unit_s), 0.0)
        return program, unit


def minimise_memory(costs: DeviceCosts, control: SearchControl | None = None) -> Solution:
    """The fewest bytes."""
    start = lowest(costs)
    best = Solution(start, Pricing(costs, start).memory_bytes, costs.fixed_bytes)
    unit = (best.objective - costs.fixed_bytes) / _SCALE
    if unit <= 0.0:
        return best
    program = LinearProgram(costs)
    for columns, size in program.memory():
        for column, value in zip(columns, size, strict=True):
            program.cost[column] += float(value / unit)
    outcome = branch(program, start, _start_effort(control), lambda values, bound: False)
    if outcome.values is not None:
        levels = program.levels(outcome.values)
        best.offer(levels, Pricing(costs, levels).memory_bytes)
    best.raise_bound(best.objective if outcome.optimal else costs.fixed_bytes + unit * outcome.bound)
    return best


def minimise_time(
    costs: DeviceCosts, start: Levels, enough_s: float = 0.0, control: SearchControl | None = None
) -> Solution:
    """The shortest iteration within the memory limit; ends once one of at most ``enough_s`` is found.

    Parameters
    ----------
    costs : DeviceCosts
    start : list of int
        Levels within the memory limit.
    enough_s : float
        Seconds.
    control : SearchControl, optional
    """
    best = Solution(list(start), Pricing(costs, start).iteration_s, 0.0)
    unit_s = best.objective
    if unit_s <= enough_s:
        return best
    program = LinearProgram(costs)
    program.limit_memory()
    iteration = int(program.columns(1, float("inf"))[0])
    program.cost[iteration] = _SCALE
    for end, tail_s in zip(program.ends(unit_s), costs.tail_s, strict=True):
        pair = np.array([iteration, end])
        program.row(pair, np.array([1.0, -1.0]), float(tail_s / unit_s), float("inf"))

    def offer(values: np.ndarray) -> None:
        levels = program.levels(values)
        priced = Pricing(costs, levels)
        if priced.memory_bytes <= costs.memory_bytes:
            best.offer(levels, priced.iteration_s)

    def listen(values: np.ndarray | None, bound: float) -> bool:
        if values is not None:
            offer(values)
        return best.objective <= enough_s

    outcome = branch(program, start, _start_effort(control), listen)
    if outcome.values is not None:
        offer(outcome.values)
    best.raise_bound(unit_s * outcome.bound / _SCALE)
    return best


def _start_effort(control: SearchControl | None) -> Effort:
    whole = SearchControl() if control is None else control
    return Effort(whole.part(_START_S), nodes=_START_NODES)
