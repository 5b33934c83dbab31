"""Fused pipelines: published instances, brute force on tiny ones, memory limits, properties of all plans, the check."""

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.base.solve import predict_prices, solve_priced
from cdmpp.plan.fused import FusedProblem, Model, lower_bound_s, search
from cdmpp.plan.fused.check import check
from cdmpp.plan.fused.list_scheduling import list_schedule, serial_1f1b
from cdmpp.plan.fused.problem import run_orders
from cdmpp.plan.fused.schema import FusedPlan, FusedRequest
from cdmpp.plan.registry import make_plan
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.requests.budget import Progress, SearchControl
from cdmpp.utils.jit import COMPILED

pytestmark = pytest.mark.slow

# Stages and micro-batches of both models, their forward seconds (backward takes twice as long), and the lower
# bound: the instances in the results folder of the FlexFusion repository (RLHFuse, NSDI'25).
PUBLISHED = [
    (8, 4, 32, 16, 5, 4, 708),
    (8, 4, 16, 8, 5, 4, 372),
    (8, 4, 8, 4, 5, 4, 225),
    (8, 8, 32, 32, 5, 2, 702),
    (8, 8, 16, 16, 5, 2, 366),
    (8, 8, 8, 8, 5, 2, 225),
    (16, 8, 64, 32, 2, 2, 618),
    (16, 8, 32, 16, 2, 2, 330),
    (16, 8, 16, 8, 2, 2, 186),
    (16, 16, 64, 64, 2, 1, 606),
    (16, 16, 32, 32, 2, 1, 318),
    (16, 16, 16, 16, 2, 1, 186),
]
SERIAL = [813, 477, 309, 819, 483, 315, 708, 420, 276, 711, 423, 279]


PREDICTED = {"programs": [{"program": {"operator": "linear", "m": 512, "n": 512, "k": 512}}], "device": "t4"}


def published(instance: int, **more: Any) -> dict[str, Any]:
    p, q, m, n, f, g, _ = PUBLISHED[instance]
    return {
        "models": [
            {"stages": p, "micro_batches": m, "forward_s": f, "backward_s": 2 * f, "direction": "down"},
            {"stages": q, "micro_batches": n, "forward_s": g, "backward_s": 2 * g, "direction": "up"},
        ],
        "ranks": p,
        "seed": 0,
        **more,
    }


def test_bound_and_serial_baseline_equal_those_of_the_published_instances() -> None:
    problems = [FusedRequest.model_validate(published(instance)).problem() for instance in range(12)]
    assert [lower_bound_s(problem) for problem in problems] == [row[-1] for row in PUBLISHED]
    assert [serial_1f1b(problem)[1] for problem in problems] == SERIAL


@pytest.mark.parametrize("instance", [1, 5] if COMPILED else [5])
def test_published_instances_are_solved_to_the_bound(instance: int) -> None:
    request = published(instance, budget_s=600, max_steps=800)
    plan = make_plan("pipeline", request)
    assert plan["makespan_s"] == plan["lower_bound_s"] == PUBLISHED[instance][-1]
    assert plan["gap"] == 0
    assert check(FusedRequest.model_validate(request), plan) == []
    FusedPlan.model_validate(plan)


@st.composite
def tiny(draw: st.DrawFn) -> FusedProblem:
    ranks = draw(st.integers(1, 3))
    divisors = [d for d in (1, 2, 3) if ranks % d == 0]
    second = st.sampled_from([1.0, 2.0, 3.5])
    model = st.builds(
        Model, st.sampled_from(divisors), st.integers(1, 2), second, second, st.sampled_from(["down", "up"])
    )
    return FusedProblem(ranks, tuple(draw(st.lists(model, min_size=1, max_size=2))))


