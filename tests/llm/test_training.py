"""Training steps: breakdown, physics, memory, network, calibration, search and the layouts' text."""

import json
import re
from typing import Any

import pytest

import cdmpp
from cdmpp.errors import CdmppError, FieldError, InfeasibleError
from cdmpp.llm import TrainingStep, calibrate_training, read_config, search_layouts, training_step
from cdmpp.llm.engines import EngineProfile, load_engine
from cdmpp.llm.engines.profile import MeasuredSteps, load_training_engine
from cdmpp.llm.training.calibrate import fit_training
from cdmpp.llm.training.export import export_layout
from cdmpp.llm.training.links import Links, distinct, network_bandwidth
from cdmpp.llm.training.memory import active_parameters, model_flops
from cdmpp.llm.training.step import TrainingPlan
from cdmpp.predict.predictor import LatencyPredictor
from tests.llm.test_read_config import EXAMPLES

LLAMA_8B, LLAMA_70B = EXAMPLES / "llama-3.1-8b.json", EXAMPLES / "llama-3.1-70b.json"
QWEN, DEEPSEEK, MIXTRAL = (EXAMPLES / f"{n}.json" for n in ("qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"))
SMALL: dict[str, Any] = {"gpus": 8, "sharding": "fsdp", "micro_batch": 1, "global_batch": 64, "sequence": 4096}
LARGE: dict[str, Any] = {
    "gpus": 64,
    "tp": 4,
    "pp": 4,
    "virtual_pp": 5,
    "sharding": "optimizer",
    "micro_batch": 1,
    "global_batch": 128,
    "sequence": 4096,
    "recompute": "selective",
}


def step(predictor: LatencyPredictor, config: Any = LLAMA_8B, device: Any = "h100-sxm", **options: Any) -> TrainingStep:
    return training_step(config, device, predictor=predictor, **{**SMALL, **options})


def breakdown_sum(found: TrainingStep) -> float:
    b = found.breakdown
    parts = sum(b["compute"].values()) + sum(b["exposed"].values())
    return float(parts + b["bubble"] + b["optimizer"] + b["host"])


@pytest.mark.parametrize(
    ("config", "device", "options"),
    [
        (LLAMA_8B, "h100-sxm", {}),
        (LLAMA_70B, "h100-sxm", LARGE),
        (LLAMA_70B, "h100-sxm", {**LARGE, "cp": 2, "tp": 2, "recompute": "full"}),
        (QWEN, "gb200", {"ep": 8, "products": "mxfp8", "sharding": "optimizer"}),
        (DEEPSEEK, "gb200", {"gpus": 256, "pp": 4, "ep": 64, "global_batch": 256, "sharding": "optimizer"}),
        (EXAMPLES / "gpt2-xl.json", "a100-sxm4-80gb", {"sequence": 1024, "engine": "llm-foundry"}),
    ],
)
def test_breakdown_adds_up_to_the_step(
    predictor: LatencyPredictor, config: Any, device: str, options: dict[str, Any]
) -> None:
    found = step(predictor, config, device, **options)
    assert breakdown_sum(found) == pytest.approx(found.step_s, rel=1e-9)
    assert found.lower_s < found.step_s < found.upper_s < 3 * found.step_s
    tokens = found.layout.global_batch * found.layout.sequence
    assert found.tokens_per_s_per_gpu == pytest.approx(tokens / found.step_s / found.layout.gpus)
    assert found.model_flops_utilization is not None and 0.02 < found.model_flops_utilization < 0.8
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_domain_and_interval_follow_the_measured_steps(predictor: LatencyPredictor) -> None:
    changes: tuple[dict[str, Any], ...] = ({}, {"device": "h200"}, {"device": "h200", "dtype": "float16"})
    found = [step(predictor, **change) for change in changes]
    assert [one.domain for one in found] == ["in", "near", "out"]
    assert "device h200, products float16" in found[2].domain_reason
    widths = [round(one.upper_s / one.lower_s, 9) for one in found]
    assert widths == sorted(widths) and widths[2] > 1.2 * widths[0]


