"""``plan check`` of RL plans: plans of all kinds pass, and each false figure is found."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cdmpp import make_plan
from cdmpp.cli.main import app
from cdmpp.plan.base.solve import predict_prices, read_request
from cdmpp.plan.rl.check import check
from cdmpp.plan.rl.schema import RlRequest
from cdmpp.predict.predictor import LatencyPredictor
from tests.plan import rl_cases

pytestmark = pytest.mark.slow

HERE, THERE = rl_cases.REQUEST["pools"]
REQUEST: dict[str, Any] = {
    **rl_cases.REQUEST,
    "prompt_tokens": 16,
    "prefill": 0.02,
    "kv": {"max_batch": 16, "bytes_per_token": 1000, "memory_bytes": 2e7},
    "pools": [HERE, {**THERE, "decode": {"a_s": 0.014, "b_s": 0.0003}}],
    "draws": 3,
}
TRANSFER: dict[str, Any] = {
    "bytes": 8e9,
    "ranks": 4,
    "same_site": {"bandwidth_bytes_per_s": 5e9, "latency_s": 0.01},
    "links": [{"sites": ["a", "b"], "bandwidth_bytes_per_s": 1e9, "latency_s": 0.1, "total_bytes_per_s": 2e9}],
}
PIPELINE: dict[str, Any] = {
    "request": {
        "models": [{"stages": 2, "micro_batches": 4, "forward_s": 0.5, "backward_s": 1.0}],
        "ranks": 2,
        "max_steps": 8,
    },
    "samples": 8,
    "units": 2,
}
ONE_STAGE_POOLS = [{**REQUEST["pools"][0], "stages": ["generation"]}, {**REQUEST["pools"][1], "stages": ["training"]}]
CASES: dict[str, dict[str, Any]] = {
    "sync": {"layout": "separate"},
    "shared": {"layout": "shared"},
    "generation alone": {"training": None},
    "cost": {"objective": "cost", "slack": 0.1},
    "async": {"mode": "async"},
    "stale": {"staleness": 1, "layout": "separate", "weights": {"transfer": TRANSFER}},
    "transfer": {"pools": ONE_STAGE_POOLS, "weights": {"transfer": TRANSFER}},
    "pipeline": {"training": {"pipeline": PIPELINE, "fixed_s": 1}, "layout": "separate", "inference": 0.0},
    "answer": {"training": {"pipeline": {"answer": {"makespan_s": 4.0}, "samples": 8}}},
    "mix": {
        "mix_pools": True, "layout": "separate", "training": {"seconds_per_token": 0.0002}, "inference": 0.05,
        "pools": [
            {"name": "here", "units": 3, "price_per_hour": 3, "site": "a"},
            {"name": "there", "units": 4, "price_per_hour": 1, "site": "b", "decode": {"a_s": 0.016, "b_s": 0.002}},
            {"name": "trainer", "units": 2, "site": "b", "stages": ["training"]},
        ],
        "decode": {"a_s": 0.01, "b_s": 0.001},
    },
    "split": {
        "training": None, "inference": 0.0, "pools": [{"name": "here", "units": 8}], "draws": 8, "prefill": 0.0,
        "samples_per_step": 1024, "kv": {"max_batch": 128}, "decode": {"a_s": 0.008, "b_s": 0.0001},
        "lengths": {"quantiles": {"0.5": 1500, "0.8413": 3690}, "max_tokens": 20480},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, Any]]:
    return {name: make_plan("rl", {**REQUEST, **changes}) for name, changes in CASES.items()}


def faults(name: str, plan: Any) -> list[str]:
    return check(read_request(RlRequest, {**REQUEST, **CASES[name]}), plan)


@pytest.mark.parametrize("name", CASES)
def test_plan_of_the_solver_passes(name: str, plans: dict[str, dict[str, Any]]) -> None:
    plan = json.loads(json.dumps(plans[name]))
    assert faults(name, plan) == []
    assert (name == "mix") == bool(plan["generation"]["parts"])
    assert name != "split" or plan["tail_split"]["used"]


def changed(plan: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value, or with the old one times a factor, at a dotted path."""
    other = copy.deepcopy(plan)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    holder: Any = other
    for key in parents:
        holder = holder[key]
    holder[last] = holder[last] * float(value[1:]) if isinstance(value, str) and value[0] == "*" else value
    return other


