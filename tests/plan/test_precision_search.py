"""Precision plans of the solver against exhaustive search, its bounds, and the smallest limits that work."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cdmpp.errors import InfeasibleError, MissingDependencyError
from cdmpp.plan.precision.milp import Effort, ErrorSearch, Solution, minimise_memory, minimise_time
from cdmpp.plan.precision.pricing import DeviceCosts, Levels, Pricing, best_simple, heap, lowest
from cdmpp.plan.precision.solver import baseline_plans, rounded_up, search
from cdmpp.predict.requests.budget import Progress, SearchControl
from tests.plan.precision_cases import limited, make_costs, problems
from tests.plan.precision_exhaustive import best_levels
from tests.seeds import seeds

pytestmark = pytest.mark.slow


def start(costs: DeviceCosts, limit_s: float) -> Levels:
    return best_simple(costs, heap(costs, lowest(costs), limit_s), limit_s)


def minimise_error(
    costs: DeviceCosts, limit_s: float, effort: Effort, report: Callable[[Solution], None] = lambda _: None
) -> Solution:
    search = ErrorSearch(costs, start(costs, limit_s), limit_s, report)
    search.relax(effort)
    search.branch_and_bound(effort)
    return search.best


def solved(costs: DeviceCosts, limit_s: float, nodes: int | None = None, seed: int = 0) -> Solution:
    return minimise_error(costs, limit_s, Effort(SearchControl(None), nodes=nodes, seed=seed))


def check_against_exhaustive_search(costs: DeviceCosts, limit_s: float) -> None:
    _, least = best_levels(costs, limit_s)
    solution = solved(costs, limit_s)
    assert Pricing(costs, solution.levels).within(limit_s)
    assert solution.objective == pytest.approx(least, rel=1e-9)
    assert solution.proven


@pytest.mark.parametrize("seed", seeds(21))
def test_equal_to_exhaustive_search(seed: int) -> None:
    count = 6 + seed % 7
    share = np.random.default_rng([count, seed]).uniform(0.15, 0.7, 2)
    costs, limit_s = limited(make_costs(count, seed), float(share[0]), float(share[1]))
    if not Pricing(costs, lowest(costs)).within(limit_s):
        limit_s = 2 * limit_s
        costs = replace(costs, memory_bytes=2 * costs.memory_bytes)
    check_against_exhaustive_search(costs, limit_s)


@pytest.mark.parametrize("seed", range(4))
def test_relaxation_alone_bounds_the_best_plan(seed: int) -> None:
    """One node: the rounded relaxation, as on networks that are too large for a proof."""
    costs, limit_s = limited(make_costs(8, 20 + seed), 0.4, 0.5)
    _, least = best_levels(costs, limit_s)
    solution = solved(costs, limit_s, nodes=1)
    assert solution.objective <= 1.02 * least
    assert solution.bound <= least * (1 + 1e-9)


def test_never_worse_than_the_heap_and_never_below_the_bound() -> None:
    for seed in range(3):
        costs, limit_s = limited(make_costs(40, seed), 0.3, 0.4)
        greedy = Pricing(costs, heap(costs, lowest(costs), limit_s))
        assert greedy.within(limit_s)
        for nodes in (1, 100):
            solution = solved(costs, limit_s, nodes)
            assert solution.bound <= solution.objective <= greedy.sensitivity
            assert solution.objective / solution.bound < 1.25


def test_networks_of_50_operators_are_proven() -> None:
    for costs, limit_s in problems(50, range(3)):
        solution = solved(costs, limit_s)
        assert solution.proven
        assert Pricing(costs, solution.levels).within(limit_s)


def test_equal_node_limits_give_equal_plans() -> None:
    costs, limit_s = limited(make_costs(50, 2), 0.3, 0.4)
    for nodes in (1, 20):
        first, second = (solved(costs, limit_s, nodes, seed=3) for _ in range(2))
        assert (first.levels, first.bound) == (second.levels, second.bound)


def test_a_spent_budget_gives_the_start() -> None:
    costs, limit_s = limited(make_costs(30, 0), 0.3, 0.4)
    control = SearchControl(10.0)
    control.stop()
    solution = minimise_error(costs, limit_s, Effort(control))
    assert solution.levels == start(costs, limit_s)
    assert not solution.proven


def test_stop_ends_the_solver_while_it_runs() -> None:
    """The first report stops the search; the solver is interrupted soon after, not at its budget of 300 s."""
    costs, limit_s = limited(make_costs(300, 0), 0.3, 0.4)
    control = SearchControl(300.0)
    reports: list[float] = []

    def stop(solution: Solution) -> None:
        reports.append(solution.objective)
        control.stop()

    solution = minimise_error(costs, limit_s, Effort(control), stop)
    assert not solution.proven
    assert Pricing(costs, solution.levels).within(limit_s)
    assert solution.objective == reports[-1] == min(reports)


def test_other_threads_run_while_the_solver_runs() -> None:
    """A job is cancelled by another thread."""
    costs, limit_s = limited(make_costs(300, 0), 0.3, 0.4)
    control = SearchControl(300.0)
    began = threading.Event()

    def cancel() -> None:
        began.wait()
        control.stop()

    thread = threading.Thread(target=cancel)
    thread.start()
    solution = minimise_error(costs, limit_s, Effort(control), lambda _: began.set())
    thread.join()
    assert not solution.proven


def test_an_error_of_the_listener_is_raised() -> None:
    costs, limit_s = limited(make_costs(50, 2), 0.3, 0.4)
    calls = 0

    def fail(solution: Solution) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:  # the first reports come from outside of the solver
            raise RuntimeError("the listener fails")

    with pytest.raises(RuntimeError, match="the listener fails"):
        minimise_error(costs, limit_s, Effort(SearchControl(None)), fail)
    assert calls == 3


def test_progress_only_improves() -> None:
    costs, limit_s = limited(make_costs(50, 2), 0.3, 0.4)
    best, bound = np.inf, -np.inf

    def check(solution: Solution) -> None:
        nonlocal best, bound
        assert solution.bound <= solution.objective
        assert solution.objective <= best
        assert solution.bound >= bound
        assert Pricing(costs, solution.levels).sensitivity == solution.objective
        best, bound = solution.objective, solution.bound

    minimise_error(costs, limit_s, Effort(SearchControl(None)), check)
    assert best == pytest.approx(bound)


def test_plans_that_exceed_a_limit_by_rounding_are_not_used() -> None:
    """Equal operators: many choices take exactly the limit, and the order of the sum decides on its last bit."""
    costs = make_costs(12, 0, ("float16", "float32"))
    equal = replace(
        costs,
        forward_s=[np.array([0.1, 0.3])] * 12,
        backward_s=[np.array([0.2, 0.6])] * 12,
        sensitivity=[np.array([1.0 + i / 10, 0.0]) for i in range(12)],
        edges=(),
        kept=(),
        memory_bytes=float("inf"),
        after=np.array([23]),
        tail_s=np.array([0.0]),
    )
    for raised in range(1, 11):
        limit_s = 0.3 * 12 + 0.6 * raised
        solution = solved(equal, limit_s)
        assert Pricing(equal, solution.levels).within(limit_s)
        assert solution.objective <= Pricing(equal, start(equal, limit_s)).sensitivity
        # Without the last bit, the most sensitive operators are raised.
        ideal = sum(1.0 + i / 10 for i in range(12 - raised))
        assert solution.bound <= ideal * (1 + 1e-9)


def test_errors_of_very_different_size_are_minimised() -> None:
    """One error is a billion times the others: the solver's tolerance must not hide them."""
    costs, limit_s = limited(make_costs(9, 3), 0.45, 0.6)
    scaled = replace(costs, sensitivity=[row * (1e9 if i == 0 else 1.0) for i, row in enumerate(costs.sensitivity)])
    _, least = best_levels(scaled, limit_s)
    solution = solved(scaled, limit_s)
    assert solution.objective == pytest.approx(least, rel=1e-9)


