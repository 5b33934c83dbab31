"""``cdmpp llm``: the estimates of :func:`cdmpp.llm.estimate` as JSON and as tables."""

import json
from pathlib import Path

import pytest

from cdmpp.llm import estimate, goodput, simulate
from cdmpp.predict.predictor import LatencyPredictor
from tests.cli.conftest import ROOT, Run

LLAMA = ROOT / "examples" / "llm" / "llama-3.1-8b.json"
LLAMA_70B = ROOT / "examples" / "llm" / "llama-3.1-70b.json"


def test_json_equals_the_python_result(run: Run, predictor: LatencyPredictor) -> None:
    options = ("--tp", 4, "--batch", 8, "--input", 256, "--output", 16, "--dtype", "bf16", "--weights", "fp8")
    result = run.json("llm", LLAMA, "--device", "h100-sxm", *options, "--framework", "sglang", "--no-cuda-graph")
    same = {"tp": 4, "batch": 8, "input": 256, "output": 16, "weights": "float8_e4m3", "framework": "sglang"}
    expected = estimate(LLAMA, "h100-sxm", **same, cuda_graph=False, predictor=predictor)
    assert result == expected.to_dict()


def test_several_devices_are_a_list_and_a_table(run: Run) -> None:
    arguments = ("llm", LLAMA, "-d", "h100-sxm", "-d", "l40s", "--output", 4)
    assert [value["device"] for value in run.json(*arguments)] == ["h100-sxm", "l40s"]
    table = run(*arguments).stdout
    assert table.splitlines()[0].startswith("llama, 8.03 G parameters; tp 1, pp 1, ep 1, dp 1; batch 1")
    assert "16.3 of 85 GB" in table and "gate_up_proj" not in table
    assert "gate_up_proj" in run(*arguments, "--parts", 3).stdout


def test_a_single_device_shows_its_most_expensive_parts(run: Run, predictor: LatencyPredictor) -> None:
    result = run("llm", LLAMA, "-d", "h100-sxm", "--output", 4)
    assert "gate_up_proj" in result.stdout and " more " in result.stdout
    value = estimate(LLAMA, "h100-sxm", output=4, predictor=predictor)
    assert result.stdout == f"{value}\n"
    assert value._repr_html_().count("<table>") == 2 and "gate_up_proj" in value._repr_html_()
    assert "gate_up_proj" not in run("llm", LLAMA, "-d", "h100-sxm", "--output", 4, "--parts", 0).stdout


def test_device_that_is_too_small_does_not_stop_the_others(run: Run) -> None:
    arguments = ("llm", LLAMA_70B, "-d", "h200", "-d", "t4", "--tp", 2, "--output", 2)
    result = run.ok(*arguments)
    assert "h200" in result.stdout
    assert "at least 10 devices are needed" in result.stderr
    values = run.json(*arguments)
    assert values[0]["total_s"] > 0
    assert values[1]["error"]["code"] == "infeasible"


