"""``predict_module`` of the clients: kernels listed here, latencies by the service."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

from cdmpp.client import AsyncPredictorClient, PredictorClient
from cdmpp.errors import InvalidProgramError
from cdmpp.modules.prediction import ModulePrediction
from cdmpp.predictor import LatencyPredictor

X = torch.empty(8, 64)
NET = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
OPTIONS: dict[str, Any] = {"mode": "training", "dtype": "float16", "optimizer": "sgd"}


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
