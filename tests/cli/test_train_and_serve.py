"""``cdmpp train`` from a TOML file to a model, and the options that ``cdmpp serve`` passes to the server."""

import io
import json
import socket
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn

from cdmpp.cli.train import print_errors
from cdmpp_server.settings import Settings
from tests.cli.conftest import Run
from tests.waiting import ROOT, run_python

pytestmark = pytest.mark.slow

CONFIG = """
name = "tiny"
[data]
public = false
[network]
width = 16
layers = 1
heads = 2
feed_forward = 16
head_width = 32
head_layers = 1
[optimiser]
steps = 30
batch_rows = 64
warmup_steps = 5
average_decay = 0.9
[finish]
xgboost_trees = 5
"""

#: The loop of a prepared job, where only torch, numpy and safetensors are installed.
ELSEWHERE = """
import sys
for name in ("onnx", "onnxruntime", "pyarrow", "pydantic", "scipy", "sklearn", "tvm", "typer", "xgboost"):
    sys.modules[name] = None
from cdmpp.train.loop import main
sys.exit(main())
"""


@pytest.fixture
def gemm(tmp_path: Path) -> Path:
    """Table of synthetic rows in the layout of the public GEMM table."""
    rng = np.random.default_rng(0)
    n = 600
    m, cols, k = (2 ** rng.integers(4, 12, n) for _ in range(3))
    columns = {
        "op": ["linear"] * n,
        "device": rng.choice(["NVIDIA L40S", "NVIDIA B200"], n),
        "framework": ["vllm"] * n,
        "dtype": ["bfloat16"] * n,
        "m": m,
        "n": cols,
        "k": k,
        "latency_us": 4e-9 * m * cols * k + 5.0,
    }
    pq.write_table(pa.table(columns), tmp_path / "gemm.parquet")
    return tmp_path / "gemm.parquet"


def test_trained_model_predicts_and_is_evaluated(run: Run, gemm: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    common = ("--config", tmp_path / "tiny.toml", "--records", gemm, "--run", tmp_path / "run")
    lines = run.ok("train", *common, "--out", tmp_path / "model").stdout.splitlines()
    assert lines[1].split()[:4] == ["source", "device", "operator", "n"]
    assert lines[1].endswith("roofline MAPE  mean MAPE  xgboost MAPE")
    assert [line.split()[:3] for line in lines[2:6]] == [
        ["aiconfigurator_gemm", "b200", "linear"],
        ["aiconfigurator_gemm", "l40s", "linear"],
        ["aiconfigurator_gemm", "all", "all"],
        ["all", "all", "all"],
    ]
    # The repeated command evaluates and writes the finished run without training.
    again = run.json("train", *common, "--out", tmp_path / "again")
    assert again["model_id"] in lines[-1]
    assert again["metrics"]["overall"]["n"] > 0
    model = ("--model", tmp_path / "model", "--json")
    answer = json.loads(run("predict", "linear:m=64,n=64,k=64", "--device", "l40s", *model).stdout)
    assert answer["model_id"] == again["model_id"]
    evaluated = json.loads(run("eval", "--records", gemm, *model).stdout)
    assert evaluated["overall"]["n"] == 600


def test_a_machine_with_three_libraries_trains_the_same_model(run: Run, gemm: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG.replace("[optimiser]", "[optimiser]\nthreads = 1"))
    common, job = ("--config", tmp_path / "tiny.toml", "--records", gemm), tmp_path / "job"
    here = run("train", *common, "--run", tmp_path / "run", "--out", tmp_path / "model", "--on", "cpu")
    run.ok("train", *common, "--prepare", job)
    assert "error: " in run("train", *common, "--prepare", job).stderr
    assert "has no weights.safetensors" in run("train", "--finish", job, "--records", gemm).stderr
    assert max(path.stat().st_size for path in job.iterdir()) < 20 * 2**20

    def train(*options: str) -> subprocess.CompletedProcess[str]:
        return run_python("-c", ELSEWHERE, job, "--on", "cpu", *options)

    # A moment is over after the first step.
    assert "stopped after step 1 of 30" in train("--minutes", "1e-9").stdout
    assert "has a checkpoint" in train().stderr
    resumed = train("--resume")
    assert "finished after step 30" in resumed.stdout and "rows/s" in resumed.stdout, resumed.stderr
    finished = run.ok("train", "--finish", job, "--records", gemm)
    assert finished.stdout.splitlines()[-1].split()[-1] == here.stdout.splitlines()[-1].split()[-1]
    assert "other data" in run("train", "--finish", job, "--records", gemm, "--records", gemm).stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--config"),
        (("--config", "c.toml"), "--out"),
        (("--finish", "d", "--config", "c.toml", "--on", "cpu"), "without --config and --on"),
        (("--prepare", "d", "--config", "c.toml", "--out", "m"), "leave out --out"),
    ],
)
def test_options_that_do_not_go_together(run: Run, options: tuple[str, ...], message: str) -> None:
    assert message in " ".join(run.refused("train", *options, code=2).split())


