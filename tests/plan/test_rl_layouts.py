"""RL plans from a model's configuration: layouts that fit, whole nodes, generation as simulated, measured steps."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp import make_plan
from cdmpp.errors import CdmppError, FieldError, InfeasibleError
from cdmpp.llm import simulate, training_step
from cdmpp.plan.base.solve import predict_prices, read_request
from cdmpp.plan.rl.check import check
from cdmpp.plan.rl.from_config import read_measured, request_from_config
from cdmpp.plan.rl.generation import GenerationEngine, SampleQueues, generate
from cdmpp.plan.rl.measured import PRIOR, STAGES, USUAL, MeasuredStep, StageFactors, step_s
from cdmpp.plan.rl.problem import make_problem
from cdmpp.plan.rl.schema import RlRequest
from cdmpp.predict.predictor import LatencyPredictor

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples" / "llm"
LLAMA = str(EXAMPLES / "llama-3.1-8b.json")
CHANCE = random.Random(3)
LENGTHS = [min(4096, max(1, int(CHANCE.lognormvariate(6.5, 0.8)))) for _ in range(64)]
STEP: dict[str, Any] = {
    "lengths": {"samples": [100, 200, 400]},
    "samples_per_step": 8,
    "decode": {"a_s": 0.01},
    "pools": [{"name": "a", "units": 4}],
    "training": {"seconds_per_token": 0.001},
    "draws": 2,
}


@pytest.fixture(scope="module")
def request_32(predictor: LatencyPredictor) -> dict[str, Any]:
    return request_from_config(
        LLAMA, "h100-sxm", gpus=32, lengths=LENGTHS, samples=64, mini_batch=32, predictor=predictor
    )


@pytest.fixture(scope="module")
def plan_32(request_32: dict[str, Any], predictor: LatencyPredictor) -> dict[str, Any]:
    return make_plan("rl", {**request_32, "draws": 4}, predictor)


def test_both_stages_have_whole_nodes_and_layouts_that_fit(
    request_32: dict[str, Any], plan_32: dict[str, Any], predictor: LatencyPredictor
) -> None:
    tp = 32 // request_32["pools"][0]["units"]
    training, generation = plan_32["training"], plan_32["generation"]
    assert training["units"] * tp % 8 == generation["instances"] * tp % 8 == 0
    layout = training["layout"]
    assert layout["gpus"] == training["units"] * tp
    copies = layout["gpus"] // (layout["tp"] * layout["pp"] * layout["cp"])
    assert 32 % (copies * layout["micro_batch"]) == 0
    for changes in ({"sequence": 512 + round(np.mean(LENGTHS))}, {"sequence": 512 + max(LENGTHS), "micro_batch": 1}):
        training_step(LLAMA, "h100-sxm", **{"global_batch": 32, **layout, **changes}, predictor=predictor)


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_fit_their_devices(seed: int, predictor: LatencyPredictor) -> None:
    chance = random.Random(seed)
    model = str(EXAMPLES / f"{chance.choice(['llama-3.1-70b', 'qwen3-30b-a3b', 'gemma-2-9b'])}.json")
    longest, prompt, gpus = chance.choice([2048, 16384, 32768]), chance.choice([64, 2048]), chance.choice([16, 32, 64])
    lengths = [chance.randint(longest // 8, longest) for _ in range(64)]
    request = request_from_config(
        model, "h100-sxm", gpus=gpus, lengths=lengths, samples=128, prompt=prompt, predictor=predictor
    )
    for size in request["training"]["sizes"]:
        layout = {"global_batch": 128, **size["layout"], "sequence": prompt + max(lengths), "micro_batch": 1}
        step = training_step(model, "h100-sxm", **layout, predictor=predictor)
        assert step.memory.fits_with_margin


def test_costs_of_a_plan_are_listed_and_pass_the_check(
    request_32: dict[str, Any], plan_32: dict[str, Any], predictor: LatencyPredictor
) -> None:
    costs = {part["name"]: part for part in plan_32["breakdown"]}
    for name in ("generation", "prefill", "inference", "training", "transfer of weights"):
        assert costs[name]["seconds"] > costs[name]["predicted_s"] > 0
    assert costs["start of the engines"]["seconds"] is None
    assert "2 updates" in costs["training"]["remark"]
    request = read_request(RlRequest, {**request_32, "draws": 4})
    assert check(request, plan_32, predict_prices(request.price_requests(), predictor)) == []


def test_colocated_stages_pay_for_the_bytes_of_the_training_state(
    request_32: dict[str, Any], predictor: LatencyPredictor
) -> None:
    changes = {"layout": "shared", "measured": None, "draws": 2}
    plan = make_plan("rl", {**request_32, **changes}, predictor)
    costs = {part["name"]: part["seconds"] for part in plan["breakdown"]}
    state = next(s for s in request_32["training"]["sizes"] if s["units"] == plan["training"]["units"])
    assert costs["training state"] == pytest.approx(state["swap_s"]) and state["swap_s"] > 0.1
    whole = sum(costs[name] for name in ("generation", "inference", "training", "transfer of weights"))
    assert plan["step_s"] == pytest.approx(whole + costs["training state"])
    request = read_request(RlRequest, {**request_32, **changes})
    assert check(request, plan, predict_prices(request.price_requests(), predictor)) == []


@pytest.mark.parametrize(("tp", "prompt"), [(1, 512), (2, 4096)])
def test_generation_takes_as_long_as_in_the_serving_simulation(
    tp: int, prompt: int, predictor: LatencyPredictor
) -> None:
    made = request_from_config(
        LLAMA, "h100-sxm", gpus=8, lengths=LENGTHS, samples=64, prompt=prompt, generation_tp=tp, predictor=predictor
    )
    request = read_request(RlRequest, {**made, "measured": None})
    problem = make_problem(request.with_prices(predict_prices(request.price_requests(), predictor)))
    lengths = np.array(sorted(LENGTHS, reverse=True))
    generated = generate(problem.sizing.pools[0].generation_engine(), lengths, SampleQueues.shared(64, 1)).end_s
    served = simulate(LLAMA, "h100-sxm", tp=tp, requests=[(0.0, prompt, int(n)) for n in lengths], predictor=predictor)
    assert generated == pytest.approx(served.duration_s, rel=0.03)


def test_steps_read_the_cached_tokens_by_plain_loops() -> None:
    chance = np.random.default_rng(0)
    for prompt, batch in ((0, 3), (7, 4), (50, 8)):
        seconds, cached = np.linspace(1.0, 2.0, batch + 1), np.linspace(0.01, 0.02, batch + 1)
        engine = GenerationEngine(seconds, prompt_tokens=prompt, seconds_per_cached=cached)
        lengths = chance.integers(1, 40, 12)
        now, waiting, running, ends = 0.0, list(range(12)), {}, np.zeros(12)
        while waiting or running:
            while waiting and len(running) < batch:
                running[waiting.pop(0)] = 0
            now += seconds[len(running)] + cached[len(running)] * sum(prompt + made for made in running.values())
            running = {sample: made + 1 for sample, made in running.items()}
            for sample in [sample for sample, made in running.items() if made == lengths[sample]]:
                ends[sample] = now
                del running[sample]
        result = generate(engine, lengths, SampleQueues.shared(12, 1))
        assert result.finish_s == pytest.approx(ends)
        stop_s = 0.6 * now
        stopped = generate(engine, lengths, SampleQueues.shared(12, 1), until_s=stop_s)
        assert np.array_equal(stopped.finish_s[ends <= stop_s], result.finish_s[ends <= stop_s])
        assert np.all(np.isinf(stopped.finish_s[ends > stop_s + 1e-9]))


def test_instances_of_unequal_nodes_and_too_few_devices_are_refused(predictor: LatencyPredictor) -> None:
    with pytest.raises(FieldError, match="nodes of 8"):
        request_from_config(LLAMA, "h100-sxm", gpus=12, lengths=LENGTHS, predictor=predictor)
    with pytest.raises(InfeasibleError):
        request_from_config(LLAMA, "t4", gpus=1, lengths=LENGTHS, predictor=predictor)


def test_factors_of_measured_stages_are_recovered() -> None:
    predicted, factors = np.array([50.0, 10.0, 20.0, 2.0]), np.array([1.7, 1.2, 1.1, 4.0])
    seconds = {f"{name}_s": s for name, s in zip(STAGES, factors * predicted, strict=True)}
    fit = StageFactors.fit([MeasuredStep(generation_units=1, **seconds)], [predicted], 0)
    assert fit.values == pytest.approx(factors, rel=0.05)
    assert np.sqrt(np.diag(fit.covariance)).max() < 0.04
    whole = MeasuredStep(generation_units=1, step_s=step_s(factors * predicted, True, None))
    from_step = StageFactors.fit([whole], [predicted], 0)
    assert step_s(from_step.values * predicted, True, None) == pytest.approx(whole.step_s, rel=0.02)
    prior = StageFactors.prior()
    assert prior.values == pytest.approx(USUAL)
    assert prior.spread(predicted, True, 0) > from_step.spread(predicted, True, 0) > 1
    assert np.sqrt(np.diag(from_step.covariance)) == pytest.approx(PRIOR, rel=0.5)


def test_plan_of_a_request_meets_its_measured_step() -> None:
    plain = make_plan("rl", {**STEP, "layout": "shared"})
    units = plain["generation"]["instances"]
    measured = [{"generation_units": units, "step_s": 3 * plain["step_s"]}]
    plan = make_plan("rl", {**STEP, "layout": "shared", "measured": measured})
    assert plan["step_s"] == pytest.approx(3 * plain["step_s"], rel=0.05)
    assert set(plan["factors"]) == set(STAGES) and plain["factors"] is None
    with pytest.raises(FieldError, match="step_s"):
        make_plan("rl", {**STEP, "measured": [{"generation_units": 1}]})


def test_measured_layouts_have_their_own_predictions(predictor: LatencyPredictor, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("step_s,generation_gpus,training_gpus,generation_tp,tp\n70,16,16,2,2\n60,32,,,\n", "utf-8")
    request = request_from_config(
        LLAMA, "h100-sxm", gpus=32, lengths=LENGTHS, samples=64, measured=read_measured(path), predictor=predictor
    )
    separate, shared = request["measured"]
    assert (separate["generation_units"], separate["training_units"]) == (8, 8)
    assert "training_units" not in shared
    assert all(value > 0 for step in request["measured"] for value in step["predicted"].values())
    assert separate["predicted"]["training_s"] > 1.5 * shared["predicted"]["training_s"]


@pytest.mark.parametrize("text", ["", "step_s\n", "step_s,gpu\n1,2\n", "step_s,pp\n1,x\n", "step_s,pp\n1,2,3\n"])
def test_invalid_tables_of_measured_steps_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CdmppError):
        read_measured(path)


def test_sizes_that_need_too_much_memory_do_not_train() -> None:
    sizes = [{"units": n, "token_s": 0.01 / n, "memory_bytes": 1.2e11 / n, "swap_s": 1.0} for n in (1, 2, 3)]
    pools = [{"name": "a", "units": 4, "device": "h100-sxm"}]
    request = {**STEP, "pools": pools, "training": {"sizes": sizes}, "layout": "separate", "kv": {"max_batch": 8}}
    plan = make_plan("rl", request)
    assert plan["training"]["units"] in (2, 3)
    assert math.isclose(plan["training"]["memory_bytes"], 1.2e11 / plan["training"]["units"])
    ignored = make_plan("rl", {**request, "training_units": 1, "ignore_memory": True})
    assert ignored["training"]["units"] == 1
    with pytest.raises(FieldError):
        make_plan("rl", {**request, "training_units": 1})
