"""Estimates: sums of their parts, bounds, memory, host time and errors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import cdmpp
from cdmpp.devices import lookup
from cdmpp.errors import CdmppError, FieldError, InfeasibleError
from cdmpp.predict.llm import (
    Decode,
    EstimatePlan,
    Layout,
    LLMEstimate,
    Prefill,
    StepPart,
    estimate,
    read_config,
    step_operators,
)
from cdmpp.predict.llm.layout import Types, allowed_ep, allowed_tp
from cdmpp.predict.llm.memory import memory_of, smallest_layout
from cdmpp.predict.llm.pricing import GRAPH, StepPricing, host_cost, step_seconds
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.operators import make_operator
from tests.predict.llm.test_read_config import EXAMPLES, LLAMA

LLAMA_8B = EXAMPLES / "llama-3.1-8b.json"
LLAMA_70B = EXAMPLES / "llama-3.1-70b.json"
DURATIONS = ("prefill", "decode", "total", "ttft", "tpot")


@pytest.fixture(scope="module")
def llama(predictor: LatencyPredictor) -> LLMEstimate:
    return estimate(LLAMA_8B, "h100-sxm", batch=8, input=512, output=64, predictor=predictor)


def test_prefill_is_the_sum_of_the_predictions_of_its_step(llama: LLMEstimate, predictor: LatencyPredictor) -> None:
    parts = step_operators(read_config(LLAMA_8B), Layout(), Prefill([512] * 8))
    prices = predictor.predict([part.program for part in parts], "h100-sxm", protocol="kernel", framework="vllm")
    for figure, value in (
        ("latency_s", llama.prefill.point),
        ("lower_s", llama.prefill.lower),
        ("upper_s", llama.prefill.upper),
    ):
        expected = sum(part.count * getattr(price, figure) for part, price in zip(parts, prices, strict=True))
        assert value == pytest.approx(expected, rel=1e-12)


def test_decode_lies_between_its_shortest_and_longest_step(llama: LLMEstimate, predictor: LatencyPredictor) -> None:
    def step_s(past_len: int) -> float:
        parts = step_operators(read_config(LLAMA_8B), Layout(), Decode(8, past_len))
        prices = predictor.predict([part.program for part in parts], "h100-sxm", protocol="kernel", framework="vllm")
        return sum(part.count * (price.latency_s or 0.0) for part, price in zip(parts, prices, strict=True))

    # A prediction need not grow with every cached token, so the first step need not be the shortest.
    steps = [step_s(512 + i) for i in range(63)]
    assert llama.decode is not None
    assert min(steps) <= llama.decode.point <= max(steps)
    assert min(steps) * 63 <= llama.total.point - llama.prefill.point <= max(steps) * 63


def test_parts_add_up_to_the_total(llama: LLMEstimate) -> None:
    value = llama.to_dict()
    assert sum(part["seconds"] for part in value["parts"]) == pytest.approx(value["total_s"], rel=1e-9)
    assert sum(part["share"] for part in value["parts"]) == pytest.approx(1, rel=1e-9)
    prefill = sum(part["seconds"] for part in value["parts"] if part["phase"] == "prefill")
    assert prefill == pytest.approx(value["prefill_s"], rel=1e-9)
    counts = {(part["phase"], part["name"]): part["count"] for part in value["parts"]}
    assert counts["prefill", "qkv_proj"] == 32
    assert counts["decode", "qkv_proj"] == 32 * 63


def test_json_has_all_figures_with_their_bounds(llama: LLMEstimate) -> None:
    value = json.loads(json.dumps(llama.to_dict(), allow_nan=False))
    for name in DURATIONS:
        assert 0 < value[f"{name}_lower_s"] < value[f"{name}_s"] < value[f"{name}_upper_s"]
    assert value["ttft_s"] == value["prefill_s"]
    assert value["total_s"] == pytest.approx(value["prefill_s"] + 63 * value["tpot_s"])
    assert value["throughput_tokens_per_s"] == pytest.approx(8 * 64 / value["total_s"])
    lower, upper = value["throughput_lower_tokens_per_s"], value["throughput_upper_tokens_per_s"]
    assert lower < value["throughput_tokens_per_s"] < upper
    assert (value["device"], value["batch"], value["framework"], value["gpus"]) == ("h100-sxm", 8, "vllm", 1)
    assert sum(value["domain_shares"].values()) == pytest.approx(1)
    memory = value["memory_bytes"]
    assert memory["total"] == memory["weights"] + memory["kv_cache"] + memory["activations"] < memory["device"]


def test_a_single_output_token_has_no_decode_step(predictor: LatencyPredictor) -> None:
    value = estimate(LLAMA_8B, "h100-sxm", output=1, predictor=predictor).to_dict()
    assert value["decode_s"] is None and value["tpot_upper_s"] is None
    assert value["total_s"] == value["prefill_s"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-3.1-70b", {"tp": 4, "batch": 2}),
        ("qwen3-30b-a3b", {"tp": 2, "ep": 4, "batch": 4}),
        ("deepseek-v3", {"tp": 8, "pp": 2}),
        ("gemma-2-9b", {"weights": "fp8"}),
        ("mixtral-8x7b", {"tp": 2, "weights": "int4"}),
        ("gpt2-xl", {"input": 256, "dtype": "float16"}),
        ("qwen2.5-14b", {"framework": "sglang"}),
    ],
)
def test_every_example_has_an_estimate(name: str, options: dict[str, Any], predictor: LatencyPredictor) -> None:
    value = estimate(EXAMPLES / f"{name}.json", "h100-sxm", output=8, predictor=predictor, **options).to_dict()
    assert all(value[f"{figure}_lower_s"] < value[f"{figure}_upper_s"] for figure in DURATIONS)
    assert sum(part["seconds"] for part in value["parts"]) == pytest.approx(value["total_s"], rel=1e-9)


def test_device_may_be_a_specification(predictor: LatencyPredictor) -> None:
    by_name = estimate(LLAMA_8B, "h100-sxm", output=2, predictor=predictor)
    for device in (lookup("h100-sxm"), lookup("h100-sxm").model_dump(exclude_none=True)):
        assert estimate(LLAMA_8B, device, output=2, predictor=predictor) == by_name


def test_package_is_public() -> None:
    assert cdmpp.predict.llm.estimate is estimate


def test_ranks_divide_weights_and_cache() -> None:
    config = read_config(LLAMA_70B)
    one, four = (memory_of(config, Layout(tp=tp), Types(), 8, 2048) for tp in (1, 4))
    assert one.weights == pytest.approx(70.55e9 * 2, rel=1e-3)
    assert four.weights == pytest.approx(one.weights / 4, rel=1e-3)
    assert one.kv_cache == 8 * 2048 * 80 * 2 * 8 * 128 * 2
    assert four.kv_cache == one.kv_cache / 4
    # Eight key-value heads on sixteen ranks: each rank holds one.
    assert memory_of(config, Layout(tp=16), Types(), 8, 2048).kv_cache == one.kv_cache / 8
    assert memory_of(config, Layout(pp=4), Types(), 8, 2048).kv_cache == one.kv_cache / 4
    narrow = memory_of(config, Layout(), Types(weights="float8_e4m3"), 8, 2048)
    assert one.weights / 2 < narrow.weights < 0.53 * one.weights


def test_expert_parallelism_divides_experts_and_replicas_the_batch() -> None:
    config = read_config(EXAMPLES / "qwen3-30b-a3b.json")
    whole, spread = (memory_of(config, layout, Types(), 8, 1024) for layout in (Layout(), Layout(ep=8)))
    assert spread.kv_cache == whole.kv_cache / 8
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert whole.weights - spread.weights == pytest.approx(experts * 7 / 8)


def test_windows_and_latents_shrink_the_cache() -> None:
    gemma = memory_of(read_config(EXAMPLES / "gemma-2-9b.json"), Layout(), Types(), 1, 8192)
    assert gemma.kv_cache == 21 * (8192 + 4096) * 2 * 8 * 256 * 2
    deepseek = memory_of(read_config(EXAMPLES / "deepseek-v3.json"), Layout(tp=8), Types(), 1, 1000)
    assert deepseek.kv_cache == 61 * 1000 * 576 * 2


def test_model_that_does_not_fit_names_the_smallest_number_of_devices(predictor: LatencyPredictor) -> None:
    with pytest.raises(InfeasibleError, match=r"needs 141\.\d GB on each h100-sxm.*at least 2 devices") as caught:
        estimate(LLAMA_70B, "h100-sxm", predictor=predictor)
    assert "tp=2, pp=1" in caught.value.hint
    config, device_bytes = read_config(LLAMA_70B), lookup("h100-sxm").memory_bytes
    assert device_bytes is not None
    best = smallest_layout(config, 1, Types(), 1, 1152, device_bytes)
    assert best == Layout(tp=2)
    with pytest.raises(InfeasibleError, match="GB on each h100-sxm") as caught:
        estimate(LLAMA_8B, "h100-sxm", batch=65_536, input=1_000_000, predictor=predictor)
    assert "reduce batch" in caught.value.hint


@pytest.mark.parametrize("name", ["gemma-2-9b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("device_bytes", [6e9, 24e9, 80e9])
@pytest.mark.parametrize("ep", [1, 8])
def test_smallest_layout_is_that_of_a_search_through_all(name: str, device_bytes: float, ep: int) -> None:
    config = read_config(EXAMPLES / f"{name}.json")
    ep = 1 if config.experts is None else ep
    fitting = [
        layout
        for tp in allowed_tp(config)
        for pp in range(1, config.layers + 1)
        for layout in (Layout(tp, pp, ep),)
        if layout.gpus <= 1024 and memory_of(config, layout, Types(), 4, 5000).total <= device_bytes
        if config.experts is None or ep in allowed_ep(config, tp)
    ]
    best = min(fitting, key=lambda layout: (layout.gpus, layout.pp), default=None)
    assert smallest_layout(config, ep, Types(), 4, 5000, device_bytes) == best


def test_smallest_layout_of_a_huge_model_is_found_with_few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"hidden_size": 2**20, "num_hidden_layers": 10_000, "vocab_size": 1000, "intermediate_size": 720_720}
    heads = {"num_attention_heads": 720_720, "num_key_value_heads": 720_720, "head_dim": 8}
    config = read_config({"model_type": "mixtral", "num_local_experts": 720_720, **fields, **heads})
    trials: list[Layout] = []

    def counted(*args: Any) -> Any:
        trials.append(args[1])
        return memory_of(*args)

    monkeypatch.setattr("cdmpp.predict.llm.memory.memory_of", counted)
    assert smallest_layout(config, 1, Types(), 1, 1152, 80e9) is None
    assert len(trials) < 1000


def test_smallest_layout_can_be_asked_for() -> None:
    # Two columns of an expert cannot be split over four ranks: the experts are spread instead.
    experts = {"num_local_experts": 64, "intermediate_size": 2}
    config = read_config({**LLAMA, "model_type": "mixtral", "num_hidden_layers": 1, **experts})
    for device_bytes in (2e8, 3e8, 6e8, 1.2e9):
        best = smallest_layout(config, 1, Types(), 1, 10, device_bytes)
        assert best is not None
        best.check(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch: '0' is not allowed"),
        ({"input": 1.5}, "input: '1.5' is not allowed"),
        ({"output": True}, "output: 'True' is not allowed"),
        ({"tp": 3}, "tp: 3 does not divide"),
        ({"framework": "vlm"}, "did you mean vllm"),
        ({"framework": "nccl"}, "runs collectives"),
    ],
)
def test_impossible_requests_are_errors(options: dict[str, Any], message: str, predictor: LatencyPredictor) -> None:
    with pytest.raises(CdmppError, match=message):
        estimate(LLAMA_8B, "h100-sxm", predictor=predictor, **options)


def test_a_step_that_is_too_large_names_its_part_and_what_to_reduce() -> None:
    with pytest.raises(FieldError, match=r"cannot compute the model's part '.*: its sizes are too large") as caught:
        step_operators(read_config(LLAMA_8B), Layout(), Prefill([1 << 24] * 4))
    assert "reduce one of" in caught.value.hint and "the batch, the input length and config.json" in caught.value.hint


def test_learned_positions_limit_the_length(predictor: LatencyPredictor) -> None:
    with pytest.raises(FieldError, match="1024 and 128 output tokens exceed the model's 1024 positions"):
        estimate(EXAMPLES / "gpt2-xl.json", "h100-sxm", predictor=predictor)


def test_launches_from_the_host_bound_short_steps(predictor: LatencyPredictor) -> None:
    small = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 1000}
    eager, graph = (
        estimate(small, "h100-sxm", output=9, cuda_graph=on, predictor=predictor).to_dict() for on in (False, True)
    )
    launches = sum(part.count for part in step_operators(read_config(small), Layout(), Decode(1, 1)))
    assert eager["decode_s"] == pytest.approx(max(launches * host_cost(captured=False).launch_s[0], graph["decode_s"]))
    assert sum(part["seconds"] for part in eager["parts"]) == pytest.approx(eager["total_s"], rel=1e-9)


def test_host_time_of_a_step() -> None:
    assert step_seconds(1.0, 100, 1e-5, 1e-3) == 1.001
    assert step_seconds(1e-4, 100, 1e-5, 1e-3) == pytest.approx(2e-3)
    assert host_cost(captured=True) == GRAPH
    point, lower, upper = host_cost(captured=False).launch_s
    assert 0 < lower < point < upper


def test_decode_uses_the_protocol_that_training_covered_better(predictor: LatencyPredictor) -> None:
    """The H800's dense products were measured as kernels, those of the H200 in graphs."""
    parts = [
        StepPart("product", make_operator({"operator": "linear", "dtype": "bfloat16", "m": 8, "n": 4096, "k": 4096}), 1)
    ]
    for device, protocol in (("h800", "kernel"), ("h200", "graph")):
        pricing = StepPricing(parts, captured=True)
        step = pricing.priced(predictor.predict_queries(pricing.queries(lookup(device), "vllm")))
        assert [p.protocol for p in step.predictions] == [protocol]


def test_lengths_replace_batch_and_input(predictor: LatencyPredictor) -> None:
    config = read_config(LLAMA_8B)
    equal = EstimatePlan(config, lookup("h100-sxm"), batch=4, input=512, output=8)
    listed = EstimatePlan(config, lookup("h100-sxm"), lengths=[512] * 4, output=8)
    assert listed.queries == equal.queries
    assert listed.settings == equal.settings


def test_interpolated_steps_add_up_to_all_steps() -> None:
    from cdmpp.predict.llm.estimate import _points, _weights

    past = np.arange(100, 200, dtype=np.float64)
    points = _points(past)
    assert (points[0], points[-1], len(points)) == (100, 199, 5)
    # A linear function of the length is summed exactly.
    assert _weights(past, points) @ (3 * points + 1) == pytest.approx((3 * past + 1).sum())
