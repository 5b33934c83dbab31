"""RL plans: sizes against plain loops, streaming and migration by hand, requests and their errors."""

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
from cdmpp.plan.base.solve import read_request, solve_request
from cdmpp.plan.rl.dispatch import Dispatcher, TailSplit
from cdmpp.plan.rl.evaluate import action_of, evaluate, lower_bounds
from cdmpp.plan.rl.generation import GenerationEngine
from cdmpp.plan.rl.lengths import SampledSteps, draw_steps
from cdmpp.plan.rl.migration import MigrationLink, fewest_instances, inference_after, simulate_migration
from cdmpp.plan.rl.problem import RlProblem, token_table
from cdmpp.plan.rl.schema import RlPlan, RlRequest
from cdmpp.plan.rl.size_search import candidate_sizes, pareto_front
from cdmpp.plan.rl.sizes import Pool, PoolSizes, SizingProblem
from cdmpp.plan.rl.solver import draw, search
from cdmpp.plan.rl.training import Mode, ReadyTimes, TrainingCost
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.rendering import render
from cdmpp.predict.requests.budget import Progress, SearchControl
from tests.plan.rl_cases import LENGTHS, REQUEST, ranker

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "rl.json"
CURVE = 0.01 + 2e-4 * np.arange(17)


def solve(**changes: Any) -> RlPlan:
    """The plan of the request with other fields."""
    plan = solve_request(read_request(RlRequest, {**REQUEST, **changes}))
    assert isinstance(plan, RlPlan)
    return plan


def sample_steps(samples: int = 64, draws: int = 3, seed: int = 0) -> SampledSteps:
    return draw_steps(LENGTHS, ranker(), samples, draws, seed)


