"""Best types of one device by mixed-integer programming: smallest error, memory or time.

The columns and rows of the program (:class:`LinearProgram`):

- ``x[i][k]``, binary: operator i computes in its type k; one type for each operator.
- For each edge and pair of types a column in [0, 1], whose sums over either end are the ends' ``x``. It is 1 for
  the chosen pair, so a cast costs its table entry. These equations make the linear relaxation tight.
- For each shared tensor and type a column that is at least the ``x`` of every consumer in that type: its copy.
- For each exchange the time at which its gradients are ready: the time of the one before plus the slots between.

The package ``highspy`` is used, not ``scipy.optimize.milp`` (the same solver): only its callbacks report better
plans and bounds while the solver runs and can interrupt it, and only it accepts a start. The solver compares sums up
to a tolerance. So levels that it finds count only where :class:`Pricing` finds them within the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.errors import MissingDependencyError, install_hint
from cdmpp.plan.precision.pricing import DeviceCosts, Levels, Pricing, heap, lowest
from cdmpp.predict.requests.budget import SearchControl

Terms = tuple[np.ndarray, np.ndarray]
_INF = float("inf")


class LinearProgram:
    """Columns and rows of one device; starts with ``x`` and one row per operator.

    ``x``: column numbers by operator and level. ``cost``, ``upper``: objective and upper bound of each column; lower
    bounds are 0. ``rows``: (indexes, values) of each.
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


_OPTIONS = {
    "output_flag": False,
    # One thread: the same request gives the same plan, and plans for several users run side by side.
    "threads": 1,
    "parallel": "off",
    "mip_rel_gap": 1e-10,
    "mip_abs_gap": 1e-7,
    "mip_feasibility_tolerance": 1e-9,
    "primal_feasibility_tolerance": 1e-9,
    "dual_feasibility_tolerance": 1e-9,
    "small_matrix_value": 1e-12,
}
#: Called with the values of a better solution (or None) and the lower bound; True ends the search.
Listener = Callable[[np.ndarray | None, float], bool]


@dataclass(frozen=True)
class Effort:
    """Limits of one call of the solver."""

    control: SearchControl  # budget and cancellation
    until_s: float | None = None  # ``control.spent_s`` at which this call ends
    # Limit of branch-and-bound nodes. With it, and a budget that is not reached, equal requests give equal plans.
    nodes: int | None = None
    seed: int = 0

    @property
    def left_s(self) -> float:
        """Seconds left; infinite without a budget."""
        left = self.control.left_s
        return left if self.until_s is None else max(min(left, self.until_s - self.control.spent_s), 0.0)


@dataclass(frozen=True)
class SolverOutcome:
    """Result of a call."""

    values: np.ndarray | None  # values of the columns; None where no solution was found
    bound: float  # lower bound of the objective; minus infinity where there is none
    optimal: bool  # the solution is optimal within the solver's tolerance


def relax(program: LinearProgram, effort: Effort) -> SolverOutcome:
    """Solve the linear relaxation of a program."""
    highs = _load(program, effort, integer=False)
    highs.setOptionValue("presolve", "off")  # takes longer than it saves
    _run(highs, effort, lambda values, bound: False)
    optimal = _is_optimal(highs)
    values = np.array(highs.getSolution().col_value) if optimal else None
    return SolverOutcome(values, float(highs.getInfo().objective_function_value) if optimal else -np.inf, optimal)


def branch(program: LinearProgram, start: Levels | None, effort: Effort, listen: Listener) -> SolverOutcome:
    """Solve a program by branch and bound from ``start`` (ignored where it breaks a row).

    ``listen``: called for every better solution, and regularly in between.
    """
    highs = _load(program, effort, integer=True)
    if start is not None:
        columns = np.concatenate(program.x).astype(np.int32)
        values = np.concatenate([np.arange(len(x)) == level for x, level in zip(program.x, start, strict=True)])
        highs.setSolution(len(columns), columns, values.astype(np.float64))
    _run(highs, effort, listen)
    solution, bound = highs.getSolution(), float(highs.getInfo().mip_dual_bound)
    return SolverOutcome(np.array(solution.col_value) if solution.value_valid else None, bound, _is_optimal(highs))


def _load(program: LinearProgram, effort: Effort, integer: bool) -> Any:
    try:
        import highspy
    except ImportError:
        raise MissingDependencyError("precision plans need highspy", hint=install_hint("plan")) from None
    highs = highspy.Highs()
    options: dict[str, Any] = {**_OPTIONS, "random_seed": effort.seed % 2**31, "time_limit": effort.left_s}
    if effort.nodes is not None:
        options["mip_max_nodes"] = effort.nodes
    for name, value in options.items():
        highs.setOptionValue(name, value)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.rows)
    lp.col_cost_, lp.col_upper_ = np.array(program.cost), np.array(program.upper)
    lp.col_lower_ = np.zeros(lp.num_col_)
    lp.row_lower_, lp.row_upper_ = np.array(program.row_lower), np.array(program.row_upper)
    if integer:
        kinds = [highspy.HighsVarType.kContinuous] * lp.num_col_
        for column in np.concatenate(program.x):
            kinds[column] = highspy.HighsVarType.kInteger
        lp.integrality_ = kinds
    matrix = lp.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.num_col_, matrix.num_row_ = lp.num_col_, lp.num_row_
    matrix.start_ = np.cumsum([0, *(len(index) for index, _ in program.rows)]).astype(np.int32)
    matrix.index_ = np.concatenate([index for index, _ in program.rows]).astype(np.int32)
    matrix.value_ = np.concatenate([value for _, value in program.rows])
    status = highs.passModel(lp)
    assert status != highspy.HighsStatus.kError, "the solver refuses the program"
    return highs


def _run(highs: Any, effort: Effort, listen: Listener) -> None:
    """Run the solver; exceptions of the listener end it and are raised here."""
    failures: list[BaseException] = []

    def interrupt(event: Any) -> None:
        try:
            if failures or effort.left_s <= 0.0 or listen(None, event.data_out.mip_dual_bound):
                event.interrupt()
        except BaseException as error:  # nothing may be raised through the solver's own frames
            failures.append(error)
            event.interrupt()

    def improved(event: Any) -> None:
        try:
            listen(np.array(event.data_out.mip_solution), event.data_out.mip_dual_bound)
        except BaseException as error:
            failures.append(error)

    highs.cbSimplexInterrupt += interrupt
    highs.cbMipInterrupt += interrupt
    highs.cbMipImprovingSolution += improved
    highs.run()
    if failures:
        raise failures[0]


def _is_optimal(highs: Any) -> bool:
    from highspy import HighsModelStatus

    return bool(highs.getModelStatus() == HighsModelStatus.kOptimal)


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
    """Best levels known, their objective, and its lower bound."""

    levels: Levels
    # Error, bytes or seconds.
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


class ErrorSearch:
    """Search for the smallest sum of sensitivities within the limits; ``best`` is the solution so far.

    In the program errors count from ``floor``, the least error of each operator. ``start`` has levels within the
    limits. ``report`` is called with the solution whenever its levels or its bound may have improved.
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
    """The shortest iteration within the memory limit, from levels within it; ends once it takes ``enough_s``."""
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
