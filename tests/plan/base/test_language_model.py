"""Curves of language models in requests: the steps of cdmpp.llm as costs of planners."""

import json
from pathlib import Path
from typing import Any

import pytest

import cdmpp
from cdmpp.cli.plan import solve as solve_request
from cdmpp.errors import DataError, FieldError
from cdmpp.llm import Decode, Layout, estimate, read_config, step_operators
from cdmpp.llm.engines import load_engine
from cdmpp.llm.read import with_configs
from cdmpp.plan.base.batch_curve import BatchCurve
from cdmpp.plan.base.solve import predict_prices
from cdmpp.plan.registry import PLANNERS
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.requests.pricing import Cost

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "llm"
LLAMA_FILE = EXAMPLES / "llama-3.1-8b.json"
LLAMA: dict[str, Any] = json.loads(LLAMA_FILE.read_text())


def costs(curve: dict[str, Any], predictor: LatencyPredictor) -> list[Cost]:
    form = BatchCurve.model_validate(curve)
    prices = predict_prices(form.price_requests("curve"), predictor)
    return form.with_prices(iter(prices)).points()[1]


@pytest.mark.parametrize("options", [{"tp": 2, "weights": "float8_e4m3"}, {"cuda_graph": False}, {"pp": 2}])
def test_points_are_the_steps_of_an_estimate(options: dict[str, Any], predictor: LatencyPredictor) -> None:
    llm = {"config": LLAMA, **options}
    # An answer of two tokens has one decode step, behind the prompt.
    expected = estimate(LLAMA, "h100-sxm", batch=4, input=300, output=2, predictor=predictor, **options)
    [decode] = costs({"batch": [4], "llm": {**llm, "past_len": 300}, "device": "h100-sxm"}, predictor)
    [prefill] = costs({"batch": [4], "llm": {**llm, "phase": "prefill", "input": 300}, "device": "h100-sxm"}, predictor)
    assert expected.decode is not None
    for cost, step in ((decode, expected.decode), (prefill, expected.prefill)):
        assert (cost.latency_s, cost.lower_s, cost.upper_s) == pytest.approx((step.point, step.lower, step.upper))
    assert "gate_up_proj" in decode.largest()


def test_halves_of_all_layers_add_up_to_the_layers_of_a_step(predictor: LatencyPredictor) -> None:
    for name, layers, layout in (("gemma-2-9b", 42, {}), ("deepseek-v3", 61, {"tp": 8, "ep": 8})):
        config = json.loads((EXAMPLES / f"{name}.json").read_text())

        def seconds(part: str, config: Any = config, layout: Any = layout) -> float:
            llm = {"config": config, "part": part, "past_len": 6000, **layout}
            return costs({"batch": [8], "llm": llm, "device": "h200"}, predictor)[0].latency_s

        step = step_operators(read_config(config), Layout(**layout), Decode(8, 6000))
        outer = {"embedding", "embedding_scale", "embedding_all_reduce", "final_norm", "lm_head", "logits_all_gather"}
        outer |= {"logits_soft_cap", "sampling"}
        halves = [
            part.name
            for only in ("attention", "ffn")
            for part in step_operators(read_config(config), Layout(**layout), Decode(8, 6000), only=only)  # type: ignore[arg-type]
        ]
        assert halves == [part.name for part in step if part.name not in outer]
        assert 0.7 * seconds("step") < layers * (seconds("attention") + seconds("ffn")) < seconds("step")


def test_device_and_framework_may_stand_in_the_model(predictor: LatencyPredictor) -> None:
    inside = {"llm": {"config": LLAMA, "device": "h100-sxm", "engine": "sglang", "phase": "prefill"}}
    form = BatchCurve.model_validate(inside)
    assert form.batch == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert {(one.device, one.framework) for one in form.price_requests("x")} == {("h100-sxm", "sglang")}
    outside = {"batch": [2], "llm": {"config": LLAMA, "phase": "prefill"}, "device": "h100-sxm", "framework": "sglang"}
    assert costs({**inside, "batch": [2]}, predictor) == costs(outside, predictor)
    bare = {"config": LLAMA, "device": "t4", "engine": "kernels-only"}
    default = BatchCurve.model_validate({"llm": bare}).price_requests("x")
    assert {one.framework for one in default} == {"vllm"}


@pytest.mark.parametrize(
    ("llm", "batch", "message", "path"),
    [
        ({"config": {"model_type": "mamba"}}, [1], "'mamba' is not known", "curve.llm.config.model_type"),
        ({"config": LLAMA, "tp": 3}, [1], "tp: 3 does not divide", "curve.llm.tp"),
        ({"config": LLAMA, "ep": 2}, [1], "has no experts", "curve.llm.ep"),
        ({"config": LLAMA}, list(range(1, 258)), "at most 256 batch sizes", "curve.llm"),
        ({"config": LLAMA}, [10**6], "at most 65536 sequences", "curve.llm"),
    ],
)
def test_wrong_models_name_their_field(llm: Any, batch: list[int], message: str, path: str) -> None:
    form = BatchCurve.model_validate({"batch": batch, "llm": llm, "device": "t4"})
    with pytest.raises(FieldError, match=message) as caught:
        form.price_requests("curve")
    assert caught.value.path == path
    with pytest.raises(FieldError, match="need a device"):
        BatchCurve.model_validate({"batch": [1], "llm": {"config": LLAMA}}).price_requests("curve")


