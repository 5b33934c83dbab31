"""The check of fused pipelines: every kind of fault is found, and a right answer passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from cdmpp.planning.fused.check import check
from cdmpp.planning.fused.schema import FusedRequest
from cdmpp.planning.registry import make_plan

REQUEST: dict[str, Any] = {
    "models": [
        {"stages": 2, "micro_batches": 3, "forward_s": 1, "backward_s": 2, "direction": "down"},
        {"stages": 1, "micro_batches": 2, "forward_s": 1, "backward_s": 1, "direction": "up"},
    ],
    "ranks": 2,
    "max_activations": 3,
    "budget_s": 60,
    "max_steps": 100,
}
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def right() -> Answer:
    return make_plan("pipeline", REQUEST)


def faults(answer: Any) -> list[str]:
    return check(FusedRequest.model_validate(REQUEST), answer)


def test_a_right_answer_passes_with_or_without_what_others_leave_out(right: Answer) -> None:
    assert faults(right) == []
    contract = ("makespan_s", "baselines", "lower_bound_s", "gap", "peak_activations", "order")
    assert faults({name: right[name] for name in contract} | {"more": 1}) == []


def lost(answer: Answer) -> None:
    del answer["order"][0][-1]


def twice(answer: Answer) -> None:
    answer["order"][0].append(answer["order"][0][-1])


def elsewhere(answer: Answer) -> None:
    answer["order"][1].append(answer["order"][0].pop())
    answer["order"][1][-1]["copy"] = 5


def one_rank(answer: Answer) -> None:
    del answer["order"][1]


def shorter(answer: Answer) -> None:
    answer["order"][0][0]["end_s"] -= 0.5


def overlapping(answer: Answer) -> None:
    row = answer["order"][0]
    length = row[1]["end_s"] - row[1]["start_s"]
    row[1]["start_s"] = row[0]["start_s"]
    row[1]["end_s"] = row[1]["start_s"] + length


def too_early(answer: Answer) -> None:
    # The last rank's first pass of model 0 needs the one of rank 0.
    step = next(s for s in answer["order"][1] if s["model"] == 0)
    step["start_s"], step["end_s"] = 0.0, 1.0


def reversed_rank(answer: Answer) -> None:
    answer["order"][0].reverse()


def faster(answer: Answer) -> None:
    answer["makespan_s"] -= 1


def leaner(answer: Answer) -> None:
    answer["peak_activations"] -= 1


def bolder(answer: Answer) -> None:
    answer["lower_bound_s"] = answer["makespan_s"] + 1


def flattered(answer: Answer) -> None:
    answer["gap"] = 0.5


def beaten(answer: Answer) -> None:
    answer["baselines"]["serial_1f1b"] = answer["makespan_s"] - 1


def alone(answer: Answer) -> None:
    answer["baselines"] = {}


def unreadable(answer: Answer) -> None:
    answer["order"][0][0]["pass"] = "forward"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lost, "1 passes are missing"),
        (twice, "runs twice"),
        (elsewhere, "has no place on rank 1"),
        (one_rank, "1 ranks, the request has 2"),
        (shorter, "its cost is"),
        (overlapping, "the pass before it ends"),
        (too_early, "F of micro-batch 0, model 0 copy 0 stage 0 ends at"),
        (reversed_rank, "waits for ever"),
        (faster, "the last pass ends at"),
        (leaner, "the order holds"),
        (bolder, "above makespan_s"),
        (flattered, "gap: 0.5"),
        (beaten, "better than the plan"),
        (alone, "baselines: Dictionary should have at least 1 item"),
        (unreadable, "order.0.0.pass"),
    ],
)
def test_each_fault_is_named(right: Answer, wrong: Callable[[Answer], None], said: str) -> None:
    answer = copy.deepcopy(right)
    wrong(answer)
    assert said in "\n".join(faults(answer))


@pytest.mark.parametrize("answer", [None, [], {}, {"order": 3}, "text"])
def test_what_is_no_answer_is_said_to_be_none(answer: Any) -> None:
    assert faults(answer)


def test_an_order_over_the_limit_is_found(right: Answer) -> None:
    tight = FusedRequest.model_validate({**REQUEST, "max_activations": 1})
    loose = make_plan("pipeline", {**REQUEST, "max_activations": None})
    assert any("max_activations is 1" in fault for fault in check(tight, loose))


def test_at_most_twenty_faults_are_listed(right: Answer) -> None:
    answer = copy.deepcopy(right)
    for row in answer["order"]:
        for step in row:
            step["micro_batch"] += 100
    assert len(faults(answer)) == 21 and faults(answer)[-1].startswith("and ")
