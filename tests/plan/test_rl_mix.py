"""Generation on several unlike pools: divisions and sizes against brute force over all of them."""

from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.plan.base.solve import read_request, solve_request
from cdmpp.plan.rl.dispatch import Dispatcher, MixDispatcher, PoolMix, TailSplit
from cdmpp.plan.rl.evaluate import lower_bounds
from cdmpp.plan.rl.generation import Floats, GenerationEngine
from cdmpp.plan.rl.lengths import draw_steps
from cdmpp.plan.rl.problem import RlProblem
from cdmpp.plan.rl.schema import RlPlan, RlRequest
from cdmpp.plan.rl.size_search import candidate_sizes, search_mixes
from cdmpp.plan.rl.sizes import Pool, SizingProblem
from cdmpp.plan.rl.solver import draw
from cdmpp.plan.rl.training import Mode, TrainingCost
from cdmpp.predict.rendering import render
from cdmpp.predict.requests.budget import SearchControl
from tests.plan.rl_cases import LENGTHS, ranker
from tests.seeds import seeds

pytestmark = pytest.mark.slow

BATCHES = np.arange(9, dtype=np.float64)
CURVE: Floats = np.asarray(0.01 + 1e-3 * BATCHES)
#: Decoding speeds of unlike pools: slower, slower at large batches, slow but flat.
CURVES: tuple[Floats, ...] = (CURVE, np.asarray(1.7 * CURVE), np.asarray(0.004 + 4e-3 * BATCHES))
REQUEST: dict[str, Any] = {
    "lengths": {"quantiles": {"0.5": 300, "0.9": 1000, "0.99": 3000}, "max_tokens": 4000},
    "samples_per_step": 64,
    "inference": 0.05,
    "kv": {"max_batch": 16},
    "pools": [
        {"name": "fast", "units": 3, "price_per_hour": 3, "site": "a", "decode": {"a_s": 0.01, "b_s": 0.001}},
        {"name": "slow", "units": 4, "price_per_hour": 1, "site": "b", "decode": {"a_s": 0.016, "b_s": 0.002}},
        {"name": "trainer", "units": 2, "price_per_hour": 2, "site": "b", "stages": ["training"]},
    ],
    "training": {"seconds_per_token": 0.0002},
    "weights": {"same_site_s": 0.5, "cross_site_s": 2},
    "layout": "separate",
    "draws": 4,
    "budget_s": 600,
}


def solve(**changes: Any) -> RlPlan:
    return solve_request(read_request(RlRequest, {**REQUEST, **changes}))


def dispatchers_of(pools: int, samples: int, draws: int, seed: int) -> dict[int, Dispatcher]:
    steps = draw_steps(LENGTHS, ranker(), samples, draws, seed)
    return {index: Dispatcher(GenerationEngine(CURVES[index]), steps) for index in range(pools)}


def all_mixes(units: dict[int, int], samples: int) -> list[PoolMix]:
    """All orders of the pools and all numbers of samples for each."""
    return [
        PoolMix(order, tuple(units[pool] for pool in order), (*counts, samples - sum(counts)))
        for order in permutations(units)
        for counts in product(range(samples + 1), repeat=len(units) - 1)
        if sum(counts) <= samples
    ]


@settings(max_examples=40)
@given(units=st.lists(st.integers(1, 3), min_size=2, max_size=3), samples=st.integers(2, 14), seed=st.integers(0, 999))
def test_division_equals_brute_force_over_orders_and_counts(units: list[int], samples: int, seed: int) -> None:
    mixed = MixDispatcher(dispatchers_of(len(units), samples, 2, seed))
    counts = dict(enumerate(units))
    best = min(float(mixed.makespans(mix).mean()) for mix in all_mixes(counts, samples))
    mix = mixed.divide(list(counts), units)
    assert sum(mix.samples) == samples
    assert dict(zip(mix.pools, mix.units, strict=True)) == counts
    assert float(mixed.makespans(mix).mean()) <= best * (1 + 1e-12)
    assert float(mixed.lower_bound_s(mix).mean()) <= best * (1 + 1e-12)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("inference_s", [0.0, 0.3])
def test_mixes_equal_brute_force_over_units_and_divisions(mode: Mode, inference_s: float) -> None:
    cost = TrainingCost(per_sample_s=0.1, per_token_s=0.0002, fixed_s=1, efficiency=0.9, batch_overhead_s=0.4)
    pools = (
        Pool("fast", 2, 3.0, "a", GenerationEngine(CURVES[0]), cost, inference_s),
        Pool("slow", 3, 1.0, "b", GenerationEngine(CURVES[1]), None, inference_s),
    )
    sizing = SizingProblem(pools, mode, 0.5, 2.0, mix=True)
    samples = 12
    dispatchers = dispatchers_of(2, samples, 2, 5)
    problem = RlProblem(LENGTHS, ranker(), samples, sizing, draws=2)
    front, complete = search_mixes(problem, dispatchers, SearchControl())
    assert complete
    mixed = MixDispatcher(dispatchers)
    steps = []
    for fast, slow in product(range(1, 3), range(1, 4)):
        mixes = all_mixes({0: fast, 1: slow}, samples)
        best = min(mixes, key=lambda mix: float(mixed.makespans(mix).mean()))
        steps += [sizes.step_s for sizes in candidate_sizes(sizing, -1, mixed, best)]
    assert min(sizes.step_s for sizes in front) == pytest.approx(min(steps))
    # With one instance in the fast pool, since the other one trains.
    assert all(sizes.training_units == 1 and dict(sizing.stage_of(sizes).units)[0] == 1 for sizes in front)
    seconds, price = lower_bounds(sizing, dispatchers)
    assert all(sizes.step_s >= seconds * (1 - 1e-12) and sizes.price >= price * (1 - 1e-12) for sizes in front)