FALSE: list[tuple[str, str, Any, str]] = [
    ("sync", "step_s", "*0.99", "step_s"),
    ("sync", "price_per_step", "*1.01", "price_per_step"),
    ("sync", "objective.value", "*0.9", "objective.value"),
    ("sync", "objective.lower_bound", "*1.5", "objective.lower_bound"),
    ("sync", "lower_bound_s", "*1.5", "lower_bound_s"),
    ("sync", "lower_bound_s", "*0.5", "lower_bound_s"),
    ("cost", "lower_bound_s", 0.0, "lower_bound_s"),
    ("sync", "step_lower_s", 1.0, "step_lower_s"),
    ("sync", "step_upper_s", 1e6, "step_upper_s"),
    ("sync", "gap", 0.0, "gap"),
    ("sync", "generation.time_s", "*0.9", "generation.time_s"),
    ("sync", "generation.instances", 60, "tail_split"),
    ("sync", "generation.pool", "nowhere", "no pool 'nowhere'"),
    ("sync", "training.units", 40, "units are used"),
    ("sync", "training.time_s", "*0.9", "training.time_s"),
    ("sync", "training.pool", "nowhere", "no pool 'nowhere' trains"),
    ("sync", "streaming.batches", 3, "streaming.batches"),
    ("sync", "streaming.weights_s", "*0.5", "streaming.weights_s"),
    ("sync", "streaming.staleness", 1, "streaming.staleness"),
    ("sync", "mode", "async", "mode"),
    ("sync", "baselines.colocated", "*2", "baselines.colocated"),
    ("sync", "baselines.floor", "*0.5", "baselines.floor"),
    ("sync", "baselines.lpt", "*0.1", "below the lower bound"),
    ("sync", "training", None, "training: missing"),
    ("stale", "streaming.staleness", 2, "streaming.staleness"),
    ("stale", "streaming.weights_s", "*2", "streaming.weights_s"),
    ("transfer", "streaming.weights_s", "*0.9", "streaming.weights_s"),
    ("pipeline", "training.pipeline.runs", 1, "need"),
    ("pipeline", "training.pipeline.run_s", "*0.5", "training.pipeline.run_s"),
    ("pipeline", "training.pipeline.schedule.makespan_s", "*0.5", "training.pipeline"),
    ("pipeline", "training.pipeline.schedule", None, "schedule: missing"),
    ("pipeline", "training.pipeline", None, "training.pipeline: missing"),
    ("answer", "training.pipeline.run_s", "*0.5", "the request has 4"),
    ("mix", "generation.parts.0.samples", 63, "their ranges"),
    ("mix", "generation.parts.0.instances", 6, "not the sum"),
    ("mix", "generation.time_s", "*0.9", "generation.time_s"),
    ("split", "tail_split.tail.instances", 1, "tail_split"),
    ("shared", "training.units", 1, "other units"),
    ("async", "step_s", "*0.9", "step_s"),
]


@pytest.mark.parametrize(("name", "path", "value", "text"), FALSE, ids=[f"{name} {path}" for name, path, *_ in FALSE])
def test_false_figure_is_found(name: str, path: str, value: Any, text: str, plans: dict[str, dict[str, Any]]) -> None:
    mistakes = faults(name, changed(plans[name], path, value))
    assert mistakes
    assert text in "\n".join(mistakes)


@settings(max_examples=25)
@given(
    changes=st.fixed_dictionaries(
        {
            "samples_per_step": st.sampled_from([1, 2, 7, 33]),
            "layout": st.sampled_from(["any", "separate", "shared"]),
            "objective": st.sampled_from(["time", "cost"]),
            "mix_pools": st.booleans(),
            "inference": st.sampled_from([0.0, 0.5]),
            "staleness": st.sampled_from([None, 0, 1, 3]),
            "training": st.sampled_from([None, REQUEST["training"], CASES["pipeline"]["training"]]),
            "weights": st.sampled_from([REQUEST["weights"], {"transfer": TRANSFER}]),
            "seed": st.integers(0, 9),
        }
    )
)
def test_plans_of_any_request_pass_and_are_not_below_their_bounds(changes: dict[str, Any]) -> None:
    value = {**REQUEST, **changes}
    plan = make_plan("rl", value)
    assert check(read_request(RlRequest, value), plan) == []
    assert plan["objective"]["value"] >= plan["objective"]["lower_bound"] * (1 - 1e-12)


def test_command_checks_an_rl_plan(tmp_path: Path, plans: dict[str, dict[str, Any]]) -> None:
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.write_text(json.dumps({**REQUEST, **CASES["stale"]}))
    answer.write_text(json.dumps(plans["stale"]))
    checked = CliRunner().invoke(app, ["plan", "check", str(request), str(answer)])
    assert checked.exit_code == 0, checked.output
    assert checked.output.startswith(f"ok step_s={plans['stale']['step_s']:.9g}")
    answer.write_text(json.dumps(changed(plans["stale"], "step_s", "*0.99")))
    checked = CliRunner().invoke(app, ["plan", "check", str(request), str(answer)])
    assert checked.exit_code == 1
    assert "step_s" in checked.output


def test_step_at_the_bounds_of_predictions_is_simulated(predictor: LatencyPredictor) -> None:
    value = json.loads((Path(__file__).parents[2] / "docs" / "examples" / "rl.json").read_text()) | {"draws": 2}
    request = read_request(RlRequest, value)
    prices = predict_prices(request.price_requests(), predictor)
    plan = make_plan("rl", value, predictor)
    assert check(request, plan, prices) == []
    for path, claim in (("step_lower_s", "*0.5"), ("step_upper_s", "*2"), ("step_upper_s", None)):
        assert any(path in fault for fault in check(request, changed(plan, path, claim), prices))
