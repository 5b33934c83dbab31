"""Training steps as costs of plans: curves of rl, split and pipeline requests, and RL requests from a configuration."""

from pathlib import Path
from typing import Any

import pytest

from cdmpp import make_plan
from cdmpp.errors import CdmppError, FieldError
from cdmpp.llm import training_step
from cdmpp.plan.rl.from_config import read_lengths, request_from_config
from cdmpp.predict.predictor import LatencyPredictor

EXAMPLES = Path(__file__).parents[2] / "examples" / "llm"
LLAMA = str(EXAMPLES / "llama-3.1-8b.json")
LENGTHS = [100 + 37 * i % 1500 for i in range(64)]


def layer(passes: str, device: str | None = "h100-sxm") -> dict[str, Any]:
    form = {"config": LLAMA, "phase": "train", "input": 2048, "train": {"passes": passes}}
    return form if device is None else {**form, "device": device}


def rl_request(curve: dict[str, Any]) -> dict[str, Any]:
    return {
        "lengths": {"samples": LENGTHS},
        "samples_per_step": 64,
        "decode": {"a_s": 0.01, "b_s": 0.0001},
        "pools": [{"name": "a", "units": 8, "device": "h100-sxm"}],
        "training": {"curve": curve, "curve_units": 8},
        "generation_units": 4,
        "training_units": 4,
        "layout": "separate",
        "mode": "async",
        "draws": 2,
        "max_steps": 2,
    }


def test_rl_training_follows_the_tokens_of_a_predicted_step(predictor: LatencyPredictor) -> None:
    form: dict[str, Any] = {"config": LLAMA, "phase": "train", "input": 1024, "dp": 8, "train": {"sharding": "fsdp"}}
    curve = {"batch": [16, 64], "device": "h100-sxm", "llm": form}
    plan = make_plan("rl", rl_request(curve), predictor)
    few, many = (
        training_step(
            LLAMA,
            "h100-sxm",
            gpus=8,
            sharding="fsdp",
            micro_batch=1,
            global_batch=batch,
            sequence=1024,
            predictor=predictor,
        ).step_s
        for batch in (16, 64)
    )
    sample_s = (many - few) / 48
    tokens = 64 * sum(LENGTHS) / len(LENGTHS)
    # Half of the units need twice as long; what a step costs once is not divided.
    expected = 2 * sample_s / 1024 * tokens + (few - 16 * sample_s)
    assert plan["training"]["time_s"] == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(
    ("curve", "says"),
    [
        ({"batch": [1, 2], "seconds": [1.0, 2.0]}, "phase"),
        ({"batch": [8], "device": "h100-sxm", "llm": {"config": LLAMA, "phase": "train"}}, "two or more"),
        ({"batch": [8, 16], "device": "h100-sxm", "llm": {"config": LLAMA, "phase": "decode"}}, "phase"),
        (
            {"batch": [8, 16], "device": "h100-sxm", "llm": {"config": LLAMA, "phase": "train", "part": "ffn"}},
            "no part",
        ),
        ({"batch": [8, 16], "device": "h100-sxm", "llm": {"config": LLAMA, "phase": "train", "tp": 3}}, "tp"),
    ],
)
def test_wrong_training_curves_are_refused(predictor: LatencyPredictor, curve: dict[str, Any], says: str) -> None:
    with pytest.raises(FieldError, match=says):
        make_plan("rl", rl_request(curve), predictor)


def test_fields_of_training_need_its_phase(predictor: LatencyPredictor) -> None:
    decode = {"batch": [1, 8], "device": "h100-sxm", "llm": {"config": LLAMA, "train": {"cp": 2}}}
    with pytest.raises(FieldError, match="phase"):
        make_plan("rl", {**rl_request({}), "decode": decode, "training": {"step_s": 1.0}}, predictor)


