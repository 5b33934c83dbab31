"""An answer does not depend on what else was asked: equal to the last digit."""

import random
from pathlib import Path

import pytest

from cdmpp.model.artifact.load import load_artifact
from cdmpp.predict.predictor import CHUNK_ROWS, LatencyPredictor, Query
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Protocol
from tests.features.shapes import random_specs
from tests.model.nn.synthetic import write_artifact

DEVICES = ("t4", "l4", "a100-pcie-40gb", "h100-sxm5-80gb")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "synthetic"
    write_artifact(path)
    return path


def fresh(folder: Path) -> LatencyPredictor:
    """Without anything remembered."""
    return LatencyPredictor(load_artifact(folder))


def queries(count: int) -> list[Query]:
    rng = random.Random(0)
    rows = []
    for spec in random_specs(count, 4):
        protocol: Protocol = "kernel" if rng.random() < 0.5 else "eager"
        rows.append(Query(TensorProgram.from_operator(spec), rng.choice(DEVICES), protocol))
    return rows


def test_batch_equals_one_by_one_to_the_last_digit(folder: Path) -> None:
    batch = queries(5 * CHUNK_ROWS // 2)
    together = fresh(folder).predict_queries(batch)
    lonely = fresh(folder)
    assert [lonely.predict_queries([q])[0] for q in batch] == together
    backwards = fresh(folder).predict_queries(batch[::-1])[::-1]
    assert backwards == together
    assert all(p.latency_s and p.latency_s > 0 for p in together)


def test_threads_and_chunk_sizes_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = queries(6 * CHUNK_ROWS)
    together = fresh(folder).predict_queries(batch)
    assert LatencyPredictor(load_artifact(folder), threads=3).predict_queries(batch) == together
    for rows in (24, 64):
        monkeypatch.setattr("cdmpp.model.inference.engine.MAX_CHUNK_ROWS", rows)
        assert fresh(folder).predict_queries(batch) == together


def test_processor_whose_results_depend_on_the_shape(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = queries(CHUNK_ROWS + 5)
    expected = fresh(folder).predict_queries(batch)
    # No number of rows gives the same last digits: chunks of one fixed shape.
    monkeypatch.setattr("cdmpp.model.inference.engine.STEPS", ())
    together, lonely = fresh(folder).predict_queries(batch), fresh(folder)
    assert [lonely.predict_queries([q])[0] for q in batch] == together
    for one, other in zip(together, expected, strict=True):
        assert one.latency_s == pytest.approx(other.latency_s, rel=1e-4)


def test_memory_changes_nothing(folder: Path) -> None:
    predictor = fresh(folder)
    batch = queries(40)
    assert predictor.predict_queries(batch) == predictor.predict_queries(batch)
    # Other quantiles are read from the same answer.
    levels = predictor.predict_queries(batch, quantiles=(0.05, 0.5, 0.95))
    assert levels == fresh(folder).predict_queries(batch, quantiles=(0.05, 0.5, 0.95))
    for answer in levels:
        assert list(answer.quantiles) == ["0.05", "0.5", "0.95"]
        assert answer.lower_s is not None
        assert answer.upper_s is not None
        assert answer.lower_s <= answer.quantiles["0.05"] < answer.quantiles["0.95"] <= answer.upper_s
