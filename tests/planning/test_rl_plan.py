"""RL plans: sizes against plain loops, streaming and migration by hand, and the request at its doors."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp import FieldError, InfeasibleError, make_plan
from cdmpp.compose.budget import Progress, SearchControl
from cdmpp.compose.solve import read_request
from cdmpp.planning.rl import (
    Dispatcher,
    Engine,
    Lengths,
    Link,
    Pool,
    Problem,
    Ranker,
    Sizes,
    Split,
    Terms,
    TrainingCost,
    draw_steps,
    evaluate,
    search,
    token_table,
)
from cdmpp.planning.rl.answer import RlAnswer
from cdmpp.planning.rl.bounds import lower_bounds
from cdmpp.planning.rl.elastic import action_of
from cdmpp.planning.rl.migration import enough, inference_after, migrated
from cdmpp.planning.rl.plot import draw
from cdmpp.planning.rl.render import show
from cdmpp.planning.rl.schema import RlRequest
from cdmpp.planning.rl.sizes import Front, coarse_to_fine, steps_of
from cdmpp.planning.rl.streaming import Mode, Ready
from cdmpp.predictor import LatencyPredictor

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "rl.json"
LENGTHS = Lengths.of_quantiles({0.5: 300, 0.9: 1000, 1.0: 4000}, 64)
CURVE = 0.01 + 2e-4 * np.arange(17)
GIVEN: dict[str, Any] = {
    "lengths": {"quantiles": {"0.5": 300, "0.9": 1000, "0.99": 3000}, "max_tokens": 4000},
    "samples_per_step": 64,
    "decode": {"a_s": 0.01, "b_s": 0.0002},
    "kv": {"max_batch": 16},
    "inference": 0.2,
    "pools": [
        {"name": "here", "units": 6, "price_per_hour": 3, "site": "a"},
        {"name": "there", "units": 5, "price_per_hour": 1, "site": "b"},
    ],
    "training": {"seconds_per_token": 0.002, "fixed_s": 1, "efficiency": 0.9, "batch_overhead_s": 0.3},
    "weights": {"same_site_s": 0.5, "cross_site_s": 4},
    "draws": 4,
    "budget_s": 60,
}


def steps(samples: int = 64, draws: int = 3, seed: int = 0) -> Any:
    return draw_steps(LENGTHS, Ranker(), samples, draws, seed)


def pools(inference_s: float = 0.0) -> tuple[Pool, ...]:
    cost = TrainingCost(per_sample_s=0.2, per_token_s=0.001, fixed_s=1, efficiency=0.9, batch_overhead_s=0.4)
    return (
        Pool("here", 4, 3.0, "a", Engine(CURVE), cost, inference_s),
        Pool("there", 3, 1.0, "b", Engine(1.5 * CURVE), cost, inference_s),
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_sizes_are_the_best_of_all_by_plain_loops(mode: Mode) -> None:
    terms = Terms(pools(), mode, same_site_s=0.5, cross_site_s=2.0, layout="separate")
    drawn = steps()
    found: dict[tuple[int, int, int, int], float] = {}
    for g, pool in enumerate(terms.pools):
        judge = Dispatcher(pool.generates(), drawn)
        for x in range(1, pool.units + 1):
            finish = judge.finish(Split(0, x))
            for t, trainer in enumerate(terms.pools):
                for y in range(1, trainer.units - (x if t == g else 0) + 1):
                    found[g, x, t, y] = plain_step(mode, finish, drawn.lengths, y, 0.5 if t == g else 2.0)
    ours = {
        (one.generation, one.generation_units, one.training, one.training_units): one.step_s
        for g, pool in enumerate(terms.pools)
        for x in range(1, pool.units + 1)
        for one in steps_of(terms, g, Dispatcher(pool.generates(), drawn), Split(0, x))
    }
    assert ours == pytest.approx(found)
    problem = Problem(LENGTHS, Ranker(), 64, terms, draws=3)
    plan = search(problem)
    assert plan.complete
    assert plan.sizes.training is not None


def plain_step(mode: Mode, finish: Any, lengths: Any, units: int, weights_s: float) -> float:
    """The mean step of :func:`pools`' training, written out."""
    speed = units * 0.9 ** np.log2(units)
    if mode == "async":
        works = [(0.2 * len(row) + 0.001 * row.sum()) / speed + 1.4 for row in lengths]
        return float(np.mean([max(ends.max(), work) for ends, work in zip(finish, works, strict=True)]))
    means = []
    for batches in (1, 2, 4, 8, 16, 32):
        total = 0.0
        for ends, row in zip(finish, lengths, strict=True):
            order, now = np.argsort(ends, kind="stable"), 0.0
            for part in np.split(order, batches):
                work = (0.2 * len(part) + 0.001 * row[part].sum()) / speed
                now = max(now, ends[part].max()) + work + 0.4
            total += now + 1 + weights_s
        means.append(total / len(lengths))
    return min(means)


