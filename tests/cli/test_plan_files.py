"""``cdmpp plan KIND FILE --export`` and ``--from``."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

STEP: dict[str, Any] = {"stages": [{"forward_s": 1.0, "backward_s": 2.0}] * 2, "micro_batches": 2, "schedule": "gpipe"}
ARGUMENTS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128
    --micro-batch-size 1 --pipeline-model-parallel-size 2 --lr 1"""


@pytest.mark.slow
def test_plan_is_written_and_printed(run: Run, tmp_path: Path) -> None:
    request, out = tmp_path / "request.json", tmp_path / "schedule.csv"
    request.write_text(json.dumps(STEP))
    done = run.ok("plan", "simulate", request, "--export", "torch-csv", "--out", out, "--json")
    assert out.read_text() == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert json.loads(done.stdout)["makespan_s"] == 9
    assert "note: 2 micro-batches" in done.stderr


def test_configuration_is_read_with_further_fields(run: Run, tmp_path: Path) -> None:
    schedule, costs = tmp_path / "schedule.csv", tmp_path / "costs.json"
    schedule.write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    costs.write_text(json.dumps({"stages": STEP["stages"][0]}))
    assert run.json("plan", "simulate", schedule, "--from", "torch-csv", "--with", costs)["makespan_s"] == 9


def test_request_is_printed_and_ignored_fields_are_listed(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(ARGUMENTS)
    done = run.ok("plan", "split", script, "--from", "megatron", "--set", "device=t4", "--print-request")
    assert json.loads(done.stdout)["ranks"] == [{"device": "t4"}] * 2
    assert "note: ignored: --lr" in done.stderr


def test_one_file_is_read_and_another_written(run: Run, tmp_path: Path) -> None:
    schedule, costs, out = tmp_path / "a.csv", tmp_path / "costs.json", tmp_path / "b.csv"
    schedule.write_text("0F0,0B0\n1F0,1B0\n")
    costs.write_text(json.dumps({"stages": STEP["stages"][0]}))
    run.ok("plan", "simulate", schedule, "--from", "torch-csv", "--with", costs, "--export", "torch-csv", "--out", out)
    assert out.read_text() == schedule.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--export", "torch-csv"], "--export and --out belong together"),
        (["--out", "a.csv"], "--export and --out belong together"),
        (["--with", "a.json"], "--with needs --from"),
        (["--set", "tp=2"], "--set needs --export or --from"),
        (["--export", "verl", "--out", "a.yaml"], "'simulate' has: torch-csv"),
        (["--export", "torch-csv", "--out", "missing/a.csv"], "the folder does not exist"),
        (["--export", "torch-csv", "--out", "a.csv", "--set", "tp=2"], "unknown option 'tp'"),
        (["--export", "torch-csv", "--out", "a.csv", "--set", "tp"], "not NAME=VALUE"),
        (["--export", "torch-csv", "--out", "a.csv", "--set", "x={1"], "not JSON"),
        (["--from", "nope"], "no format is called 'nope'"),
    ],
)
def test_options_are_checked_before_the_search(
    options: list[str], message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("plan", "simulate", "missing.json", *options)
    assert done.exit_code == 1 and message in done.output
    assert not list(tmp_path.glob("*"))


def test_plan_that_cannot_be_written_is_printed(run: Run, tmp_path: Path) -> None:
    request, out = tmp_path / "request.json", tmp_path / "schedule.csv"
    request.write_text(json.dumps({**STEP, "timeline": False}))
    done = run("plan", "simulate", request, "--export", "torch-csv", "--out", out, "--json")
    assert done.exit_code == 1 and "the plan has no passes" in done.output
    assert json.loads(done.stdout)["makespan_s"] == 9 and not out.exists()


def test_faults_of_a_configuration_name_the_file(run: Run, tmp_path: Path) -> None:
    schedule = tmp_path / "schedule.csv"
    schedule.write_text("0F0,what\n")
    done = run("plan", "simulate", schedule, "--from", "torch-csv")
    assert done.exit_code == 1 and "schedule.csv: row 1, column 2: 'what' is no action" in done.output


def test_plan_that_does_not_fit_ends_with_1_unless_memory_is_ignored(run: Run, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(
        json.dumps({**STEP, "memory_bytes": 10, "stages": [{**stage, "weight_bytes": 20} for stage in STEP["stages"]]})
    )
    assert "--ignore-memory" in run.refused("plan", "simulate", request, "--json")
    assert run.json("plan", "simulate", request, "--ignore-memory")["peak_bytes"] == 20