@settings(max_examples=20)
@given(tiny())
def test_search_finds_the_optimum_of_tiny_problems(problem: FusedProblem) -> None:
    result = search(problem, seed=1, max_steps=800)
    assert result.schedule.makespan_s == pytest.approx(optimal_makespan_s(problem), rel=1e-9)
    assert result.lower_bound_s <= result.schedule.makespan_s * (1 + 1e-9)


def optimal_makespan_s(problem: FusedProblem) -> float:
    """Least makespan, by enumeration of all active schedules except those that cannot beat the best so far.

    Giffler and Thompson (1960): on the rank where a task can end first, every task that can start before that
    end is tried. Micro-batches are equal, so they keep their order within a model, stage and pass.
    """
    tasks = problem.tasks
    groups = len(tasks.count)
    best = np.inf

    def visit(done: tuple[int, ...], ends: dict[tuple[int, int], float], free: tuple[float, ...]) -> None:
        nonlocal best
        ready = {}
        for g in range(groups):
            i, p = done[g], tasks.before[g]
            if i < tasks.count[g] and (p < 0 or done[p] > i):
                ready[g] = max(free[tasks.rank[g]], ends[p, i] + tasks.lag[g] if p >= 0 else 0.0)
        if not ready:
            best = min(best, max(free))
            return
        if max(start + tasks.duration[g] + tasks.tail[g] for g, start in ready.items()) >= best - 1e-9:
            return
        work = [0.0] * problem.ranks
        for g in range(groups):
            work[tasks.rank[g]] += (tasks.count[g] - done[g]) * tasks.duration[g]
        if max(f + w for f, w in zip(free, work, strict=True)) >= best - 1e-9:
            return
        first = min(ready, key=lambda g: ready[g] + tasks.duration[g])
        rank, end = tasks.rank[first], ready[first] + tasks.duration[first]
        for g in sorted(ready, key=lambda g: ready[g]):
            if tasks.rank[g] == rank and ready[g] < end:
                over = ready[g] + tasks.duration[g]
                visit(
                    tuple(n + (k == g) for k, n in enumerate(done)),
                    {**ends, (g, done[g]): over},
                    tuple(over if r == rank else f for r, f in enumerate(free)),
                )

    visit((0,) * groups, {}, (0.0,) * problem.ranks)
    return float(best)


@pytest.mark.parametrize("limit", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("directions", [("down", "up"), ("down", "down")])
def test_search_finds_the_optimum_under_a_memory_limit(limit: float, directions: tuple[Any, Any]) -> None:
    models = (Model(2, 2, 2.0, 3.0, directions[0]), Model(2, 1, 1.0, 4.0, directions[1]))
    problem = FusedProblem(2, models, limit)
    spans = []
    for order in itertools.product(*(rank_orders(problem, row.tolist()) for row in problem.tasks.by_rank())):
        if max(held.max() for held in problem.tasks.held(order)) <= limit:
            try:
                spans.append(float(run_orders(problem, order)[1].max()))
            except FieldError:
                continue  # a deadlock
    result = search(problem, seed=0, max_steps=2000)
    assert result.schedule.makespan_s == min(spans)
    assert result.lower_bound_s <= min(spans)


def rank_orders(problem: FusedProblem, numbers: list[int]) -> Iterator[list[int]]:
    """Every order of a rank's tasks in which passes of a kind keep their order, and F comes before its B."""
    tasks = problem.tasks
    for sequence in sorted(set(itertools.permutations(tasks.group[numbers].tolist()))):
        queues = {g: iter([n for n in numbers if tasks.group[n] == g]) for g in sequence}
        order = [next(queues[g]) for g in sequence]
        held = np.cumsum(
            np.where(tasks.forward[tasks.group[order]], 1, -1)[:, None]
            * (tasks.model[tasks.group[order]][:, None] == np.arange(len(problem.models))),
            axis=0,
        )
        if (held >= 0).all():
            yield order


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6]))
    seconds = st.floats(1e-4, 1e-2)
    model = st.fixed_dictionaries(
        {
            "stages": st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]),
            "micro_batches": st.integers(1, 5),
            "forward_s": seconds,
            "backward_s": seconds,
            "direction": st.sampled_from(["down", "up"]),
            "activation": st.floats(0.5, 3.0),
        }
    )
    return {
        "models": draw(st.lists(model, min_size=1, max_size=3)),
        "ranks": ranks,
        "max_activations": draw(st.none() | st.floats(3.0, 12.0)),
        "budget_s": 600,
        "max_steps": 40,
        "seed": draw(st.integers(0, 5)),
    }


