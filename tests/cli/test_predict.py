"""``cdmpp predict``: the predictor's results, one line per program and device, with separate errors."""

import json
from pathlib import Path

import pytest

from cdmpp.devices import SPECIFICATION_EXAMPLE, load_device
from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.programs.frontends.load import load_programs
from cdmpp.programs.program import TensorProgram
from tests.cli.conftest import LINEAR, ROOT, Run
from tests.programs.frontends.test_load import write_database

pytestmark = pytest.mark.slow

MODEL = ROOT / "examples" / "transformer_block.onnx"


def test_json_equals_the_python_result(run: Run, predictor: LatencyPredictor) -> None:
    softmax = "softmax:rows=4096,cols=512"
    options = (
        "--protocol=eager",
        "--framework=pytorch",
        "--implementation=tuned",
        "--quantile=0.25",
        "--quantile=0.75",
    )
    result = run.ok("predict", LINEAR, softmax, "--device=t4", "--device=l4", *options, "--json")
    assert result.stderr == ""
    output = json.loads(result.stdout)
    programs = [TensorProgram.from_operator(text) for text in (LINEAR, softmax)]
    queries = [Query(p, d, "eager", "pytorch", "tuned") for p in programs for d in ("t4", "l4")]
    fresh = LatencyPredictor.load()  # without cached predictions
    for item, answer in zip(output["results"], fresh.predict_queries(queries, (0.25, 0.75)), strict=True):
        assert {k: v for k, v in item.items() if k not in ("count", "source")} == answer.to_dict()
        assert item["count"] == 1
    assert output["model_id"] == predictor.model_id
    assert output["unsupported"] == []


@pytest.mark.parametrize(
    "command",
    [
        ("predict", LINEAR, "--device"),
        ("curve", "linear:n=512,k=512", "--axis", "m=1,8", "--device"),
        ("llm", ROOT / "examples/llm/llama-3.1-8b.json", "--device"),
        ("support", "--operator", "linear", "--device"),
        ("replay", MODEL, "--device"),
        ("devices",),
    ],
    ids=lambda command: command[0],
)
def test_native_is_this_machine(run: Run, command: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdmpp.devices.host.this_cpu_name", lambda threads: "xeon-platinum-8124m")
    assert run.ok(*command, "native@1").stdout == run(*command, "xeon-platinum-8124m").stdout


def test_text_says_why_a_stand_in_is_not_in_the_domain(run: Run) -> None:
    result = run.ok("predict", LINEAR, "-d", "gfx942-tensile", "-d", "t4")
    assert "1 of 2: " in result.stdout
    assert "stands in for a board" in result.stdout


def test_text_has_a_line_per_program_and_device(run: Run, predictor: LatencyPredictor) -> None:
    lines = run.ok("predict", LINEAR, "-d", "t4", "-d", "a100-pcie-40gb").stdout.splitlines()
    assert len(lines) == 5  # header, two devices, two lines on what the latency means
    text = TensorProgram.from_operator(LINEAR).name
    for line, device in zip(lines[1:3], ("t4", "a100-pcie-40gb"), strict=True):
        assert line.startswith(text)
        answer = predictor.predict([LINEAR], device)[0]
        assert f" {device} " in line and f"{1e6 * (answer.latency_s or 0):.3g}" in line and " µs" in line
        assert line.endswith(answer.domain or "?")
    assert "kernel" in lines[3] and predictor.model_id in lines[3]
    assert lines[4].startswith("backend: library ")
    norm = run("predict", "rmsnorm:rows=64,cols=64", LINEAR, "-d", "t4", "--framework", "pytorch").stdout
    assert "implementation: composed (1), fused (1)" in norm.splitlines()


def test_model_has_counts_and_totals(run: Run) -> None:
    graph = load_programs(MODEL)
    output = run.json("predict", MODEL, "--device", "t4", "--device", "v100-sxm2-16gb")
    assert [r["count"] for r in output["results"][::2]] == list(graph.counts)
    for total in output["totals"]:
        items = [r for r in output["results"] if r["device"] == total["device"]]
        assert total["latency_s"] == pytest.approx(sum(r["count"] * r["latency_s"] for r in items), rel=1e-12)
        assert (total["launches"], total["programs"], total["failed"]) == (graph.launches, len(items), 0)
    matrix = run("predict", MODEL, "--device", "t4", "--device", "v100-sxm2-16gb").stdout.splitlines()
    assert matrix[0].split() == ["program", "count", "t4", "v100-sxm2-16gb"]
    [row] = [line.split() for line in matrix if line.startswith("total  ")]  # number, unit, domain
    shown = [float(row[i]) * {"ms": 1e-3, "µs": 1e-6}[row[i + 1]] for i in (1, 4)]
    assert shown == pytest.approx([total["latency_s"] for total in output["totals"]], rel=5e-3)
    text = run("predict", MODEL, LINEAR, "--device", "t4").stdout
    assert f"total of {MODEL} on t4: " in text
    assert max(map(len, text.splitlines())) > 100  # uncut


def test_operators_have_one_total(run: Run) -> None:
    text = run("predict", LINEAR, "relu:rows=4096,cols=4096", "-d", "t4").stdout
    assert "total on t4: " in text and "2 launches of 2 programs" in text
    assert "total" not in run("predict", LINEAR, "-d", "t4").stdout


def test_invalid_item_does_not_stop_the_others(run: Run) -> None:
    result = run("predict", LINEAR, "nothing.onnx", "linear:m=0,n=1,k=1", "-d", "t4", "-d", "foo", "--json")
    assert result.exit_code == 1
    output = json.loads(result.stdout)
    codes = [(r["source"], r["device"], r.get("error", {}).get("code")) for r in output["results"]]
    assert codes == [
        (LINEAR, "t4", None),
        (LINEAR, "foo", "unknown_device"),
        ("nothing.onnx", "t4", "invalid_program"),
        ("nothing.onnx", "foo", "invalid_program"),
        ("linear:m=0,n=1,k=1", "t4", "invalid_program"),
        ("linear:m=0,n=1,k=1", "foo", "invalid_program"),
    ]
    assert all("latency_s" not in r for r in output["results"] if "error" in r)
    assert {t["device"]: t["failed"] for t in output["totals"]} == {"t4": 2, "foo": 3}
    assert output["totals"][1]["latency_s"] is None  # never 0
    lines = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"] * 3  # each error once


def test_command_fails_if_no_item_is_predicted(run: Run) -> None:
    messages = run.refused("predict", LINEAR, "--device", "a101-pcie-40gb")
    assert "a100-pcie-40gb" in messages and "hint: " in messages


def test_user_defined_device_is_accepted(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "my-gpu.toml"
    path.write_text(SPECIFICATION_EXAMPLE)
    item = run.json("predict", LINEAR, "--device", path)["results"][0]
    assert item["device"] == load_device(str(path)).name
    assert item["latency_s"] > 0
    path.write_text("name = 'x'")
    assert "vendor" in run.refused("predict", LINEAR, "--device", path)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--protocol", "slow"),
        ("--framework", "x"),
        ("--implementation", "unfused"),
        ("--backend", "x"),
        ("--dim", "n"),
        ("--dim", "n=0"),
        ("--quantile", "many"),
    ],
)
def test_wrong_usage_exits_with_code_2(run: Run, option: str, value: str) -> None:
    assert option in run.refused("predict", LINEAR, "--device", "t4", option, value, code=2)


