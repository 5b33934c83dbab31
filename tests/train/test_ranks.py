"""Training over two processes equals training in one, and either continues the other's checkpoint.

Sums of floats are rounded in another order. Over the twelve steps of the scenarios the losses agree within 1e-5
relative. The weights agree within 1 % of the largest weight of a tensor: Adam's first steps have the size of the
learning rate whatever the size of the gradient, so weights that start at zero feel the rounding most.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cdmpp.errors import DataError, ServiceError
from cdmpp.train.checkpoint import CHECKPOINT
from cdmpp.train.loop import METRICS
from cdmpp.train.ranks import Ranks, process_group
from tests.train.rank_scenarios import STEPS, STOP_AT, KilledError, run
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
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
steps = 1000000
seconds = 100000
batch_rows = 16
checkpoint_every = 5
"""
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-2
NAMES = ("plain", "ranking", "domain")


def torchrun(processes: int, *arguments: str) -> subprocess.Popen[str]:
    """Start processes of a module."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'server'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def step_of(folder: Path) -> int:
    with safe_open(str(folder / CHECKPOINT), framework="pt") as file:
        return int(file.metadata()["step"])


def assert_close(folder: Path, other: Path) -> None:
    one, two = load_file(str(folder / CHECKPOINT)), load_file(str(other / CHECKPOINT))
    assert one.keys() == two.keys()
    for name in one:
        largest = float(one[name].float().abs().max())
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=WEIGHT_TOLERANCE * largest + 1e-7, msg=name)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Run folders and losses of one process."""
    folder = tmp_path_factory.mktemp("one")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    losses = {name: run(name, folder / name) for name in NAMES}
    with pytest.raises(KilledError):
        run("plain", folder / "killed", kill_at=9)  # its last checkpoint is of step 8
    torch.set_num_threads(before)
    return folder, losses


@pytest.fixture(scope="module")
def two(
    one: tuple[Path, dict[str, list[float]]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, list[float]]]]:
    """Run folders of two processes, and the parts of the losses by rank."""
    folder = tmp_path_factory.mktemp("two")
    shutil.copytree(one[0] / "killed", folder / "continued")
    process = torchrun(2, "tests.train.rank_scenarios", str(folder))
    _, errors = process.communicate(timeout=PATIENCE_S)
    # Not the exit status: PyTorch's threads may abort a process that is done with everything.
    assert (folder / "rank0.json").exists() and (folder / "rank1.json").exists(), errors
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


Folders = tuple[Path, dict[str, list[float]]]
Ranked = tuple[Path, list[dict[str, list[float]]]]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_have_the_loss_curve_and_weights_of_one(one: Folders, two: Ranked, name: str) -> None:
    total = [first + second for first, second in zip(*(losses[name] for losses in two[1]), strict=True)]
    assert len(total) == STEPS
    assert total == pytest.approx(one[1][name], rel=LOSS_TOLERANCE)
    assert_close(one[0] / name, two[0] / name)


def test_two_processes_continue_a_checkpoint_of_one(one: Folders, two: Ranked) -> None:
    total = [first + second for first, second in zip(*(losses["continued"] for losses in two[1]), strict=True)]
    assert total == pytest.approx(one[1]["plain"][8:], rel=LOSS_TOLERANCE)
    assert_close(one[0] / "plain", two[0] / "continued")


def test_sigterm_to_one_rank_ends_all_with_a_checkpoint_that_one_process_continues(one: Folders, two: Ranked) -> None:
    assert [losses["stopped"] for losses in two[1]] == [[STOP_AT], [STOP_AT]]
    folder = two[0] / "stopped"
    assert step_of(folder) == STOP_AT
    assert run("plain", folder) == pytest.approx(one[1]["plain"][STOP_AT:], rel=LOSS_TOLERANCE)
    assert_close(one[0] / "plain", folder)


def test_only_the_first_rank_writes(two: Ranked) -> None:
    assert sorted(path.name for path in (two[0] / "plain").iterdir()) == [CHECKPOINT, METRICS]
    assert len((two[0] / "plain" / METRICS).read_text().splitlines()) == 1


def test_command_line_under_torchrun_stops_at_sigterm_with_a_checkpoint(tmp_path: Path) -> None:
    table, config, folder = tmp_path / "mine.csv", tmp_path / "config.toml", tmp_path / "run"
    rows = [f'"linear:m={2**i},n=256,k={2**j},dtype=float16",{5 + 2**i},t4' for i in range(12) for j in range(5, 12)]
    table.write_text("\n".join(["program,latency_us,device", *rows]) + "\n")
    config.write_text(CONFIG)
    options = ["--config", str(config), "--records", str(table), "--run", str(folder), "--out", str(tmp_path / "model")]
    # torchrun would take --run for an abbreviation of its --run-path. One process is enough here, and starts faster.
    process = torchrun(1, "--", "cdmpp", "train", *options)
    wait_until(lambda: (folder / CHECKPOINT).exists() or process.poll() is not None, "the first checkpoint")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert errors.count("the same command resumes the run") == 1, errors
    assert f"stopped after step {step_of(folder):,};" in errors
    assert not (tmp_path / "model").exists()


def test_fewer_rows_than_processes_are_refused() -> None:
    with pytest.raises(DataError, match="a batch of 1 rows cannot be divided among 2 processes"):
        Ranks(0, 2).own(1)


def test_lost_process_is_an_error_that_names_the_way_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_reduce", closed)
    with pytest.raises(ServiceError, match="another process of the run ended: Connection closed") as caught:
        Ranks(0, 2).whole(torch.zeros(2, 3), 4)
    assert "resumes from the last checkpoint" in caught.value.hint


def test_without_world_size_there_is_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    with process_group() as ranks, ranks.stoppable():
        assert (ranks.rank, ranks.size, ranks.first) == (0, 1, True)
        assert not torch.distributed.is_initialized()
        assert signal.getsignal(signal.SIGTERM) == before


def test_error_of_the_first_rank_is_raised_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []

    def broadcast(outcome: list[object]) -> None:
        sent.append(outcome[0]) if outcome[0] is not None else outcome.__setitem__(0, sent[-1])

    def fails() -> int:
        raise DataError("it holds a run on other data", hint="choose another")

    monkeypatch.setattr("torch.distributed.broadcast_object_list", broadcast)
    assert [Ranks(rank, 2).from_first(lambda: 7) for rank in (0, 1)] == [7, 7]
    for rank in (0, 1):
        with pytest.raises(DataError, match="other data") as caught:
            Ranks(rank, 2).from_first(fails)
        assert caught.value.hint == "choose another"


def test_processes_with_different_data_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(values: list[object], own: object) -> None:
        values[:] = [own, {"data": "another"}]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    Ranks(0, 2).check_same({"data": "another"})
    with pytest.raises(DataError, match="different configurations or data"):
        Ranks(0, 2).check_same({"data": "mine"})