@settings(max_examples=20)
@given(requests())
def test_every_plan_passes_the_check_and_beats_its_baselines(request: dict[str, Any]) -> None:
    plan = make_plan("pipeline", request)
    FusedPlan.model_validate(plan)
    assert check(FusedRequest.model_validate(request), json.loads(json.dumps(plan))) == []
    assert plan["makespan_s"] <= min(plan["baselines"].values())
    assert plan["makespan_s"] >= plan["lower_bound_s"]
    if request["max_activations"] is not None:
        assert max(plan["rank_peak_activations"]) <= request["max_activations"] * (1 + 1e-9)


def test_equal_requests_give_equal_plans_and_seeds_differ() -> None:
    request = published(4, budget_s=600, max_steps=200)
    first, again = (make_plan("pipeline", request) for _ in range(2))
    assert first == again
    other = make_plan("pipeline", {**request, "seed": 1})
    assert other["order"] != first["order"]


def test_makespan_grows_as_memory_shrinks_to_one_activation() -> None:
    request = published(5, budget_s=600, max_steps=300)
    spans = [make_plan("pipeline", {**request, "max_activations": most})["makespan_s"] for most in (8, 4, 2, 1)]
    assert spans == sorted(spans)
    # One micro-batch of one model at a time: (5 + 10) * 8 stages and (2 + 4) * 8, eight times each.
    assert spans[-1] <= 8 * (15 * 8 + 6 * 8)
    with pytest.raises(InfeasibleError, match="at least 1 is needed") as error:
        make_plan("pipeline", {**request, "max_activations": 0.99})
    assert error.value.path == "max_activations"


def test_explanation_names_what_determines_the_bound() -> None:
    for instance, limit, text in (
        (5, None, "model 0 alone takes as long"),
        (1, None, "one rank sets the lower bound"),
        (5, 2, "the memory limit sets the lower bound"),
    ):
        plan = make_plan("pipeline", published(instance, max_activations=limit, budget_s=600, max_steps=2))
        assert any(text in line for line in plan["explanation"])


def test_memory_falls_to_that_of_the_larger_model_alone() -> None:
    # The published plan of this instance holds 8 activations of the first model: what 1F1B holds.
    request = published(5, budget_s=600, max_steps=1500)
    request["models"][0]["activation"], request["models"][1]["activation"] = 1.95, 1.0
    plan = make_plan("pipeline", request)
    assert plan["makespan_s"] == 225
    assert plan["peak_activations"] == pytest.approx(8 * 1.95)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"ranks": 12}, "models.0.stages"),
        ({"models": []}, "models"),
        ({"models": [{"stages": 8, "micro_batches": 1, "forward_s": 1}]}, "models.0"),
        ({"models": [{"stages": 8, "micro_batches": 1, "forward_s": 1, "backward_s": 0}]}, "models.0.backward_s"),
        ({"models": [{"stages": 8, "micro_batches": 1, "forward_s": 1e9, "backward_s": 1e-9}]}, "models"),
        ({"models": [{**published(5)["models"][1], "forward": PREDICTED}]}, "models.0"),
    ],
)
def test_invalid_requests_are_refused_with_their_path(change: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError) as error:
        make_plan("pipeline", {**published(1), **change})
    assert error.value.path == path