def test_split_prices_layers_on_each_device(predictor: LatencyPredictor) -> None:
    passes = {name: {"curve": {"batch": 2, "llm": layer(name, None)}} for name in ("forward", "backward")}
    request = {
        "layers": [{"name": "block", "count": 12, **passes}],
        "ranks": [{"device": "h100-sxm"}, {"device": "a100-sxm4-80gb"}],
        "micro_batches": 8,
    }
    plan = make_plan("split", request, predictor)
    fast, slow = plan["stages"]
    assert fast["last_layer"] - fast["first_layer"] > slow["last_layer"] - slow["first_layer"]
    assert 1.5 < fast["backward_s"] / fast["forward_s"] < 3


def test_split_layer_has_programs_or_a_curve(predictor: LatencyPredictor) -> None:
    cost = {"curve": {"llm": layer("forward", None)}, "programs": [{"program": "relu:rows=8,cols=8"}]}
    request = {"layers": [{"forward": cost, "backward_s": 1.0}], "ranks": [{"device": "t4"}], "micro_batches": 1}
    with pytest.raises(FieldError, match="programs"):
        make_plan("split", request, predictor)


def test_pipeline_modules_take_passes_of_a_layer(predictor: LatencyPredictor) -> None:
    curves = {name: {"batch": [1, 2], "llm": layer(name)} for name in ("forward", "backward")}
    request = {
        "modules": [{"name": "llm", "layers": 8, "cost": curves}],
        "ranks": 2,
        "batch": {"llm": 4},
        "max_steps": 2,
    }
    plan = make_plan("pipeline", request, predictor)
    recomputed = {**curves, "backward": {"batch": [1, 2], "llm": {**layer("backward")}}}
    recomputed["backward"]["llm"]["train"] = {"passes": "backward", "recompute": "full"}
    modules = [{"name": "llm", "layers": 8, "cost": recomputed}]
    longer = make_plan("pipeline", {**request, "modules": modules}, predictor)
    assert longer["makespan_s"] == pytest.approx(4 / 3 * plan["makespan_s"], rel=0.15)


def test_request_from_a_configuration(predictor: LatencyPredictor) -> None:
    request = request_from_config(
        LLAMA, "h100-sxm", gpus=8, lengths=LENGTHS, samples=64, generation_tp=1, predictor=predictor
    )
    assert request["pools"] == [{"name": "h100-sxm", "units": 8, "device": "h100-sxm", "placement": 1}]
    assert request["weights"]["transfer"]["bytes"] == pytest.approx(2 * 8.03e9, rel=0.01)
    # Keys and values of 8 heads of 128 columns in 32 layers, 16 bits each.
    assert request["kv"]["bytes_per_token"] == pytest.approx(2 * 8 * 128 * 32 * 2)
    plan = make_plan("rl", {**request, "draws": 2, "max_steps": 4}, predictor)
    assert {"colocated"} <= set(plan["baselines"])


def test_lengths_are_read_with_and_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("tokens,source\n5,a\n7,b\n", encoding="utf-8")
    assert read_lengths(path) == [5, 7]
    path.write_text("5\n7\n\n", encoding="utf-8")
    assert read_lengths(path) == [5, 7]
    path.write_text("tokens\n5\n-1\n", encoding="utf-8")
    with pytest.raises(CdmppError, match="no length"):
        read_lengths(path)


def test_assumed_links_and_networks_are_said(predictor: LatencyPredictor) -> None:
    form = {"config": LLAMA, "phase": "train", "input": 1024, "dp": 4, "tp": 2, "train": {"sharding": "fsdp"}}
    request = rl_request({"batch": [32, 64], "device": "mi210", "llm": form})
    request["pools"][0]["device"] = "mi210"
    plan = make_plan("rl", request, predictor)
    assert plan["reliability"]["assumed"] == ["the link of mi210 is not known: pcie4-x16 of 32 GB/s assumed"]
    known = rl_request({"batch": [32, 64], "device": "h100-sxm", "llm": form})
    assert make_plan("rl", known, predictor)["reliability"]["assumed"] == []
