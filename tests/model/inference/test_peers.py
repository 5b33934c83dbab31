"""Known devices correct predictions for unseen ones, except those of scheduled programs on CPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from cdmpp.devices import lookup
from cdmpp.model.inference import pipeline
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.program import TensorProgram

RECORDS = Path(__file__).resolve().parents[3] / "data" / "cdmpp-measured" / "records.parquet"


@pytest.fixture
def corrected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows of every correction by peers."""
    counts: list[int] = []

    def counted(own: np.ndarray, peers: np.ndarray, weight: np.ndarray) -> np.ndarray:
        counts.append(len(own))
        return np.zeros(len(own))

    monkeypatch.setattr(pipeline, "shift", counted)
    return counts


@pytest.mark.slow
def test_scheduled_programs_on_an_unseen_cpu_are_the_networks_own(
    predictor: LatencyPredictor, corrected: list[int]
) -> None:
    text = pq.read_table(RECORDS, columns=["program"]).slice(0, 1).to_pylist()[0]["program"]
    scheduled = TensorProgram.from_tvm_json(text)
    cpu = lookup("amd-zen3-1t-avx2").model_copy(update={"name": "my-cpu", "clock_hz": 3.1e9})
    (prediction,) = predictor.predict([scheduled], cpu)
    assert prediction.latency_s > 0 and prediction.domain != "in"
    assert not corrected
    gpu = lookup("t4").model_copy(update={"name": "my-gpu", "clock_hz": 2.1e9})
    predictor.predict(["linear:m=512,n=1024,k=1024"], gpu)
    assert corrected == [1]
