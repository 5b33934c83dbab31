"""Check of fused pipeline plans: every kind of fault is reported, and a correct plan passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from cdmpp.plan.base.solve import predict_prices, solve_priced
from cdmpp.plan.fused.check import check
from cdmpp.plan.fused.schema import FusedRequest
from cdmpp.plan.registry import make_plan
from cdmpp.predict.predictor import LatencyPredictor

REQUEST: dict[str, Any] = {
    "models": [
        {"stages": 2, "micro_batches": 3, "forward_s": 1, "backward_s": 2, "direction": "down"},
        {"stages": 1, "micro_batches": 2, "forward_s": 1, "backward_s": 1, "direction": "up"},
    ],
    "ranks": 2,
    "max_activations": 3,
    "budget_s": 600,
    "max_steps": 100,
}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def plan() -> Json:
    return make_plan("pipeline", REQUEST)


def faults(answer: Any) -> list[str]:
    return check(FusedRequest.model_validate(REQUEST), answer)


def test_correct_plans_pass_with_and_without_optional_fields(plan: Json) -> None:
    assert faults(plan) == []
    required = ("makespan_s", "baselines", "lower_bound_s", "gap", "peak_activations", "order")
    assert faults({name: plan[name] for name in required} | {"unknown": 1}) == []


def drop_pass(plan: Json) -> None:
    del plan["order"][0][-1]


def repeat_pass(plan: Json) -> None:
    plan["order"][0].append(plan["order"][0][-1])


def move_to_other_rank(plan: Json) -> None:
    plan["order"][1].append(plan["order"][0].pop())
    plan["order"][1][-1]["copy"] = 5


def drop_rank(plan: Json) -> None:
    del plan["order"][1]


def shorten_pass(plan: Json) -> None:
    plan["order"][0][0]["end_s"] -= 0.5


def overlap_passes(plan: Json) -> None:
    row = plan["order"][0]
    length = row[1]["end_s"] - row[1]["start_s"]
    row[1]["start_s"] = row[0]["start_s"]
    row[1]["end_s"] = row[1]["start_s"] + length


def start_too_early(plan: Json) -> None:
    # The last rank's first pass of model 0 needs the one of rank 0.
    step = next(s for s in plan["order"][1] if s["model"] == 0)
    step["start_s"], step["end_s"] = 0.0, 1.0


def reverse_rank(plan: Json) -> None:
    plan["order"][0].reverse()


def lower_makespan(plan: Json) -> None:
    plan["makespan_s"] -= 1


def lower_peak(plan: Json) -> None:
    plan["peak_activations"] -= 1


def raise_bound(plan: Json) -> None:
    plan["lower_bound_s"] = plan["makespan_s"] + 1


def change_gap(plan: Json) -> None:
    plan["gap"] = 0.5


def beat_plan(plan: Json) -> None:
    plan["baselines"]["serial_1f1b"] = plan["makespan_s"] - 1


def invent_longer_baseline(plan: Json) -> None:
    plan["baselines"]["serial_1f1b"] *= 2


def invent_longer_greedy(plan: Json) -> None:
    plan["baselines"]["greedy"] += 1


def invent_interval(plan: Json) -> None:
    plan["interval"] = {"lower_s": 1.0, "upper_s": 99.0}


def lower_peak_of_a_rank(plan: Json) -> None:
    plan["rank_peak_activations"][1] -= 0.5


def drop_baselines(plan: Json) -> None:
    plan["baselines"] = {}


def misspell_pass(plan: Json) -> None:
    plan["order"][0][0]["pass"] = "forward"


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (invent_longer_baseline, "baselines.serial_1f1b: "),
        (invent_longer_greedy, "baselines.greedy: "),
        (invent_interval, "interval: given, but no cost is predicted"),
        (lower_peak_of_a_rank, "rank_peak_activations.1: "),
        (drop_pass, "1 passes are missing"),
        (repeat_pass, "runs twice"),
        (move_to_other_rank, "does not belong on rank 1"),
        (drop_rank, "1 ranks, the request has 2"),
        (shorten_pass, "its cost is"),
        (overlap_passes, "the previous pass ends"),
        (start_too_early, "F of micro-batch 0, model 0 copy 0 stage 0 ends at"),
        (reverse_rank, "deadlock"),
        (lower_makespan, "the last pass ends at"),
        (lower_peak, "the order holds"),
        (raise_bound, "above makespan_s"),
        (change_gap, "gap: 0.5"),
        (beat_plan, "shorter than the plan"),
        (drop_baselines, "baselines: Dictionary should have at least 1 item"),
        (misspell_pass, "order.0.0.pass"),
    ],
)
def test_each_fault_is_reported(plan: Json, spoil: Callable[[Json], None], text: str) -> None:
    spoiled = copy.deepcopy(plan)
    spoil(spoiled)
    assert text in "\n".join(faults(spoiled))


@pytest.mark.parametrize("answer", [None, [], {}, {"order": 3}, "text"])
def test_values_that_are_no_plan_are_faults(answer: Any) -> None:
    assert faults(answer)


def test_exceeded_memory_limit_is_reported() -> None:
    tight = FusedRequest.model_validate({**REQUEST, "max_activations": 1})
    loose = make_plan("pipeline", {**REQUEST, "max_activations": None})
    assert any("max_activations is 1" in fault for fault in check(tight, loose))


def test_at_most_twenty_faults_are_listed(plan: Json) -> None:
    spoiled = copy.deepcopy(plan)
    for row in spoiled["order"]:
        for step in row:
            step["micro_batch"] += 100
    assert len(faults(spoiled)) == 21 and faults(spoiled)[-1].startswith("and ")


def test_interval_of_predicted_costs_is_simulated_again(predictor: LatencyPredictor) -> None:
    cost = {"programs": [{"program": {"operator": "linear", "m": 512, "n": 512, "k": 512}}], "device": "t4"}
    value = {**REQUEST, "models": [{**REQUEST["models"][0], "forward_s": None, "forward": cost}, REQUEST["models"][1]]}
    value["models"][0]["backward_s"] = value["models"][1]["forward_s"] = value["models"][1]["backward_s"] = 1e-4
    request = FusedRequest.model_validate(value)
    prices = predict_prices(request.price_requests(), predictor)
    answer = solve_priced(request, prices).to_json()
    assert check(request, answer, prices) == []
    for name in ("lower_s", "upper_s"):
        wrong = {**answer, "interval": {**answer["interval"], name: 0.5 * answer["interval"][name]}}
        assert [fault.partition(":")[0] for fault in check(request, wrong, prices)] == [f"interval.{name}"]
    assert check(request, {**answer, "interval": None}, prices) == ["interval: missing, and costs are predicted"]