def test_failures_are_one_line_with_a_hint(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "config.json"
    other.write_text('{"model_type": "mamba"}')
    for arguments, message, hint in (
        ((LLAMA, "-d", "t4"), "the device has 15.8 GB", "smallest number of t4"),
        ((LLAMA, "-d", "h100-sxm", "--tp", 3), "tp: 3 does not divide the model", "allowed: 1, 2, 4, 8"),
        ((LLAMA, "-d", "h10"), "no device named 'h10'", "a device need not be known"),
        ((other, "-d", "t4"), "config.model_type: 'mamba' is not known", "known: llama, mistral"),
        ((tmp_path / "absent.json", "-d", "t4"), "cannot be read", "config.json"),
    ):
        error, advice = run.refused("llm", *arguments).splitlines()
        assert message in error
        assert hint in advice


def test_unknown_device_beside_a_known_one_fails(run: Run) -> None:
    result = run("llm", LLAMA, "-d", "h100-sxm", "-d", "h10", "--output", 2)
    assert result.exit_code == 1
    assert "h100-sxm" in result.stdout


@pytest.mark.slow
def test_a_profile_is_fitted_and_used(run: Run, tmp_path: Path) -> None:
    table, profile = tmp_path / "mine.csv", tmp_path / "mine.toml"
    table.write_text("batch,input,output,total_s\n1,128,32,0.5\n32,128,32,0.9\n8,1024,16,0.6\n")
    arguments = ("llm", "calibrate", table, "--config", LLAMA, "--device", "h100-sxm", "--out", profile)
    result = run.ok(*arguments)
    assert result.stdout.startswith("3 rows; mean error ") and f"--engine {profile}" in result.stdout
    assert run.json("llm", LLAMA, "-d", "h100-sxm", "--engine", profile, "--output", 4)["engine"] == "vllm-calibrated"
    assert run.json(*arguments)["rows"] == 3
    table.write_text("batch,rate,input,output,ttft_s,closed_loop,prefix_hit\n8,,128,32,0.5,yes,\n,2,128,32,0.3,,0.5\n")
    assert run(*arguments).exit_code == 0
    table.write_text("batch,input,output,total_s\n1,128,32,0.5\n1,128,32,0.0001\n")
    assert "row 2: total_s 0.0001 is below" in run.refused(*arguments)


@pytest.mark.slow
def test_load_is_simulated(run: Run, predictor: LatencyPredictor, tmp_path: Path) -> None:
    options = ("--input", 256, "--output", 32, "--count", 24)
    value = run.json("llm", LLAMA, "-d", "h100-sxm", "--concurrency", 8, *options)
    expected = simulate(LLAMA, "h100-sxm", concurrency=8, input=256, output=32, count=24, predictor=predictor)
    assert value == expected.to_dict()
    table = run.ok("llm", LLAMA, "-d", "h100-sxm", "-d", "t4", "--rate", 2, *options)
    assert "24 requests; engine vllm" in table.stdout and "tokens, a request has" in table.stderr
    image = tmp_path / "load.png"
    goals = ("--tpot-goal", 0.02, "--prefill-pool", "tp=1,dp=2", "--plot", image)
    value = run.json("llm", LLAMA, "-d", "h100-sxm", "--concurrency", 4, *options, *goals)
    pool = {"tp": 1, "dp": 2}
    few = {"input": 256, "output": 32, "count": 24, "prefill_pool": pool, "predictor": predictor}
    assert value["curve"] == [simulate(LLAMA, "h100-sxm", concurrency=n, **few).to_dict() for n in (1, 2, 4)]
    assert value["goodput"] == goodput(LLAMA, "h100-sxm", tpot_s=0.02, **few).to_dict()
    assert image.read_bytes().startswith(b"\x89PNG")
    # A device on which nothing fits takes neither table nor picture from the others, and its error says what does.
    beside = run.ok("llm", LLAMA, "-d", "t4", "-d", "h100-sxm", "--concurrency", 4, *options, *goals)
    assert "h100-sxm" in beside.stdout and "goodput" in beside.stdout
    assert "on each t4 with tp=1, pp=1, weights take 16.1 GB" in beside.stderr and "devices are needed" in beside.stderr
    unknown = run("llm", LLAMA, "-d", "t40", "-d", "h100-sxm", "--concurrency", 4, *options)
    assert unknown.exit_code == 1 and "h100-sxm" in unknown.stdout
    warm = run("llm", LLAMA, "-d", "h100-sxm", "--concurrency", 4, *options, "--warmup", 0, "--no-cuda-graph", "--json")
    few = {"input": 256, "output": 32, "count": 24, "warmup": 0, "cuda_graph": False, "predictor": predictor}
    assert json.loads(warm.stdout) == simulate(LLAMA, "h100-sxm", concurrency=4, **few).to_dict()
    assert "add --concurrency" in run("llm", LLAMA, "-d", "h100-sxm", "--plot", image).stderr
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input,output\n0,100,4\n0.5,200,8\n")
    assert run.json("llm", LLAMA, "-d", "h100-sxm", "--requests", trace)["requests"] == 2
    trace.write_text("arrival_s,input\n0,100\n")
    assert "row 1 is no request" in run("llm", LLAMA, "-d", "h100-sxm", "--requests", trace).stderr


def test_options_of_a_load_need_a_load(run: Run) -> None:
    for option in (("--prefix-hit", 0.5), ("--warmup", 4), ("--count", 8), ("--spread", 0.1), ("--seed", 3)):
        alone = run("llm", LLAMA, "-d", "h100-sxm", *option)
        assert alone.exit_code and "are of a load" in alone.stderr and "--concurrency" in alone.stderr
    beside = run("llm", LLAMA, "-d", "h100-sxm", "--batch", 4, "--concurrency", 8)
    assert beside.exit_code and "--batch beside a load" in beside.stderr
