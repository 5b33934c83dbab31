"""``cdmpp plan pipeline`` and ``cdmpp plan check`` together."""

import json
from pathlib import Path
from typing import Any

import pytest

from cdmpp.programs.operators import parse_operator
from tests.cli.conftest import LINEAR, Run

pytestmark = pytest.mark.slow

REQUEST: dict[str, Any] = {
    "models": [
        {"stages": 2, "micro_batches": 3, "forward_s": 1, "backward_s": 2, "direction": "down"},
        {"stages": 1, "micro_batches": 2, "forward_s": 1, "backward_s": 1, "direction": "up"},
    ],
    "ranks": 2,
    "budget_s": 600,
    "max_steps": 64,
    "seed": 0,
}


@pytest.fixture
def files(run: Run, tmp_path: Path) -> tuple[Path, Path]:
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.write_text(json.dumps(REQUEST))
    answer.write_text(run.ok("plan", "pipeline", request, "--json").stdout)
    return request, answer


def test_an_answer_of_the_command_passes(run: Run, files: tuple[Path, Path]) -> None:
    assert run.ok("plan", "check", *files).stdout.startswith("ok makespan_s=")
    report = run.json("plan", "check", *files)
    claimed = json.loads(files[1].read_text())
    assert report["ok"] and report["faults"] == [] and report["makespan_s"] == claimed["makespan_s"]


def test_a_wrong_answer_exits_with_code_1(run: Run, files: tuple[Path, Path]) -> None:
    request, answer = files
    claimed = json.loads(answer.read_text())
    answer.write_text(json.dumps({**claimed, "makespan_s": claimed["makespan_s"] - 1}))
    done = run("plan", "check", request, answer)
    assert done.exit_code == 1 and "the last pass ends at" in done.stdout
    report = json.loads(run("plan", "check", request, answer, "--json").stdout)
    assert not report["ok"] and report["faults"]


def test_the_answer_as_a_table_and_a_picture(run: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    done = run.ok("plan", "pipeline", files[0], "--figure", picture)
    assert "the lower bound of all plans is" in done.stdout
    assert "model 0" in done.stdout and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ['{"nodes": []}', "[]", "nonsense"])
def test_other_requests_are_refused(run: Run, tmp_path: Path, text: str) -> None:
    request = tmp_path / "request.json"
    request.write_text(text)
    done = run("plan", "check", request, request)
    assert done.exit_code == 1 and done.output.startswith("error:")


def test_predicted_costs_are_priced_again(run: Run, tmp_path: Path) -> None:
    forward = {"programs": [{"program": parse_operator(LINEAR).canonical(), "count": 2}], "device": "t4"}
    backward = {**forward, "programs": 2 * forward["programs"]}
    model = {"stages": 2, "micro_batches": 2, "forward": forward, "backward": backward}
    value = {"models": [model], "ranks": 2, "budget_s": 600, "max_steps": 8}
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.write_text(json.dumps(value))
    made = run.ok("plan", "pipeline", request, "--json")
    plan = json.loads(made.stdout)
    costs = plan["costs"][0]
    assert costs["backward_s"] == pytest.approx(2 * costs["forward_s"])
    # (micro-batches + stages - 1) x (forward + backward)
    assert plan["makespan_s"] == pytest.approx(3 * (costs["forward_s"] + costs["backward_s"]))
    assert plan["interval"]["lower_s"] <= plan["makespan_s"] <= plan["interval"]["upper_s"]
    assert plan["model_id"] and any("linear" in line for line in plan["explanation"])
    answer.write_text(made.stdout)
    assert run("plan", "check", request, answer).exit_code == 0
