"""Pools of RL plans for veRL, OpenRLHF and Ray, and back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cdmpp import make_plan
from cdmpp.errors import FieldError
from cdmpp.llm.read import with_configs
from cdmpp.plan.formats import export_plan, import_request
from cdmpp.plan.formats.layers import tensor_parallel
from cdmpp.plan.formats.text import options, read_yaml
from cdmpp.plan.registry import PLANNERS

#: Fields that no framework's configuration has.
COSTS: dict[str, Any] = {
    "lengths": {"quantiles": {"0.5": 100, "0.9": 300}},
    "decode": {"a_s": 0.01, "b_s": 0.0002},
    "training": {"seconds_per_sample": 0.5},
    "draws": 2,
    "budget_s": 60,
}
REQUEST: dict[str, Any] = {
    **COSTS,
    "lengths": {**COSTS["lengths"], "max_tokens": 1000},
    "samples_per_step": 32,
    "prompt_tokens": 64,
    "kv": {"max_batch": 16},
    "pools": [{"name": "near", "units": 8}],
}
PLANS = {
    "separate": {"layout": "separate", "generation_units": 3, "training_units": 4},
    "stale": {"layout": "separate", "generation_units": 4, "training_units": 2, "staleness": 2},
    "shared": {"layout": "shared", "generation_units": 8, "training_units": 8},
}


@pytest.fixture(scope="module")
def plans() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Requests and plans by name."""
    requests = {name: {**REQUEST, **changes} for name, changes in PLANS.items()}
    return {name: (request, make_plan("rl", request)) for name, request in requests.items()}


Plans = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def sizes(plan: dict[str, Any]) -> tuple[int, int, bool]:
    """Units of both stages, and whether they are the same."""
    training = plan["training"]
    return plan["generation"]["instances"], training["units"], training["shared"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("format", "writing", "reading"),
    [
        ("verl", {"tp": 2, "samples_per_prompt": 4}, {}),
        ("openrlhf", {"tp": 2, "samples_per_prompt": 4}, {}),
        ("openrlhf", {"tp": 2, "version": "0.9"}, {}),
        ("ray", {"tp": 2}, {"samples": 32}),
        ("ray", {"tp": 16}, {"samples": 32, "tp": 16}),
    ],
)
def test_plan_that_is_read_back_has_the_same_sizes(
    format: str, writing: dict[str, Any], reading: dict[str, Any], name: str, plans: Plans
) -> None:
    request, plan = plans[name]
    text = export_plan(format, "rl", request, plan, **writing).text
    found = import_request(format, text, "rl", fields=COSTS, **reading).request
    again = make_plan("rl", found)
    assert sizes(again) == sizes(plan)
    assert found["samples_per_step"] == request["samples_per_step"]
    if format != "ray":
        assert found["prompt_tokens"] == 64 and found["lengths"]["max_tokens"] == plan["lengths"]["limit"]
        assert found.get("staleness", 0) == request.get("staleness", 0)


def test_verl_has_separate_pools_of_whole_nodes(plans: Plans) -> None:
    found = export_plan("verl", "rl", *plans["separate"], tp=4)
    tree = read_yaml(found.text)
    assert tree["trainer"]["nnodes"] == 2 and tree["trainer"]["n_gpus_per_node"] == 8
    assert tree["trainer"]["v1"]["trainer_mode"] == "separate_async"
    rollout = tree["actor_rollout_ref"]["rollout"]
    assert (rollout["nnodes"], rollout["n_gpus_per_node"], rollout["tensor_model_parallel_size"]) == (3, 4, 4)
    assert rollout["max_num_seqs"] == 16
    assert tree["actor_rollout_ref"]["hybrid_engine"] is False
    assert tree["data"] == {"train_batch_size": 32, "max_response_length": 1000, "max_prompt_length": 64}
    assert any("3 units of 4 GPUs" in note for note in found.notes)


