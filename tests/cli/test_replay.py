"""``cdmpp replay``: graphs and models, equal to the Python call, with its files."""

import json
from pathlib import Path

import pytest

from cdmpp import LatencyPredictor, make_plan
from cdmpp.devices import SPECIFICATION_EXAMPLE
from tests.cli.conftest import ROOT, Run

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "docs/examples/replay.json"
BLOCK = ROOT / "examples/transformer_block.onnx"


def test_json_is_the_python_answer(run: Run, predictor: LatencyPredictor) -> None:
    assert run.json("replay", EXAMPLE) == make_plan("replay", json.loads(EXAMPLE.read_text()), predictor)


def test_options_change_the_request(run: Run, predictor: LatencyPredictor, tmp_path: Path) -> None:
    saved, trace = tmp_path / "saved.json", tmp_path / "trace.json"
    change = "device=rank0,class=compute:ratio=2,delay_s=1e-4"
    options = ("--samples=10", "--seed=3", "--protocol=eager", "--framework=pytorch")
    result = run.json("replay", EXAMPLE, "--what-if", change, *options, "--save-graph", saved, "--trace", trace)
    request = json.loads(saved.read_text())
    assert request["overrides"][-1] == {"device": "rank0", "class": "compute", "ratio": 2.0, "delay_s": 1e-4}
    assert (request["samples"], request["seed"]) == (10, 3)
    assert result == make_plan("replay", request, predictor)
    assert "trace" not in request
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}


def test_a_model_is_its_programs_on_one_stream(run: Run, predictor: LatencyPredictor, tmp_path: Path) -> None:
    saved = tmp_path / "graph.json"
    answer = run.json("replay", BLOCK, "--device", "t4", "--gap-us", 2, "--save-graph", saved)
    total = run.json("predict", BLOCK, "--device", "t4")["totals"][0]
    gaps = (total["launches"] - 1) * 2e-6
    assert answer["makespan_s"] == pytest.approx(total["latency_s"] + gaps, rel=1e-12)
    assert answer["by_program"][-1]["class"] == "gap"
    assert answer == make_plan("replay", json.loads(saved.read_text()), predictor)
    assert run.json("replay", saved) == answer


def test_the_host_launches_ahead_and_is_waited_for(run: Run) -> None:
    def makespan(*options: object) -> float:
        return float(run.json("replay", BLOCK, "--device", "t4", *options)["makespan_s"])

    alone = makespan()
    # A host that is always ahead costs its first launch; one that is always late, all of them and the last
    # kernel.
    assert makespan("--launch-us", 1) == pytest.approx(alone + 1e-6, rel=1e-12)
    assert 12 * 0.01 < makespan("--launch-us", 10_000) < 12 * 0.01 + alone


def test_user_defined_device(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(SPECIFICATION_EXAMPLE)
    assert {one["device"] for one in run.json("replay", BLOCK, "--device", mine)["by_program"]} == {"my-gpu"}


def test_unsupported_operators_are_named(run: Run, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from tests.programs.frontends.onnx_models import model

    path = tmp_path / "odd.onnx"
    odd = onnx.helper.make_node("Det", ["y"], ["z"], name="odd")
    path.write_bytes(model([onnx.helper.make_node("Relu", ["x"], ["y"]), odd], {"x": (1, 8, 16, 16)}, ["z"]))
    assert "not included: Det (1 x)" in run.ok("replay", path, "--device", "t4").output
    missing = run.json("replay", path, "--device", "t4")["missing"]
    assert [(entry["operator"], entry["count"]) for entry in missing] == [("Det", 1)]
    path.write_bytes(model([odd], {"y": (1, 8, 16, 16)}, ["z"]))
    assert "nothing to predict" in run.refused("replay", path, "--device", "t4")


def test_a_table_and_a_picture(run: Run, tmp_path: Path) -> None:
    figure = tmp_path / "timeline.png"
    result = run.ok("replay", EXAMPLE, "--figure", figure)
    assert "makespan" in result.stdout
    assert "(comm)" in result.stdout
    assert "class comm: x 0.5" in result.stdout
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--gap-us", "2"], 2, "--device"),
        (["--what-if", "class=comm"], 2, "ratio=0.5"),
        (["--what-if", "colour=red:ratio=2"], 2, "ratio=0.5"),
        (["--what-if", "class=comm:ratio=nan"], 2, "ratio=0.5"),
        (["--what-if", "class=none:ratio=2"], 1, "no node has class 'none'"),
        (["--figure", "x.nope"], 1, "nope"),
    ],
)
def test_errors_name_the_problem(run: Run, arguments: list[str], code: int, says: str) -> None:
    assert says in run.refused("replay", EXAMPLE, *arguments, code=code)