def test_price_inference_and_weights_of_a_mix_by_hand() -> None:
    pools = (
        Pool("fast", 2, 3.0, "a", GenerationEngine(CURVES[0]), None, 0.2),
        Pool("slow", 3, 1.0, "b", GenerationEngine(CURVES[1]), None, 0.6),
        Pool("trainer", 1, 7.0, "b", None, TrainingCost(per_sample_s=0.1)),
    )
    sizing = SizingProblem(pools, "sync", 0.5, 2.0)
    stage = sizing.stage(-1, PoolMix((1, 0), (3, 2), (4, 8)))
    assert stage.instances == 5
    # 2 / 0.2 + 3 / 0.6 samples a second.
    assert stage.inference_s / stage.instances == pytest.approx(1 / 15)
    assert float(sizing.prices_per_s(stage, 2, 1)) == pytest.approx((2 * 3 + 3 * 1 + 7) / 3600)
    assert sizing.weights_s(stage, 2) == 2.0
    assert sizing.training_sizes(stage, 2).tolist() == [1]
    assert sizing.training_sizes(stage, 0).tolist() == []


def test_plan_divides_samples_between_unlike_pools_and_is_faster_than_one() -> None:
    one, mixed = solve(), solve(mix_pools=True)
    assert one.generation.parts == []
    parts = mixed.generation.parts
    assert {part.pool for part in parts} == {"fast", "slow"}
    assert sum(part.samples for part in parts) == 64
    assert [part.first for part in parts] == [0, parts[0].samples]
    assert sum(part.instances for part in parts) == mixed.generation.instances
    assert mixed.generation.pool == " + ".join(part.pool for part in parts)
    assert mixed.generation.time_s >= max(part.time_s for part in parts) * (1 - 1e-12)
    assert mixed.step_s < one.step_s
    assert mixed.baselines["one_pool"] >= mixed.step_s
    assert mixed.baselines["proportional"] >= mixed.step_s * 0.99
    assert mixed.lower_bound_s <= mixed.step_s
    text = render(mixed.report())
    assert "fast" in text and "samples from rank 0" in text
    request = read_request(RlRequest, {**REQUEST, "mix_pools": True})
    bars = [label.get_text() for label in draw(request, mixed).axes[-1].get_yticklabels()]
    assert {"generation, fast", "generation, slow", "training, trainer", "weights"} <= set(bars)


CHANGES: list[dict[str, Any]] = [{"training": None}, {"objective": "cost"}, {"mode": "async"}, {"staleness": 1}]


@pytest.mark.parametrize("changes", CHANGES)
def test_mix_is_never_worse_than_one_pool_on_the_search_steps(changes: dict[str, Any]) -> None:
    if "training" in changes:
        changes = {**changes, "pools": REQUEST["pools"][:2]}
    mixed = solve(**changes, mix_pools=True)
    assert mixed.objective.value >= mixed.objective.lower_bound
    one = solve(**changes)
    # Chosen on the search steps, evaluated on the held-out steps.
    assert mixed.objective.value <= 1.05 * one.objective.value


def test_single_pool_is_kept_where_a_second_one_does_not_help() -> None:
    pools = [REQUEST["pools"][0], {**REQUEST["pools"][1], "decode": {"a_s": 100.0}}, REQUEST["pools"][2]]
    plan = solve(pools=pools, mix_pools=True)
    assert plan.generation.pool == "fast"
    assert plan.generation.parts == []
    assert TailSplit(0, plan.generation.instances).instances <= 3


def test_fixed_number_of_generation_units_is_that_of_all_pools() -> None:
    plan = solve(generation_units=5, mix_pools=True)
    assert plan.generation.instances == 5
    assert sum(part.instances for part in plan.generation.parts) == 5


@pytest.mark.parametrize("seed", seeds(10))
def test_exchange_between_neighbours_is_near_brute_force_where_not_all_divisions_are_tried(seed: int) -> None:
    mixed = MixDispatcher(dispatchers_of(3, 24, 2, seed))
    units = {0: 1, 1: 2, 2: 1}
    best = min(float(mixed.makespans(mix).mean()) for mix in all_mixes(units, 24))
    divided = float(mixed.makespans(mixed.divide(list(units), list(units.values()))).mean())
    assert best * (1 - 1e-12) <= divided <= 1.05 * best