def test_verl_is_read_from_overrides_of_a_command() -> None:
    text = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.n=5 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2 +actor_rollout_ref.rollout.name=vllm $@"""
    found = import_request("verl", text, "rl")
    assert found.request["samples_per_step"] == 320
    assert found.request["pools"] == [{"name": "shared", "units": 8}]
    assert found.ignored == ("algorithm.adv_estimator", "actor_rollout_ref.rollout.name")
    assert found.missing == ("lengths.quantiles", "decode", "training")


def test_openrlhf_arguments_of_a_shared_plan(plans: Plans) -> None:
    found = options(export_plan("openrlhf", "rl", *plans["shared"]).text)
    assert found["actor.num_nodes"] == "1" and found["actor.num_gpus_per_node"] == "8"
    assert found["vllm.num_engines"] == "8" and found["vllm.tensor_parallel_size"] == "1"
    assert found["train.colocate_all"] is True and "train.async_enable" not in found
    older = options(export_plan("openrlhf", "rl", *plans["shared"], version="0.9").text)
    assert older["colocate_all_models"] is True and older["vllm_num_engines"] == "8"


def test_ray_accepts_the_groups(plans: Plans) -> None:
    validate = pytest.importorskip("ray.util.placement_group", exc_type=ImportError).validate_placement_group
    for name in PLANS:
        groups = json.loads(export_plan("ray", "rl", *plans[name], tp=2, label="pool").text)["groups"]
        for group in groups:
            validate(**{key: value for key, value in group.items() if key != "name"})
    assert [group["name"] for group in groups] == ["shared-near"]


def test_ray_has_a_group_for_each_pool(plans: Plans) -> None:
    groups = json.loads(export_plan("ray", "rl", *plans["separate"], tp=16, cpus=2).text)["groups"]
    assert {group["name"]: len(group["bundles"]) for group in groups} == {"generation-near": 6, "training-near": 8}
    assert all(bundle == {"GPU": 8, "CPU": 16} for group in groups for bundle in group["bundles"])


def test_ray_has_groups_of_attention_and_ffn() -> None:
    side = {"layer": {"batch": [1, 64], "seconds": [1e-4, 2e-4]}, "instances": 4}
    link = {"bytes_per_token": 1e4, "bandwidth_bytes_per_s": 1e11}
    request = {"layers": 4, "attention": side, "ffn": side, "link": link, "tpot_s": 0.05}
    plan = make_plan("afd", request)
    groups = json.loads(export_plan("ray", "afd", request, plan).text)["groups"]
    sizes = {group["name"]: len(group["bundles"]) for group in groups}
    assert sizes == {"attention": plan["attention_instances"], "ffn": plan["ffn_instances"]}


def test_tensor_parallel_size_is_that_of_the_decode_programs() -> None:
    work = [
        {"program": {"operator": "linear", "m": "batch", "n": 64, "k": 64, "dtype": "bfloat16"}},
        {"program": {"operator": "all_reduce", "bytes": "batch*128", "ranks": 4}},
    ]
    decode = {"batch": [1, 8], "programs": work, "device": "h100-sxm"}
    assert tensor_parallel(None, PLANNERS["rl"].read({**REQUEST, "decode": decode}), "decode")[0] == 4


@pytest.mark.parametrize(
    ("format", "options_", "message"),
    [
        ("verl", {"samples_per_prompt": 5}, "does not divide the 32 samples"),
        ("verl", {"tp": 12}, "does not fill nodes of 8"),
        ("ray", {"tp": 12}, "does not fill nodes of 8"),
        ("openrlhf", {"version": "2"}, "option version"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(format: str, options_: dict[str, Any], message: str, plans: Plans) -> None:
    with pytest.raises(FieldError, match=message):
        export_plan(format, "rl", *plans["separate"], **options_)


def test_plans_that_frameworks_cannot_run_are_named() -> None:
    request = {**REQUEST, "generation_units": 3, "training": None}
    with pytest.raises(FieldError, match="the plan only generates"):
        export_plan("verl", "rl", request, make_plan("rl", request))
    pools = [
        {"name": "a", "units": 2, "stages": ["generation"]},
        {"name": "b", "units": 2, "stages": ["generation"], "decode": {"a_s": 0.012}},
        {"name": "c", "units": 2, "stages": ["training"]},
    ]
    request = {**REQUEST, "pools": pools, "mix_pools": True}
    plan = make_plan("rl", request)
    assert plan["generation"]["parts"]
    with pytest.raises(FieldError, match="2 pools generate at once"):
        export_plan("openrlhf", "rl", request, plan)
    groups = json.loads(export_plan("ray", "rl", request, plan).text)["groups"]
    assert [group["name"] for group in groups] == ["generation-a", "generation-b", "training-c"]


#: 2^30 values in 30 lines: each line refers to the one above twice.
_ALIASES = "trainer:\n  a0: &a0 {x: 1}\n" + "".join(
    f"  a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 30)
)


@pytest.mark.parametrize(
    ("format", "text", "message"),
    [
        ("verl", "a: [1", "not YAML"),
        ("verl", "a: 1", "none of trainer"),
        ("verl", "trainer: {nnodes: many}", "not a whole number"),
        ("verl", "trainer: {nnodes: 0}", "nnodes: '0' is not a whole number from 1 to"),
        ("verl", "trainer.nnodes=9999999999", "is not a whole number from 1 to 1000000"),
        ("verl", "trainer: [1, 2]", "is no section"),
        ("verl", "trainer: &itself {x: *itself}", "a value that contains itself"),
        ("verl", _ALIASES, "more than 100,000 values"),
        ("verl", "trainer: {v1: {trainer_mode: separate_async}}", "nnodes: 0"),
        ("verl", "trainer: {n_gpus_per_node: 7}", "no multiple of the 2"),
        ("openrlhf", "--model llama", "no argument of actor"),
        ("openrlhf", "--actor.num_nodes 1", "num_engines: missing"),
        ("openrlhf", "--vllm_num_engines 3 --colocate_all_models", "do not fit 3 engines"),
        ("ray", "[]", "Input should be"),
        ("ray", "{", "not JSON"),
        ("ray", '{"groups": [{"name": "shared", "bundles": [{"CPU": 1}]}]}', "no multiple"),
        ("ray", '{"groups": [{"name": "x", "bundles": [{"GPU": 1}]}]}', "no single group"),
        ("ray", '{"groups": [{"name": "shared", "strategy": "ANY", "bundles": [{"GPU": 1}]}]}', "strategy"),
    ],
)
def test_files_of_another_format_are_refused(format: str, text: str, message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        import_request(format, text, "rl", **({"samples": 8} if format == "ray" else {}))
    assert caught.value.hint or format == "ray"


def test_model_and_device_give_the_decode_curve(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[3] / "examples" / "llm" / "llama-3.1-8b.json", tmp_path / "config.json")
    text = f"""--vllm.num_engines 4 --vllm.tensor_parallel_size 2 --actor.num_gpus_per_node 8 --train.colocate_all
        --rollout.max_new_tokens 1000 --data.max_len 1100 --actor.model_name_or_path {tmp_path}"""
    found = import_request("openrlhf", text, "rl", device="h100-sxm", fields={"training": COSTS["training"]})
    assert found.missing == ("lengths.quantiles",)
    llm = found.request["decode"]["llm"]
    assert (llm["past_len"], llm["tp"]) == (600, 2)
    request = with_configs({**found.request, "lengths": COSTS["lengths"]})
    read = PLANNERS["rl"].read(request)
    assert read.price_requests()
    assert tensor_parallel(None, read, "decode", "pools")[0] == 2
    named = import_request("openrlhf", text, "rl", device="h100-sxm", model="other.json").request
    assert named["decode"]["llm"]["config"] == "other.json"
    assert "decode" not in import_request("openrlhf", text, "rl").request


def sized_plan(**layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request and its plan with two GPUs to a unit, of which sixteen train."""
    whole = {"gpus": 16, "tp": 2, "pp": 2, "virtual_pp": 1, "cp": 1, "ep": 1, "micro_batch": 2}
    whole |= {"sharding": "optimizer", "recompute": "none", **layout}
    sizes = [{"units": 8, "token_s": 0.001, "layout": whole}]
    changes = {"layout": "separate", "generation_units": 8, "training_units": 8}
    pools = [{"name": "near", "units": 16}]
    request = {**REQUEST, **changes, "pools": pools, "training": {"sizes": sizes, "mini_batch": 16}}
    return request, make_plan("rl", request)