def test_a_curve_has_one_source() -> None:
    with pytest.raises(ValueError, match="seconds or programs or collective or llm"):
        BatchCurve.model_validate({"batch": [1], "seconds": [1.0], "llm": {"config": LLAMA}, "device": "t4"})


def test_paths_become_the_content_of_their_files(tmp_path: Path) -> None:
    request = {"engines": [{"curve": {"llm": {"config": str(LLAMA_FILE)}}}], "arrivals_s": [0.0]}
    load_engine("sglang").write(tmp_path / "mine.toml")
    request["engines"][0]["curve"]["llm"]["engine"] = str(tmp_path / "mine.toml")  # type: ignore[index]
    replaced = with_configs(request)
    assert load_engine(replaced["engines"][0]["curve"]["llm"]["engine"]) == load_engine("sglang")
    assert replaced["engines"][0]["curve"]["llm"]["config"] == LLAMA
    assert replaced["arrivals_s"] is request["arrivals_s"]
    assert with_configs(replaced) is replaced
    with pytest.raises(DataError, match="cannot be read"):
        with_configs({"llm": {"config": str(tmp_path / "absent.json")}})


def application(config: Any) -> dict[str, Any]:
    def engine(name: str, **llm: Any) -> dict[str, Any]:
        return {"name": name, "curve": {"batch": [1, 4], "llm": {"config": config, "device": "h100-sxm", **llm}}}

    return {
        "engines": [engine("prefill", phase="prefill", input=512), engine("decode", past_len=512)],
        "primitives": [
            {"id": "prefill", "engine": "prefill"},
            {"id": "decode", "engine": "decode", "after": ["prefill"]},
        ],
        "arrivals_s": [0.0, 0.001],
        "max_steps": 5,
    }


def test_application_takes_paths_in_python_and_on_the_command_line(predictor: LatencyPredictor) -> None:
    plan = cdmpp.make_plan("application", application(str(LLAMA_FILE)), predictor)
    assert plan == cdmpp.make_plan("application", application(LLAMA), predictor)
    alone = estimate(LLAMA, "h100-sxm", input=512, output=2, predictor=predictor)
    assert plan["makespan_s"] >= alone.total.point * (1 - 1e-9)
    _, solved = solve_request(PLANNERS["application"], application(str(LLAMA_FILE)))
    assert solved.makespan_s == plan["makespan_s"]


def test_requests_hold_no_paths() -> None:
    """A service validates with the same models: it never reads a path."""
    with pytest.raises(FieldError, match=r"engines\.0\.curve\.llm\.config"):
        PLANNERS["application"].read(application(str(LLAMA_FILE)))


def test_afd_prices_halves_of_a_layer(predictor: LatencyPredictor) -> None:
    def side(part: str, device: str) -> dict[str, Any]:
        curve = {"batch": [1, 64, 128], "llm": {"config": str(LLAMA_FILE), "part": part, "device": device}}
        return {"layer": curve, "instances": 4}

    request = {
        "layers": 32,
        "attention": side("attention", "l40s"),
        "ffn": side("ffn", "h100-sxm"),
        "link": {"bytes_per_token": 8192, "bandwidth_bytes_per_s": 5e10},
        "tpot_s": 0.1,
    }
    plan = cdmpp.make_plan("afd", request, predictor)
    assert plan["tpot_s"] <= 0.1
    assert any("qkv_proj" in line or "attention" in line for line in plan["explanation"])


def block(page: str, heading: str) -> dict[str, Any]:
    text = (ROOT / "docs" / page).read_text()
    value: dict[str, Any] = json.loads(text[text.index(heading) :].split("```json", 1)[1].split("```", 1)[0])
    return value


def test_rl_decodes_a_language_model_on_the_device_of_each_pool(
    predictor: LatencyPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    request = json.loads((ROOT / "docs" / "examples" / "rl.json").read_text())
    request |= block("rl.md", "### Language models as decode curves")
    read = PLANNERS["rl"].read(with_configs(request))
    devices = {one.device for one in read.price_requests() if one.path == "decode.llm"}
    assert devices == {"h100-sxm", "a100-sxm4-80gb"}
    assert read.sizes()["programs"] > 100
    priced = read.with_prices(predict_prices(read.price_requests(), predictor))
    near, far = (pool.decode.points()[1] for pool in priced.pools)  # type: ignore[attr-defined]
    assert [a.latency_s < b.latency_s for a, b in zip(near, far, strict=True)] == [True] * 4


@pytest.mark.parametrize(
    ("page", "heading"),
    [("planning.md", "### Language models as curves"), ("serving-and-clusters.md", "### Halves of a language model")],
)
def test_curves_on_pages_are_valid(page: str, heading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [curve] = with_configs(block(page, heading)).values()
    assert BatchCurve.model_validate(curve).price_requests("curve")
