"""Estimates: sums of their parts, bounds, memory, host time and errors."""

import json
from typing import Any

import numpy as np
import pytest

from cdmpp.devices import lookup
from cdmpp.errors import CdmppError, FieldError, InfeasibleError
from cdmpp.llm import (
    Decode,
    EstimatePlan,
    Layout,
    LLMEstimate,
    Prefill,
    StepPart,
    estimate,
    read_config,
    simulate,
    step_operators,
)
from cdmpp.llm.engines import EngineProfile, load_engine
from cdmpp.llm.engines.profile import MeasuredSteps
from cdmpp.llm.layout import Types, allowed_ep, allowed_tp
from cdmpp.llm.memory import memory_of, smallest_layout
from cdmpp.llm.pricing import UNSURE_RESIDUAL, StepPricing, combined
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.operators import make_operator
from tests.llm.test_read_config import EXAMPLES, LLAMA

LLAMA_8B = EXAMPLES / "llama-3.1-8b.json"
LLAMA_70B = EXAMPLES / "llama-3.1-70b.json"
#: Nothing but the kernels: no launches, no host.
BARE = EngineProfile(name="bare", framework="vllm", graph_prefill=True)
DURATIONS = ("prefill", "decode", "total", "ttft", "tpot")


@pytest.fixture(scope="module")
def llama(predictor: LatencyPredictor) -> LLMEstimate:
    return estimate(LLAMA_8B, "h100-sxm", batch=8, input=512, output=64, engine=BARE, predictor=predictor)


def test_prefill_is_the_sum_of_the_predictions_of_its_step(llama: LLMEstimate, predictor: LatencyPredictor) -> None:
    parts = step_operators(read_config(LLAMA_8B), Layout(), Prefill([512] * 8))
    prices = predictor.predict([part.program for part in parts], "h100-sxm", protocol="kernel", framework="vllm")
    point, lower, upper = (
        sum(part.count * getattr(price, figure) for part, price in zip(parts, prices, strict=True))
        for figure in ("latency_s", "lower_s", "upper_s")
    )
    assert llama.prefill.point == pytest.approx(point, rel=1e-12)
    # Errors of different kinds of kernels do not all have the same sign.
    unsure = np.exp(1.2816 * UNSURE_RESIDUAL * (1 - llama.domain_shares["in"]))
    assert lower / unsure < llama.prefill.lower < point < llama.prefill.upper < upper * unsure


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
        if config.experts is None or ep in allowed_ep(config, tp, layout.dp)
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

    monkeypatch.setattr("cdmpp.llm.memory.memory_of", counted)
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
        estimate(small, "h100-sxm", output=9, engine="kernels-only", cuda_graph=on, predictor=predictor).to_dict()
        for on in (False, True)
    )
    launches = sum(part.count for part in step_operators(read_config(small), Layout(), Decode(1, 1)))
    launch_s = load_engine("kernels-only").host.launch_s
    assert eager["decode_s"] == pytest.approx(max(launches * launch_s, graph["decode_s"]))
    assert sum(part["seconds"] for part in eager["parts"]) == pytest.approx(eager["total_s"], rel=1e-9)


def test_host_time_adds_to_the_kernels_or_overlaps_them(predictor: LatencyPredictor) -> None:
    host = {"step_s": 1e-3, "sequence_s": 1e-4, "ranks_s": 2e-3}
    own = {"name": "mine", "framework": "vllm", "kernel_factor": 2.0, "graph_prefill": True}
    request: dict[str, Any] = {"batch": 4, "input": 64, "output": 3, "tp": 2, "predictor": predictor}
    bare = estimate(LLAMA_8B, "h100-sxm", engine=BARE, **request)
    serial = estimate(LLAMA_8B, "h100-sxm", engine={**own, "host": host}, **request)
    hidden = estimate(LLAMA_8B, "h100-sxm", engine={**own, "host": {**host, "overlapped": True}}, **request)
    assert bare.decode is not None and serial.decode is not None and hidden.decode is not None
    assert serial.decode.point == pytest.approx(2 * bare.decode.point + 1e-3 + 4e-4 + 2e-3)
    assert hidden.decode.point == pytest.approx(max(2 * bare.decode.point, 3.4e-3))
    assert serial.to_dict()["parts"][-1]["name"] == "host"


