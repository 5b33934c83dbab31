"""Plans of training steps: against ``training_step``, baselines, memory, exports, command line, refused requests."""

from __future__ import annotations

import json
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cdmpp import FieldError, InfeasibleError, LatencyPredictor, make_plan
from cdmpp.cli.main import app
from cdmpp.llm import training_step
from cdmpp.plan.formats import export_plan
from cdmpp.plan.training.schema import TrainingRequest, TrainingStepPlan
from cdmpp.plan.training.solver import draw
from cdmpp.predict.rendering import render

LLAMA = Path(__file__).parents[2] / "examples" / "llm" / "llama-3.1-8b.json"
SMALL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
REQUEST: dict[str, Any] = {"model": SMALL, "device": "h100-sxm", "gpus": 16, "global_batch": 64, "sequence": 2048}
#: A slow network, copies on all nodes, and nothing that is divided: all gradients are exchanged over the network.
COPIES: dict[str, Any] = {**REQUEST, "network": 1e9, "layout": {"tp": 1, "pp": 1, "sharding": "none"}}
WORK = {"compress_s_per_byte": 1e-12, "decompress_s_per_byte": 1e-12, "overhead_s": 1e-5}
COMPRESSOR = {"name": "fp8", "ratio": 0.25, "collective": "all_reduce", "gpu": WORK}


def step_of(plan: dict[str, Any], request: dict[str, Any], predictor: LatencyPredictor) -> Any:
    """The predicted step of a plan's layout."""
    names = ("tp", "pp", "virtual_pp", "cp", "ep", "micro_batch", "sharding", "recompute", "overlap")
    sizes = {name: request[name] for name in ("gpus", "global_batch", "sequence")}
    layout = {name: plan["layout"][name] for name in names}
    return training_step(
        request["model"], request["device"], **sizes, **layout, network=request.get("network"), predictor=predictor
    )


def test_one_copy_is_the_predicted_step(predictor: LatencyPredictor) -> None:
    layout = {"tp": 8, "pp": 1, "micro_batch": 4, "recompute": "none", "sharding": "optimizer"}
    request = {**REQUEST, "gpus": 8, "layout": layout}
    plan = make_plan("training", request, predictor)
    step = step_of(plan, request, predictor)
    assert plan["step_s"] == pytest.approx(step.step_s, rel=1e-12)
    assert (plan["interval"]["lower_s"], plan["interval"]["upper_s"]) == pytest.approx((step.lower_s, step.upper_s))
    parts = ("weights", "gradients", "optimizer", "activations", "total")
    assert [plan["memory"][name] for name in parts] == [step.memory_bytes[name] for name in parts]
    assert (plan["buckets"], plan["gap"], plan["layout"]["dp"]) == ([], 0.0, 1)
    assert plan["tokens_per_s_per_gpu"] == pytest.approx(64 * 2048 / plan["step_s"] / 8)
    assert plan["step_domain"] == step.domain


@pytest.mark.slow
def test_plan_is_not_worse_than_its_baselines_and_keeps_the_memory(predictor: LatencyPredictor) -> None:
    plan = make_plan("training", REQUEST, predictor)
    assert {"data_parallel_fsdp", "tp_in_the_node", "smallest_tp_pp"} <= plan["baselines"].keys()
    assert plan["lower_bound_s"] <= plan["step_s"] <= min(plan["baselines"].values())
    assert all(plan["step_s"] <= other["step_s"] for other in plan["alternatives"])
    for row in (plan, *plan["alternatives"]):
        assert sum(row["breakdown"].values()) == pytest.approx(row["step_s"])
        assert row["memory"]["total"] <= row["memory"]["limit"]
    needed = step_of(plan, REQUEST, predictor).memory.total
    tight = make_plan("training", {**REQUEST, "memory_bytes": 0.8 * needed}, predictor)
    assert tight["memory"]["total"] <= 0.8 * needed == tight["memory"]["limit"]
    assert step_of(tight, REQUEST, predictor).memory.total <= 0.8 * needed
    assert tight["step_s"] >= plan["step_s"]
    free = make_plan("training", {**REQUEST, "memory_bytes": 0.8 * needed, "ignore_memory": True}, predictor)
    assert free["memory"]["limit"] is None and free["step_s"] <= plan["step_s"]


