"""Every documented benchmark that needs no outside data runs on tiny sizes, and ``--help`` only prints the help."""

import importlib
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.waiting import ROOT, run_python

#: Modules that need the public tables, or another model: only their help is tested.
NEED_PUBLIC_DATA = [
    *("accuracy", "leave_one_device_out", "peers", "serving_truth.__main__", "training_truth.__main__"),
    *("quick.__main__", "schedules.gpu", "schedules.new_device", "schedules.study", "unseen_shapes"),
]
#: Tiny sizes of the others. {out} is a result file, {folder} an empty folder, {records} some measured programs,
#: {config} a training configuration of a few steps.
TINY = {
    "agreement": "--programs 20 --out {out}",
    "coverage": None,
    "figures": None,
    "fuzz.__main__": None,  # tests/server/test_fuzz.py
    "gate": None,
    "serving.__main__": "--seconds 0.2 --workers 1 --out {out}",
    "schedules.__main__": "--config {config} --preset {config} --data {records} --splits task --runs {folder}"
    " --out {out}",
}
#: Longer than a few seconds.
SLOW = {"schedules.__main__", "serving.__main__"}


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
    text = text.replace("steps = 2000", "steps = 5").replace("xgboost_trees = 400", "xgboost_trees = 5")
    file.write_text(text + "[reference]\nlayers = 1\n")
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
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TINY if TINY[name]]
)
def test_benchmark_runs_on_tiny_sizes(name: str, tmp_path: Path, records: Path, config: Path) -> None:
    out, folder = tmp_path / "result.json", tmp_path / "work"
    options = TINY[name].format(out=out, folder=folder, records=records, config=config).split()
    done = run_python("-m", f"benchmarks.{name.removesuffix('.__main__')}", *options, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout
    if out.exists():
        assert json.loads(out.read_text())