def test_units_that_do_both_take_one_stage_after_the_other() -> None:
    terms = Terms(pools(0.3), "sync", shared_s=0.7, layout="shared")
    drawn = steps()
    judge = Dispatcher(terms.pools[0].generates(), drawn)
    (one,) = steps_of(terms, 0, judge, Split(1, 2))
    cost = terms.pools[0].training
    assert cost is not None
    ends = judge.finish(Split(1, 2)).max(1) + 64 * 0.3 / 3
    whole = cost.whole_s(64, drawn.lengths.sum(1).astype(float), 3.0)
    assert one.step_s == pytest.approx(float((ends + whole).mean()) + 0.7)
    assert one.price == pytest.approx(one.step_s * 3 * 3.0 / 3600)
    assert one.units == 3
    assert evaluate(terms, one, judge).step_s.mean() == pytest.approx(one.step_s)


@settings(max_examples=15, deadline=None)
@given(
    inference=st.sampled_from([0.0, 0.4]),
    mode=st.sampled_from(["sync", "async"]),
    seed=st.integers(0, 99),
    samples=st.integers(1, 70),
    layout=st.sampled_from(["any", "separate", "shared"]),
)
def test_no_plan_is_below_its_bound(inference: float, mode: Any, seed: int, samples: int, layout: Any) -> None:
    terms = Terms(pools(inference), mode, 0.5, 2.0, 0.1, layout)
    problem = Problem(LENGTHS, Ranker(), samples, terms, draws=2, seed=seed, doubt=0.1)
    plan = search(problem)
    assert plan.sizes.step_s >= plan.bound_s * (1 - 1e-12)
    assert plan.sizes.price >= plan.bound_price * (1 - 1e-12)
    assert plan.outcome.generation_s.mean() >= plan.floor_s * (1 - 1e-12)
    if layout != "separate":
        assert plan.colocated is not None
    judges = {n: problem.dispatcher(pool.generates(), plan.drawn, 1) for n, pool in enumerate(terms.pools)}
    seconds, price = lower_bounds(terms, judges)
    for number, judge in judges.items():
        for one in steps_of(terms, number, judge, Split(0, 2)):
            assert one.step_s >= seconds * (1 - 1e-12)
            assert one.price >= price * (1 - 1e-12)


def test_on_two_sites_the_faster_stage_gives_units_back_until_both_take_equally_long() -> None:
    here, there = pools()
    terms = Terms((replace(here, training=None), replace(there, units=12, engine=None)), "async")
    problem = Problem(LENGTHS, Ranker(), 64, terms, draws=3)
    plan = search(problem)
    sizes = plan.sizes
    assert (sizes.generation, sizes.training) == (0, 1)
    judge = problem.dispatcher(here.generates(), problem.drawn(0), 0)
    all_steps = [
        one
        for units in range(1, 5)
        for split in {Split(0, units), judge.best(units)}
        for one in steps_of(terms, 0, judge, split)
    ]
    shortest = min(one.step_s for one in all_steps)
    chosen = next(
        one
        for one in all_steps
        if (one.generation_units, one.training_units, one.split)
        == (sizes.generation_units, sizes.training_units, sizes.split)
    )
    assert chosen.step_s == shortest
    # Nobody is as fast with fewer units.
    assert chosen.units == min(one.units for one in all_steps if one.step_s == shortest)
    assert sizes.training_units < 12 or sizes.generation_units < 4


def test_streaming_waits_and_works_as_written_out() -> None:
    ready = Ready.of(np.array([[4.0, 1.0, 2.0, 9.0]]), np.array([[10, 20, 30, 40]]), 0)
    assert ready.samples.tolist() == [1, 2, 3, 4]
    assert ready.tokens.tolist() == [[20, 50, 60, 100]]
    end, idle = ready.trained(TrainingCost(per_token_s=0.1, fixed_s=2.0), np.array([1, 2]), 2)
    # Two batches, of 50 tokens at 2 s and 50 at 9 s: one unit works 5 s on each and waits from 7 to 9.
    assert end.tolist() == [[9 + 5 + 2, 9 + 2.5 + 2]]
    assert idle.tolist() == [[2, 9 - 4.5]]