def test_measured_steps_widen_a_profile() -> None:
    first = MeasuredSteps().widened("a", "bfloat16", {"gpus": 8.0})
    assert first.departures("a", "bfloat16", {"gpus": 16.0}) == []
    assert first.departures("b", "mxfp8", {"gpus": 32.0}) == ["device b", "products mxfp8", "gpus 32"]
    assert first.widened("b", "mxfp8", {"gpus": 32.0}).departures("b", "mxfp8", {"gpus": 64.0}) == []


def test_sustained_rates_follow_power(predictor: LatencyPredictor) -> None:
    own = cdmpp.devices.lookup("h100-sxm")
    limited = own.model_copy(update={"name": "h100-500w", "aliases": (), "tdp_w": 500.0})
    full, slow = (step(predictor, device=device, engine="torchtitan") for device in (own, limited))
    assert 1.1 < sum(slow.breakdown["compute"].values()) / sum(full.breakdown["compute"].values()) < 1.25
    assert full.step_s > 1.15 * step(predictor, engine="megatron").step_s
    eager = step(predictor, engine="torchtitan-eager")
    assert eager.step_s > 1.1 * full.step_s


def test_ring_of_context_parallelism_slows_attention(predictor: LatencyPredictor) -> None:
    layout = {"sequence": 32768, "global_batch": 8, "recompute": "full", "engine": "torchtitan"}
    one, four = (step(predictor, cp=cp, **{**layout, "sequence": cp * 32768}, device="h200") for cp in (1, 4))
    # Each of twice two doublings has 17 % more of 4 times the pairs of tokens.
    attention = four.breakdown["compute"]["attention"] / one.breakdown["compute"]["attention"]
    assert attention == pytest.approx(4 * 4 * 1.34, rel=0.03)


def test_result_says_what_is_assumed(predictor: LatencyPredictor) -> None:
    found = step(predictor, LLAMA_70B, **LARGE)
    assert any("400 Gbit/s for each GPU assumed" in remark for remark in found.remarks)
    stated = step(predictor, LLAMA_70B, **LARGE, network="roce-200")
    assert stated.network_bytes_per_s == 25e9
    assert not any("assumed" in remark for remark in stated.remarks)


def test_model_flops_are_those_of_megatron_bridge() -> None:
    """744 TFLOP/s for 14,451 tokens/s of Llama 3 8B, 736 for 1,639 of the 70B (published side by side)."""
    assert model_flops(read_config(LLAMA_8B), 8192) == pytest.approx(744e12 / 14451, rel=0.01)
    assert model_flops(read_config(LLAMA_70B), 8192) == pytest.approx(736e12 / 1639, rel=0.01)


def test_active_parameters_of_experts() -> None:
    assert active_parameters(read_config(QWEN)) == pytest.approx(3.0e9, rel=0.05)


def test_more_work_takes_longer(predictor: LatencyPredictor) -> None:
    base = step(predictor)
    assert step(predictor, global_batch=128).step_s == pytest.approx(2 * base.step_s, rel=0.1)
    assert step(predictor, sequence=8192).step_s > 2 * base.step_s
    full = step(predictor, recompute="full")
    forward = 1 / 3 * sum(base.breakdown["compute"].values())
    assert full.step_s - base.step_s == pytest.approx(forward, rel=0.25)
    assert base.step_s < step(predictor, recompute="selective").step_s < full.step_s


def test_eight_bit_products_are_faster(predictor: LatencyPredictor) -> None:
    assert step(predictor, products="float8_e4m3").step_s < 0.9 * step(predictor).step_s


def test_overlap_hides_communication(predictor: LatencyPredictor) -> None:
    steps = [step(predictor, LLAMA_70B, **LARGE, overlap=overlap) for overlap in ("none", "gradients", "all")]
    assert steps[0].step_s > steps[1].step_s > steps[2].step_s
    assert steps[0].breakdown["exposed"]["dp"] > steps[1].breakdown["exposed"]["dp"]
    assert steps[1].breakdown["exposed"]["tp"] > steps[2].breakdown["exposed"]["tp"]