def test_minimise_time_finds_and_bounds_the_fastest_plan() -> None:
    for seed in range(3):
        costs, _ = limited(make_costs(7, seed), 1.0, 0.3)
        least = min(
            priced.iteration_s
            for levels in product(range(3), repeat=7)
            if (priced := Pricing(costs, levels)).memory_bytes <= costs.memory_bytes
        )
        fastest = minimise_time(costs, minimise_memory(costs).levels)
        assert fastest.bound <= least * (1 + 1e-9)
        assert fastest.objective == pytest.approx(least, rel=1e-9)


def test_minimise_time_ends_at_a_plan_that_is_fast_enough() -> None:
    costs, limit_s = limited(make_costs(20, 1), 0.2, 0.5)
    start = minimise_memory(costs).levels
    fast = minimise_time(costs, start, limit_s)
    assert fast.objective <= limit_s
    assert Pricing(costs, fast.levels).within(limit_s)


def test_minimise_memory_is_exact() -> None:
    for seed in range(3):
        costs = make_costs(7, seed)
        least = min(Pricing(costs, levels).memory_bytes for levels in product(range(3), repeat=7))
        smallest = minimise_memory(costs)
        assert smallest.proven
        assert smallest.objective == pytest.approx(least)
        assert Pricing(costs, smallest.levels).memory_bytes == smallest.objective