def test_missing_device_or_program_exits_with_code_2(run: Run) -> None:
    assert run("predict", LINEAR).exit_code == 2
    assert run("predict", "--device", "t4").exit_code == 2


@pytest.mark.parametrize("level", ["0", "1.5", "nan"])
def test_invalid_quantile_is_refused(run: Run, level: str) -> None:
    assert "hint" in run.refused("predict", LINEAR, "--device", "t4", "--quantile", level, "--json")


def test_dims_are_refused_for_operators(run: Run) -> None:
    assert "ONNX" in run.refused("predict", LINEAR, "--device", "t4", "--dim", "batch=2")


def test_invalid_model_folder_is_refused(run: Run, tmp_path: Path) -> None:
    messages = run.refused("predict", LINEAR, "--device", "t4", "--model", tmp_path, "--json")
    assert "not a model folder" in messages


@pytest.mark.tvm
def test_tvm_program_is_predicted(run: Run, tmp_path: Path) -> None:
    from cdmpp.programs.lowering import lower, to_json
    from cdmpp.programs.operators import parse_operator

    path = tmp_path / "program.json"
    path.write_text(to_json(lower(parse_operator("linear:m=64,n=128,k=32"))))
    item = run.json("predict", path, "--device", "intel-xeon-amx-2t-avx2")["results"][0]
    assert item["backend"] == "tvm" and item["latency_s"] > 0
    assert "stores outside of thread bindings, and t4 is a GPU" in run.refused("predict", path, "--device", "t4")
    path.write_text("{}")
    assert run("predict", path, "--device", "t4").exit_code == 1


def test_short_device_name_prints_its_board_and_the_others(run: Run) -> None:
    result = run.ok("predict", "linear:m=64,n=64,k=64", "--device", "h100")
    assert "note: h100 is read as h100-sxm; other boards: h100-pcie, h100-nvl" in result.stderr
    assert " h100-sxm " in result.stdout
    assert "backend: library" in result.stdout


def test_unknown_device_beside_a_known_one_fails(run: Run) -> None:
    result = run("predict", "linear:m=64,n=64,k=64", "--device", "t4", "--device", "wrong")
    assert result.exit_code == 1
    assert " t4 " in result.stdout
    assert "wrong" in result.stderr