def test_bubble_is_that_of_the_schedule(predictor: LatencyPredictor) -> None:
    options = {**LARGE, "recompute": "full"}
    plain = step(predictor, LLAMA_70B, **{**options, "virtual_pp": 1})
    interleaved = step(predictor, LLAMA_70B, **options)
    assert plain.breakdown["bubble"] == pytest.approx(5 * interleaved.breakdown["bubble"], rel=0.01)
    # One micro-batch passes through all stages, whatever their parts are.
    single = [step(predictor, LLAMA_70B, **{**options, "virtual_pp": n, "global_batch": 4}) for n in (1, 5)]
    assert single[0].breakdown["bubble"] == pytest.approx(single[1].breakdown["bubble"])
    one = step(predictor, LLAMA_70B, **{**options, "tp": 8, "pp": 1, "virtual_pp": 1})
    assert one.breakdown["bubble"] == one.breakdown["exposed"]["pp"] == 0


def test_layers_that_stages_do_not_divide(predictor: LatencyPredictor) -> None:
    found = step(predictor, DEEPSEEK, "gb200", gpus=256, pp=4, ep=64, global_batch=256, sharding="optimizer")
    assert sum(found.layers) == 61
    assert found.layers[-1] < max(found.layers)  # the output layer counts as layers


def test_network_matters_only_between_nodes(predictor: LatencyPredictor) -> None:
    slow, fast = (step(predictor, network=rate).step_s for rate in (1e9, 1e11))
    assert slow == fast
    slow, fast = (step(predictor, LLAMA_70B, **LARGE, network=rate, overlap="none").step_s for rate in (1e9, 1e11))
    assert slow > 1.05 * fast
    # 72 devices of a GB200 rack reach each other over NVLink, whatever a node has.
    options: dict[str, Any] = {"ep": 64, "gpus": 64, "sharding": "optimizer", "ranks_per_node": 4}
    slow, fast = (step(predictor, QWEN, "gb200", **options, network=rate).step_s for rate in (1e9, 1e11))
    assert slow == fast


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        (None, 50e9),
        (12.5e9, 12.5e9),
        ("infiniband-ndr", 50e9),
        ("roce-200", 25e9),
        ("efa-400", 50e9),
        ("roce", 50e9),
        ("1e10", 1e10),
    ],
)
def test_named_networks(name: Any, rate: float) -> None:
    assert network_bandwidth(name) == rate


@pytest.mark.parametrize("name", ["token-ring", "roce-fast", 0.0, True, "nvlink4", "nan"])
def test_unknown_networks_are_refused(name: Any) -> None:
    with pytest.raises(FieldError, match="network"):
        network_bandwidth(name)


def test_exchange_sends_a_token_once_to_each_node() -> None:
    links = Links.of(cdmpp.devices.lookup("h100-sxm"), None, 50e9)
    assert distinct(2, 8) == pytest.approx(2 * (1 - 0.5**8))
    one, eight = (links.exchange_s(1e9, topk, 16) for topk in (1, 8))
    assert one < eight < 2.5 * one


def test_memory_error_names_layouts_that_fit(predictor: LatencyPredictor) -> None:
    with pytest.raises(InfeasibleError, match=r"needs .* GB on a h100-sxm") as error:
        step(predictor, LLAMA_70B, sharding="none")
    assert "GPUs: tp=" in (error.value.hint or "")


@pytest.mark.parametrize("config", [LLAMA_8B, LLAMA_70B, QWEN, MIXTRAL])
@pytest.mark.parametrize("batch", [3, 8, 24, 64])
@pytest.mark.parametrize("device", ["h100-sxm", "l40s"])
def test_layouts_of_the_hint_work(predictor: LatencyPredictor, config: Any, batch: int, device: str) -> None:
    wanted: dict[str, Any] = {"gpus": 1, "sharding": "optimizer", "global_batch": batch}
    with pytest.raises(InfeasibleError) as error:
        step(predictor, config, device, **wanted)
    found = re.findall(r"(\d+) GPUs: ([^;]*), optimizer, recompute (\w+)", error.value.hint or "")
    assert found or "another batch" in (error.value.hint or "")
    for gpus, degrees, recompute in found:
        layout = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", degrees)}
        memory = step(
            predictor, config, device, **{**wanted, **layout, "gpus": int(gpus), "recompute": recompute}
        ).memory
        assert memory.fits_with_margin