def make_pools(inference_s: float = 0.0) -> tuple[Pool, ...]:
    cost = TrainingCost(per_sample_s=0.2, per_token_s=0.001, fixed_s=1, efficiency=0.9, batch_overhead_s=0.4)
    return (
        Pool("here", 4, 3.0, "a", GenerationEngine(CURVE), cost, inference_s),
        Pool("there", 3, 1.0, "b", GenerationEngine(1.5 * CURVE), cost, inference_s),
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_candidate_sizes_equal_plain_loops(mode: Mode) -> None:
    sizing = SizingProblem(make_pools(), mode, same_site_s=0.5, cross_site_s=2.0, layout="separate")
    steps = sample_steps()
    expected: dict[tuple[int, int, int, int], float] = {}
    for generation, pool in enumerate(sizing.pools):
        dispatcher = Dispatcher(pool.generation_engine(), steps)
        for units in range(1, pool.units + 1):
            finish = dispatcher.finish_times(TailSplit(0, units))
            for training, trainer in enumerate(sizing.pools):
                same_pool = training == generation
                for training_units in range(1, trainer.units - (units if same_pool else 0) + 1):
                    expected[generation, units, training, training_units] = mean_step(
                        mode, finish, steps.lengths, training_units, 0.5 if same_pool else 2.0
                    )
    computed = {
        (sizes.generation, sizes.generation_units, sizes.training, sizes.training_units): sizes.step_s
        for index, pool in enumerate(sizing.pools)
        for units in range(1, pool.units + 1)
        for sizes in candidate_sizes(sizing, index, Dispatcher(pool.generation_engine(), steps), TailSplit(0, units))
    }
    assert computed == pytest.approx(expected)
    result = search(RlProblem(LENGTHS, ranker(), 64, sizing, draws=3))
    assert result.complete
    assert result.sizes.training is not None


def mean_step(mode: Mode, finish: Any, lengths: Any, units: int, weights_s: float) -> float:
    """Mean step with the training cost of :func:`make_pools`, by plain loops."""
    speed = units * 0.9 ** np.log2(units)
    if mode == "async":
        works = [(0.2 * len(row) + 0.001 * row.sum()) / speed + 1.4 for row in lengths]
        return float(np.mean([max(ends.max(), work) for ends, work in zip(finish, works, strict=True)]))
    means = []
    for batches in (1, 2, 4, 8, 16, 32):
        total = 0.0
        for ends, row in zip(finish, lengths, strict=True):
            order, now = np.argsort(ends, kind="stable"), 0.0
            for batch in np.split(order, batches):
                work = (0.2 * len(batch) + 0.001 * row[batch].sum()) / speed
                now = max(now, ends[batch].max()) + work + 0.4
            total += now + 1 + weights_s
        means.append(total / len(lengths))
    return min(means)


def test_shared_units_run_the_stages_one_after_the_other() -> None:
    sizing = SizingProblem(make_pools(0.3), "sync", shared_s=0.7, layout="shared")
    steps = sample_steps()
    dispatcher = Dispatcher(sizing.pools[0].generation_engine(), steps)
    (sizes,) = candidate_sizes(sizing, 0, dispatcher, TailSplit(1, 2))
    cost = sizing.pools[0].training
    ends = dispatcher.finish_times(TailSplit(1, 2)).max(1) + 64 * 0.3 / 3
    whole = cost.whole_s(64, steps.lengths.sum(1).astype(float), 3.0)
    assert sizes.step_s == pytest.approx(float((ends + whole).mean()) + 0.7)
    assert sizes.price == pytest.approx(sizes.step_s * 3 * 3.0 / 3600)
    assert sizes.units == 3
    assert evaluate(sizing, sizes, dispatcher).step_s.mean() == pytest.approx(sizes.step_s)


@settings(max_examples=15)
@given(
    inference=st.sampled_from([0.0, 0.4]),
    mode=st.sampled_from(["sync", "async"]),
    seed=st.integers(0, 99),
    samples=st.integers(1, 70),
    layout=st.sampled_from(["any", "separate", "shared"]),
)
def test_no_plan_is_below_its_lower_bound(inference: float, mode: Any, seed: int, samples: int, layout: Any) -> None:
    sizing = SizingProblem(make_pools(inference), mode, 0.5, 2.0, 0.1, layout)
    problem = RlProblem(LENGTHS, ranker(), samples, sizing, draws=2, seed=seed, doubt=0.1)
    result = search(problem)
    assert result.sizes.step_s >= result.bound_s * (1 - 1e-12)
    assert result.sizes.price >= result.bound_price * (1 - 1e-12)
    assert result.outcome.generation_s.mean() >= result.longest_alone_s * (1 - 1e-12)
    if layout != "separate":
        assert result.colocated is not None
    assert (result.disaggregated is not None) == (result.sizes.shared and layout == "any")
    engines = {index: pool.generation_engine() for index, pool in enumerate(sizing.pools)}
    held_out = problem.dispatchers(engines, held_out=True)
    seconds, price = lower_bounds(sizing, held_out)
    for index, dispatcher in held_out.items():
        for sizes in candidate_sizes(sizing, index, dispatcher, TailSplit(0, 2)):
            assert sizes.step_s >= seconds * (1 - 1e-12)
            assert sizes.price >= price * (1 - 1e-12)


def test_faster_stage_on_another_site_gives_units_back_until_both_stages_take_equally_long() -> None:
    here, there = make_pools()
    sizing = SizingProblem((replace(here, training=None), replace(there, units=12, engine=None)), "async")
    problem = RlProblem(LENGTHS, ranker(), 64, sizing, draws=3)
    sizes = search(problem).sizes
    assert (sizes.generation, sizes.training) == (0, 1)
    dispatcher = problem.dispatchers({0: here.generation_engine()}, held_out=False)[0]
    candidates = [
        candidate
        for units in range(1, 5)
        for split in {TailSplit(0, units), dispatcher.choose_split(units)}
        for candidate in candidate_sizes(sizing, 0, dispatcher, split)
    ]
    shortest = min(candidate.step_s for candidate in candidates)
    chosen = next(
        candidate
        for candidate in candidates
        if (candidate.generation_units, candidate.training_units, candidate.split)
        == (sizes.generation_units, sizes.training_units, sizes.split)
    )
    assert chosen.step_s == shortest
    # No smaller sizes are as fast.
    assert chosen.units == min(candidate.units for candidate in candidates if candidate.step_s == shortest)
    assert sizes.training_units < 12 or sizes.generation_units < 4


def test_streamed_training_waits_and_works_as_calculated_by_hand() -> None:
    ready = ReadyTimes.of(np.array([[4.0, 1.0, 2.0, 9.0]]), np.array([[10, 20, 30, 40]]), 0)
    assert ready.samples.tolist() == [1, 2, 3, 4]
    assert ready.tokens.tolist() == [[20, 50, 60, 100]]
    end, idle = ready.trained(TrainingCost(per_token_s=0.1, fixed_s=2.0), np.array([1, 2]), 2)
    # Two batches: 50 tokens at 2 s and 50 at 9 s. One unit works 5 s on each and waits from 7 to 9.
    assert end.tolist() == [[9 + 5 + 2, 9 + 2.5 + 2]]
    assert idle.tolist() == [[2, 9 - 4.5]]


def test_inference_after_generation_runs_in_order_of_finish() -> None:
    after = inference_after(np.array([[3.0, 1.0, 2.0]]), 4.0, 2)
    assert after.tolist() == [[9, 5, 7]]
    assert inference_after(np.array([[3.0, 1.0]]), 0.0, 2).tolist() == [[3, 1]]


def test_few_instances_remain_if_the_batch_does_not_slow_decoding_down() -> None:
    flat, steep = GenerationEngine(np.full(65, 0.01)), GenerationEngine(0.01 * np.arange(65))
    limited = GenerationEngine(np.full(65, 0.01), memory_tokens=1000)
    assert fewest_instances(flat, 128, 16, 0.0, 0.0) == 2
    assert fewest_instances(steep, 128, 16, 0.0, 0.0) == 16
    assert fewest_instances(limited, 128, 16, 0.0, 7500.0) == 8


@settings(max_examples=15)
@given(
    threshold=st.integers(1, 40),
    remaining=st.integers(1, 4),
    seed=st.integers(0, 9),
    bytes_per_token=st.sampled_from([0.0, 1e6]),
    inference=st.sampled_from([0.0, 0.5]),
)
def test_migration_keeps_all_samples_and_none_is_ready_before_it_ends(
    threshold: int, remaining: int, seed: int, bytes_per_token: float, inference: float
) -> None:
    dispatcher = Dispatcher(GenerationEngine(CURVE, prompt_tokens=10), sample_steps(64, 2, seed))
    link = MigrationLink(bytes_per_token, 1e9)
    migration = simulate_migration(dispatcher, TailSplit(2, 3), threshold, remaining, link, inference)
    finish = dispatcher.finish_times(TailSplit(2, 3))
    assert migration.ready_s.shape == finish.shape
    assert np.isfinite(migration.ready_s).all()
    before = finish <= migration.at_s - 60
    if inference == 0:
        assert (migration.ready_s[before] == finish[before]).all()
        assert migration.ends_s.tolist() == migration.ready_s.max(1).tolist()
    else:
        # The last inference ends after generation, on at most all instances.
        assert (migration.ready_s.max(1) >= migration.ends_s + inference / 5 - 1e-9).all()
    assert (migration.ends_s >= dispatcher.longest_alone_s() * (1 - 1e-12)).all()
    assert migration.moved_bytes >= 0
    assert (migration.moved_bytes > 0) == (migration.moved > 0 and bytes_per_token > 0)


def test_migration_shortens_a_step_with_inference_and_a_long_tail() -> None:
    plan = solve(training=None, inference=0.5, pools=REQUEST["pools"][:1])
    migration = plan.migration
    assert migration.applied
    assert plan.step_s < plan.baselines["not_migrated"]
    assert migration.remaining_instances < plan.generation.instances
    assert migration.threshold <= 0.7 * 64 + 1


@pytest.mark.parametrize("inference", [0.0, 0.3, 2.0])
def test_layout_any_gives_the_better_layout_with_migration(inference: float) -> None:
    pools = REQUEST["pools"][:1]
    chosen, shared, separate = (
        solve(inference=inference, pools=pools, layout=layout) for layout in ("any", "shared", "separate")
    )
    assert shared.training.shared
    assert not separate.training.shared
    # Chosen on the search steps, evaluated on the held-out steps.
    assert chosen.step_s <= 1.02 * min(shared.step_s, separate.step_s)


def test_pareto_front_has_all_sizes_that_are_not_dominated() -> None:
    rng = np.random.default_rng(0)
    candidates = [
        PoolSizes(0, 1, None, 0, TailSplit(0, 1), 1, float(step), float(price))
        for step, price in rng.integers(1, 12, (60, 2))
    ]
    front: list[PoolSizes] = []
    for candidate in candidates:
        front = pareto_front([*front, candidate], priced=True)
    points = {(sizes.step_s, sizes.price) for sizes in candidates}
    dominated = {a for a in points if any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points)}
    assert {(sizes.step_s, sizes.price) for sizes in front} == points - dominated


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
def test_unit_is_added_if_the_gap_is_at_least_its_saving(
    gap: float, saving: float, loss: float | None, action: str
) -> None:
    assert action_of(gap, saving, loss, min_saving_s=1.0) == action