def test_progress_reports_better_and_better_plans() -> None:
    reports: list[Progress] = []
    request = FusedRequest.model_validate(published(4, budget_s=600, max_steps=400))
    plan = request.solve(SearchControl(60, reports.append, every_s=0.0))
    makespans = [report.best for report in reports if report.best is not None]
    assert makespans == sorted(makespans, reverse=True) and makespans[-1] == plan.makespan_s
    assert reports[-1].answer is not None and reports[-1].answer() == plan


@pytest.mark.skipif(not COMPILED, reason="numba is not installed")
def test_compiled_and_interpreted_list_schedules_are_equal() -> None:
    problem = FusedRequest.model_validate(published(2)).problem()
    tasks = problem.tasks
    rng = np.random.default_rng(0)
    for limit, patience in ((np.inf, 0.5), (9.0, 0.5), (np.inf, -1.0), (9.0, -1.0)):
        priority = rng.normal(size=tasks.size)
        window, limits = np.full(len(tasks.count), 4), np.full(problem.ranks, limit)
        results = []
        for function in (list_schedule, list_schedule.py_func):  # type: ignore[attr-defined]
            start, peak = np.zeros(tasks.size), np.zeros(problem.ranks)
            makespan = function(
                tasks.arrays, window, limits, limit < 10, priority, patience, start, peak, np.zeros(1, np.int64)
            )
            results.append((makespan, start.tolist(), peak.tolist()))
        assert results[0] == results[1]


def test_activations_in_bytes_are_limited_by_the_memory_that_the_weights_leave() -> None:
    def request(**more: Any) -> dict[str, Any]:
        model = {"stages": 2, "micro_batches": 4, "forward_s": 1, "backward_s": 2}
        value: dict[str, Any] = {"ranks": 2, "max_steps": 2, "budget_s": 60, **more}
        return {"models": [{**model, "activation_bytes": 10e9, "weight_bytes": 40e9}], **value}

    free, limited = make_plan("pipeline", request()), make_plan("pipeline", request(memory_bytes=55e9))
    assert free["peak_activations"] == 20e9 and limited["peak_activations"] == 10e9
    assert any("no cost names a device of known capacity" in line for line in free["explanation"])
    assert not any("memory was not checked" in line for line in limited["explanation"])
    with pytest.raises(InfeasibleError, match=r"needs 50\.0 GB .* of the 49\.0 GB") as error:
        make_plan("pipeline", request(memory_bytes=49e9))
    assert error.value.path == "models"
    ignored = make_plan("pipeline", request(memory_bytes=49e9, ignore_memory=True))
    assert ignored["makespan_s"] == free["makespan_s"]
    stated = {**published(2), "max_activations": 0.5, "ignore_memory": True}
    assert make_plan("pipeline", {**stated, "max_steps": 2})["peak_activations"] >= 1
    with pytest.raises(FieldError, match="activation_bytes: missing"):
        make_plan("pipeline", {**published(2), "memory_bytes": 1e9})


# The check


CHECKED: dict[str, Any] = {
    "models": [
        {"stages": 2, "micro_batches": 3, "forward_s": 1, "backward_s": 2, "direction": "down"},
        {"stages": 1, "micro_batches": 2, "forward_s": 1, "backward_s": 1, "direction": "up"},
    ],
    "ranks": 2,
    "max_activations": 3,
    "budget_s": 600,
    "max_steps": 100,
}


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return make_plan("pipeline", CHECKED)


def faults(answer: Any) -> list[str]:
    return check(FusedRequest.model_validate(CHECKED), answer)


def test_correct_plans_pass_with_and_without_optional_fields(plan: dict[str, Any]) -> None:
    assert faults(plan) == []
    required = ("makespan_s", "baselines", "lower_bound_s", "gap", "peak_activations", "order")
    assert faults({name: plan[name] for name in required} | {"unknown": 1}) == []


