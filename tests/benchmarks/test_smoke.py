"""Every documented benchmark that needs no outside data runs on tiny sizes, and ``--help`` only prints the help."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.benchmarks.forked import run_command
from tests.data.measure.networks import two_layers

ROOT = Path(__file__).resolve().parents[2]
#: Modules that need the public tables: only their help is tested.
NEED_PUBLIC_DATA = [
    "ablations",
    "accuracy",
    "end_to_end.__main__",
    "gpu_schedules.__main__",
    "leave_one_device_out",
    "llm_serving.__main__",
    "planning.replay_intervals",
    "stacks",
    "unseen_shapes",
]
#: Tiny sizes of the others. {out} is a result file, {folder} an empty folder, {records} some measured programs,
#: {config} a training configuration of a few steps, {model} a small ONNX model.
TINY = {
    "bulk": "--rows 8 --repeats 1",
    "coverage": None,
    "engines": "--repeats 1 --skip-compile --skip-predictor --skip-tvm --leaves 1 --rows 1",
    "features": "--candidates 2 --repeats 1 --without-intrinsics",
    "figures": None,
    "fuzz.__main__": "--cases 20 --seconds 30 --only ONNX",
    "gate": None,
    "network": "--repeats 1 --batches 4 --threads 1",
    "planning.casts": "--rounds 1 --sizes 64 128 --out {out}",
    "planning.cluster": "--jobs 5 --seeds 1 --out {out}",
    "planning.emulator": "--repeats 1 --candidates 40 --output {out}",
    "planning.fused": "--instances 1 --random-instances 1 --budget 0.1 --random-budget 0.1 --limited-budget 0.02"
    " --skip-cold --out {out}",
    "planning.gloo": "--rounds 1 --repeats 2 --networks mlp --out {out}",
    "planning.multimodal": "--mixes 1 --steps 10 --out {out}",
    "planning.multimodal_exact": "--cases 2 --steps 100 --out {out}",
    "planning.precision": "--operators 8 --seeds 1 --budgets 1 --networks 2 --tensors 1 0 --out {out}",
    "planning.replay_speed": "--nodes 50 --file-nodes 50 --repeats 1 --out {out}",
    "planning.rl": "--regimes 1 --seeds 1 --units 4 --large-units 600 --budgets 1 --out {out}",
    "reference_preset": "--seconds 0.2 --config {config} --data {records} --out {out}",
    "serving.__main__": "--seconds 0.2 --workers 1 --requests 20 --only rates --out {out}",
    "serving.overload": "--seconds 0.3 --workers 1 --items 20 --capacity-seconds 0.3 --probes 5 --out {out}",
    "serving.jobs": "--seconds 0.3 --rounds 1 --rates 20 --out {out}",
    "traces": "--rounds 1 --iterations 1 --width 16 --batch 8 --out {out}",
    "tuning.__main__": "--tasks 1 --trials 2 --methods 1 --work {folder}",
    "collecting": "--network {model} --schedules 1 --builders 1 --skip-tvm --json {out}",
    "tables": None,
    "schedules.__main__": "--config {config} --data {records} --splits task --original-seconds 0.2 --runs {folder}"
    " --out {out}",
}
#: Longer than a few seconds.
SLOW = {
    "collecting",
    "engines",
    "features",
    "fuzz.__main__",
    "network",
    "planning.emulator",
    "planning.fused",
    "planning.gloo",
    "planning.multimodal",
    "planning.rl",
    "reference_preset",
    "schedules.__main__",
    "serving.__main__",
    "serving.jobs",
    "serving.overload",
    "tuning.__main__",
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured programs of some tasks."""
    tasks = json.loads((ROOT / "tests" / "regression_gate.json").read_text())["tasks"]
    wanted = [*tasks["test"][:4], *tasks["train"][:12]]
    rows = pq.read_table(ROOT / "data" / "cdmpp-measured" / "records.parquet", filters=[("task", "in", wanted)])
    file = tmp_path_factory.mktemp("data") / "records.parquet"
    pq.write_table(rows, file)
    return file


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of scheduled programs with a few steps and trees."""
    text = (ROOT / "configs" / "cpu.toml").read_text()
    assert "steps = 2000" in text and "xgboost_trees = 400" in text
    file = tmp_path_factory.mktemp("config") / "tiny.toml"
    file.write_text(text.replace("steps = 2000", "steps = 5").replace("xgboost_trees = 400", "xgboost_trees = 5"))
    return file


@pytest.mark.parametrize("name", sorted([*TINY, *NEED_PUBLIC_DATA]))
def test_help_prints_the_help_and_runs_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert "--help" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name, options in TINY.items()
        if options is not None
    ],
)
def test_benchmark_runs_on_tiny_sizes(name: str, tmp_path: Path, records: Path, config: Path) -> None:
    out, folder, model = tmp_path / "result.json", tmp_path / "work", tmp_path / "model.onnx"
    model.write_bytes(two_layers())
    options = (TINY[name] or "").format(out=out, folder=folder, records=records, config=config, model=model).split()
    # A process of its own, because some change settings of the process.
    done = run_command(f"benchmarks.{name.removesuffix('.__main__')}", options, tmp_path)
    assert done.status == 0, done.error[-4000:]
    assert done.output
    if out.exists():
        assert json.loads(out.read_text())
