"""Offline searches among measured schedules."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.schedules.parts import Scheduled
from benchmarks.schedules.search import ROUND, SHARE, TRIALS, OfflineSearch, SchedulePool, group, pools
from cdmpp.features.encode import EncodedPrograms, encode_many
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.train.evaluation.parts import row_parts
from tests.train.schedules import program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool(scheduled: Scheduled) -> SchedulePool:
    """A hundred programs of one task, the last one the fastest."""
    texts = [program(n, 2, 0) for n in range(8, 108)]
    latency_s = 1e-6 * np.linspace(9.0, 1.0, len(texts))
    encoded = [e for e in encode_many(texts, schedule=True) if isinstance(e, EncodedPrograms)]
    return SchedulePool("made up", "task", scheduled.dataset.devices[0], texts, encoded, latency_s)


def test_pools_are_test_tasks_with_enough_programs(scheduled: Scheduled, predictor: LatencyPredictor) -> None:
    table = scheduled.table
    test = row_parts(predictor.artifact, table) == 2
    expected = {(table.device.array()[row], table.tvm.tasks[table.program_key[row]]) for row in np.flatnonzero(test)}
    listed = list(pools(predictor.artifact, table, "test", 6))
    assert expected and {(pool.device.name, pool.task) for pool in listed} == expected
    assert all(len(pool) == 6 == len(set(pool.texts)) == len(pool.latency_s) for pool in listed)
    assert not list(pools(predictor.artifact, table, "test", 7))


def test_learning_methods_find_the_best_programs_of_a_pool(
    pool: SchedulePool, predictor: LatencyPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tvm")
    sizes = [np.full((1, 164), n, dtype=np.float32) for n in range(len(pool))]
    monkeypatch.setattr("benchmarks.schedules.search.per_store_features", lambda texts, gpu: sizes)
    search = OfflineSearch(pool, predictor)
    # Predictions in the opposite order: only runs can tell.
    search.log_s = np.log(pool.latency_s[::-1])
    trials = {name: search.figures(name, 0)["trials"] for name in search.methods}
    assert trials["cdmpp, frozen"] == len(pool) - (pool.latency_s * SHARE <= pool.latency_s.min()).sum() + 1
    assert trials["cdmpp, fine-tuned"] < trials["cdmpp, frozen"] and trials["TVM's XGBModel"] < trials["cdmpp, frozen"]
    for method in search.methods.values():
        order = method(1)
        assert len(order) >= TRIALS[-1] and len(set(order.tolist())) == len(order)


def test_pool_of_one_round_has_no_method_that_learns(pool: SchedulePool, predictor: LatencyPredictor) -> None:
    small = replace(pool, texts=pool.texts[:8], encoded=pool.encoded[:8], latency_s=pool.latency_s[:8])
    search = OfflineSearch(small, predictor)
    assert len(small) <= ROUND and list(search.methods) == ["random order", "cdmpp, frozen"]
    search.log_s = np.log(small.latency_s)
    figures = group([search], 2)
    assert (figures["pools"], figures["programs"]) == (1, 8)
    assert figures["methods"]["cdmpp, frozen"] == pytest.approx(
        {"trials": 1, "median_trials": 1, "speed_4": 1, "speed_16": None, "speed_32": None, "speed_64": None}
    )
    assert 0 < figures["methods"]["random order"]["speed_4"] <= 1
