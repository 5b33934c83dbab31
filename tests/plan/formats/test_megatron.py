"""Layouts and arguments of Megatron-LM."""

from typing import Any

import pytest

from cdmpp import make_plan
from cdmpp.errors import FieldError
from cdmpp.plan.formats import export_plan, import_request
from cdmpp.plan.formats.layers import layout_text, parse_layout
from cdmpp.plan.formats.text import options
from cdmpp.plan.registry import PLANNERS

COST = {"forward_s": 1.0, "backward_s": 2.0}
SPLIT: dict[str, Any] = {
    "layers": [{"name": "embedding", **COST}, {"name": "block", "count": 8, **COST}, {"name": "lm_head", **COST}],
    "ranks": 3,
    "micro_batches": 6,
}
ARGUMENTS = """#!/bin/bash
TP=${TP:-2}
PP=2
MODEL=(
    --num-layers 4     # decoder layers
    --hidden-size 512
    --ffn-hidden-size 1024
    --num-attention-heads 8
    --group-query-attention --num-query-groups 4
    --seq-length 256
    --vocab-size 1000
    --swiglu
)
torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL[@]} --micro-batch-size 2 --global-batch-size=32 \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} --bf16 --lr 1e-4
"""


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|t*2|L", ["Ettt", "tt", "L"]),
        ("Ettt|(tt|)*3,m|L", ["Ettt", "tt", "tt", "tt", "m", "L"]),
        ("E|(t|)*3,m|m||L", ["E", "t", "t", "t", "m", "m", "", "L"]),
        ("E(t|t)*2,tL", ["Et", "tt", "ttL"]),
        ("Et*12L", ["E" + 12 * "t" + "L"]),
    ],
)
def test_layout_is_parsed_as_megatron_does(text: str, stages: list[str]) -> None:
    assert parse_layout(text) == stages
    assert parse_layout(layout_text(stages)) == stages


@pytest.mark.parametrize("text", ["", "|", "Exx|L", "E(t|L", "t*999999999L", "E(t*9999)*9999L"])
def test_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(FieldError):
        parse_layout(text)


def test_layout_and_sizes_of_a_split() -> None:
    plan = make_plan("split", SPLIT)
    found = export_plan("megatron-layout", "split", SPLIT, plan)
    values = options(found.text)
    stages = parse_layout(str(values["pipeline-model-parallel-layout"]))
    sizes = [stage["last_layer"] - stage["first_layer"] + 1 for stage in plan["stages"]]
    assert [len(stage) for stage in stages] == sizes
    assert "".join(stages) == "E" + "t" * 8 + "L"
    assert values["pipeline-model-parallel-size"] == "3"
    assert values["tensor-model-parallel-size"] == "1"
    assert values["num-layers"] == "8"
    assert any("vp 1" in note for note in found.notes)


def test_tensor_parallel_size_is_that_of_the_all_reduces() -> None:
    request = import_request("megatron", ARGUMENTS, "split", device="h100-sxm").request
    plan = split_without_prices(request)
    assert options(export_plan("megatron-layout", "split", request, plan).text)["tensor-model-parallel-size"] == "2"
    found = export_plan("megatron-layout", "split", request, plan, tp=4)
    assert options(found.text)["tensor-model-parallel-size"] == "4"


def split_without_prices(request: dict[str, Any]) -> dict[str, Any]:
    """The plan of the same layers and ranks with given costs."""
    layers = [{key: layer[key] for key in ("name", "count") if key in layer} | COST for layer in request["layers"]]
    return make_plan(
        "split", {"layers": layers, "ranks": len(request["ranks"]), "micro_batches": request["micro_batches"]}
    )