def test_domain_and_interval_follow_the_measured_requests(predictor: LatencyPredictor) -> None:
    ranges = dict.fromkeys(("tp", "pp", "ep", "dp", "experts"), (1.0, 1.0))
    ranges |= {"batch": (4.0, 16.0), "tokens": (256.0, 1024.0), "parameters": (8e9, 8e9)}
    measured = MeasuredSteps(devices=("h100-sxm",), products=("bfloat16",), ranges=ranges)
    residuals = {"residual": 0.05, "near_residual": 0.2, "out_residual": 0.4}
    own = BARE.model_copy(update={**residuals, "measured": measured})
    requests: tuple[dict[str, Any], ...] = ({"batch": 8}, {"batch": 64}, {"batch": 64, "tp": 4})
    found = [estimate(LLAMA_8B, "h100-sxm", input=512, engine=own, predictor=predictor, **r) for r in requests]
    assert [value.engine_domain[0] for value in found] == ["in", "near", "out"]
    assert found[2].domain_reason.startswith("engine bare; no such step was measured with bare: batch 64, tp 4")
    assert found[2].domain == "out"
    widths = [value.total.upper / value.total.lower for value in found]
    assert widths[0] < widths[1] < widths[2]
    # Without measured requests, kernels alone decide.
    assert (
        estimate(LLAMA_8B, "h100-sxm", input=512, batch=64, engine=BARE, predictor=predictor).engine_domain[0] == "in"
    )
    sparse = estimate(EXAMPLES / "qwen3-30b-a3b.json", "h100-sxm", engine=own, batch=8, input=512, predictor=predictor)
    assert "parameters" in sparse.domain_reason and "experts" in sparse.domain_reason


def test_engines_differ_and_contradictions_are_errors(predictor: LatencyPredictor) -> None:
    request: dict[str, Any] = {"tp": 2, "output": 4, "predictor": predictor}
    default, alone, kernels = (
        estimate(LLAMA_70B, "h200", **request, **options)
        for options in ({}, {"framework": "vllm"}, {"engine": "kernels-only", "framework": "vllm"})
    )
    assert default == alone and default.settings.engine == "vllm" and default.domain_reason.startswith("engine vllm;")
    assert default.engine_domain[0] == "near" and "device h200" in default.domain_reason
    names = [{part.name for part in value.parts if part.phase == "decode"} for value in (default, kernels)]
    # Fused parts take no time of their own; the host does.
    assert names[1] - names[0] == {"rotary", "kv_cache_save", "attention_norm", "mlp_norm"}
    assert names[0] - names[1] == {"host"}
    with pytest.raises(FieldError, match="framework: sglang, but the engine vllm has the kernels of vllm"):
        estimate(LLAMA_8B, "h100-sxm", engine="vllm", framework="sglang", predictor=predictor)
    with pytest.raises(CdmppError, match="no engine profile named 'tgi'"):
        estimate(LLAMA_8B, "h100-sxm", engine="tgi", predictor=predictor)
    with pytest.raises(FieldError, match=r"engine: host\.step_s"):
        estimate(LLAMA_8B, "h100-sxm", engine={"name": "x", "host": {"step_s": -1}}, predictor=predictor)


def test_long_prompts_are_prefilled_in_chunks(predictor: LatencyPredictor) -> None:
    chunked = EngineProfile(name="chunked", framework="vllm", graph_prefill=True, token_budget=1000)
    plan = EstimatePlan(read_config(LLAMA_8B), lookup("h100-sxm"), batch=3, input=2500, output=1, engine=chunked)
    calls = {
        query.program.operator.text()
        for query in plan.queries
        if query.program.operator.operator == "attention_prefill"
    }
    assert {int(name.partition("past_len=")[2].partition(",")[0] or 0) for name in calls} == {0, 1000, 2000}
    whole, parts = (
        estimate(LLAMA_8B, "h100-sxm", batch=3, input=2500, output=1, engine=engine, predictor=predictor).prefill.point
        for engine in (BARE, chunked)
    )
    assert 0.9 * whole < parts < 1.5 * whole
    # 1,024 prompts of a large model are many steps, and no impossible tensor.
    assert EstimatePlan(
        read_config(EXAMPLES / "deepseek-v3.json"), lookup("h200"), tp=8, batch=1024, input=256, output=1
    )


def test_bounds_of_kinds_add_up_within_a_kind_and_in_quadrature_between_kinds() -> None:
    one = combined(np.array([[2.0, 0.0], [1.8, 0.0], [2.2, 0.0]]))
    assert one == pytest.approx([2.0, 1.8, 2.2])
    two = combined(np.array([[1.0, 1.0], [0.9, 0.9], [1.1, 1.1]]))
    assert np.log(two[2] / 2) == pytest.approx(2**0.5 * np.log(1.05))
    assert combined(np.array([[1.0], [1.0], [1.0]]), residual=0.1) == pytest.approx(
        [1, np.exp(-0.12816), np.exp(0.12816)]
    )
    # Kernels that are not "in" may be others in an engine.
    half = combined(np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]))
    assert half[2] / half[0] == pytest.approx(np.exp(1.2816 * UNSURE_RESIDUAL / 2))


