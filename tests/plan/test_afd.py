"""AFD sizing: equal to plain loops over every choice, its bound below it, and what is refused."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp import FieldError, InfeasibleError, make_plan
from cdmpp.plan.afd import AfdLink, AfdSide, size
from cdmpp.plan.afd.schema import AfdPlan, AfdRequest
from cdmpp.plan.afd.solver import draw, side_bytes
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.rendering import render
from cdmpp.predict.requests.budget import SearchControl

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "afd.json"
GIVEN: dict[str, Any] = {
    "layers": 10,
    "attention": {"layer": {"batch": [1, 4], "seconds": [1e-3, 2e-3]}, "instances": 4},
    "ffn": {"layer": {"batch": [1, 16], "seconds": [1e-3, 1.5e-3]}, "instances": 2},
    "link": {"bytes_per_token": 1e3, "bandwidth_bytes_per_s": 1e9},
    "tpot_s": 0.06,
}


def test_a_balanced_choice_by_hand() -> None:
    answer = make_plan("afd", GIVEN)
    # Stages of at most 20 ms in 10 layers: attention takes its 4 tokens in 2 ms, the links 2(16/1 kB)/1 GB/s.
    assert answer["attention_instances"] == 4
    assert answer["ffn_instances"] == 1
    assert answer["micro_batch"] == 16
    assert answer["stage_s"] == pytest.approx({"attention": 0.02, "ffn": 0.015, "communication": 10 * 2 * 16e3 / 1e9})
    assert answer["tokens_per_s"] == pytest.approx(16 / 0.02)
    assert answer["price_s_per_token"] == pytest.approx(5 * 0.02 / 16)
    assert answer["lower_bound_price_s_per_token"] == pytest.approx(0.02 / 4 + 0.015 / 16)
    assert answer["gap"] >= 0
    assert not answer["dead_zone"]


def test_slow_links_are_the_dead_zone_and_the_colocated_baseline_is_both_layers_in_turn() -> None:
    answer = make_plan("afd", {**GIVEN, "link": {"bytes_per_token": 1e6, "bandwidth_bytes_per_s": 1e9}})
    assert answer["dead_zone"] and any("dead zone" in line for line in answer["explanation"])
    both = {"layer": {"batch": [4], "seconds": [3.5e-3]}, "instances": 1}
    answer = make_plan("afd", {**GIVEN, "colocated": both})
    assert answer["baselines"]["colocated"] == pytest.approx(10 * 3.5e-3 / 4)


@settings(max_examples=40)
@given(seconds=st.floats(1e-3, 2e-2), batch=st.integers(1, 6), instances=st.integers(1, 3), rate=st.floats(0, 900))
def test_recommendation_is_the_cheapest_of_all_choices_that_keep_the_goal(
    seconds: float, batch: int, instances: int, rate: float
) -> None:
    both = {"layer": {"batch": [1, batch + 1], "seconds": [seconds, 2 * seconds]}, "instances": instances}
    answer = make_plan("afd", {**GIVEN, "tokens_per_s": rate / 2, "colocated": both})
    stage = {b: 10 * (seconds + seconds * (b - 1) / batch) for b in range(1, batch + 2)}
    kept = [b for b, s in stage.items() if s <= 0.06 and instances * b / s >= rate / 2]
    best = min((stage[b] / b for b in kept), default=math.inf)
    assert answer["baselines"].get("colocated", math.inf) == pytest.approx(best)
    cheaper = best < answer["price_s_per_token"] * (1 - 1e-9)
    assert answer["recommended"] == ("colocated" if cheaper else "disaggregated")
    text = render(AfdPlan.model_validate(answer).report())
    assert text.startswith("recommended: colocated") == cheaper
    assert f"{answer['price_s_per_token']:.4g} price-seconds per token" in text
    if cheaper:
        together = answer["colocated"]
        assert together["instances"] <= instances
        assert together["instances"] * together["batch"] / together["tpot_s"] >= rate / 2 * (1 - 1e-9)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"tpot_s": 1e-3}, InfeasibleError, r"tpot_s: .* the fastest takes 0\.03 s"),
        ({"tokens_per_s": 1e6}, InfeasibleError, "tokens_per_s: "),
        ({"layers": 0}, FieldError, "layers: "),
        ({"tpot_s": -1.0}, FieldError, "tpot_s: "),
    ],
)
def test_what_cannot_be_answered_names_the_field(change: dict[str, Any], error: type[FieldError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        make_plan("afd", {**GIVEN, **change})
    assert caught.value.path == text.partition(":")[0]
    make_plan("afd", {**GIVEN, "tpot_s": 0.0301})


def test_the_example_is_answered_from_predictions(predictor: LatencyPredictor, tmp_path: Path) -> None:
    value = json.loads(EXAMPLE.read_text())
    answer = make_plan("afd", value, predictor)
    plan = AfdPlan.model_validate(answer)
    assert answer["model_id"] == predictor.model_id
    assert answer["gap"] >= 0
    assert answer["tpot_s"] <= value["tpot_s"]
    assert any("attention_decode:" in line for line in answer["explanation"])
    request = AfdRequest.model_validate(value)
    assert "attention and" in render(plan.report())
    draw(request, plan).savefig(tmp_path / "afd.png")


@pytest.mark.parametrize("goal", [{}, {"tokens_per_s": 2e7}, {"tpot_s": 0.031}])
def test_many_instances_are_sized_in_bounded_memory(goal: dict[str, Any]) -> None:
    many = {**GIVEN, **goal} | {name: {**GIVEN[name], "instances": 100_000} for name in ("attention", "ffn")}
    answer = make_plan("afd", many)
    assert answer["tpot_s"] <= many["tpot_s"]
    assert answer["tokens_per_s"] >= many.get("tokens_per_s", 0)
    # Counts in the best ratio meet the lower bound of a stage that never waits.
    assert answer["baselines"]["equal_counts"] >= answer["price_s_per_token"] * (1 - 1e-9)


@settings(max_examples=90)
@given(
    times=st.lists(st.sampled_from([0.5, 1.0, 2.0, 2.7]), min_size=4, max_size=4),
    # Few counts are all tried; of more, lower bounds exclude some.
    most=st.sampled_from([(3, 3), (2, 5), (10, 13), (12, 11), (14, 14)]),
    price=st.sampled_from([0.3, 1.0, 2.0]),
    rate=st.sampled_from([0.0, 3.0, 9.0]),
    equal=st.booleans(),
)
def test_pruned_enumeration_equals_plain_loops(
    times: list[float], most: tuple[int, int], price: float, rate: float, equal: bool
) -> None:
    attention = AfdSide(np.array([1.0, 3.0]), np.array(times[:2]), most[0], price, 4)
    ffn = AfdSide(np.array([2.0, 5.0]), np.array(times[2:]), most[1], 1.0, 5)
    best: tuple[float, int, int, int] | None = None
    for x, y in itertools.product(range(1, most[0] + 1), range(1, most[1] + 1)):
        for batch in range(1, min(4 * x, 5 * y) + 1) if x == y or not equal else ():
            a, f = math.ceil(batch / x), math.ceil(batch / y)
            stages = (attention.layer_s(np.array(a)), ffn.layer_s(np.array(f)), 2 * (0.1 + 0.2 * max(a, f)))
            stage_s = float(max(stages))
            cost = (price * x + y) * stage_s / batch
            if 3 * stage_s <= 7 and batch / stage_s >= rate and (best is None or cost < best[0] * (1 - 1e-12)):
                best = cost, x, y, batch
    try:
        plan = size(attention, ffn, AfdLink(0.2, 1.0, 0.1), layers=1, tpot_s=7.0, tokens_per_s=rate, equal=equal)
    except InfeasibleError:
        assert best is None
        return
    assert (plan.attention, plan.ffn, plan.micro_batch) == best[1:]


def test_stopped_search_returns_the_best_choice_so_far() -> None:
    control = SearchControl()
    control.stop()
    answer = make_plan("afd", {**GIVEN, "tpot_s": 0.2}, control=control)
    assert any("stopped" in line for line in answer["explanation"])
    assert answer["tpot_s"] <= 0.2


def test_instances_hold_the_weights_and_the_caches_of_all_micro_batches_in_flight() -> None:
    side = {**GIVEN["attention"], "weight_bytes": 10, "bytes_per_token": 5}
    limited = {**GIVEN, "attention": {**side, "memory_bytes": 40}}
    # Two sequences in each of three micro-batches; the curve alone would allow four.
    assert make_plan("afd", limited)["micro_batch"] == 8
    assert make_plan("afd", {**limited, "ignore_memory": True})["micro_batch"] == 16
    with pytest.raises(InfeasibleError, match=r"needs 25.0 B .* of the 20.0 B") as error:
        make_plan("afd", {**GIVEN, "attention": {**side, "memory_bytes": 20}})
    assert error.value.path == "attention" and "ignore_memory" in error.value.hint


def test_memory_follows_from_the_operators() -> None:
    request = json.loads((EXAMPLE.parent / "afd_moe.json").read_text())
    attention = AfdRequest.model_validate(request).attention
    weights, cache = side_bytes(attention, "attention.layer", 58)
    assert cache == 58 * (4096 + 1) * (512 + 64) * 2
    assert weights == pytest.approx(58 * 187e6 * 2, rel=0.01)
    request["ffn"]["layer"]["device"] = "a100-sxm4-40gb"
    with pytest.raises(InfeasibleError, match=r"81\.7 GB"):
        make_plan("afd", request, LatencyPredictor.load())