def test_exported_torch_model_is_read_as_library_kernels(run: Run, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

        def forward(self, x, *, scale):
            return self.second(torch.relu(self.first(x))) * scale

    inputs = (torch.zeros(8, 64),), {"scale": torch.zeros(8, 64)}
    torch.export.save(torch.export.export(Block().eval(), *inputs), tmp_path / "block.pt2")
    result = run.json("predict", tmp_path / "block.pt2", "--device", "t4")
    names = [entry["name"].partition(":")[0] for entry in result["results"]]
    assert names == ["linear", "relu", "linear", "mul"]
    assert {entry["backend"] for entry in result["results"]} == {"library"}


def test_total_of_a_model_has_an_interval_and_shares_of_domains(run: Run) -> None:
    setting = ("--device", "t4", "--protocol", "eager", "--framework", "pytorch")
    output = run.json("predict", MODEL, *setting)
    (total,), rows = output["totals"], output["results"]
    for key in ("latency_s", "lower_s", "upper_s"):
        assert total[key] == pytest.approx(sum(r["count"] * r[key] for r in rows), rel=1e-12)
    inside = sum(r["count"] * r["latency_s"] for r in rows if r["domain"] == "in") / total["latency_s"]
    assert total["domain_shares"]["in"] == pytest.approx(inside)
    # One operator of seven is near; it takes less than a tenth of the time.
    assert {r["domain"] for r in rows} == {"in", "near"} and total["domain"] == "in"
    assert sum(total["domain_shares"].values()) == pytest.approx(1.0) and total["lower_bound"] is False
    done = run.ok("predict", MODEL, *setting, "--strict")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("total on t4: ")]
    assert f", domain in: {100 * inside:.0f} % of the time in, {100 * (1 - inside):.0f} % near (" in line
    assert " ms [" in line and "at least" not in line
    assert "training had no such type of attention_encoder: the bfloat16 prediction" in done.stdout


def test_nodes_left_out_make_the_total_a_lower_bound(run: Run, tmp_path: Path) -> None:
    from onnx import helper

    from tests.programs.frontends.onnx_models import model, weight

    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("LSTM", ["r", "w", "u"], ["y"], hidden_size=64)]
    path = tmp_path / "lstm.onnx"
    constants = {"w": weight(1, 256, 32), "u": weight(1, 256, 64)}
    path.write_bytes(model(nodes, {"x": (10, 8, 32)}, ["y"], constants))
    output = run.json("predict", path, "--device", "t4")
    assert [u["operator"] for u in output["unsupported"]] == ["LSTM"]
    assert [total["lower_bound"] for total in output["totals"]] == [True]
    text = run.ok("predict", path, "--device", "t4")
    assert "total on t4: at least " in text.stdout
    assert "a lower bound: 1 node is left out" in text.stdout
    for more in ((), ("--json",)):
        strict = run("predict", path, "--device", "t4", "--strict", *more)
        assert strict.exit_code == 3 and "lower bound" in strict.stderr


def test_text_names_the_levels_that_bound_the_interval(run: Run, predictor: LatencyPredictor) -> None:
    from cdmpp.utils.units import format_latency

    result = run.ok("predict", LINEAR, "--device", "t4", "--quantile", 0.9, "--quantile", 0.95)
    assert "interval: 10 % – 90 %" in result.stdout
    header, row = result.stdout.splitlines()[:2]
    [answer] = predictor.predict([LINEAR], "t4", quantiles=(0.9, 0.95))
    assert "90 %" in header and "95 %" in header
    assert format_latency(answer.quantiles["0.95"]) in row
    result = run("predict", LINEAR, "--device", "t4", "--quantile", 0.05, "--quantile", 0.95)
    assert "interval: 5 % – 95 %" in result.stdout and "95 %" not in result.stdout.splitlines()[0]


@pytest.mark.tvm
def test_schedules_of_a_search_are_ranked_not_added(run: Run, tmp_path: Path) -> None:
    write_database(tmp_path, [2, 4, 8, 8])
    write_database(tmp_path, [4, 16], size=32)
    command = ("predict", tmp_path, "--device", "xeon-platinum-8124m")
    output = run.json(*command)
    fastest = []
    for task, schedules in (("task0", 3), ("task1", 2)):
        entries = sorted((e for e in output["results"] if e["task"] == task), key=lambda e: e["rank"])
        assert [entry["rank"] for entry in entries] == list(range(1, schedules + 1))
        latencies = [entry["latency_s"] for entry in entries]
        assert latencies == sorted(latencies)
        fastest.append(latencies[0])
    (total,) = output["totals"]
    assert total["latency_s"] == pytest.approx(sum(fastest)) and total["launches"] == 2
    assert not total["lower_bound"]
    text = run(*command).stdout
    assert f"   1  {entries[0]['name']} " in text and "tasks: 2 of 2, schedules: 5" in text
    replayed = run.refused("replay", tmp_path, "--device", "xeon-platinum-8124m")
    assert "alternative schedules of tasks (task0, task1)" in replayed