def test_replicas_divide_the_batch_and_share_the_experts(predictor: LatencyPredictor) -> None:
    two, one = (
        estimate(LLAMA_8B, "h100-sxm", dp=dp, batch=batch, output=4, engine=BARE, predictor=predictor)
        for dp, batch in ((2, 8), (1, 4))
    )
    assert (two.gpus, two.settings.dp, two.prefill, two.decode) == (2, 2, one.prefill, one.decode)
    assert (Layout(2, 1, 8).dp, Layout(8, 1, 2).dp, Layout(2, 2, 4, 2).gpus) == (4, 1, 8)
    config = read_config(EXAMPLES / "qwen3-30b-a3b.json")
    for layout in (Layout(2, 1, 1, 2), Layout(1, 1, 4), Layout(4)):
        assert (
            memory_of(config, layout, Types(), 8, 1024).weights
            < 0.3 * memory_of(config, Layout(), Types(), 8, 1024).weights + 2e9
        )
    with pytest.raises(FieldError, match="ep: 8 does not fit tp=2, dp=2"):
        Layout(2, 1, 8, 2).check(config)


def test_caches_and_weights_are_in_the_types_that_file_request_and_device_say(predictor: LatencyPredictor) -> None:
    config = {
        **LLAMA,
        "quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    }
    stated, asked, plain = (
        estimate(c, "h100-sxm", batch=4, output=2, predictor=predictor, **options)
        for c, options in ((config, {}), (LLAMA, {"kv_dtype": "fp8"}), (LLAMA, {}))
    )
    assert (
        stated.settings.kv_dtype == asked.settings.kv_dtype == "float8_e4m3" and plain.settings.kv_dtype == "bfloat16"
    )
    assert 2 * stated.memory.kv_cache == 2 * asked.memory.kv_cache == plain.memory.kv_cache
    assert estimate(config, "h100-sxm", kv_dtype="bf16", output=2, predictor=predictor).settings.kv_dtype == "bfloat16"
    # The type of a request counts, for the products too.
    options = {"weights": "bfloat16", "kv_dtype": "bfloat16", "batch": 4, "output": 2}
    assert estimate(config, "h100-sxm", predictor=predictor, **options).total == plain.total
    # A cache whose type nothing states is the same whether the file or the request quantises the weights.
    file = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    asks: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (file, {}),
        (file, {"weights": "fp8"}),
        (LLAMA, {"weights": "fp8"}),
    ]
    for profile, kv_dtype in ((None, "bfloat16"), (load_engine().model_copy(update={"kv_dtype": "int8"}), "int8")):
        several = [estimate(c, "h100-sxm", engine=profile, output=2, predictor=predictor, **w) for c, w in asks]
        assert {one.settings.kv_dtype for one in several} == {kv_dtype} and len(
            {one.total.point for one in several}
        ) == 1
        assert all(("kv_dtype changes it" in " ".join(one.remarks)) == (kv_dtype == "int8") for one in several)
    ampere = estimate(LLAMA, "a100-sxm4-80gb", weights="fp8", output=2, predictor=predictor)
    assert ampere.remarks == (
        "a100-sxm4-80gb has no units for float8_e4m3: weights are read packed, products are in bfloat16",
    )
    assert ampere.memory.weights < 0.7 * estimate(LLAMA, "a100-sxm4-80gb", output=2, predictor=predictor).memory.weights
    volta = estimate(LLAMA, "v100-sxm2-32gb", output=2, predictor=predictor)
    assert volta.remarks == ("v100-sxm2-32gb has no matrix units for bfloat16; float16 is faster",)
    assert not estimate(LLAMA, "v100-sxm2-32gb", dtype="float16", output=2, predictor=predictor).remarks
    with pytest.raises(FieldError, match="kv_dtype: 'int4' is not allowed"):
        estimate(LLAMA, "h100-sxm", kv_dtype="int4", predictor=predictor)


def test_prompts_beyond_the_context_of_the_model_are_remarked(predictor: LatencyPredictor) -> None:
    value = estimate({**LLAMA, "max_position_embeddings": 512}, "h100-sxm", input=600, output=2, predictor=predictor)
    assert value.to_dict()["remarks"] == ["input + output of 602 tokens exceed max_position_embeddings, 512"]


