"""``predict_module`` of the clients: kernels listed here, latencies by the service."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from cdmpp.cli.main import app
from cdmpp.client import AsyncPredictorClient, PredictorClient
from cdmpp.devices import SPECIFICATION_EXAMPLE
from cdmpp.errors import InvalidProgramError
from cdmpp.predict.modules.prediction import ModulePrediction
from cdmpp.predict.predictor import LatencyPredictor

X = torch.empty(8, 64)
NET = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
OPTIONS: dict[str, Any] = {"mode": "training", "dtype": "float16", "optimizer": "sgd", "implementation": "tuned"}


def without_ids(answers: list[ModulePrediction]) -> list[dict[str, Any]]:
    values = [answer.to_dict() for answer in answers]
    for value in values:
        for program in value["programs"]:
            program.pop("prediction_id", None)
    return values


def test_clients_equal_the_predictor_in_this_process(url: str, predictor: LatencyPredictor) -> None:
    devices = ["t4", "a100-pcie-40gb"]
    here = predictor.predict_module(NET, X, devices, **OPTIONS)
    with PredictorClient(url) as client:
        served = client.predict_module(NET, X, devices, **OPTIONS)
        assert without_ids(served) == without_ids(here)
        assert client.predict_module(NET, X, "t4", **OPTIONS).latency_s == here[0].latency_s
        with pytest.raises(InvalidProgramError, match="do not fit"):
            client.predict_module(NET, (), "t4")

    async def ask() -> list[ModulePrediction]:
        async with AsyncPredictorClient(url) as client:
            one, several = await asyncio.gather(
                client.predict_module(NET, X, "t4", **OPTIONS), client.predict_module(NET, X, devices, **OPTIONS)
            )
            return [one, *several]

    assert without_ids(asyncio.run(ask())) == without_ids([here[0], *here])


def test_the_command_line_asks_a_service(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cdmpp_test_net.py").write_text("from torch import nn\ndef net(): return nn.Linear(64, 32)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own.toml").write_text(SPECIFICATION_EXAMPLE)
    command = ["predict", "cdmpp_test_net:net", "--input", "8,64", "-d", "t4", "-d", "own.toml", "--json"]
    here, there = (CliRunner().invoke(app, [*command, *more]) for more in ([], ["--url", url]))
    assert there.exit_code == 0, there.output
    assert json.loads(there.stdout)["totals"] == json.loads(here.stdout)["totals"]
    unknown = CliRunner().invoke(app, [*command[:4], "-d", "a101", "--url", url])
    assert unknown.exit_code == 1 and "a101" in unknown.stderr