def test_inference_after_generation_takes_the_first_ended_first() -> None:
    after = inference_after(np.array([[3.0, 1.0, 2.0]]), 4.0, 2)
    assert after.tolist() == [[9, 5, 7]]
    assert inference_after(np.array([[3.0, 1.0]]), 0.0, 2).tolist() == [[3, 1]]


def test_few_instances_are_enough_where_the_batch_costs_nothing() -> None:
    flat, steep = Engine(np.full(65, 0.01)), Engine(0.01 * np.arange(65))
    assert enough(flat, 128, 16, 0.0, 0.0) == 2
    assert enough(steep, 128, 16, 0.0, 0.0) == 16
    assert enough(Engine(np.full(65, 0.01), memory_tokens=1000), 128, 16, 0.0, 7500.0) == 8


@settings(max_examples=15, deadline=None)
@given(
    threshold=st.integers(1, 40),
    remaining=st.integers(1, 4),
    seed=st.integers(0, 9),
    bytes_each=st.sampled_from([0.0, 1e6]),
    inference=st.sampled_from([0.0, 0.5]),
)
def test_migration_loses_no_sample_and_none_is_ready_before_it_ends(
    threshold: int, remaining: int, seed: int, bytes_each: float, inference: float
) -> None:
    judge = Dispatcher(Engine(CURVE, prompt_tokens=10), steps(64, 2, seed))
    found = migrated(judge, Split(2, 3), threshold, remaining, Link(bytes_each, 1e9), inference)
    finish = judge.finish(Split(2, 3))
    assert found.ready_s.shape == finish.shape
    assert np.isfinite(found.ready_s).all()
    before = finish <= found.at_s - 60
    if inference == 0:
        assert (found.ready_s[before] == finish[before]).all()
        assert found.ends_s.tolist() == found.ready_s.max(1).tolist()
    else:
        # The work of inference fits between the moment and the end, at most on all instances.
        assert (found.ready_s.max(1) >= found.ends_s + inference / 5 - 1e-9).all()
    assert (found.ends_s >= judge.floor() * (1 - 1e-12)).all()
    assert found.moved_bytes >= 0
    assert (found.moved_bytes > 0) == (found.moved > 0 and bytes_each > 0)


def test_migration_with_inference_beside_it_shortens_a_step_that_has_a_long_tail() -> None:
    answer = make_plan("rl", {**GIVEN, "training": None, "inference": 0.5, "pools": GIVEN["pools"][:1]})
    moved = answer["migration"]
    assert moved["applied"]
    assert answer["step_s"] < answer["baselines"]["not_migrated"]
    assert moved["remaining_instances"] < answer["generation"]["instances"]
    assert moved["threshold"] <= 0.7 * 64 + 1


@pytest.mark.parametrize("inference", [0.0, 0.3, 2.0])
def test_the_free_choice_of_a_layout_is_the_better_one_migration_counted_in(inference: float) -> None:
    value = {**GIVEN, "inference": inference, "pools": GIVEN["pools"][:1]}
    steps = {layout: make_plan("rl", {**value, "layout": layout}) for layout in ("any", "shared", "separate")}
    assert steps["shared"]["training"]["shared"]
    assert not steps["separate"]["training"]["shared"]
    # Chosen on some steps and judged on others.
    best = min(steps["shared"]["step_s"], steps["separate"]["step_s"])
    assert steps["any"]["step_s"] <= 1.02 * best


def test_coarse_to_fine_has_each_size_once() -> None:
    for most in (1, 2, 3, 7, 64):
        assert sorted(coarse_to_fine(most)) == list(range(1, most + 1))


def test_the_front_is_who_none_beats() -> None:
    rng = np.random.default_rng(0)
    some = [Sizes(0, 1, None, 0, Split(0, 1), 1, float(s), float(p)) for s, p in rng.integers(1, 12, (60, 2))]
    front = Front(priced=True)
    for one in some:
        front.add([one])
    points = {(one.step_s, one.price) for one in some}
    beaten = {a for a in points if any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points)}
    assert {(one.step_s, one.price) for one in front.found} == points - beaten