def test_token_table_is_piecewise_linear_and_does_not_fall() -> None:
    table = token_table(np.array([2.0, 4.0, 6.0]), np.array([3.0, 2.9, 5.0]), 9)
    assert table[1] == table[2] == table[4] == pytest.approx(np.sqrt(3.0 * 2.9))
    assert table[5] == pytest.approx((table[4] + 5) / 2)
    assert table[9] == pytest.approx(5 * 9 / 6)
    assert (np.diff(table[1:]) >= 0).all()


def test_plan_is_complete_consistent_and_reproducible() -> None:
    plan = solve()
    assert plan.model_dump() == make_plan("rl", json.loads(json.dumps(REQUEST)))
    assert plan == RlPlan.model_validate(plan.model_dump())
    assert {"random", "lpt", "rule", "guesses", "floor", "colocated"} <= set(plan.baselines)
    assert plan.step_s <= 1.001 * min(plan.baselines[name] for name in ("random", "lpt", "colocated"))
    assert plan.gap == pytest.approx(plan.step_s / plan.lower_bound_s - 1)
    assert plan.complete
    assert [row.growth for row in plan.elastic] == [0.5, 0.75, 1, 1.25, 1.5, 2, 3]
    for row in plan.elastic:
        assert row.gap_s == pytest.approx(row.generation_s - row.training_s)
    pairs = [(sizes.step_s, sizes.price) for sizes in plan.pareto]
    assert pairs == sorted(pairs)
    assert [price for _, price in pairs] == sorted((price for _, price in pairs), reverse=True)
    split = plan.tail_split
    assert split.tail.samples + split.regular.samples == 64
    assert split.tail.instances + split.regular.instances == plan.generation.instances
    histogram = plan.lengths.histogram
    assert sum(histogram.tail) + sum(histogram.regular) == 64 * 4


