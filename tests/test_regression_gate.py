"""Errors on a small fixed split of the project's own measurements may not rise (``benchmarks/gate.py``)."""

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.gate import (
    GATE,
    complaints,
    model_figures,
    part_of_tasks,
    read_tasks,
    training_config,
    training_figures,
)
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.train.config import TrainConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gate() -> dict[str, Any]:
    return json.loads(GATE.read_text(encoding="utf-8"))


def test_the_shipped_model_is_as_good_as_it_was(gate: dict[str, Any], predictor: LatencyPredictor) -> None:
    table = read_tasks(gate["tasks"]["test"])
    data = TrainConfig.of_manifest(predictor.artifact.manifest["config"]).data
    parts = part_of_tasks(table, data)
    assert parts == dict.fromkeys(sorted(gate["tasks"]["test"]), 2), "the model was trained on the gate's rows"
    now = model_figures(predictor.artifact, table)
    assert not complaints(now, gate["model"], gate["margins"]["model"])


def test_training_gets_as_far_as_it_did(gate: dict[str, Any]) -> None:
    table = read_tasks([*gate["tasks"]["test"], *gate["tasks"]["train"]])
    now = training_figures(table, training_config())
    assert not complaints(now, gate["training"], gate["margins"]["training"])


def test_the_gate_closes(gate: dict[str, Any]) -> None:
    for name, margins in gate["margins"].items():
        held = gate[name]
        assert not complaints(held, held, margins)
        # Further off than the margin, in either figure; no figure at all; other rows.
        for worse in (
            {"mape": held["mape"] * (1.01 + margins["mape"])},
            {"task_kendall_tau": held["task_kendall_tau"] - 0.01 - margins["task_kendall_tau"]},
            {"mape": np.nan},
            {"task_kendall_tau": np.nan},
            {"n": held["n"] - 1},
        ):
            assert len(complaints(held | worse, held, margins)) == 1