def test_decode_uses_the_protocol_that_training_covered_better(predictor: LatencyPredictor) -> None:
    """The H800's dense products were measured as kernels, those of the H200 in graphs."""
    parts = [
        StepPart("product", make_operator({"operator": "linear", "dtype": "bfloat16", "m": 8, "n": 4096, "k": 4096}), 1)
    ]
    for device, protocol in (("h800", "kernel"), ("h200", "graph")):
        pricing = StepPricing(parts, captured=True)
        step = pricing.priced(predictor.predict_queries(pricing.queries(lookup(device))))
        assert [p.protocol for p in step.predictions] == [protocol]


def test_lengths_replace_batch_and_input(predictor: LatencyPredictor) -> None:
    config = read_config(LLAMA_8B)
    equal = EstimatePlan(config, lookup("h100-sxm"), batch=4, input=512, output=8)
    listed = EstimatePlan(config, lookup("h100-sxm"), lengths=[512] * 4, output=8)
    assert listed.queries == equal.queries
    assert listed.settings == equal.settings


def test_interpolated_steps_add_up_to_all_steps() -> None:
    from cdmpp.llm.estimate_plan import _points, _weights

    past = np.arange(100, 200, dtype=np.float64)
    points = _points(past)
    assert (points[0], points[-1], len(points)) == (100, 199, 5)
    # A linear function of the length is summed exactly.
    assert _weights(past, points) @ (3 * points + 1) == pytest.approx((3 * past + 1).sum())


@pytest.mark.slow
def test_network_between_nodes_is_an_option_and_its_default_is_said(predictor: LatencyPredictor) -> None:
    options: dict[str, Any] = {"tp": 16, "output": 8, "predictor": predictor}
    config = LLAMA_70B
    assumed = estimate(config, "h100-sxm", **options)
    assert any("network of 400 Gbit/s for each h100-sxm assumed" in remark for remark in assumed.remarks)
    slow, same = (estimate(config, "h100-sxm", network=network, **options) for network in ("roce-100", 50e9))
    assert not any("assumed" in remark for remark in (*slow.remarks, *same.remarks))
    assert slow.prefill.point > 1.2 * same.prefill.point == pytest.approx(1.2 * assumed.prefill.point)
    inside = estimate(config, "h100-sxm", **{**options, "tp": 8})
    assert not any("network" in remark for remark in inside.remarks)
    with pytest.raises(FieldError, match="network"):
        estimate(config, "h100-sxm", network="token-ring", **options)
    load: dict[str, Any] = {**options, "concurrency": 2, "count": 4}
    assert any("network of 400" in remark for remark in simulate(config, "h100-sxm", **load).remarks)
    assert not simulate(config, "h100-sxm", network=50e9, **load).remarks


def test_model_of_70_billion_parameters_fits_one_h200(predictor: LatencyPredictor) -> None:
    config = LLAMA_70B
    assert estimate(config, "h200", output=8, predictor=predictor).memory.device == pytest.approx(150.1e9, rel=0.002)


@pytest.mark.slow
def test_assumed_link_is_said_by_estimates_and_simulations(predictor: LatencyPredictor) -> None:
    options: dict[str, Any] = {"tp": 2, "output": 8, "predictor": predictor}
    says = "the link of mi210 is not known: pcie4-x16 of 32 GB/s assumed"
    assert says in estimate(LLAMA_8B, "mi210", **options).remarks
    assert says in simulate(LLAMA_8B, "mi210", concurrency=2, count=4, **options).remarks
    assert says not in estimate(LLAMA_8B, "mi210", **{**options, "tp": 1}).remarks


def test_kernels_of_other_engines_count_in_steps_with_prompts_where_the_profile_says_so(
    predictor: LatencyPredictor,
) -> None:
    own = load_engine("vllm").model_copy(update={"also_prefill": ()})
    both = own.model_copy(update={"also_prefill": ("trtllm",)})
    alone, fastest = (
        estimate(LLAMA_8B, "b200", weights="float8_e4m3", engine=e, output=8, predictor=predictor) for e in (own, both)
    )
    assert fastest.prefill.point < alone.prefill.point
    assert fastest.decode == alone.decode


def test_first_token_is_behind_the_front_end(predictor: LatencyPredictor) -> None:
    base = load_engine("vllm").model_copy(update={"first_residual": 0.0})
    slow = base.model_copy(update={"host": base.host.model_copy(update={"frontend_s": 0.25}), "first_residual": 0.5})
    quick, late = (estimate(LLAMA_8B, "h100-sxm", engine=e, output=8, predictor=predictor) for e in (base, slow))
    assert quick.ttft.point == pytest.approx(quick.prefill.point + base.host.frontend_s)
    assert late.ttft.point == pytest.approx(late.prefill.point + 0.25)
    assert late.ttft.upper - late.ttft.lower > 1.5 * (quick.ttft.upper - quick.ttft.lower)
    assert late.prefill == quick.prefill and late.total == quick.total
