"""Calls of HiGHS: the linear relaxation, and branch and bound with progress, cancellation and a start.

The package ``highspy`` is used, not ``scipy.optimize.milp`` (the same solver): only its callbacks report better
plans and bounds while the solver runs and can interrupt it, and only it accepts a start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.errors import MissingDependencyError, install_hint
from cdmpp.plan.precision.linear import LinearProgram
from cdmpp.plan.precision.pricing import Levels
from cdmpp.predict.requests.budget import SearchControl

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
    """Limits of one call of the solver.

    Attributes
    ----------
    control : SearchControl
        Budget and cancellation.
    until_s : float, optional
        ``control.spent_s`` at which this call ends.
    nodes : int, optional
        Limit of branch-and-bound nodes. With it, and a budget that is not reached, equal requests give equal plans.
    seed : int
    """

    control: SearchControl
    until_s: float | None = None
    nodes: int | None = None
    seed: int = 0

    @property
    def left_s(self) -> float:
        """Seconds left; infinite without a budget."""
        left = self.control.left_s
        return left if self.until_s is None else max(min(left, self.until_s - self.control.spent_s), 0.0)


@dataclass(frozen=True)
class Outcome:
    """Result of a call.

    Attributes
    ----------
    values : ndarray or None
        Values of the columns; None where no solution was found.
    bound : float
        Lower bound of the objective; minus infinity where there is none.
    optimal : bool
        The solution is optimal within the solver's tolerance.
    """

    values: np.ndarray | None
    bound: float
    optimal: bool


def relax(program: LinearProgram, effort: Effort) -> Outcome:
    """Solve the linear relaxation of a program."""
    highs = _load(program, effort, integer=False)
    highs.setOptionValue("presolve", "off")  # takes longer than it saves
    _run(highs, effort, lambda values, bound: False)
    optimal = _is_optimal(highs)
    values = np.array(highs.getSolution().col_value) if optimal else None
    return Outcome(values, float(highs.getInfo().objective_function_value) if optimal else -np.inf, optimal)


def branch(program: LinearProgram, start: Levels | None, effort: Effort, listen: Listener) -> Outcome:
    """Solve a program by branch and bound.

    Parameters
    ----------
    program : LinearProgram
    start : list of int, optional
        Levels to begin with; ignored where they break a row.
    effort : Effort
    listen : callable
        Called for every better solution, and regularly in between.
    """
    highs = _load(program, effort, integer=True)
    if start is not None:
        columns = np.concatenate(program.x).astype(np.int32)
        values = np.concatenate([np.arange(len(x)) == level for x, level in zip(program.x, start, strict=True)])
        highs.setSolution(len(columns), columns, values.astype(np.float64))
    _run(highs, effort, listen)
    solution = highs.getSolution()
    return Outcome(
        np.array(solution.col_value) if solution.value_valid else None,
        float(highs.getInfo().mip_dual_bound),
        _is_optimal(highs),
    )


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
