"""RL plans of large requests: many units, budgets that hold, and searches that end when they are stopped."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.errors import InfeasibleError
from cdmpp.plan.base.solve import read_request, solve_request
from cdmpp.plan.rl import dispatch, generation, migration, solver
from cdmpp.plan.rl.schema import RlPlan, RlRequest
from cdmpp.plan.rl.sizes import grid
from cdmpp.predict.requests import budget
from cdmpp.predict.requests.budget import SearchControl
from tests.plan import rl_cases

pytestmark = pytest.mark.slow

HERE, THERE = rl_cases.REQUEST["pools"]
REQUEST = {
    **rl_cases.REQUEST,
    "samples_per_step": 256,
    "pools": [{**HERE, "units": 12}, {**THERE, "units": 10}],
    "draws": 2,
}


SHORT: dict[str, Any] = {
    "lengths": {"quantiles": {"0.5": 30, "0.9": 90}, "max_tokens": 100},
    "samples_per_step": 8,
    "decode": {"batch": [1, 8], "seconds": [0.01, 0.02]},
    "pools": [{"name": "g", "units": 8, "device": "h100-sxm"}],
    "draws": 2,
    "max_steps": 8,
    "budget_s": 60,
}


def solve(control: SearchControl | None = None, **changes: Any) -> RlPlan:
    return solve_request(read_request(RlRequest, {**REQUEST, **changes}), control=control)


class Clock:
    """Time that passes by simulated samples alone, and an action at a given time."""

    def __init__(self, sample_s: float) -> None:
        self.now_s, self.sample_s = 0.0, sample_s
        self.at_s = np.inf
        self.action: Callable[[], None] = print

    def monotonic(self) -> float:
        return self.now_s

    process_time = monotonic

    def simulate(self, engine: Any, lengths: Any, *rest: Any, **options: Any) -> Any:
        self.now_s += self.sample_s * len(lengths)
        if self.now_s >= self.at_s:
            self.at_s = np.inf
            self.action()
        return generation.generate(engine, lengths, *rest, **options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    # The seconds of one simulation at the limits of the service: 65,536 samples in 50 ms.
    made = Clock(0.05 / REQUEST["samples_per_step"])
    monkeypatch.setattr(budget, "time", made)
    for module in (dispatch, migration):
        monkeypatch.setattr(module, "generate", made.simulate)
    yield made


@pytest.mark.parametrize("budget_s", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("mix_pools", [False, True])
def test_budget_holds_within_a_tenth_and_a_second(clock: Clock, budget_s: float, mix_pools: bool) -> None:
    plan = solve(budget_s=budget_s, mix_pools=mix_pools)
    assert clock.now_s <= 1.1 * budget_s + 1
    assert clock.now_s >= 0.5 * budget_s or plan.complete
    assert {"random", "floor", "colocated"} <= set(plan.baselines)
    assert plan.gap >= 0


@pytest.mark.parametrize("at_s", [0.5, 4.0, 12.0, 20.0, 27.0])
def test_stopped_search_gives_its_best_plan_within_two_seconds(clock: Clock, at_s: float) -> None:
    control = SearchControl(40.0)
    clock.at_s, clock.action = at_s, control.stop
    plan = solve(control)
    assert at_s <= clock.now_s <= at_s + 2
    assert plan.step_s >= plan.lower_bound_s


def test_compilation_is_not_part_of_the_budget(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = solve(budget_s=600.0, max_steps=6)

    def compile_slowly() -> None:
        clock.now_s += 500

    monkeypatch.setattr(solver, "compile_loops", compile_slowly)
    assert solve(budget_s=600.0, max_steps=6) == complete


@pytest.mark.nightly
def test_ten_thousand_units_of_a_pool_are_planned() -> None:
    pools = [{**pool, "units": 10_000} for pool in REQUEST["pools"]]
    plan = solve(pools=pools, budget_s=600.0, max_steps=20, samples_per_step=2048, inference=0.01)
    assert plan.training is not None
    # Separate units that train take nearly no time, so that the longest sample decides.
    assert plan.gap < 0.02
    assert plan.baselines["random"] >= plan.step_s * (1 - 1e-9)


@pytest.mark.nightly
def test_search_among_many_units_finds_what_the_search_of_all_finds() -> None:
    units = 700
    pools = [{**REQUEST["pools"][0], "units": units, "decode": {"a_s": 0.01, "b_s": 0.001}, "stages": ["generation"]}]
    pools.append({**REQUEST["pools"][1], "units": units, "stages": ["training"]})
    changes: dict[str, Any] = {"pools": pools, "inference": 0.0, "samples_per_step": 1024, "objective": "cost"}
    short = solve(**changes, budget_s=600.0, max_steps=60)
    complete = solve(**changes, budget_s=600.0)
    assert complete.complete
    assert not short.complete
    assert short.price_per_step <= 1.005 * complete.price_per_step
    assert short.objective.lower_bound <= short.price_per_step


@pytest.mark.parametrize("most", [1, 5, 512, 513, 10_000, 1_000_000])
def test_grid_has_both_ends_and_few_numbers(most: int) -> None:
    counts = grid(most)
    assert counts[0] == 1
    assert counts[-1] == most
    assert len(counts) <= 514
    assert (np.diff(counts) > 0).all()
    assert (counts[1:] <= 1.03 * counts[:-1] + 1).all()


def test_training_needs_units_that_hold_weights_gradients_and_optimizer_states() -> None:
    def request(**more: Any) -> RlRequest:
        training = {"seconds_per_token": 1e-3, "state_bytes": 300e9}
        return RlRequest.model_validate({**SHORT, "training": training, "layout": "separate", **more})

    assert solve_request(request()).training.units >= 4
    with pytest.raises(InfeasibleError, match=r"3 devices.* needs 100 GB .* of the 84\.9 GB") as error:
        solve_request(request(training_units=3))
    assert error.value.path == "training_units" and error.value.hint.startswith("4 units of 'g' hold it")
    assert solve_request(request(training_units=3, ignore_memory=True)).training.units == 3
    with pytest.raises(InfeasibleError, match="training on 3 units"):
        solve_request(request(pools=[{"name": "g", "units": 3, "device": "h100-sxm"}]))


def test_generation_instances_hold_the_weights_and_the_caches_of_their_samples() -> None:
    def request(**more: Any) -> RlRequest:
        value = {
            **SHORT,
            "samples_per_step": 64,
            "decode": {"batch": [1, 64], "seconds": [0.01, 0.02]},
            "kv": {"bytes_per_token": 1e8, "max_batch": 64},
            "weights": {"transfer": {"bytes": 60e9}},
            "pools": [{"name": "g", "units": 1, "device": "h100-sxm"}],
            **more,
        }
        return RlRequest.model_validate(value)

    def tokens(form: RlRequest) -> int:
        return form.instance_memory(form.with_pool_costs().pools[0], 100).tokens

    # 60 of 84.9 GB are weights: 249 tokens remain, and samples wait.
    limited, unlimited = request(), request(ignore_memory=True)
    assert tokens(limited) == 249 and tokens(unlimited) == 2**62
    plans = [solve_request(form) for form in (limited, unlimited)]
    assert plans[0].step_s > 2 * plans[1].step_s
    assert not any("memory was not checked" in line for line in plans[0].explanation)
    assert plans[1].explanation[-1] == "memory was not checked: ignore_memory is true"
    with pytest.raises(InfeasibleError, match=r"'g' \(1 devices.* needs 90\.0 GB .* of the 84\.9 GB") as error:
        solve_request(request(weights={"transfer": {"bytes": 80e9}}))
    assert error.value.hint.startswith("2 or more such devices in an instance")
    with pytest.raises(InfeasibleError, match=r"needs 90\.0 GB"):
        solve_request(request(kv={"bytes_per_token": 1e8, "memory_bytes": 30e9}))
    unknown = solve_request(request(weights={}, pools=[{"name": "g", "units": 1}]))
    reason = "generation on 'g' has no device of known capacity and no weight bytes (weights.transfer)"
    assert unknown.explanation[-1] == f"memory was not checked: {reason}"


def test_weights_and_cache_of_a_language_model_limit_its_generation() -> None:
    config = json.loads((Path(__file__).parents[2] / "examples" / "llm" / "llama-3.1-70b.json").read_text())
    value = {**SHORT, "decode": {"batch": [1], "llm": {"config": config, "tp": 1}}}
    with pytest.raises(InfeasibleError, match=r"needs 141 GB .* of the 84\.9 GB"):
        RlRequest.model_validate(value).price_requests()
    value["decode"]["llm"]["tp"] = 2
    request = RlRequest.model_validate(value)
    memory = request.instance_memory(request.with_pool_costs().pools[0], 100)
    assert memory.token_bytes == 2 * 80 * 8 * 128 * 2
    assert memory.tokens == (2 * 79.1 * 2**30 - memory.needed(0)) // memory.token_bytes
