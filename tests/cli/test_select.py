"""``cdmpp select``, and ``cdmpp measure`` on its folder."""

import json
from pathlib import Path

import pytest

from cdmpp.data.load import load_table
from cdmpp.devices.loading import specification_toml
from tests.cli.conftest import Run
from tests.data.test_device_specs import cpu

TEXTS = [*(f"linear:m={m},n=64,k=64" for m in range(1, 9)), "softmax:rows=8,cols=8", "relu:rows=1,cols=4"]


@pytest.fixture
def mine(tmp_path: Path) -> list[object]:
    """Arguments for a user-defined CPU and a pool of small programs."""
    (tmp_path / "mine.toml").write_text(specification_toml(cpu("mine")))
    (tmp_path / "pool.txt").write_text("\n".join(TEXTS))
    return ["--device", tmp_path / "mine.toml", "--pool", tmp_path / "pool.txt"]


def test_selected_programs_are_measured(run: Run, mine: list[object], tmp_path: Path) -> None:
    folder = tmp_path / "todo"
    summary = run.json("select", *mine, "--k", 4, "--out", folder)
    assert len(summary["programs"]) == 4 and summary["protocol"] == "eager" and summary["pool_programs"] == 10
    assert json.loads((folder / "select.json").read_text())["sampler"] == "variance"
    assert 0 < summary["estimate_s"] < 60 and sum(summary["families"].values()) == 4
    assert run.json("measure", folder, "--threads", 1)["records"] == 4
    table = load_table(folder)
    assert table.device.used() == ("mine",) and table.protocol.used() == ("eager",)
    # The CSV is about the same programs.
    path = folder / "programs.csv"
    path.write_text(path.read_text().replace(",,eager", ",5,eager"))
    assert sorted(table.program_hashes) == sorted(load_table(path).program_hashes)
    assert "4 records of mine (eager), 0 of them new" in run.ok("measure", folder, "--threads", 1).stdout


def test_text_shows_the_estimate_and_the_next_command(run: Run, mine: list[object], tmp_path: Path) -> None:
    result = run.ok("select", *mine, "--k", 3, "--sampler", "variance", "--out", tmp_path / "todo")
    assert "3 of 10 programs" in result.stdout
    assert "measuring them on mine (eager) takes about" in result.stdout
    assert f"cdmpp measure {tmp_path / 'todo'} --on cpu" in result.stdout


def test_invalid_arguments_are_refused(run: Run, mine: list[object], tmp_path: Path) -> None:
    folder = tmp_path / "todo"
    for arguments, message in (
        (("--k", 11), "cannot choose k = 11"),
        (("--framework", "jax"), "no framework 'jax'"),
        (("--device", "no-such"), "no device named"),
        (("--pool", tmp_path / "absent.txt"), "cannot be read"),
    ):
        assert message in run.refused("select", *mine, *arguments, "--out", folder)
        assert not folder.exists()
    assert run("select", *mine, "--k", 2, "--out", tmp_path).exit_code == 1  # not empty


def test_selection_for_a_gpu_is_not_measured_on_a_cpu(run: Run, mine: list[object], tmp_path: Path) -> None:
    folder = tmp_path / "todo"
    assert run("select", *mine, "--device", "t4", "--k", 2, "--out", folder).exit_code == 0
    assert "t4 is a gpu, not a CPU" in run.refused("measure", folder, "--on", "cpu")
    assert "protocol 'kernel'" in run.refused("measure", folder, "--on", "cpu", "--device", tmp_path / "mine.toml")


def test_job_needs_out_and_refuses_on(run: Run, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    assert run("measure", tmp_path / "job").exit_code == 2
    assert run("measure", tmp_path / "job", "--out", tmp_path / "r", "--on", "cpu").exit_code == 2