def test_memory_follows_sharding_and_recomputation(predictor: LatencyPredictor) -> None:
    memory = {kind: step(predictor, device="gb200", sharding=kind).memory for kind in ("none", "optimizer", "fsdp")}
    assert memory["optimizer"].optimizer == pytest.approx(memory["none"].optimizer / 8)
    assert memory["fsdp"].weights < 0.3 * memory["optimizer"].weights
    activations = [step(predictor, recompute=r).memory.activations for r in ("none", "selective", "full")]
    assert activations[0] > activations[1] > activations[2]
    # 16 bytes for each of 8.03 G parameters: weights and gradients in 16 bits, the optimizer in 12.
    assert memory["none"].total - memory["none"].activations == pytest.approx(16 * 8.03e9, rel=0.01)


def test_memory_of_torchtitan(predictor: LatencyPredictor) -> None:
    """Published: 84 GiB with full recomputation of 32,768 tokens on 8 GPUs, of which copies of the logits are 55."""
    layout = {"recompute": "full", "sequence": 32768, "global_batch": 8, "engine": "torchtitan"}
    memory = step(predictor, device="h200", **layout).memory
    assert memory.total == pytest.approx(84 * 2**30, rel=0.1)
    stages: dict[str, Any] = {"pp": 4, "gpus": 32, "sequence": 4096, "device": "h200", "engine": "torchtitan"}
    # Stages gather their weights once, and keep whole gradients.
    assert step(predictor, **stages).memory.gradients > 4 * 8e9 / 4
    narrow = load_training_engine("torchtitan")
    assert narrow.training is not None
    loop = narrow.training.model_copy(update={"gradient_bytes": 2.0, "optimizer_bytes": 4.0})
    half = step(predictor, device="h200", **{**layout, "engine": narrow.model_copy(update={"training": loop})}).memory
    assert half.optimizer == pytest.approx(memory.optimizer / 3)
    assert half.gradients == pytest.approx(memory.gradients / 2)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"gpus": 0}, "gpus"),
        ({"tp": 3}, "gpus"),
        ({"ep": 2}, "ep"),
        ({"cp": 8, "sequence": 4}, "cp"),
        ({"global_batch": 60}, "global_batch"),
        ({"virtual_pp": 2}, "virtual_pp"),
        ({"sharding": "zero"}, "sharding"),
        ({"recompute": "some"}, "recompute"),
        ({"products": "int3"}, "products"),
        ({"dtype": "float8_e4m3"}, "dtype"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"engine": "vllm"}, "engine"),
    ],
)
def test_wrong_requests_name_their_field(predictor: LatencyPredictor, change: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as error:
        step(predictor, **change)
    assert error.value.path == field


@pytest.mark.parametrize(
    ("device", "products", "having"),
    [
        ("a100-sxm4-80gb", "float8_e4m3", "h100-sxm"),
        *((name, "mxfp8", "b200") for name in ("h100-sxm", "h200", "h20", "mi300x", "l40s", "a100-sxm4-80gb")),
        ("h100-sxm", "nvfp4", "gb300"),
        ("mi355x", "nvfp4", "b200"),
    ],
)
def test_device_without_units_refuses_the_products(
    predictor: LatencyPredictor, device: str, products: str, having: str
) -> None:
    with pytest.raises(FieldError, match=f"{device} has no units for {products}") as error:
        step(predictor, device=device, products=products)
    assert having in (error.value.hint or "")
    assert step(predictor, device="b200", products=products).step_s > 0


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (QWEN, {"gpus": 128, "global_batch": 128, "sharding": "fsdp"}),
        (QWEN, {"gpus": 128, "global_batch": 256, "ep": 8, "sharding": "fsdp"}),
        (LLAMA_8B, {"gpus": 128, "global_batch": 128, "sharding": "fsdp", "recompute": "full"}),
        (LLAMA_8B, {"gpus": 64, "tp": 2, "sharding": "optimizer"}),
        (LLAMA_8B, {"gpus": 64, "pp": 4, "virtual_pp": 4, "sharding": "none"}),
        (EXAMPLES / "gpt2-xl.json", {"gpus": 64, "sharding": "fsdp", "engine": "llm-foundry"}),
    ],
)
@pytest.mark.parametrize("device", ["b200", "a100-sxm4-40gb"])
def test_longer_sequence_is_never_faster(
    predictor: LatencyPredictor, config: Any, options: dict[str, Any], device: str
) -> None:
    engine, seconds = load_training_engine(options.get("engine", "megatron")), []
    layout = {name: value for name, value in {**SMALL, **options}.items() if name != "engine"}
    for sequence in (512, 1024, 2048, 4096, 8192):
        plan = TrainingPlan.of(
            read_config(config),
            cdmpp.devices.lookup(device),
            engine,
            {**layout, "sequence": sequence},
            check_memory=False,
        )
        seconds.append(plan.result("", predictor.predict_queries(plan.queries)).step_s)
    assert seconds == pytest.approx(sorted(seconds), rel=1e-9)


