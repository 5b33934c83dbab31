"""``cdmpp select --backend tvm``, and ``cdmpp measure``, ``collect`` and ``adapt`` on its folder."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cdmpp.data.load import load_table
from cdmpp.data.records import from_measurements, write_records
from cdmpp.devices.loading import specification_toml
from cdmpp.model.artifact.scheduled import attach_scheduled
from tests.cli.conftest import Run
from tests.data.test_device_specs import cpu, row
from tests.model.nn.synthetic import TINY, write_artifact

pytestmark = [pytest.mark.slow, pytest.mark.tvm, pytest.mark.native]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a part for TVM programs."""
    root = tmp_path_factory.mktemp("model")
    write_artifact(root / "model")
    write_artifact(root / "scheduled", 1, replace(TINY, schedule=True, head="ratio"))
    attach_scheduled(root / "model", root / "scheduled")
    return root / "model"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five functions as JSON, two of them in one module, and one as TVMScript."""
    tvm = pytest.importorskip("tvm")
    from tvm import te, topi

    folder = tmp_path_factory.mktemp("pool")

    def function(rows: int) -> object:
        a = te.placeholder((rows, 16), name="A")
        return te.create_prim_func([a, topi.nn.relu(a) if rows % 2 else topi.nn.softmax(a)])

    for rows in (4, 5, 6):
        (folder / f"{rows}.json").write_text(tvm.ir.save_json(function(rows).with_attr("global_symbol", "main")))
    module = tvm.IRModule(
        {name: function(rows).with_attr("global_symbol", name) for name, rows in (("a", 7), ("b", 8))}
    )
    (folder / "module.json").write_text(tvm.ir.save_json(module))
    (folder / "script.py").write_text(function(9).with_attr("global_symbol", "main").script())
    return folder


@pytest.fixture
def mine(tmp_path: Path, model: Path) -> list[object]:
    """Arguments for a user-defined CPU of one thread and the model."""
    (tmp_path / "mine.toml").write_text(specification_toml(cpu("mine")))
    return ["--backend", "tvm", "--model", model, "--device", tmp_path / "mine.toml"]


def test_chosen_programs_are_measured_and_adapt_the_model(
    run: Run, mine: list[object], model: Path, pool: Path, tmp_path: Path
) -> None:
    todo, adapted = tmp_path / "todo", tmp_path / "adapted"
    summary = run.json("select", *mine, "--pool", pool, "--k", 4, "--out", todo)
    assert summary["pool_programs"] == 6 and len(summary["programs"]) == 4
    chosen = {p["program"] for p in json.loads((todo / "select.json").read_text())["programs"]}
    assert len(chosen) == 4 and {p["program"].split()[-1] for p in summary["programs"]} == chosen
    run.ok("measure", todo)
    table = load_table(todo)
    assert set(table.program_hashes) == chosen and np.isfinite(table.latency_s).all()
    assert table.device.used() == ("mine",) and table.backend.used() == ("tvm",)
    before = (todo / "records.parquet").read_bytes()
    assert run("measure", todo).exit_code == 0 and (todo / "records.parquet").read_bytes() == before
    assert "programs of mine" in run.ok("adapt", "--model", model, "--records", todo, "--out", adapted).stdout
    assert run("predict", pool / "4.json", "--device", tmp_path / "mine.toml", "--model", adapted).exit_code == 0


def test_selection_is_built_for_another_machine(run: Run, mine: list[object], pool: Path, tmp_path: Path) -> None:
    todo, job, out = tmp_path / "todo", tmp_path / "job", tmp_path / "out"
    assert run("select", *mine, "--pool", pool, "--k", 2, "--out", todo).exit_code == 0
    options = ("--target", "native@1", "--device", tmp_path / "mine.toml")
    assert run("collect", todo, "--network", "mixer", "--out", job).exit_code == 2
    assert run("collect", todo, *options, "--build-only", "--repeat-gap-s", 0, "--out", job).exit_code == 0
    run.ok("measure", job, "--device", tmp_path / "mine.toml", "--out", out)
    chosen = {p["program"] for p in json.loads((todo / "select.json").read_text())["programs"]}
    assert set(load_table(out).program_hashes) == chosen


def test_choice_ignores_latencies_and_programs_of_gpus(
    run: Run, mine: list[object], pool: Path, tmp_path: Path
) -> None:
    texts = [(pool / f"{rows}.json").read_text() for rows in (4, 5, 6)]
    bound = texts[0].replace('"main"', '"blockIdx.x"')  # only the tag counts
    chosen = []
    for number, scale in enumerate((1.0, 1e3)):
        rows = [
            row("t4", program=text, program_kind="tvm_json", program_hash=f"{i:032}", backend="tvm", latency_s=scale**i)
            for i, text in enumerate((*texts, bound))
        ]
        write_records(from_measurements(rows), tmp_path / f"{number}.parquet")
        todo = tmp_path / f"todo-{number}"
        result = run.ok("select", *mine, "--pool", tmp_path / f"{number}.parquet", "--k", 2, "--out", todo)
        assert "2 of 3 programs (left out: needs a GPU 1)" in result.stdout
        chosen.append(json.loads((todo / "select.json").read_text())["programs"])
    assert chosen[0] == chosen[1]


def test_pool_of_a_network(run: Run, mine: list[object], tmp_path: Path) -> None:
    network = "elementwise:rows=8,columns=8"
    assert run.json("select", *mine, "--network", network, "--k", 3, "--out", tmp_path / "todo")["pool"] == [network]
    refused = run("select", *mine[2:], "--network", network, "--k", 3, "--out", tmp_path / "other")
    assert refused.exit_code == 2 and "--network" in refused.output