@pytest.mark.parametrize("content", ["nonsense = 1", "not toml", CONFIG.replace("false", "true")])
def test_invalid_configurations_are_refused(run: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "c.toml").write_text(content)
    assert run.refused("train", "--config", tmp_path / "c.toml", "--out", tmp_path / "model").startswith("error: ")
    assert not (tmp_path / "model").exists()


def test_held_out_devices_have_a_separate_table(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"n": 2, "mape": 0.0731, "median_ape": 0.05, "within_10": 1.0, "within_20": 1.0}
    figures |= {"kendall_tau": None, "coverage": None}
    print_errors({"groups": [], "by_source": {"s": figures}, "overall": figures}, "unseen")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "errors: unseen"
    assert "7.3 %" in lines[2] and lines[2].split()[-1] == "-"


def test_serve_passes_its_options_to_the_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[uvicorn.Config, list[tuple[str, int]]]] = []

    def serve(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        calls.append((server.config, [listener.getsockname()[:2] for listener in sockets]))
        server.started = True

    monkeypatch.setattr(uvicorn.Server, "run", serve)
    assert run("serve", "--port", "0").exit_code == 0
    config, ((host, port),) = calls[0]
    assert config.factory and host == "127.0.0.1" and port > 0
    database, model = "here.sqlite", ROOT / "models" / "base"
    run("serve", "--host", "0.0.0.0", "--port", "0", "--model", model, "--database", database)
    config, ((host, _),) = calls[1]
    assert host == "0.0.0.0"
    settings: Settings = config.app.args[0]
    assert (settings.host, settings.model, settings.database) == ("0.0.0.0", model, database)
    assert config.timeout_graceful_shutdown is not None
    assert config.timeout_graceful_shutdown > Settings(model=None).deadline_s
    assert run("serve", "--port", "99999").exit_code == 2
    assert run("serve", "--workers", "0").exit_code == 2
    monkeypatch.setenv("CDMPP_MAX_ITEMS", "0")
    assert run("serve").exit_code == 2
    assert len(calls) == 2


def test_server_that_cannot_start_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(uvicorn.Server, "run", stop)
    assert run("serve", "--port", "0").exit_code == 1


def test_port_in_use_is_reported_with_a_remedy(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port))
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: port {port} of 127.0.0.1 is in use by another program, perhaps a service that still runs: end it, "
        "or choose another port with --port (0: any free one)\n"
    )


def test_training_prints_lines_where_there_is_no_terminal() -> None:
    from cdmpp.cli.progress import ProgressLines

    stream, now_s = io.StringIO(), iter([0.0, 10.0, 40.0, 50.0])
    lines = ProgressLines(stream, every_s=30.0, clock=lambda: next(now_s))
    for step in (50, 100, 150, 200):
        lines("step", step, 200, "loss 0.5000")
    assert stream.getvalue().splitlines() == [
        "step 50 of 200, loss 0.5000",
        "step 150 of 200, loss 0.5000, about 1 min left",
        "step 200 of 200, loss 0.5000",
    ]
