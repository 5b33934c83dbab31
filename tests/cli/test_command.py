"""Behaviour of all commands: help, exit codes, errors without traceback, closed pipes, light imports."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import cdmpp
from cdmpp.cli import predict as predict_module
from cdmpp.devices import known, load_device, lookup
from cdmpp.predict.predictor import LatencyPredictor
from tests.cli.conftest import LINEAR, Run, Spawn
from tests.waiting import PATIENCE_S, ROOT, run_python

pytestmark = pytest.mark.slow

COMMANDS = [
    *("", "predict", "inspect", "eval", "train", "serve", "devices", "support", "data import", "data info"),
    *("collect", "measure", "probe", "select"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(run: Run, command: str) -> None:
    assert f"example: cdmpp {command}" in " ".join(run.ok(*command.split(), "--help").stdout.split())


def test_version_is_printed(run: Run) -> None:
    assert run("--version").stdout == f"cdmpp {cdmpp.__version__}\n"


def test_wrong_usage_exits_with_code_2(run: Run) -> None:
    assert run().exit_code == 2
    assert run("predct").exit_code == 2
    assert run("devices", "--nonsense").exit_code == 2


def test_devices_are_listed(run: Run) -> None:
    devices = run.json("devices")["devices"]
    assert [device["name"] for device in devices] == [spec.name for spec in known()]
    lines = run("devices").stdout.splitlines()
    assert len(lines) == 1 + len(devices)
    assert next(line for line in lines if line.startswith("t4 ")).split()[-3:] == ["320", "GB/s", "pcie3-x16"]
    assert next(line for line in lines if line.startswith("gfx942-tensile ")).endswith("stand-in")


def test_named_devices_are_printed_as_a_specification_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "h20.toml"
    file.write_text(run("devices", "NVIDIA H20").stdout, encoding="utf-8")
    assert load_device(str(file)) == lookup("h20")
    [device] = run.json("devices", "h20")["devices"]
    assert device["link"] == "nvlink4"
    assert "unreleased hardware" in run.refused("devices", "AMD gfx1250 256CU")


def test_support_is_that_of_the_predictor(run: Run, predictor: LatencyPredictor) -> None:
    assert run.json("support") == json.loads(json.dumps(predictor.support()))
    text = run("support").stdout
    assert predictor.model_id in text and "attention_decode" in text


def test_support_of_one_operator_and_one_device(run: Run, predictor: LatencyPredictor) -> None:
    whole = predictor.support()["matrix"]["rows"]
    [row] = [r for r in whole if (r["operator"], r["dtype"], r["scaling"]) == ("linear", "float32", None)]
    output = run.json("support", "--operator", "linear", "--device", "T4")
    assert output["matrix"]["devices"] == ["t4"]
    [part] = [r for r in output["matrix"]["rows"] if (r["dtype"], r["scaling"]) == ("float32", None)]
    assert part["domain"] == {"t4": "in"} and part["mape"] == {"t4": row["mape"]["t4"]}
    lines = run("support", "--operator", "linear", "--device", "t4").stdout.splitlines()
    assert lines[1].startswith("linear: dtype=float32,")
    [line] = [line for line in lines if line.split()[:2] == ["linear", "float32"]]
    assert line.split()[2] == "in" and line.endswith(f"{100 * row['mape']['t4']:.1f} %")
    assert "any other" in run("support", "--operator", "linear").stdout
    assert "no training rows" in run("support", "--device", "rtx-4090").stdout


def test_support_lists_untrained_types_on_demand(run: Run, predictor: LatencyPredictor) -> None:
    rows = [row for row in predictor.support()["matrix"]["rows"] if row["operator"] == "bmm"]
    untrained = [row for row in rows if not row["rows"] and "in" not in row["domain"].values()]
    shown, listed = (run("support", "--operator", "bmm", *option).stdout for option in ((), ("--all",)))
    assert f"{len(untrained)} types without training rows" in shown and "types without" not in listed
    assert listed.count("any other") == len(rows) and shown.count("any other") == len(rows) - len(untrained)


def test_support_and_devices_read_a_specification(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "my-gpu.toml"
    file.write_text(run("devices", "rtx-3090").stdout.replace('"rtx-3090"', '"my-gpu"'))
    assert "my-gpu: no training rows" in run("support", "--device", file).stdout
    assert run("devices", file).stdout.startswith('name = "my-gpu"')


def test_support_refuses_unknown_names(run: Run) -> None:
    assert "did you mean linear?" in run.refused("support", "--operator", "linaer")
    assert "no-such-device" in run.refused("support", "--device", "no-such-device")


def test_unexpected_exception_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom\nand more")

    monkeypatch.setattr(predict_module, "_programs", broken)
    result = run("predict", LINEAR, "--device", "t4", "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[0] == "error: internal error: RuntimeError: boom and more"
    assert "Traceback" not in result.stderr
    assert "Traceback" in run("-v", "predict", LINEAR, "--device", "t4").stderr
    monkeypatch.setenv("CDMPP_DEBUG", "1")
    assert "Traceback" in run("predict", LINEAR, "--device", "t4").stderr


def test_later_logging_goes_to_the_present_stderr(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("-v", "devices")
    logging.getLogger("later").warning("still heard")
    assert "later: still heard" in capsys.readouterr().err


def test_missing_package_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'tvm'", name="tvm.relax")

    monkeypatch.setattr(predict_module, "_programs", missing)
    result = run.refused("predict", LINEAR, "--device", "t4")
    assert "'.[tvm]'" in result and "internal" not in result


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_interruption_is_quiet(run: Run, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr(predict_module, "_programs", interrupted)
    result = run("predict", LINEAR, "--device", "t4")
    assert result.exit_code == (130 if error is KeyboardInterrupt else 141)
    assert result.output == ""


def test_shipped_model_is_used_from_any_folder_and_writes_nothing_in_the_home_folder(
    spawn: Spawn, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    # ONNX Runtime's telemetry writes to XDG_CACHE_HOME, else to .cache of the home folder.
    hidden = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "ORT_DISABLE_TELEMETRY": "0"}
    result = spawn("predict", LINEAR, "--device", "t4", "--json", **hidden)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert list(home.iterdir()) == []
    answer = LatencyPredictor.load().predict([LINEAR], "t4")[0].to_dict()
    item = json.loads(result.stdout)["results"][0]
    assert {k: v for k, v in item.items() if k not in ("count", "source")} == answer


def test_errors_of_a_subprocess_have_no_traceback(spawn: Spawn) -> None:
    result = spawn("predict", "linear:m=nan,n=1,k=1", "--device", "t4", "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["results"][0]["error"]["code"] == "invalid_program"
    assert "Traceback" not in result.stderr and result.stderr.startswith("error: ")


def test_output_is_escaped_in_an_encoding_without_greek(spawn: Spawn) -> None:
    result = spawn("predict", LINEAR, "--device", "t4", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "\\xb5s" in result.stdout


def test_closed_pipe_is_quiet() -> None:
    command = f"'{sys.executable}' -m cdmpp.cli.main devices --json | head -c 10"
    shell = ["bash", "-o", "pipefail", "-c", command]
    result = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert result.stderr == ""
    assert result.returncode in (0, 141)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from cdmpp.cli.main import app; "
        "assert CliRunner().invoke(app, ['predict', '--help']).exit_code == 0; "
        "print(sorted({'torch', 'tvm', 'onnx', 'pyarrow', 'numpy', 'server', 'fastapi'} & set(sys.modules)))"
    )
    result = run_python("-c", code)
    assert result.stdout.strip() == "[]", result.stderr


def test_models_that_would_choose_no_schedule_are_refused(run: Run, tmp_path: Path) -> None:
    refused = run.refused("collect", "--network", "agent", "--model", tmp_path, "--out", tmp_path / "new", code=2)
    assert "--good or --active" in refused
    assert not (tmp_path / "new").exists()