def test_devices_share_one_limit() -> None:
    slow, limit_s = limited(make_costs(8, 1), 0.0, 0.7)
    fast = replace(slow, name="fast", workers=3, forward_s=[row / 4 for row in slow.forward_s])
    job = search([slow, fast], None, SearchControl(None), max_steps=8000)
    assert job.limit_of == "start"
    assert job.limit_s == pytest.approx(limit_s)
    first, second = (Pricing(c, s.levels) for c, s in zip([slow, fast], job.solutions, strict=True))
    # The fast device has time for more precision while it waits for the slow one.
    assert second.sensitivity < first.sensitivity
    baselines = {plan.name: plan for plan in baseline_plans([slow, fast], job)}
    assert not baselines["all_float32"].feasible
    lowest_errors = [baselines["all_lowest"].sensitivity, baselines["start"].sensitivity]
    assert lowest_errors == [pytest.approx(4 * Pricing(slow, lowest(slow)).sensitivity)] * 2


def test_the_default_limit_is_the_time_of_the_fastest_plan_of_one_type_that_fits() -> None:
    """The lowest precision is slower than float16 here, and float32 is fastest but does not fit."""
    costs = make_costs(8, 1)
    seconds = [np.array([3.0, 2.0, 1.0])] * costs.size
    costs = replace(costs, forward_s=seconds, backward_s=seconds, edges=(), tail_s=np.zeros(len(costs.after)))
    sixteen_bits = Pricing(costs, [1] * costs.size)
    narrow = replace(costs, memory_bytes=sixteen_bits.memory_bytes)
    assert Pricing(costs, [2] * costs.size).memory_bytes > narrow.memory_bytes
    job = search([narrow], None, SearchControl(None), max_steps=100)
    assert job.limit_s == sixteen_bits.iteration_s < Pricing(costs, lowest(costs)).iteration_s


def test_where_no_plan_of_one_type_fits_the_least_memory_is_the_start() -> None:
    """Copies of the weights can take more than their activations save."""
    costs, _ = limited(make_costs(12, 0, ("float16", "float32")), 0.45, 0.6)
    least_memory = minimise_memory(costs)
    costs = replace(costs, memory_bytes=least_memory.objective)
    assert all(Pricing(costs, [level] * 12).memory_bytes > costs.memory_bytes for level in (0, 1))
    job = search([costs], None, SearchControl(None), max_steps=60_000)
    assert job.limit_s == Pricing(costs, least_memory.levels).iteration_s
    _, least = best_levels(costs, job.limit_s)
    assert job.solutions[0].objective == pytest.approx(least, rel=1e-9)


def test_search_for_any_plan_ends_with_the_budget() -> None:
    costs, _ = limited(make_costs(12, 0, ("float16", "float32")), 0.45, 0.6)
    control = SearchControl(60.0)
    control.stop()
    with pytest.raises(InfeasibleError) as caught:
        search([costs], None, control)
    assert "raise budget_s" in caught.value.hint


def test_memory_that_fits_no_plan_names_what_would() -> None:
    costs = make_costs(8, 2)
    least = minimise_memory(costs).objective
    with pytest.raises(InfeasibleError, match="the plan of least memory needs") as caught:
        search([replace(costs, memory_bytes=least * 0.9)], None, SearchControl(None))
    assert caught.value.path == "devices.0.memory_bytes"
    need = float(caught.value.hint.split()[2].rstrip(","))
    job = search([replace(costs, memory_bytes=need)], None, SearchControl(None), max_steps=500)
    assert Pricing(costs, job.solutions[0].levels).memory_bytes <= need


def test_time_that_fits_no_plan_names_what_would() -> None:
    costs = make_costs(8, 2)
    with pytest.raises(InfeasibleError) as caught:
        search([costs], 1e-5, SearchControl(None))
    assert caught.value.path == "iteration_limit_s"
    need = float(caught.value.hint.split()[2])
    job = search([costs], need, SearchControl(None), max_steps=500)
    assert Pricing(costs, job.solutions[0].levels).iteration_s <= need


@pytest.mark.parametrize("value", [1e-9, 0.123456789, 1.0, 1234567.8])
def test_rounded_up_is_a_limit_that_the_value_meets(value: float) -> None:
    assert value <= rounded_up(value) <= value * 1.00001


def test_without_highspy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    costs, limit_s = limited(make_costs(8, 1), 0.3, 0.4)
    with pytest.raises(MissingDependencyError, match="highspy") as caught:
        solved(costs, limit_s)
    assert ".[plan]" in caught.value.hint


def test_budget_is_shared_by_the_devices() -> None:
    """Progress of both devices is reported within the budget."""
    costs, limit_s = limited(make_costs(40, 1), 0.3, 0.4)
    reports: list[Progress] = []
    control = SearchControl(2.0, reports.append, every_s=0.0)
    job = search(
        [costs, replace(costs, name="second")],
        limit_s,
        control,
        report=lambda job: control.report(best=sum(s.objective for s in job.solutions)),
    )
    assert len(job.solutions) == 2
    assert [report.best for report in reports] == sorted((report.best for report in reports), reverse=True)  # type: ignore[type-var]