def test_buckets_and_compression_shorten_the_exposed_exchange(predictor: LatencyPredictor) -> None:
    plan = make_plan("training", COPIES, predictor)
    step = step_of(plan, COPIES, predictor)
    assert plan["step_s"] <= plan["baselines"]["buckets_of_the_engine"] == pytest.approx(step.step_s)
    buckets, layers = plan["buckets"], [f"layer {i}" for i in range(8)]
    # Float32 gradients of all parameters, each layer once, from the output to the embedding.
    assert sum(bucket["bytes"] for bucket in buckets) == pytest.approx(step.memory.gradients)
    assert (buckets[0]["first_layer"], buckets[-1]["last_layer"]) == ("output", "embedding")
    assert sum(bucket["gradients"] for bucket in buckets) == len(layers) + 2
    for before, bucket in pairwise(buckets):
        assert max(before["end_s"], bucket["ready_s"]) == pytest.approx(bucket["start_s"])
    compressed = make_plan("training", {**COPIES, "compressors": [COMPRESSOR]}, predictor)
    assert compressed["step_s"] < plan["step_s"]
    assert any(bucket["compressor"] == "fp8" for bucket in compressed["buckets"])
    assert compressed["breakdown"]["dp communication"] < plan["breakdown"]["dp communication"]
    sized = make_plan("training", {**COPIES, "bucket_bytes": [1e12]}, predictor)
    assert plan["step_s"] <= sized["step_s"] <= sized["baselines"]["buckets_of_the_engine"]


def test_path_command_line_and_python_agree(predictor: LatencyPredictor, tmp_path: Path) -> None:
    sizes = {"device": "h100-sxm", "gpus": 16, "global_batch": 32, "sequence": 4096}
    here = make_plan("training", {"model": str(LLAMA), **sizes, "layout": {"tp": 2, "pp": 1}}, predictor)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in {**sizes, "tp": 2, "pp": 1}.items()]
    exported = ["--export", "megatron", "--out", str(tmp_path / "arguments.sh")]
    result = CliRunner().invoke(app, ["plan", "training", "--config", str(LLAMA), *words, "--json", *exported])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(json.dumps(here))
    arguments = (tmp_path / "arguments.sh").read_text()
    assert "--tensor-model-parallel-size 2" in arguments and "--seq-length 4096" in arguments
    missing = CliRunner().invoke(app, ["plan", "training", "--config", str(LLAMA), "--gpus=8"])
    assert missing.exit_code != 0 and "--config needs --device" in missing.output
    both = CliRunner().invoke(app, ["plan", "training", "request.json", "--tp=2"])
    assert both.exit_code != 0 and "--tp is for --config" in both.output


def test_plan_is_exported_printed_and_drawn(predictor: LatencyPredictor) -> None:
    answer = make_plan("training", REQUEST, predictor)
    exported = export_plan("torchtitan", "training", REQUEST, answer)
    job, layout = tomllib.loads(exported.text)["parallelism"], answer["layout"]
    degrees = [job[f"{name}_degree"] for name in ("tensor_parallel", "pipeline_parallel", "context_parallel")]
    assert degrees == [layout["tp"], layout["pp"], layout["cp"]]
    request, plan = TrainingRequest.model_validate(REQUEST), TrainingStepPlan.model_validate(answer)
    assert "tokens/s for each GPU" in render(plan.tables())
    left, right = draw(request, plan).axes
    assert left.get_xlabel().startswith("step (") and "GB" in right.get_xlabel()


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        ({"gpu": 8}, "gpu", "unknown field"),
        ({"layout": {"dp": 2}}, "layout.dp", "unknown field"),
        ({"device": "h1000"}, "device", "h1000"),
        ({"engine": "jax"}, "engine", "jax"),
        ({"layout": {"ep": 2}}, "layout.ep", "has no experts"),
        ({"model": {"model_type": "unknown"}}, "model.model_type", "not known"),
        ({"compressors": [COMPRESSOR], "bucket_bytes": [1e6]}, "bucket_bytes", "any size"),
    ],
)
def test_error_names_the_field(changes: dict[str, Any], path: str, text: str, predictor: LatencyPredictor) -> None:
    with pytest.raises(FieldError, match=text) as caught:
        make_plan("training", {**REQUEST, **changes}, predictor)
    assert caught.value.path == path


def test_model_that_does_not_fit_has_a_hint_with_layouts_that_do(predictor: LatencyPredictor) -> None:
    model = json.loads(LLAMA.with_name("llama-3.1-70b.json").read_text())
    with pytest.raises(InfeasibleError, match="no layout of 1 h100-sxm") as caught:
        make_plan("training", {**REQUEST, "model": model, "gpus": 1}, predictor)
    assert caught.value.path == "gpus" and "smallest layouts that fit: " in caught.value.hint