@pytest.mark.parametrize(
    ("gap", "saving", "loss", "action"),
    [
        (5, 4, 9, "add"),
        (3, 4, 9, "keep"),
        (-9.5, 4, 9, "give back"),
        (-8, 4, 9, "keep"),
        (-99, 4, None, "keep"),
        (5, 0.5, 9, "keep"),
        (0, 0, 0, "keep"),
    ],
)
def test_a_unit_is_added_when_the_gap_is_what_it_saves(
    gap: float, saving: float, loss: float | None, action: str
) -> None:
    assert action_of(gap, saving, loss, worth_s=1.0) == action


def test_token_tables_are_lines_that_do_not_fall() -> None:
    table = token_table(np.array([2.0, 4.0, 6.0]), np.array([3.0, 2.9, 5.0]), 9)
    assert table[1] == table[2] == table[4] == pytest.approx(np.sqrt(3.0 * 2.9))
    assert table[5] == pytest.approx((table[4] + 5) / 2)
    assert table[9] == pytest.approx(5 * 9 / 6)
    assert (np.diff(table[1:]) >= 0).all()


def test_a_plan_says_all_that_it_promises() -> None:
    answer = make_plan("rl", GIVEN)
    RlAnswer.model_validate(answer)
    assert answer == make_plan("rl", json.loads(json.dumps(GIVEN)))
    assert {"random", "lpt", "rule", "guesses", "floor", "colocated"} <= set(answer["baselines"])
    assert answer["step_s"] <= 1.001 * min(answer["baselines"][name] for name in ("random", "lpt", "colocated"))
    assert answer["gap"] == pytest.approx(answer["step_s"] / answer["lower_bound_s"] - 1)
    assert answer["complete"]
    assert [line["growth"] for line in answer["elastic"]] == [0.5, 0.75, 1, 1.25, 1.5, 2, 3]
    for line in answer["elastic"]:
        assert line["gap_s"] == pytest.approx(line["generation_s"] - line["training_s"])
    pairs = [(one["step_s"], one["price"]) for one in answer["pareto"]]
    assert pairs == sorted(pairs)
    assert [price for _, price in pairs] == sorted((price for _, price in pairs), reverse=True)
    split = answer["tail_split"]
    assert split["tail"]["samples"] + split["regular"]["samples"] == 64
    assert split["tail"]["instances"] + split["regular"]["instances"] == answer["generation"]["instances"]
    shown = answer["lengths"]["histogram"]
    assert sum(shown["tail"]) + sum(shown["regular"]) == 64 * 4


def test_the_cheapest_plan_is_no_dearer_and_limits_hold() -> None:
    quick = make_plan("rl", GIVEN)
    cheap = make_plan("rl", {**GIVEN, "objective": "cost"})
    assert cheap["price_per_step"] <= quick["price_per_step"]
    assert cheap["objective"]["value"] == cheap["price_per_step"] >= cheap["objective"]["lower_bound"]
    limit = (quick["step_s"] + cheap["step_s"]) / 2
    between = make_plan("rl", {**GIVEN, "objective": "cost", "most_step_s": limit})
    # Chosen on some steps and judged on others.
    assert between["step_s"] <= 1.1 * limit
    assert cheap["price_per_step"] <= 1.05 * between["price_per_step"]
    with pytest.raises(InfeasibleError, match="at most 1 s") as error:
        make_plan("rl", {**GIVEN, "most_step_s": 1})
    assert error.value.path == "most_step_s"
    assert "shortest takes" in error.value.message