@pytest.mark.parametrize("device", ["l40s", "rtx-4090", "h100-sxm", "a100-pcie-80gb"])
@pytest.mark.parametrize("options", [{"tp": 4}, {"ep": 8}, {"cp": 4}])
def test_ranks_on_several_nodes_are_never_faster(
    predictor: LatencyPredictor, device: str, options: dict[str, Any]
) -> None:
    config = read_config(QWEN if "ep" in options else LLAMA_8B)
    steps = []
    for ranks_per_node in (None, 1, 2):
        own = {**SMALL, "sharding": "optimizer", "overlap": "none", **options, "ranks_per_node": ranks_per_node}
        plan = TrainingPlan.of(
            config, cdmpp.devices.lookup(device), load_training_engine("megatron"), own, check_memory=False
        )
        steps.append(plan.result("", predictor.predict_queries(plan.queries)).step_s)
    assert steps[0] <= min(steps[1:]) * (1 + 1e-9)


def test_assumed_link_is_said(predictor: LatencyPredictor) -> None:
    options: dict[str, Any] = {"tp": 2, "sharding": "optimizer", "recompute": "full"}
    unknown = step(predictor, device="mi210", **options)
    assert any("link of mi210 is not known: pcie4-x16" in remark for remark in unknown.remarks)
    assert not any("not known" in remark for remark in step(predictor, **options).remarks)


def test_training_engine_is_no_serving_engine() -> None:
    with pytest.raises(FieldError, match="training framework"):
        load_engine("megatron")
    with pytest.raises(CdmppError, match="no engine profile"):
        load_training_engine("deepspeed")


def test_calibration_moves_the_factors_towards_measured_steps(predictor: LatencyPredictor) -> None:
    rows = [
        {**SMALL, "sequence": length, "step_s": 1.3 * step(predictor, sequence=length).step_s}
        for length in (2048, 4096, 8192, 8192, 4096, 2048)
    ]
    found = fit_training(LLAMA_8B, "h100-sxm", rows, predictor=predictor)
    assert found.before == pytest.approx(1 - 1 / 1.3, rel=0.01)
    assert found.after < 0.5 * found.before
    assert found.left_out is not None and found.left_out < found.before
    profile = calibrate_training(LLAMA_8B, "h100-sxm", rows, predictor=predictor)
    assert profile == found.profile
    assert step(predictor, engine=profile).step_s > 1.1 * step(predictor).step_s
    assert EngineProfile.of(json.loads(profile.model_dump_json()), "file") == profile


@pytest.mark.parametrize(("slower", "least", "most"), [(1.05, 0.0, 0.6), (1.5, 0.7, 1.0)])
def test_one_step_moves_as_far_as_it_is_surprising(
    predictor: LatencyPredictor, slower: float, least: float, most: float
) -> None:
    measured = {**SMALL, "step_s": slower * step(predictor).step_s}
    profile = calibrate_training(LLAMA_8B, "h100-sxm", [measured], predictor=predictor)
    moved = step(predictor, sequence=8192, engine=profile).step_s / step(predictor, sequence=8192).step_s
    assert least < (moved - 1) / (slower - 1) < most


def test_calibration_reads_a_file_and_one_step(predictor: LatencyPredictor, tmp_path: Any) -> None:
    path = tmp_path / "measured.csv"
    path.write_text(
        "gpus,sharding,micro_batch,global_batch,sequence,tokens_per_s_per_gpu\n8,fsdp,1,64,4096,9000\n",
        encoding="utf-8",
    )
    found = fit_training(LLAMA_8B, "h100-sxm", path, predictor=predictor)
    assert found.rows == 1 and found.left_out is None
    replaced = [name for name in found.profile.source if "kernel_factor" in name]
    assert [found.profile.source[name] for name in replaced] == ["measured steps: 1; prior: megatron"]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"gpus": 8, "step_s": 1.0},
        {**SMALL, "step_s": -1},
        {**SMALL, "speed": 3, "step_s": 1.0},
        {**SMALL, "tp": 3, "step_s": 1.0},
        {**SMALL, "device": "h1000", "step_s": 1.0},
    ],
)
def test_unusable_measurements_are_refused(predictor: LatencyPredictor, row: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match="measurement 1: "):
        fit_training(LLAMA_8B, "h100-sxm", [row], predictor=predictor)