def test_cheapest_plan_costs_no_more_and_the_step_limit_holds() -> None:
    fastest, cheapest = solve(), solve(objective="cost")
    assert cheapest.price_per_step <= fastest.price_per_step
    assert cheapest.objective.value == cheapest.price_per_step >= cheapest.objective.lower_bound
    limit = (fastest.step_s + cheapest.step_s) / 2
    between = solve(objective="cost", most_step_s=limit)
    # Chosen on the search steps, evaluated on the held-out steps.
    assert between.step_s <= 1.1 * limit
    assert cheapest.price_per_step <= 1.05 * between.price_per_step
    with pytest.raises(InfeasibleError, match="at most 1 s") as error:
        solve(most_step_s=1)
    assert error.value.path == "most_step_s"
    assert "shortest takes" in error.value.message


def test_price_without_a_positive_lower_bound_is_refused() -> None:
    free = [{"name": "a", "units": 2, "price_per_hour": 1}, {"name": "b", "units": 2}]
    with pytest.raises(FieldError, match="lower bound of its price is 0") as error:
        solve(objective="cost", pools=free)
    assert error.value.path == "pools"


def test_fixed_sizes_are_kept_and_max_steps_ends_the_search() -> None:
    fixed = solve(generation_units=3, training_units=2)
    assert fixed.generation.instances == 3
    assert fixed.training.units == 2
    short = solve(max_steps=2)
    assert short.sizes_tried == 2
    assert not short.complete


def test_progress_listener_gets_the_best_plan_so_far() -> None:
    reports: list[Progress] = []
    make_plan("rl", REQUEST, control=SearchControl(60, reports.append, every_s=0))
    assert reports[-1].answer is not None
    assert isinstance(reports[-1].answer(), RlPlan)