def test_given_sizes_are_kept_and_few_steps_end_the_search() -> None:
    given = make_plan("rl", {**GIVEN, "generation_units": 3, "training_units": 2})
    assert given["generation"]["instances"] == 3
    assert given["training"]["units"] == 2
    few = make_plan("rl", {**GIVEN, "max_steps": 2})
    assert few["sizes_tried"] == 2
    assert not few["complete"]
    heard: list[Progress] = []
    make_plan("rl", GIVEN, watch=SearchControl(60, heard.append, every_s=0))
    assert heard[-1].answer is not None
    RlAnswer.model_validate({"model_id": None, "domain": None, **heard[-1].answer()})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"lengths": {"samples": []}}, "lengths"),
    ({"lengths": {"samples": [3, -1]}}, "lengths"),
    ({"lengths": {"quantiles": {"0.5": 10}}}, "lengths"),
    ({"lengths": {"quantiles": {"0.5": 10, "1.5": 12}}}, "lengths"),
    ({"lengths": {"quantiles": {"0.5": 10, "0.9": 5}}}, "lengths.quantiles"),
    ({"ranker": {"recall": 0}}, "ranker.recall"),
    ({"ranker": {"recall": 1.01}}, "ranker.recall"),
    ({"ranker": {"recall": 0.1, "share": 0.2}}, "ranker.recall"),
    ({"pools": []}, "pools"),
    ({"pools": [{"name": "a", "units": 0}]}, "pools.0.units"),
    ({"pools": [{"name": "a", "units": 1}, {"name": "a", "units": 1}]}, "pools.1.name"),
    ({"pools": [{"name": "a", "units": 1, "stages": ["training"]}]}, "pools"),
    ({"pools": [{"name": "a", "units": 1, "stages": ["generation"]}]}, "pools"),
    ({"pools": [{"name": "a", "units": 1}], "layout": "separate"}, "pools"),
    ({"decode": None}, "pools.0.decode"),
    ({"decode": {"batch": [1, 1], "seconds": [1, 2]}}, "decode.batch"),
    ({"decode": {"batch": [1], "programs": [{"program": {"operator": "linear"}}]}}, "pools.0.device"),
    ({"objective": "cost", "pools": [{"name": "a", "units": 4}]}, "pools.0.price_per_hour"),
    ({"training": {"fixed_s": 1}}, "training"),
    ({"kv": {"memory_bytes": 10}}, "kv"),
    ({"draws": 64, "samples_per_step": 65536}, "draws"),
    ({"generation_units": 500}, "pools"),
]


@pytest.mark.parametrize(("change", "path"), BAD, ids=[json.dumps(change) for change, _ in BAD])
def test_what_is_wrong_is_said_with_its_field(change: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError) as error:
        make_plan("rl", {**GIVEN, **change})
    assert error.value.path == path or error.value.path.startswith(path + ".")


def test_memory_for_no_sample_is_refused_with_the_smallest_that_holds_one() -> None:
    value = {**GIVEN, "prompt_tokens": 96, "kv": {"bytes_per_token": 1000, "memory_bytes": 4e6}}
    with pytest.raises(InfeasibleError, match="longest") as error:
        make_plan("rl", value)
    assert error.value.path == "kv.memory_bytes"
    assert "4096000 bytes" in error.value.message
    value["kv"]["memory_bytes"] = 4096000
    assert make_plan("rl", value)["generation"]["preemptions"] >= 0
    one = [{**GIVEN["pools"][0]}, {**GIVEN["pools"][1], "memory_bytes": 1e6}]
    assert list(make_plan("rl", {**value, "pools": one})["left_out"]) == ["there"]


def test_the_documentation_shows_the_example() -> None:
    text = (EXAMPLE.parents[1] / "rl.md").read_text()
    (shown,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert json.loads(shown) == json.loads(EXAMPLE.read_text())
    for name in RlRequest.model_fields:
        assert f"`{name}`" in text, name


def test_the_example_is_predicted_shown_and_drawn(
    predictor: LatencyPredictor, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    value = json.loads(EXAMPLE.read_text())
    request = pickle.loads(pickle.dumps(read_request(RlRequest, value)))
    answer = make_plan("rl", value, predictor)
    RlAnswer.model_validate(answer)
    assert answer["model_id"] == predictor.model_id
    assert answer["step_lower_s"] <= answer["step_s"] <= answer["step_upper_s"]
    curve = answer["decode"][0]
    asked = request.price_requests()
    batches, programs = value["decode"]["batch"], value["decode"]["programs"]
    assert len(asked) == len(value["pools"]) * len(batches) * len(programs)
    assert [one.program["m"] for one in asked[:: len(programs)]] == batches * 2
    assert {one.device for one in asked} == {"h100-sxm", "a100-sxm4-80gb"}
    assert len(curve["seconds_per_token"]) == len(value["decode"]["batch"])
    assert any("linear:" in line and "%" in line for line in answer["explanation"])
    show(request, answer)
    said = capsys.readouterr().out
    assert "simulated" in said
    assert "tail" in said
    figure = draw(request, answer)
    assert [axes.get_xlabel() for axes in figure.axes] == ["response length (tokens)", "simulated step (s)"]
    figure.savefig(tmp_path / "rl.png")
    assert (tmp_path / "rl.png").stat().st_size > 5000
