"""``cdmpp replay`` on traces: the answer of the Python call, its graph, and errors."""

import gzip
import json
from pathlib import Path

import pytest

from cdmpp import LatencyPredictor
from cdmpp.simulate.traces import replay_trace
from tests.cli.conftest import ROOT, Run
from tests.simulate.traces.kineto import training_step

pytestmark = pytest.mark.slow

RANKS = [f"docs/examples/trace_rank{rank}.json.gz" for rank in range(2)]


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    first, second = training_step(0, 2), training_step(1, 2, late=50)
    return [first.write(tmp_path / "rank0.json.gz"), second.write(tmp_path / "rank1.json")]


def test_json_is_the_python_answer(run: Run, predictor: LatencyPredictor, pair: list[Path]) -> None:
    options = ["--device", "h100-sxm", "--ranks", 8, "--link", "nvlink4", "--speed-up", "gemm=2", "--remove", "add_"]
    result = run.json("replay", *pair, *options)
    same = {"device": "h100-sxm", "ranks": 8, "link": "nvlink4", "speed_up": [("gemm", 2.0)], "remove": ["add_"]}
    expected = replay_trace(*pair, **same, predictor=predictor)
    answer = result
    assert answer == json.loads(json.dumps(expected.to_dict()))
    assert len(answer["what_if"]) == 6 and answer["model_id"] == predictor.model_id


@pytest.mark.parametrize("name", ["graph.json", "graph.parquet"])
def test_saved_graph_is_replayed_again(run: Run, tmp_path: Path, pair: list[Path], name: str) -> None:
    graph = tmp_path / name
    first = run.json("replay", *pair, "--save-graph", graph)
    plan = run.json("replay", graph, "--what-if", "class=comm:ratio=0.5")
    assert plan["makespan_s"] == pytest.approx(first["replayed_s"])
    assert plan["what_if"][0]["saving_s"] == pytest.approx(100e-6)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--speed-up", "gemm"], 2, "gemm=1.5"),
        (["--speed-up", "gemm=-1"], 2, "gemm=1.5"),
        (["--speed-up", "nothing=2"], 1, "matches no kernel"),
        (["--device", "no-such-gpu"], 1, "no-such-gpu"),
        (["--iteration", "9"], 1, "no iteration 9"),
        (["--gap-us", "2"], 2, "not for a trace"),
        (["--what-if", "class=comm:ratio=2"], 2, "--save-graph writes its graph"),
        (["--save-graph", "/nowhere/graph.json"], 1, "/nowhere/graph.json"),
    ],
)
def test_errors_name_the_problem(run: Run, pair: list[Path], arguments: list[str], code: int, says: str) -> None:
    messages = run.refused("replay", *pair, *arguments, code=code)
    assert says in " ".join(messages.replace("│", " ").split())


def test_a_cut_trace_is_one_line_and_writes_nothing(run: Run, tmp_path: Path, pair: list[Path]) -> None:
    cut, graph = tmp_path / "cut.json.gz", tmp_path / "graph.json"
    cut.write_bytes(gzip.compress(pair[1].read_bytes())[:600])
    messages = run.refused("replay", cut, "--save-graph", graph)
    assert "the gzip file is cut" in messages and "copy the whole file" in messages and not graph.exists()


def test_search_is_in_the_json_answer(run: Run, pair: list[Path]) -> None:
    search = json.loads(run("replay", *pair, "--search", "--json").stdout)["search"]
    assert search["after_s"] <= search["before_s"] and search["remarks"]
    assert "add search=True (--search)" in run.refused("replay", *pair, "--all-reduce-us", "9")


def test_options_of_traces_need_a_trace(run: Run) -> None:
    graph = ROOT / "docs/examples/replay.json"
    assert "only for a trace" in run.refused("replay", graph, "--remove", "gemm", code=2)
    assert "only for a trace" in run.refused("replay", graph, "--search", code=2)
    assert "one graph or model" in run.refused("replay", graph, graph, code=2)


COMMANDS = [
    line.removeprefix("$ ")
    for line in (ROOT / "docs/traces.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("$ cdmpp replay docs/")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documentation_shows_the_output(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    text = (ROOT / "docs/traces.md").read_text(encoding="utf-8")
    shown = text.partition(f"$ {command}\n")[2].partition("```")[0]
    monkeypatch.chdir(ROOT)
    answer = run(*command.replace("'", "").split()[1:]).stdout
    if "--device" in command:  # another model answers other times
        answer, shown = answer.partition("\nwhat if")[0], shown.partition("\nwhat if")[0]
    # Of a search the page shows what follows the replay, without remarks about the files.
    assert shown in answer if "--search" in command else answer == shown


def test_recorded_examples_are_replayed_within_one_percent() -> None:
    answer = replay_trace(*(ROOT / path for path in RANKS))
    assert answer.replayed_s == pytest.approx(answer.measured_s, rel=0.01)