@pytest.mark.slow
def test_segments_of_a_module_are_virtual_stages() -> None:
    module = {"name": "decoder", "layers": 8, "cost": {"sizes": [1], "forward_s": [1], "backward_s": [2]}}
    request = {"modules": [module], "batch": {"decoder": 4}, "ranks": 2, "max_steps": 20, "budget_s": 60}
    plan = make_plan("pipeline", request)
    stages = parse_layout(
        str(options(export_plan("megatron-layout", "pipeline", request, plan).text)["pipeline-model-parallel-layout"])
    )
    assert len(stages) == len(plan["layout"]) and len(stages) % 2 == 0
    assert "".join(stages) == "E" + "t" * 8 + "L"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["block", "embedding", "head"], "Megatron's layout is E, decoder layers, L"),
        (["embedding", "head", "block"], "Megatron's layout is E, decoder layers, L"),
    ],
)
def test_layers_in_another_order_are_refused(layers: list[str], message: str) -> None:
    request = {**SPLIT, "layers": [{"name": name, **COST} for name in layers]}
    with pytest.raises(FieldError, match=message):
        export_plan("megatron-layout", "split", request, make_plan("split", request))


def test_symbols_and_missing_ends() -> None:
    request = {**SPLIT, "layers": [{"name": "in_head", **COST}, {"name": "block", "count": 5, **COST}]}
    plan = make_plan("split", request)
    found = export_plan("megatron-layout", "split", request, plan, symbols={"in_head": "t"})
    layout = parse_layout(str(options(found.text)["pipeline-model-parallel-layout"]))
    assert "".join(layout) == "EttttttL"
    assert any("E is added" in note for note in found.notes) and any("L is added" in note for note in found.notes)


def test_arguments_become_requests_with_their_fields() -> None:
    found = import_request("megatron", ARGUMENTS, "split", device="h100-sxm")
    request = PLANNERS["split"].read(found.request)
    assert [(layer.name, layer.count) for layer in request.layers] == [("embedding", 1), ("block", 4), ("head", 1)]
    assert [rank.device for rank in request.ranks] == ["h100-sxm"] * 2
    assert request.micro_batches == 32 // 2 // 2  # two data-parallel copies
    programs = [work["program"] for work in found.request["layers"][1]["forward"]["programs"]]
    assert {
        "operator": "linear",
        "m": 512,
        "n": 512,
        "k": 512,
        "dtype": "bfloat16",
    } in programs  # queries, keys, values
    assert {"operator": "linear", "m": 512, "n": 1024, "k": 512, "dtype": "bfloat16"} in programs
    assert found.ignored == ("--lr",)


@pytest.mark.parametrize(
    ("arguments", "types", "weight_gradients"),
    [
        ("--fp8-format hybrid", {"dtype": "float8_e4m3", "scaling": "tensor"}, 2 * 4),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", {"dtype": "float8_e4m3", "scaling": "mx32"}, 2 * 4),
        ("--fp8-format e4m3 --fp8-recipe blockwise", {"dtype": "float8_e4m3", "scaling": "block128"}, 2 * 4),
        ("--fp8-format hybrid --no-fp8-wgrad", {"dtype": "float8_e4m3", "scaling": "tensor"}, 4),
    ],
)
def test_fp8_format_sets_the_types_of_the_linear_layers(arguments: str, types: Any, weight_gradients: int) -> None:
    found = import_request("megatron", f"{ARGUMENTS} {arguments}", "split", device="h100-sxm")
    PLANNERS["split"].read(found.request).price_requests()
    layers = {layer["name"]: layer for layer in found.request["layers"]}

    def count(layer: str, passed: str) -> int:
        programs = [work["program"] for work in layers[layer][passed]["programs"]]
        return sum(types.items() <= program.items() for program in programs)

    assert count("block", "forward") == 4 and count("block", "backward") == weight_gradients
    assert count("head", "forward") == count("head", "backward") == 0
    assert found.ignored == ("--lr",) and any("float8_e4m3" in note for note in found.notes)


def test_arguments_become_a_step_with_virtual_stages_and_copies() -> None:
    text = ARGUMENTS + " --num-layers-per-virtual-pipeline-stage 1 --recompute-granularity full"
    found = import_request("megatron", text, "simulate", device="h100-sxm").request
    request = PLANNERS["simulate"].read(found)
    assert len(request.stages) == 4 and request.ranks == 2 and request.schedule == "interleaved"
    assert {stage.memory for stage in request.stages} == {"recompute"}
    assert request.replicas == [8]
    # The copies are two tensor-parallel ranks apart; stages are spread over all eight devices.
    groups = [found[name]["collective"] for name in ("gradient_sync", "transfer")]
    assert [(group["ranks"], group["span"]) for group in groups] == [(2, 4), (2, 8)]
    request.check()


