"""The study of unseen shapes: the figures of ``cdmpp eval``, cut by source, device and family."""

import json

import numpy as np
import pytest

from benchmarks.gate import GATE, read_tasks
from benchmarks.intervals import NOMINAL, auc, coverage_curve
from benchmarks.unseen_shapes import Answered, answer_rows, domain_of, held_out_rows, parts_of
from cdmpp.model.nn.config import LEVELS
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.train.config import TrainConfig
from cdmpp.train.evaluation.tables import evaluate

pytestmark = pytest.mark.slow


def made_up(rows: int = 60) -> Answered:
    """Two sources; the rows of ``b`` are all off by half and have the higher scores."""
    rng = np.random.default_rng(0)
    of_b = np.arange(rows) % 3 == 0
    measured = rng.normal(-9, 1, rows)
    point = measured + np.where(of_b, np.log(1.5), np.log(1.1))
    spread = np.linspace(-0.3, 0.3, len(LEVELS))
    return Answered(
        source=np.where(of_b, "b", "a").astype(object),
        device=np.where(np.arange(rows) % 2 == 0, "x", "y").astype(object),
        family=np.where(np.arange(rows) % 4 < 2, "gemm", "conv").astype(object),
        filtered=np.arange(rows) >= 6,
        task=np.full(rows, -1),
        program=np.arange(rows),
        log_measured=measured,
        point=point,
        levels=point[:, None] + spread,
        factor=np.ones(rows),
        score=np.where(of_b, 1.5, 0.5),
    )


def test_every_cut_counts_its_rows() -> None:
    rows = made_up()
    parts = {(p["source"], p["device"], p["family"], p["filtered"]): p for p in parts_of(rows)}
    assert parts["b", "", "", False]["n"] == 20 and parts["b", "", "", True]["n"] == 18
    assert parts["b", "", "", False]["mape"] == pytest.approx(0.5)
    assert parts["a", "x", "gemm", False]["mape"] == pytest.approx(0.1)
    for source in ("a", "b"):
        cuts = [p["n"] for key, p in parts.items() if key[0] == source and key[1] and key[2] and not key[3]]
        assert sum(cuts) == parts[source, "", "", False]["n"]


def test_the_domain_score_is_judged_by_errors_above_30_percent() -> None:
    rows = made_up()
    domains = domain_of(rows)
    assert domains["auc"] == 1.0
    assert domains["labels"]["in"]["n"] == 40 and domains["labels"]["near"]["mape"] == pytest.approx(0.5)


def test_auc_counts_pairs() -> None:
    score, bad = np.array([0.0, 1.0, 1.0, 2.0]), np.array([False, True, False, False])
    # Of the three pairs with the bad row one is right, one tied, one wrong.
    assert auc(score, bad) == pytest.approx(0.5)
    assert auc(score, np.zeros(4, dtype=bool)) is None and auc(score, np.ones(4, dtype=bool)) is None
    rng = np.random.default_rng(1)
    score, bad = rng.integers(0, 9, 200), rng.random(200) < 0.3
    pairs = score[bad][:, None] - score[~bad]
    assert auc(score, bad) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def test_coverage_of_a_normal_error_is_what_is_promised() -> None:
    from statistics import NormalDist

    n = 20_000
    quantiles = np.array([NormalDist().inv_cdf(level) for level in LEVELS])
    point = np.zeros(n)
    levels = np.broadcast_to(quantiles, (n, len(LEVELS)))
    error = np.random.default_rng(0).normal(size=n)
    assert coverage_curve(error, point, levels, np.ones(n)) == pytest.approx(NOMINAL, abs=0.02)
    # Intervals of half the width hold less; that of 80 % then reaches 0.64 standard deviations.
    assert coverage_curve(error, point, levels, np.full(n, 0.5), (0.8,)) == pytest.approx([0.478], abs=0.02)


def test_rows_are_answered_as_cdmpp_eval_does(predictor: LatencyPredictor) -> None:
    tasks = json.loads(GATE.read_text(encoding="utf-8"))["tasks"]
    table = read_tasks([*tasks["test"][:3], *tasks["train"][:1]])
    config = TrainConfig.of_manifest(predictor.artifact.manifest["config"])
    rows = held_out_rows(table, config)
    assert 0 < len(rows) < len(table)
    answered = answer_rows(predictor.artifact, table, rows).figures()
    theirs = evaluate(predictor.artifact, [table.select(rows)])["overall"]
    for key in ("n", "mape", "coverage", "task_kendall_tau", "top1_score"):
        assert answered[key] == pytest.approx(theirs[key], abs=1e-4)