def move_to_other_rank(plan: dict[str, Any]) -> None:
    plan["order"][1].append({**plan["order"][0].pop(), "copy": 5})


def overlap_passes(plan: dict[str, Any]) -> None:
    first, second = plan["order"][0][:2]
    length = second["end_s"] - second["start_s"]
    second.update(start_s=first["start_s"], end_s=first["start_s"] + length)


def start_too_early(plan: dict[str, Any]) -> None:
    # The last rank's first pass of model 0 needs the one of rank 0.
    next(step for step in plan["order"][1] if step["model"] == 0).update(start_s=0.0, end_s=1.0)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda p: p["baselines"].update(serial_1f1b=2 * p["baselines"]["serial_1f1b"]), "baselines.serial_1f1b: "),
        (lambda p: p["baselines"].update(greedy=1 + p["baselines"]["greedy"]), "baselines.greedy: "),
        (lambda p: p["baselines"].update(serial_1f1b=p["makespan_s"] - 1), "shorter than the plan"),
        (lambda p: p.update(baselines={}), "baselines: Dictionary should have at least 1 item"),
        (lambda p: p.update(interval={"lower_s": 1.0, "upper_s": 99.0}), "interval: given, but no cost is predicted"),
        (
            lambda p: p["rank_peak_activations"].append(p["rank_peak_activations"].pop() - 0.5),
            "rank_peak_activations.1: ",
        ),
        (lambda p: p["order"][0].pop(), "1 passes are missing"),
        (lambda p: p["order"][0].append(p["order"][0][-1]), "runs twice"),
        (move_to_other_rank, "does not belong on rank 1"),
        (lambda p: p["order"].pop(), "1 ranks, the request has 2"),
        (lambda p: p["order"][0][0].update(end_s=p["order"][0][0]["end_s"] - 0.5), "its cost is"),
        (overlap_passes, "the previous pass ends"),
        (start_too_early, "F of micro-batch 0, model 0 copy 0 stage 0 ends at"),
        (lambda p: p["order"][0].reverse(), "deadlock"),
        (lambda p: p["order"][0][0].update({"pass": "forward"}), "order.0.0.pass"),
        (lambda p: p.update(makespan_s=p["makespan_s"] - 1), "the last pass ends at"),
        (lambda p: p.update(peak_activations=p["peak_activations"] - 1), "the order holds"),
        (lambda p: p.update(lower_bound_s=p["makespan_s"] + 1), "above makespan_s"),
        (lambda p: p.update(gap=0.5), "gap: 0.5"),
    ],
)
def test_each_fault_is_reported(plan: dict[str, Any], spoil: Callable[[dict[str, Any]], None], text: str) -> None:
    spoiled = copy.deepcopy(plan)
    spoil(spoiled)
    assert text in "\n".join(faults(spoiled))


def test_values_that_are_no_plan_and_exceeded_limits_are_faults(plan: dict[str, Any]) -> None:
    assert all(faults(answer) for answer in (None, [], {}, {"order": 3}, "text"))
    tight = FusedRequest.model_validate({**CHECKED, "max_activations": 1})
    loose = make_plan("pipeline", {**CHECKED, "max_activations": None})
    assert any("max_activations is 1" in fault for fault in check(tight, loose))
    spoiled = copy.deepcopy(plan)
    for step in itertools.chain(*spoiled["order"]):
        step["micro_batch"] += 100
    assert len(faults(spoiled)) == 21 and faults(spoiled)[-1].startswith("and ")