def test_only_transfers_between_stages_on_different_nodes_cross_nodes() -> None:
    text = ARGUMENTS.replace("PP=2", "PP=4")
    found = import_request("megatron", text, "simulate", device="a100-sxm4-80gb", dp=2).request
    # Four devices a stage, eight a node: stages 0 and 1 share the first node, 2 and 3 the second.
    assert [send["collective"]["span"] for send in found["transfer"]] == [8, 16, 8]
    found = import_request("megatron", text, "simulate", device="gb200", dp=2).request
    assert found["transfer"]["collective"]["span"] == 8  # 72 devices are in one NVLink domain


def test_split_of_a_job_that_recomputes_keeps_only_the_inputs_of_stages() -> None:
    text = ARGUMENTS + " --recompute-granularity full"
    request = import_request("megatron", text, "split", device="h100-sxm").request
    for layer in request["layers"]:
        for name in ("forward", "backward", "transfer"):
            layer.pop(name, None)
        layer.update(COST)
    stage = make_plan("split", request)["stages"][0]
    layers = [layer for layer in request["layers"] for _ in range(layer.get("count", 1))]
    layers = layers[stage["first_layer"] : stage["last_layer"] + 1]
    # Two micro-batches are under way: all activations of one, and the input of the stage of the other.
    whole = sum(layer["weight_bytes"] + layer["activation_bytes"] for layer in layers)
    assert stage["peak_bytes"] == whole + 256 * 2 * 512 * 2


def test_layout_that_is_read_back_has_the_stages_of_the_plan() -> None:
    request = import_request("megatron", ARGUMENTS, "split", device="h100-sxm").request
    plan = split_without_prices(request)
    layout = export_plan("megatron-layout", "split", request, plan).text
    again = import_request("megatron", ARGUMENTS + layout.replace("\n", " "), "simulate", device="h100-sxm").request
    blocks = [stage["last_layer"] - stage["first_layer"] + 1 for stage in plan["stages"]]
    attention = [
        sum(w["count"] for w in stage["forward"]["programs"] if w["program"]["operator"] == "attention_prefill")
        for stage in again["stages"]
    ]
    assert [attention[0] + 1, attention[1] + 1] == blocks  # embedding and head beside the blocks
    split = import_request("megatron", ARGUMENTS + layout.replace("\n", " "), "split", device="h100-sxm").request
    assert split == request


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--num-layers 4", ""), "--num-layers: missing"),
        (("--num-layers 4", "--num-layers 9999999999"), "not a whole number"),
        (("TP=${TP:-2}\nPP=2", "TP=1\nPP=8"), "too many for 4 layers"),
        (("--num-layers 4", "--num-layers $LAYERS"), "not a whole number"),
        (("--vocab-size 1000", ""), "--vocab-size: missing"),
        (("--swiglu", "--num-experts 8"), "layers of experts"),
        (("--lr", "--context-parallel-size 2 --lr"), "context parallelism"),
        (("TP=${TP:-2}", "TP=3"), "no multiple of 6"),
        (("--num-attention-heads 8", "--num-attention-heads 9"), "do not divide 9"),
        (("--global-batch-size=32", "--global-batch-size=30"), "no multiple"),
        (("--lr", "--pipeline-model-parallel-layout 'Et*3|tt|L' --lr"), "3 stages are no multiple of 2"),
        (("--lr", "--pipeline-model-parallel-layout 'Et*3|ttL' --lr"), "4 decoder layers"),
        (("--bf16", "'"), "no shell line"),
        (("--lr", "--fp8-format e5m2 --lr"), "--fp8-format: 'e5m2'"),
        (("--lr", "--fp8-format hybrid --fp8-recipe custom --lr"), "--fp8-recipe: 'custom'"),
        (("--lr", "--fp4-format e2m1 --lr"), "training in FP4"),
    ],
)
def test_arguments_that_no_request_has_are_refused(change: tuple[str, str], message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        import_request("megatron", ARGUMENTS.replace(*change), "simulate", device="h100-sxm")
    assert caught.value.hint
