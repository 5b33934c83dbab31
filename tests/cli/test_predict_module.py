"""``cdmpp predict package.module:factory``."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from cdmpp.predict.predictor import LatencyPredictor
from tests.cli.conftest import LINEAR, ROOT, Run

FACTORIES = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x):
        return {"y": self.down(torch.relu(self.up(x)))}

class Cyclic(Block):
    def __init__(self):
        super().__init__()
        self.parent = nn.ModuleList([self])

class Choosing(Block):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x

class Inverse(Block):
    def forward(self, x):
        return self.up(torch.linalg.inv(x))

block = Block()
number = 3

def both():
    return Block(), (torch.empty(8, 64),)

def keywords():
    return Block(), {"x": torch.empty(8, 64)}

def inverse():
    return Inverse(), torch.empty(64, 64)

def raising():
    raise ValueError("no such configuration")

def nothing():
    return None
"""
NAME = "cdmpp_test_factories"


@pytest.fixture(autouse=True)
def current_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with Python modules."""
    folder = tmp_path_factory.mktemp("factories")
    (folder / f"{NAME}.py").write_text(FACTORIES)
    (folder / f"{NAME}_broken.py").write_text("raise OSError('disk')")
    (folder / f"{NAME}_needy.py").write_text("import cdmpp_test_missing")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        monkeypatch.delitem(sys.modules, name)
    return folder


@pytest.mark.slow
def test_json_equals_predict_module(run: Run, predictor: LatencyPredictor) -> None:
    options = ("--mode", "training", "--dtype", "float16", "--optimizer", "sgd")
    output = run.json("predict", f"{NAME}:both", "-d", "t4", "-d", "a100-pcie-40gb", *options)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(x)))

    expected = predictor.predict_module(
        Block(), torch.empty(8, 64), ["t4", "a100-pcie-40gb"], mode="training", dtype="float16", optimizer="sgd"
    )
    rows = [{**row.to_dict(), "source": f"{NAME}:both"} for answer in expected for row in answer.programs]
    assert output["results"] == rows and output["model_id"] == predictor.model_id and output["unsupported"] == []
    assert [total["device"] for total in output["totals"]] == ["t4", "a100-pcie-40gb"]
    assert [total["latency_s"] for total in output["totals"]] == [answer.latency_s for answer in expected]
    assert list(output["totals"][0]["phases"]) == ["forward", "backward", "optimizer"]


def test_every_kind_of_factory_gives_the_same_total(run: Run) -> None:
    shape = ("--input", "8,64:float32")
    commands = [("both",), ("keywords",), ("Block", *shape), ("block", *shape), ("Block", "--input", "x=8,64")]
    totals = [run.json("predict", f"{NAME}:{name}", "-d", "t4", *more)["totals"] for name, *more in commands]
    assert all(total == totals[0] for total in totals) and totals[0][0]["launches"] == 3


def test_text_has_programs_with_their_module_and_a_total(run: Run) -> None:
    result = run.ok("predict", f"{NAME}:both", "--device", "t4", "--mode", "training", "--optimizer", "adamw")
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"total of {NAME}:both on t4: ") and "device busy" in lines[1]
    assert lines[6].split() == ["call", "program", "module", "phase", "count", "each", "total", "share", "domain"]
    assert any("linear:dtype=float32,m=8,n=128,k=64,bias=true" in line and " up " in line for line in lines)
    [total] = [line for line in lines if line.startswith(f"total of {NAME}:both on t4: ")]
    assert " ms [" in total or " µs [" in total
    assert [line.split(":")[0].strip() for line in lines[2:5]] == ["forward", "backward", "optimizer"]
    assert lines[-1].startswith("latency: training, execution eager, framework pytorch, model ")


def test_several_devices_share_one_table(run: Run) -> None:
    result = run.ok("predict", f"{NAME}:both", "-d", "t4", "-d", "a100-pcie-40gb", "--execution", "cuda-graph")
    header = next(line for line in result.stdout.splitlines() if line.startswith("call "))
    assert header.split()[-2:] == ["t4", "a100-pcie-40gb"]
    assert "execution cuda-graph" in result.stdout and "device busy" not in result.stdout
    details = run("predict", f"{NAME}:both", "-d", "t4", "-d", "a100-pcie-40gb", "-v")
    assert details.stdout.count("device busy") == 2 and details.stdout.count("\ncall ") == 2


def test_host_profile_of_a_file(run: Run, current_folder: Path) -> None:
    def waiting(*options: str) -> float:
        return float(run.json("predict", f"{NAME}:both", "-d", "t4", *options)["totals"][0]["timeline"]["waiting_s"])

    Path("slow.toml").write_text("name = 'slow'\n[host.kinds]\nkernel = 1e-3\n")
    assert waiting("--host", "slow.toml") > 2e-3 > waiting()
    missing = run.refused("predict", f"{NAME}:both", "-d", "t4", "--host", "nowhere.toml")
    assert "no host profile 'nowhere.toml'" in missing


def test_calls_left_out_make_a_lower_bound(run: Run) -> None:
    result = run.ok("predict", f"{NAME}:inverse", "-d", "t4")
    assert "at least " in result.stdout
    assert "not predicted: aten.linalg_inv_ex (1 x): no operator describes factorisations" in result.stdout
    strict = run("predict", f"{NAME}:inverse", "-d", "t4", "--strict", "--json")
    assert strict.exit_code == 3 and json.loads(strict.stdout)["unsupported"][0]["count"] == 1


def test_wrong_device_does_not_stop_the_others(run: Run) -> None:
    result = run("predict", f"{NAME}:both", "-d", "t4", "-d", "wrong", "-d", "t4")
    assert result.exit_code == 1
    assert result.stdout.count("total of") == 1 and "wrong" in result.stderr
    run.refused("predict", f"{NAME}:both", "-d", "wrong")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cdmpp_test_nowhere:net",), "there is no Python module 'cdmpp_test_nowhere'"),
        ((f"{NAME}.inner:net",), f"there is no Python module '{NAME}.inner'"),
        ((f"{NAME}_broken:net",), "raised OSError: disk"),
        ((f"{NAME}_needy:net",), "it needs 'cdmpp_test_missing', which is not installed"),
        ((f"{NAME}:bath",), "'bath' does not exist; did you mean both?"),
        ((f"{NAME}:number",), "has type int, which is no factory"),
        ((f"{NAME}:raising",), "raised ValueError: no such configuration"),
        ((f"{NAME}:nothing",), "returned NoneType, not a torch module"),
        ((f"{NAME}:Block",), "needs example inputs"),
        ((f"{NAME}:Cyclic", "--input", "8,64"), "contains itself as parent.0"),
        ((f"{NAME}:Choosing", "--input", "8,64"), "does not run without data"),
        ((f"{NAME}:Block", "--input", "8,65"), "does not run on these inputs"),
        ((f"{NAME}:Block", "--input", "8x64"), "'8x64' is not [NAME=]SHAPE[:TYPE]"),
        ((f"{NAME}:Block", "--input", "8,64:int3"), "is not [NAME=]SHAPE[:TYPE]"),
        ((f"{NAME}:Block", "--input", "x=8,64", "--input", "8,64"), "a name is missing or occurs twice"),
        ((f"{NAME}:both", LINEAR), "is predicted alone"),
        ((f"{NAME}:both", "--backend", "tvm"), "--backend is not for torch modules"),
        ((f"{NAME}:both", "--optimizer", "adam"), "no gradients in mode inference"),
        ((LINEAR, "--mode", "training"), "--mode is for torch modules only"),
    ],
)
def test_mistakes_have_one_line_and_a_hint(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("predict", *arguments, "--device", "t4")
    assert result.exit_code == 1
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ") and message in error and hint.startswith("hint: ")
    assert result.stdout == ""


def test_a_module_needs_a_device(run: Run) -> None:
    assert "--device" in run.refused("predict", f"{NAME}:both", code=2)


def test_operators_are_not_taken_for_modules(run: Run) -> None:
    assert "Python module" not in run.refused("predict", "linear:m", "--device", "t4")


def test_page_shows_the_real_output(run: Run) -> None:
    page = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8")
    blocks = [block.split("\n```")[0] for block in page.split("```console\n$ ")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        command, _, shown = block.partition("\n")
        words, _, head = command.partition(" | head -")
        assert shown.splitlines() == run(*words.split()[1:]).stdout.rstrip().splitlines()[: int(head) if head else None]
