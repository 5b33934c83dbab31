"""Stage splits equal an exhaustive search, respect memory limits, and are exported for other simulators."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp import FieldError, InfeasibleError, make_plan
from cdmpp.plan.split import Layer, LayerTable, Rank, split
from cdmpp.plan.split.schema import SplitPlan, SplitRequest
from cdmpp.plan.split.search import arrangements, best_split, equal_count, every, greedy, longest
from cdmpp.plan.split.solver import draw
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.rendering import render
from cdmpp.predict.requests.budget import Progress, SearchControl
from cdmpp.predict.requests.request import Answer
from cdmpp.simulate.emulator import Emulator

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "split.json"
LAYER: dict[str, Any] = {"forward_s": 1, "backward_s": 2}
EMULATOR = Emulator()
SECONDS = st.integers(0, 40).map(lambda n: n / 8)


@st.composite
def problems(draw: st.DrawFn) -> tuple[LayerTable, list[Rank], bool]:
    kinds, layers = draw(st.integers(1, 2)), draw(st.integers(1, 7))
    costs = st.tuples(*[SECONDS] * kinds)
    made = [
        Layer(draw(costs), draw(costs), draw(st.integers(0, 5)), draw(st.integers(0, 9)), draw(SECONDS) / 4)
        for _ in range(layers)
    ]
    ranks = [
        Rank(draw(st.integers(0, kinds - 1)), draw(st.sampled_from([float("inf"), 60.0, 25.0])))
        for _ in range(draw(st.integers(1, min(layers, 4))))
    ]
    return LayerTable(made, draw(st.integers(1, 6))), ranks, draw(st.booleans())


@settings(max_examples=40)
@given(problems())
def test_split_equals_the_exhaustive_optimum(problem: tuple[LayerTable, list[Rank], bool]) -> None:
    table, ranks, any_order = problem
    orders = itertools.permutations(range(len(ranks))) if any_order else [tuple(range(len(ranks)))]
    fitting = [one for one in every(table, ranks, list(orders)) if one.fits()]
    if not fitting:
        with pytest.raises(InfeasibleError, match="no split fits"):
            split(table, ranks, any_order=any_order)
        return
    slowest = split(table, ranks, any_order=any_order)
    assert slowest.split.fits()
    assert slowest.value_s == slowest.bound_s == min(one.slowest_s for one in fitting)
    step = split(table, ranks, "step", any_order=any_order, emulator=EMULATOR)
    assert step.split.fits()
    assert step.complete
    assert step.value_s == min(one.step(EMULATOR).makespan_s for one in fitting)
    assert step.bound_s <= min(one.step(EMULATOR, "gpipe").makespan_s for one in fitting)


@settings(max_examples=30)
@given(problems())
def test_memory_of_the_hint_is_enough_and_less_is_not(problem: tuple[LayerTable, list[Rank], bool]) -> None:
    table, ranks, any_order = problem
    tight = [Rank(rank.kind, 1.0 + 7.0 * r) for r, rank in enumerate(ranks)]
    try:
        split(table, tight, any_order=any_order)
    except InfeasibleError as error:
        factor = float(error.hint.split()[1])
        more, less = ([Rank(r.kind, r.memory_bytes * factor * by) for r in tight] for by in (1.00001, 0.999))
        assert split(table, more, any_order=any_order).split.fits()
        with pytest.raises(InfeasibleError):
            split(table, less, any_order=any_order)


def test_ranks_that_only_swap_equal_ones_are_tried_once() -> None:
    assert arrangements([Rank(0), Rank(0), Rank(1)]) == [(0, 1, 2), (0, 2, 1), (2, 0, 1)]
    assert len(arrangements([Rank(0)] * 40)) == 1


class SplitObjective(Answer):
    value_s: float


def test_a_large_split_is_improved_within_its_steps_and_reported() -> None:
    random = np.random.default_rng(0)
    layers = [Layer((1.0 + a,), (2.0 + 2 * a,)) for a in random.random(60).round(3)]
    table, ranks = LayerTable(layers, 16), [Rank()] * 8
    reports: list[Progress] = []
    found = split(
        table,
        ranks,
        "step",
        control=SearchControl(30, reports.append, every_s=0.0),
        max_steps=300,
        describe=lambda so_far: SplitObjective(value_s=so_far.value_s),
    )
    assert 4 < found.steps <= 300
    assert found.bound_s <= found.value_s <= split(table, ranks).split.step(EMULATOR).makespan_s
    assert reports and reports[-1].answer is not None and reports[-1].answer().value_s == reports[-1].best
    again = split(table, ranks, "step", max_steps=300)
    assert (again.split.begin, again.steps) == (found.split.begin, found.steps)


def test_without_time_the_baselines_are_reached() -> None:
    control = SearchControl(10)
    control.stop()
    random = np.random.default_rng(1)
    layers = [Layer((1.0 + a,), (2.0 + 2 * a,)) for a in random.random(40).round(3)]
    table, ranks = LayerTable(layers, 8), [Rank()] * 5
    found = split(table, ranks, "step", control=control)
    assert found.steps == 2  # the baselines alone
    by_hand = [make(table, ranks).step(EMULATOR).makespan_s for make in (equal_count, greedy)]
    assert found.value_s <= min(by_hand)


def plan_of(**more: Any) -> dict[str, Any]:
    answer = make_plan("split", {"layers": [LAYER] * 6, "ranks": 3, "micro_batches": 4, **more})
    SplitPlan.model_validate(answer)
    return answer


def test_split_equals_hand_computed_optimum() -> None:
    answer = plan_of(layers=[{**LAYER, "name": f"l{i}", "forward_s": i + 1} for i in range(6)])
    # Layers take 3, 4, 5, 6, 7, 8: 12, 13 and 8 is the best, and 15 the longest of any other.
    assert answer["boundaries"] == [3, 5]
    assert answer["value_s"] == answer["lower_bound_s"] == 13.0 and answer["gap"] == 0.0
    assert answer["divisible_bound_s"] == 11.0
    assert answer["baselines"] == {"equal_count": 15.0, "greedy": 13.0}
    assert answer["fwd_costs"] == {"0": 6.0, "1": 9.0, "2": 6.0}
    assert answer["bwd_costs"] == {"0": 6.0, "1": 4.0, "2": 2.0}
    assert "stage 1 (layers 3 to 4" in answer["explanation"][0]


def test_the_bound_of_a_step_holds_for_other_orders_than_1f1b() -> None:
    """With transfers GPipe is shorter than the best 1F1B step: 29 against 35 s."""
    layers = [{**LAYER, "transfer_s": 1}, LAYER]
    answer = plan_of(layers=layers, ranks=2, micro_batches=8, goal="step")
    simulation = {"stages": [LAYER] * 2, "transfer_s": 1, "micro_batches": 8, "schedule": "gpipe"}
    gpipe = make_plan("simulate", simulation)
    assert answer["lower_bound_s"] == gpipe["makespan_s"] == 29.0
    assert answer["value_s"] == 35.0 and answer["complete"]
    assert "all splits and orders" in render(SplitPlan.model_validate(answer).report())


def test_unlike_devices_get_unlike_stages() -> None:
    layer = {"count": 6, "forward_s": {"fast": 1, "slow": 2}, "backward_s": {"fast": 2, "slow": 4}}
    ranks = [{"device": "slow"}, {"device": "fast"}]
    answer = plan_of(layers=[layer], ranks=ranks)
    assert answer["boundaries"] == [2] and answer["value_s"] == 12.0
    limited = [{"device": "slow"}, {"device": "fast", "memory_bytes": 45}]
    heavy = plan_of(layers=[{**layer, "weight_bytes": 10, "activation_bytes": 5}], ranks=limited)
    assert heavy["boundaries"] == [3]
    assert heavy["stages"][1]["peak_bytes"] == 45.0
    last = plan_of(layers=[{**layer, "transfer_s": 20}, LAYER], ranks=limited, any_order=True, goal="step")
    assert {one["rank"] for one in last["stages"]} == {0, 1}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"ranks": 7}, "ranks"),
        ({"ranks": 0}, "ranks"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"layers": [{"forward_s": 1}]}, "layers.0"),
        ({"layers": [{**LAYER, "forward": {"programs": [{"program": {"a": 1}}]}}]}, "layers.0"),
        ({"layers": [{**LAYER, "forward_s": {"t4": 1}}], "ranks": 1}, "layers.0.forward_s"),
        ({"layers": [{"backward_s": 1, "forward": {"programs": [{"program": {"a": 1}}]}}]}, "ranks"),
        ({"ranks": [{"memory_bytes": 1}], "layers": [{**LAYER, "weight_bytes": 5}]}, "ranks.0.memory_bytes"),
    ],
)
def test_error_names_the_field(change: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError) as error:
        plan_of(**change)
    # A union names its branch behind the field.
    assert error.value.path == path or error.value.path.startswith(f"{path}.")


def test_predicted_layers_are_planned_printed_and_drawn(predictor: LatencyPredictor) -> None:
    pytest.importorskip("matplotlib")
    value = json.loads(EXAMPLE.read_text())
    answer = make_plan("split", value, predictor)
    plan = SplitPlan.model_validate(answer)
    request = SplitRequest.model_validate(value)
    counts = [one["last_layer"] - one["first_layer"] for one in answer["stages"]]
    assert min(counts[:2]) > max(counts[2:])  # the faster devices come first, and get more
    assert any("is long because of linear:" in line for line in answer["explanation"])
    assert answer["value_s"] <= min(answer["baselines"].values())
    assert "lower bound" in render(plan.report())
    assert [axes.get_xlabel() for axes in draw(request, plan).axes] == ["one micro-batch (ms)", "peak memory (GB)"]


def test_split_that_recomputes_equals_the_simulation_of_its_stages() -> None:
    costs = {"forward_s": 1, "backward_s": 2, "activation_bytes": 10, "boundary_bytes": 3, "weight_bytes": 5}
    answer = make_plan(
        "split", {"layers": [costs] * 4, "ranks": 2, "micro_batches": 4, "goal": "step", "memory": "recompute"}
    )
    stage = {name: 2 * value for name, value in costs.items()} | {"boundary_bytes": 3, "memory": "recompute"}
    step = make_plan("simulate", {"stages": [stage] * 2, "micro_batches": 4})
    assert answer["step_s"] == step["makespan_s"]
    assert [one["peak_bytes"] for one in answer["stages"]] == [one["peak_bytes"] for one in step["ranks"]] == [33, 30]


def test_rank_without_a_limit_has_the_memory_of_its_device() -> None:
    request = {
        "layers": [{"forward_s": 1, "backward_s": 2, "weight_bytes": 45e9}] * 2,
        "ranks": [{"device": "a100-sxm4-40gb"}] * 2,
        "micro_batches": 2,
    }
    with pytest.raises(InfeasibleError, match="no split fits"):
        make_plan("split", request)
    assert make_plan("split", {**request, "ignore_memory": True})["stages"][0]["peak_bytes"] == 45e9


def test_runs_that_are_longer_than_a_baseline_are_left_out_without_loss() -> None:
    chance = np.random.default_rng(1)
    for _ in range(30):
        layers = [Layer((float(f),), (2 * float(f),), 0.0, 0.0, 0.0) for f in chance.integers(1, 9, 40)]
        table, ranks = LayerTable(layers, 4), [Rank(0, float("inf"))] * 8
        most_s = greedy(table, ranks).slowest_s
        wide, narrow = (best_split(table, ranks, False, longest, most_s=most) for most in (np.inf, most_s))
        assert wide is not None and narrow is not None
        assert narrow.slowest_s == wide.slowest_s <= most_s
        assert table.ends(most_s).shape[1] < 20 < table.ends().shape[1]


def test_infeasible_split_beside_a_rank_without_limit_names_the_limited_rank() -> None:
    layers = [{**LAYER, "weight_bytes": 100, "activation_bytes": 10}] * 4
    with pytest.raises(InfeasibleError, match=r"closest one needs 120 bytes there, 2.4 times 50") as caught:
        plan_of(layers=layers, ranks=[{"memory_bytes": 50}, {}], micro_batches=2)
    assert caught.value.path == "ranks.0.memory_bytes"