def test_interval_of_predicted_costs_is_simulated_again(predictor: LatencyPredictor) -> None:
    first, second = ({**model, "backward_s": 1e-4} for model in CHECKED["models"])
    models = [{**first, "forward_s": None, "forward": PREDICTED}, {**second, "forward_s": 1e-4}]
    request = FusedRequest.model_validate({**CHECKED, "models": models})
    prices = predict_prices(request.price_requests(), predictor)
    answer = solve_priced(request, prices).to_json()
    assert check(request, answer, prices) == []
    for name in ("lower_s", "upper_s"):
        wrong = {**answer, "interval": {**answer["interval"], name: 0.5 * answer["interval"][name]}}
        assert [fault.partition(":")[0] for fault in check(request, wrong, prices)] == [f"interval.{name}"]
    assert check(request, {**answer, "interval": None}, prices) == ["interval: missing, and costs are predicted"]


# Transfers, against a simulation of this file


def simulated_s(request: dict[str, Any], order: list[list[dict[str, Any]]]) -> float:
    """Makespan of a plan's orders: passes of stages on ranks, with a transfer between neighbouring stages."""
    ranks, ends, queues, free = request["ranks"], {}, [list(row) for row in order], [0.0] * request["ranks"]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                m, copy, way, i = (queue[0][name] for name in ("model", "copy", "pass", "micro_batch"))
                model = request["models"][m]
                stage = (rank if model["direction"] == "down" else ranks - 1 - rank) - copy * model["stages"]
                if way == "F":
                    before, lag = ((m, copy, stage - 1, "F", i), model["transfer_s"]) if stage else (None, 0.0)
                elif stage == model["stages"] - 1:
                    before, lag = (m, copy, stage, "F", i), 0.0
                else:
                    before, lag = (m, copy, stage + 1, "B", i), model["transfer_s"]
                if before is not None and before not in ends:
                    break
                start = max(free[rank], 0.0 if before is None else ends[before] + lag)
                free[rank] = start + model["forward_s" if way == "F" else "backward_s"]
                ends[m, copy, stage, way, i] = free[rank]
                queue.pop(0)
    return max(ends.values())


@settings(max_examples=25)
@given(requests(), st.floats(0, 1e-2))
def test_plans_with_transfers_take_as_long_as_simulated(request: dict[str, Any], transfer_s: float) -> None:
    for m, model in enumerate(request["models"]):
        model["transfer_s"] = transfer_s * (m + 1)
    plan = make_plan("pipeline", request)
    assert check(FusedRequest.model_validate(request), plan) == []
    assert plan["makespan_s"] == pytest.approx(simulated_s(request, plan["order"]), rel=1e-12)
    assert plan["lower_bound_s"] <= plan["makespan_s"] * (1 + 1e-12)
    # Without its transfers each plan is possible, and not shorter than the bound of that request.
    for model in request["models"]:
        model["transfer_s"] = 0.0
    assert (
        simulated_s(request, plan["order"]) >= lower_bound_s(FusedRequest.model_validate(request).problem()) * 0.999999
    )


@settings(max_examples=20)
@given(tiny(), st.sampled_from([0.5, 1.0, 3.0]))
def test_search_finds_the_optimum_of_tiny_problems_with_transfers(problem: FusedProblem, transfer_s: float) -> None:
    models = tuple(replace(model, transfer_s=transfer_s * (m + 1)) for m, model in enumerate(problem.models))
    problem = FusedProblem(problem.ranks, models)
    result = search(problem, seed=1, max_steps=800)
    assert result.schedule.makespan_s == pytest.approx(optimal_makespan_s(problem), rel=1e-9)
    assert result.lower_bound_s <= result.schedule.makespan_s * (1 + 1e-9)


def test_transfers_lengthen_the_plan_by_at_least_a_round_trip() -> None:
    request = published(5, budget_s=600, max_steps=200)
    plain = make_plan("pipeline", request)
    for model in request["models"]:
        model["transfer_s"] = 0.5
    sent = make_plan("pipeline", request)
    assert sent["lower_bound_s"] == plain["lower_bound_s"] + 2 * 7 * 0.5
    assert sent["makespan_s"] >= sent["lower_bound_s"] and sent["costs"][0]["transfer_s"] == 0.5
    assert "transfer_s" not in plain["costs"][0]
