"""A search proposes schedules of its task and learns from their latencies."""

from pathlib import Path

import pytest

from cdmpp.data.measure.collect import collect
from cdmpp.data.measure.pools import WorkerPool, WorkerSettings
from cdmpp.data.measure.sampling import SampledProgram, begin_search
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.store import Store
from cdmpp.data.measure.targets import Configuration
from cdmpp.errors import MissingDependencyError
from cdmpp.programs.frontends.tasks import TaskList, TuningTask
from tests.data.measure import work
from tests.data.measure.test_sampling import matmul

pytestmark = [pytest.mark.native, pytest.mark.slow]


def test_programs_of_a_search_are_stored(tmp_path: Path, quick: CollectSettings, one_thread: Configuration) -> None:
    pytest.importorskip("tvm")
    text, digest = matmul()
    settings = quick.model_copy(update={"schedules": 4, "tune": 8, "repeat_share": 0.0})
    with Store(tmp_path) as store:
        store.add_network("one", TaskList("one", (TuningTask("matmul", digest, text, 1),)))
    collect(["one"], [one_thread], tmp_path, settings)
    with Store(tmp_path) as store:
        programs = list(store.all_programs())
        measured = {m.program for m in store.measurements() if not m.failure}
        assert store.untuned(8) == []
    origins = [p.origin for p in programs]
    assert origins.count("default") == 1 and origins.count("sampled") == 4
    assert 1 <= origins.count("tuned") <= 8
    assert measured == {p.hash for p in programs}
    assert all(p.task == digest for p in programs)


def test_search_does_not_replace_sampled_programs(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.add_network("one", TaskList("one", (TuningTask("t", "task", "text", 1),)))
        store.add_programs("task", [SampledProgram("p0", "0", "default")], 0)
        store.add_programs("task", [SampledProgram("p9", "9", "tuned")], None)
        assert [d for d, _, _ in store.unsampled(3)] == ["task"]
        more = [SampledProgram(f"p{i}", str(i), "sampled") for i in range(3)]
        store.add_programs("task", more, 3)
        assert {p.hash: p.origin for p in store.all_programs()} == {
            "p0": "default",
            "p1": "sampled",
            "p2": "sampled",
            "p9": "tuned",
        }


def test_search_without_xgboost_has_an_installation_hint(tmp_path: Path) -> None:
    (tmp_path / "xgboost.py").write_text("raise ModuleNotFoundError('no xgboost', name='xgboost')")
    with (
        WorkerPool(1, WorkerSettings(), work.search_without, (str(tmp_path),)) as pool,
        pytest.raises(MissingDependencyError, match="xgboost") as caught,
    ):
        pool.call(begin_search, "", "", {}, 1, 0)
    assert "'.[measure]'" in caught.value.hint
