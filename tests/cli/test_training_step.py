"""``cdmpp training-step``: the steps of :func:`cdmpp.llm.training_step` as JSON and tables."""

import json
from pathlib import Path

import pytest

from cdmpp.llm import training_step
from cdmpp.predict.predictor import LatencyPredictor
from tests.cli.conftest import ROOT, Run

LLAMA = ROOT / "examples" / "llm" / "llama-3.1-8b.json"
STEP = ("training-step", LLAMA, "-d", "h100-sxm", "--gpus", 8, "--global-batch", 16, "--sequence", 2048)


def test_json_equals_the_python_result(run: Run, predictor: LatencyPredictor) -> None:
    result = run.json(*STEP, "--sharding", "fsdp", "--products", "float8_e4m3", "--network", "2e10")
    sizes = {"gpus": 8, "global_batch": 16, "sequence": 2048, "micro_batch": 1}
    options = {"sharding": "fsdp", "products": "float8_e4m3", "network": 2e10}
    expected = training_step(LLAMA, "h100-sxm", **sizes, **options, predictor=predictor)
    assert result == expected.to_dict()


def test_table_has_the_parts(run: Run) -> None:
    lines = run(*STEP, "--sharding", "fsdp").stdout.splitlines()
    assert lines[0].startswith("llama, 8.03 G parameters on 8 h100-sxm; tp=1, pp=1, micro_batch=1, fsdp")
    assert lines[1].startswith("step ") and "tokens/s for each GPU" in lines[2] and lines[3].startswith("memory ")
    assert any(line.startswith("dp communication") for line in lines)


def test_search_and_export(run: Run) -> None:
    lines = run(*STEP, "--search", "--most", 3).stdout.splitlines()
    assert lines[0].split()[:6] == ["tp", "pp", "vp", "cp", "ep", "micro"]
    assert "tokens/s per GPU" in lines[0] and "interval" in lines[0] and "domain" in lines[0]
    assert len(lines) >= 6 and "layouts fit the memory with a margin" in lines[5]
    kept = run(*STEP, "--search", "--tp", 2, "--recompute", "full", "--json").stdout
    assert {(one["tp"], one["recompute"]) for one in json.loads(kept)["layouts"]} == {(2, "full")}
    assert {layout["tp"] for layout in run.json(*STEP, "--search", "--tp", 1)["layouts"]} == {1}
    assert [value["binds"] for value in run.json(*STEP, "--search", "--most", 3)["layouts"]]
    assert "--micro-batch-size" in run(*STEP, "--search", "--export", "megatron").stdout
    assert "[parallelism]" in run(*STEP, "--sharding", "fsdp", "--export", "torchtitan").stdout


def test_measured_steps_calibrate_the_engine(run: Run, tmp_path: Path) -> None:
    measured, profile = tmp_path / "measured.csv", tmp_path / "mine.toml"
    header = "gpus,sharding,micro_batch,global_batch,sequence,tokens_per_s_per_gpu"
    measured.write_text(f"{header}\n8,fsdp,1,16,2048,6000\n8,fsdp,1,32,2048,6200\n", encoding="utf-8")
    result = run.ok(*STEP, "--sharding", "fsdp", "--measured", measured, "--out", profile)
    assert "measured steps: 2;" in result.stderr and "left out of the fit" in result.stderr
    assert run(*STEP, "--sharding", "fsdp", "--engine", profile).stdout == result.stdout


def test_infeasible_layout_is_an_error_with_a_hint(run: Run) -> None:
    result = run.refused("training-step", LLAMA, "-d", "t4", "--gpus", 8, "--global-batch", 16, "--sequence", 2048)
    assert "needs" in result and "hint:" in result


@pytest.mark.slow
def test_rl_plan_from_a_configuration(run: Run, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("tokens\n" + "\n".join(str(200 + 13 * i % 900) for i in range(64)), encoding="utf-8")
    options = ("plan", "rl", "--config", LLAMA, "--device", "h100-sxm", "--gpus", 8, "--samples", 64)
    request = json.loads(run(*options, "--lengths", lengths, "--print-request").stdout)
    assert all(size["layout"]["tp"] >= 1 and size["memory_bytes"] < 8.5e10 for size in request["training"]["sizes"])
    result = run.ok(*options, "--lengths", lengths)
    assert "colocated" in result.stdout and "transfer of weights" in result.stdout
    measured = tmp_path / "steps.csv"
    measured.write_text("step_s,generation_gpus\n60,8\n", encoding="utf-8")
    fixed = ("--generation-tp", 1, "--degrees", "pp=1,ep=1", "--budget", 5, "--print-request")
    request = json.loads(run(*options, "--lengths", lengths, "--measured", measured, *fixed).stdout)
    assert request["measured"][0]["step_s"] == 60 and request["budget_s"] == 5
    assert {size["layout"]["pp"] for size in request["training"]["sizes"]} == {1}
    assert "--degrees" in run(*options, "--lengths", lengths, "--degrees", "px=1").stderr
    assert "--lengths" in run(*options).stderr
    assert "either" in run("plan", "rl").stderr


def test_measured_rows_take_the_options_that_they_lack(run: Run, tmp_path: Path) -> None:
    bare, stated = tmp_path / "bare.csv", tmp_path / "stated.csv"
    bare.write_text("global_batch,step_s\n16,0.9\n", encoding="utf-8")
    stated.write_text("global_batch,products,tp,sharding,step_s\n16,float8_e4m3,2,optimizer,0.9\n", encoding="utf-8")
    options = (*STEP, "--products", "float8_e4m3", "--tp", 2, "--sharding", "optimizer")
    first, second = run(*options, "--measured", bare), run(*options, "--measured", stated)
    assert first.exit_code == 0, first.stderr
    assert first.stderr == second.stderr and first.stdout == second.stdout


def test_second_device_is_refused(run: Run) -> None:
    result = run.refused(*STEP, "-d", "h200")
    assert "h100-sxm, h200" in result and "one device" in result