INVALID: list[tuple[dict[str, Any], str]] = [
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
    ({"pools": [{"name": "a", "units": 1, "decode": {"batch": [1, 1], "seconds": [1, 2]}}]}, "pools.0.decode.batch"),
    ({"decode": {"batch": [1], "programs": [{"program": {"operator": "linear"}}]}}, "pools.0.device"),
    ({"objective": "cost", "pools": [{"name": "a", "units": 4}]}, "pools.0.price_per_hour"),
    ({"training": {"fixed_s": 1}}, "training"),
    ({"kv": {"memory_bytes": 10}}, "kv"),
    ({"generation_units": 500}, "pools"),
]


@pytest.mark.parametrize(("changes", "path"), INVALID, ids=[json.dumps(changes) for changes, _ in INVALID])
def test_error_of_an_invalid_request_names_its_field(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError) as error:
        solve(**changes)
    assert error.value.path == path or error.value.path.startswith(path + ".")


def test_memory_too_small_for_any_sample_is_refused_with_the_smallest_sufficient_one() -> None:
    changes: dict[str, Any] = {"prompt_tokens": 96, "kv": {"bytes_per_token": 1000, "memory_bytes": 4e6}}
    with pytest.raises(InfeasibleError, match="longest") as error:
        solve(**changes)
    assert error.value.path == "kv.memory_bytes"
    assert "4096000 bytes" in error.value.message
    changes["kv"]["memory_bytes"] = 4096000
    assert solve(**changes).generation.preemptions >= 0
    changes["pools"] = [REQUEST["pools"][0], {**REQUEST["pools"][1], "memory_bytes": 1e6}]
    assert list(solve(**changes).left_out) == ["there"]


def test_documentation_shows_the_example_and_all_fields() -> None:
    text = (EXAMPLE.parents[1] / "rl.md").read_text()
    shown, *_ = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert json.loads(shown) == json.loads(EXAMPLE.read_text())
    for name in RlRequest.model_fields:
        assert f"`{name}`" in text, name


def test_example_is_predicted_rendered_and_plotted(predictor: LatencyPredictor, tmp_path: Path) -> None:
    value = json.loads(EXAMPLE.read_text())
    request = pickle.loads(pickle.dumps(read_request(RlRequest, value)))
    plan = solve_request(request, predictor)
    assert plan.model_id == predictor.model_id
    assert plan.step_lower_s <= plan.step_s <= plan.step_upper_s
    programs = request.price_requests()
    batches, operators = value["decode"]["batch"], value["decode"]["programs"]
    assert len(programs) == len(value["pools"]) * len(batches) * len(operators)
    assert [program.program["m"] for program in programs[:: len(operators)]] == batches * 2
    assert {program.device for program in programs} == {"h100-sxm", "a100-sxm4-80gb"}
    assert len(plan.decode[0].seconds_per_token) == len(value["decode"]["batch"])
    assert any("linear:" in line and "%" in line for line in plan.explanation)
    assert any(line.startswith("assumed: a decode step") for line in plan.explanation)
    loss = plan.tail_split.if_misses_any
    assert loss is not None and loss < -0.01
    longer = f"generation takes {-100 * loss:.1f} % longer than without a split: set ranker.misses"
    assert any(longer in line for line in plan.explanation)
    text = render(plan.report())
    assert "simulated" in text
    assert "tail" in text
    figure = draw(request, plan)
    labels = ["response length (tokens)", "simulated step (s)", "seconds"]
    assert [axes.get_xlabel() for axes in figure.axes] == labels
    figure.savefig(tmp_path / "rl.png")
    assert (tmp_path / "rl.png").stat().st_size > 5000


@pytest.mark.parametrize("changes", [{}, {"objective": "cost"}, {"mode": "async"}, {"kv": {"max_batch": 8}}])
def test_plan_of_one_size_is_not_worse_than_its_baselines(changes: dict[str, Any]) -> None:
    pools = [{"name": "a", "units": 40, "price_per_hour": 3}]
    plan = solve(pools=pools, max_steps=1, budget_s=600.0, **changes)
    simpler = {name: value for name, value in plan.baselines.items() if name not in ("floor", "guesses", "random")}
    assert plan.sizes_tried == 1 and plan.objective.value <= min(simpler.values()) * (1 + 1e-9)