def test_verl_has_the_training_layout() -> None:
    found = read_yaml(export_plan("verl", "rl", *sized_plan(recompute="full"), tp=2, samples_per_prompt=4).text)
    actor = found["actor_rollout_ref"]["actor"]
    assert (actor["strategy"], actor["ppo_mini_batch_size"], actor["ppo_micro_batch_size_per_gpu"]) == (
        "megatron",
        4,
        2,
    )
    megatron = actor["megatron"]
    assert (megatron["tensor_model_parallel_size"], megatron["pipeline_model_parallel_size"]) == (2, 2)
    assert megatron["virtual_pipeline_model_parallel_size"] is None and megatron["param_offload"] is False
    assert megatron["override_transformer_config"]["recompute_method"] == "uniform"
    sharded = sized_plan(tp=1, pp=1, sharding="fsdp", micro_batch=1)
    actor = read_yaml(export_plan("verl", "rl", *sharded, tp=2).text)["actor_rollout_ref"]["actor"]
    assert actor["strategy"] == "fsdp2" and "megatron" not in actor


def test_openrlhf_has_the_training_layout() -> None:
    found = options(export_plan("openrlhf", "rl", *sized_plan(pp=1, cp=2), tp=2).text)
    assert (found["ds.tensor_parallel_size"], found["ds.ring_attn_size"], found["ds.zero_stage"]) == ("2", "2", "2")
    assert (found["train.batch_size"], found["train.micro_batch_size"]) == ("16", "2")
    with pytest.raises(FieldError, match="pp=2"):
        export_plan("openrlhf", "rl", *sized_plan(), tp=2)


@pytest.mark.parametrize("format", ["verl", "openrlhf"])
def test_samples_that_the_framework_does_not_divide_are_refused(format: str) -> None:
    with pytest.raises(FieldError, match="no multiple of 24"):
        export_plan(format, "rl", *sized_plan(pp=1, micro_batch=3), tp=2)


def test_verl_refuses_samples_that_its_gpus_do_not_divide() -> None:
    request = {**REQUEST, "layout": "separate", "generation_units": 3, "training_units": 5, "samples_per_step": 32}
    with pytest.raises(FieldError, match="32 samples of a step"):
        export_plan("verl", "rl", request, make_plan("rl", request), tp=2)