def test_search_ranks_layouts_that_fit(predictor: LatencyPredictor) -> None:
    found = search_layouts(LLAMA_8B, "h100-sxm", gpus=8, global_batch=16, sequence=4096, predictor=predictor, most=4)
    durations = [one.step_s for one in found.steps]
    assert durations == sorted(durations) and len(durations) == 4
    assert all(one.memory.total < 0.95 * 84.9e9 for one in found.steps)
    best = found.steps[0].layout
    alone = step(
        predictor,
        **{n: getattr(best, n) for n in ("tp", "pp", "virtual_pp", "cp", "ep", "sharding", "micro_batch", "recompute")},
        global_batch=16,
    )
    assert alone.step_s == pytest.approx(durations[0], rel=1e-9)


@pytest.mark.parametrize(
    "given", [{"tp": 2}, {"recompute": "full"}, {"tp": 4, "micro_batch": 2, "pp": 2}, {"cp": 2}, {"sharding": "none"}]
)
def test_search_keeps_given_values(predictor: LatencyPredictor, given: dict[str, Any]) -> None:
    found = search_layouts(LLAMA_8B, "h200", gpus=16, global_batch=32, sequence=4096, predictor=predictor, **given)
    assert found.steps
    for one in found.steps:
        assert {name: getattr(one.layout, name) for name in given} == given


@pytest.mark.slow
def test_search_leaves_a_margin_of_memory(predictor: LatencyPredictor) -> None:
    found = search_layouts(
        LLAMA_70B, "h100-sxm", gpus=64, global_batch=256, sequence=8192, predictor=predictor, most=100
    )
    assert max(one.memory.total for one in found.steps) < 0.95 * 84.9e9


@pytest.mark.parametrize(("given", "field"), [({"tp": 3}, "gpus"), ({"ep": 2}, "ep"), ({"colour": 1}, "colour")])
def test_search_refuses_given_values_that_cannot_be(
    predictor: LatencyPredictor, given: dict[str, Any], field: str
) -> None:
    with pytest.raises(FieldError) as error:
        search_layouts(LLAMA_8B, "h200", gpus=16, global_batch=32, sequence=4096, predictor=predictor, **given)
    assert error.value.path == field


def test_search_without_a_fitting_layout(predictor: LatencyPredictor) -> None:
    with pytest.raises(InfeasibleError, match="no layout"):
        search_layouts(LLAMA_70B, "t4", gpus=2, global_batch=2, sequence=4096, predictor=predictor)
    wrong: Any = "zero"
    with pytest.raises(FieldError, match="sharding"):
        search_layouts(LLAMA_8B, "h100-sxm", gpus=2, global_batch=2, sequence=4096, sharding=wrong, predictor=predictor)


def test_layouts_are_exported(predictor: LatencyPredictor) -> None:
    found = step(predictor, LLAMA_70B, **LARGE)
    text = export_layout(found, "megatron")
    assert "--tensor-model-parallel-size 4\n--pipeline-model-parallel-size 4\n" in text
    assert "--num-layers-per-virtual-pipeline-stage 4\n" in text and "--use-distributed-optimizer" in text
    uneven = json.loads(LLAMA_8B.read_text(encoding="utf-8")) | {"num_hidden_layers": 30, "vocab_size": 32000}
    stages: dict[str, Any] = {"pp": 4, "virtual_pp": 2, "sharding": "optimizer"}
    text = export_layout(step(predictor, uneven, **stages), "megatron")
    assert "--account-for-loss-in-pipeline-split\n--num-virtual-stages-per-pipeline-rank 2\n" in text
    assert "pipeline_parallel_degree = 4" in export_layout(found, "torchtitan")
    with pytest.raises(CdmppError, match="export"):
        export_layout(found, "jax")