def test_a_model_needs_a_device(run: Run) -> None:
    assert "--device" in run.refused("replay", BLOCK, code=2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "not a replay request"),
        ("{", "not JSON"),
        ('{"nodes": [{"id": "a", "device": "g", "duration_s": NaN}]}', "not a number of JSON"),
        ('{"nodes": [{"id": "a", "device": "g", "duration_s": 1, "deps": ["a"]}]}', "json: nodes.0.deps: "),
        ('{"nodes": [], "overrides": 3}', "nodes"),
    ],
)
def test_files_that_are_no_graph(run: Run, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    assert says in run.refused("replay", path, "--what-if", "class=compute:ratio=1")


@pytest.mark.parametrize(
    "command",
    [
        "cdmpp replay docs/examples/replay.json --figure docs/replay.png",
        "cdmpp replay examples/transformer_block.onnx --device t4 --gap-us 2 --what-if class=MatMul+Add:ratio=0.5",
    ],
)
def test_the_documentation_shows_the_output(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    text = (ROOT / "docs/replay.md").read_text(encoding="utf-8")
    shown = text.partition(f"$ {command}\n")[2].partition("```")[0]
    arguments = command.replace("docs/replay.png", str(tmp_path / "replay.png")).split()[1:]
    monkeypatch.chdir(ROOT)
    assert run(*arguments).stdout == shown


def test_the_documentation_has_the_example() -> None:
    assert EXAMPLE.read_text() in (ROOT / "docs/replay.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/picture.png", "the folder does not exist"),
        ("picture.jpgg", "no image format"),
        ("picture", "no image format"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_answered(
    run: Run, tmp_path: Path, name: str, message: str
) -> None:
    assert message in run.refused("replay", EXAMPLE, "--figure", tmp_path / name)


def test_a_graph_needs_no_device(run: Run) -> None:
    assert "a graph names its devices" in run.refused("replay", EXAMPLE, "--device", "t4", code=2)


def test_what_if_without_match_lists_the_values(run: Run) -> None:
    result = run.refused("replay", EXAMPLE, "--what-if", "node=zz:ratio=2")
    assert "node is one of: b1, b2, f1, f2, r1, r2, update" in result


def test_command_reads_and_writes_parquet(run: Run, tmp_path: Path) -> None:
    graph, again = tmp_path / "graph.parquet", tmp_path / "again.json"
    expected = run.ok("replay", EXAMPLE, "--json", "--save-graph", graph)
    assert run("replay", graph, "--json", "--save-graph", again).stdout == expected.stdout
    assert run("replay", again, "--json").stdout == expected.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.json", "graph.parquet"]


def test_output_options_follow_links_and_write_to_devices(run: Run, tmp_path: Path) -> None:
    links = {name: tmp_path / name for name in ("trace.json", "graph.parquet", "figure.png")}
    for name, link in links.items():
        link.symlink_to("/dev/null" if name == "trace.json" else f"real-{name}")
    trace, graph, figure = links.values()
    run.ok("replay", EXAMPLE, "--trace", trace, "--save-graph", graph, "--figure", figure)
    assert all(link.is_symlink() for link in links.values()) and Path("/dev/null").is_char_device()
    assert (tmp_path / "real-graph.parquet").read_bytes().startswith(b"PAR1")
    assert (tmp_path / "real-figure.png").read_bytes().startswith(b"\x89PNG")
