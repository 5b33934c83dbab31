"""The collector's file: locking, consistent settings, and recovery."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdmpp.data.measure.sampling import SampledProgram
from cdmpp.data.measure.store import FILE, FIRST, SECOND, Store, StoredMeasurement
from cdmpp.errors import DataError
from cdmpp.programs.frontends.tasks import TaskList, TuningTask


def tasks(count: int) -> TaskList:
    made = tuple(TuningTask(f"name{i}", f"task{i}", f"text {i}", i + 1) for i in range(count))
    return TaskList("net", made, (("custom", "not lowered"),))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two tasks of three programs each."""
    made = Store(tmp_path / "out")
    made.add_network("net", tasks(2))
    for task in ("task0", "task1"):
        programs = [SampledProgram(f"{task}-{i}", f"program {task} {i}", "sampled") for i in range(3)]
        made.add_programs(task, programs, 2)
    return made


def ok(program: str, device: str = "cpu", turn: int = FIRST, latency_s: float = 1e-3) -> StoredMeasurement:
    return StoredMeasurement(program, device, turn, (latency_s,), latency_s, 0.01, 1, measured_at=100.0)


def test_stored_data_is_read_by_the_next_process(store: Store) -> None:
    folder = store.folder
    store.add_measurements([ok("task0-0"), StoredMeasurement("task0-1", "cpu", FIRST, failure="crash: x")])
    store.remember_devices({"cpu": {"threads": "1"}})
    store.close()
    with Store(folder) as again:
        assert again.networks() == {"net": [("custom", "not lowered")]}
        assert again.devices() == {"cpu": {"threads": "1"}}
        first, failed = again.measurements(FIRST)
        assert first == ok("task0-0")
        assert failed.failure == "crash: x" and failed.latency_s is None
        program = next(again.all_programs())
        assert (program.task, program.task_name, program.networks) == ("task0", "name0", ("net",))
        assert program.tvm_json == "program task0 0"


def test_missing_programs_are_interleaved_over_tasks(store: Store) -> None:
    order = [p.hash for p in store.missing(["cpu"], 10)]
    assert order == ["task0-0", "task1-0", "task0-1", "task1-1", "task0-2", "task1-2"]
    store.add_measurements([ok("task0-0"), ok("task1-0")])
    assert [p.hash for p in store.missing(["cpu"], 2)] == ["task0-1", "task1-1"]
    # Another configuration lacks them all.
    assert [p.hash for p in store.missing(["cpu", "other"], 1)] == ["task0-0"]


def test_measurement_is_stored_once(store: Store) -> None:
    store.add_measurements([ok("task0-0", latency_s=1.0)])
    store.add_measurements([ok("task0-0", latency_s=2.0)])
    assert [m.latency_s for m in store.measurements()] == [1.0]


def test_second_measurements_need_successful_first_ones(store: Store) -> None:
    once = StoredMeasurement("task0-1", "cpu", FIRST, (2.0,), 2.0, 0.0, 1, once=True)
    failed = StoredMeasurement("task0-2", "cpu", FIRST, failure="timeout")
    store.add_measurements([ok("task0-0"), once, failed, ok("task1-0"), ok("task1-0", turn=SECOND)])
    assert store.once_measured(["cpu"]) == [("task0-0", "cpu", 100.0)]


def test_shared_task_lists_both_networks(store: Store) -> None:
    shared = TaskList("other", (TuningTask("its name", "task0", "text 0", 1),))
    store.add_network("other", shared)
    found = {p.task: p.networks for p in store.all_programs()}
    assert found == {"task0": ("net", "other"), "task1": ("net",)}


def test_schedules_can_be_added(store: Store) -> None:
    assert store.unsampled(2) == []
    assert [digest for digest, _, _ in store.unsampled(5)] == ["task0", "task1"]
    more = [SampledProgram(f"task0-{i}", f"program task0 {i}", "sampled") for i in range(6)]
    store.add_programs("task0", more, 5)
    assert store.count_programs() == 9
    assert [digest for digest, _, _ in store.unsampled(5)] == ["task1"]


def test_changed_setting_is_refused_by_name(store: Store) -> None:
    store.settle({"seed": 0, "timing": {"repeat_s": 0.004}})
    store.settle({"seed": 0})
    with pytest.raises(DataError, match="started with seed = 0, not 1"):
        store.settle({"seed": 1})
    assert store.settings()["seed"] == 0


def test_second_process_is_refused_with_the_owner(store: Store) -> None:
    with pytest.raises(DataError, match=f"process {os.getpid()} on ") as caught:
        Store(store.folder)
    assert "--out" in caught.value.hint
    store.close()
    Store(store.folder).close()


KILLED = """
import os, signal, sys
from pathlib import Path
from cdmpp.programs.frontends.tasks import TaskList
from cdmpp.data.measure.store import Store
store = Store(Path(sys.argv[1]))
store.add_network("kept", TaskList("kept", ()))
with store.transaction():
    store._db.execute("INSERT INTO networks VALUES ('lost', '[]')")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_process_leaves_its_data_and_no_lock(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -9
    with Store(tmp_path) as store:
        assert list(store.networks()) == ["kept"]


def test_failed_transaction_is_rolled_back(store: Store) -> None:
    with pytest.raises(KeyError), store.transaction():
        store._db.execute("INSERT INTO networks VALUES ('half', '[]')")
        raise KeyError
    assert list(store.networks()) == ["net"]


def test_full_disk_is_reported_and_loses_nothing(store: Store) -> None:
    store.add_measurements([ok("task0-0")])
    # SQLite's own way to run out of space, met at the same places as a full disk.
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DataError, match="no space left") as caught:
        for i in range(10_000):
            store.add_measurements([ok(f"task0-{i}", device=f"cpu{i}" * 20)])
    assert "resume" in caught.value.hint
    store._db.execute("PRAGMA max_page_count = 1000000")
    before = len(list(store.measurements()))
    store.add_measurements([ok("task1-0")])
    assert len(list(store.measurements())) == before + 1


def test_damaged_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database, and long enough to be read as one" * 100)
    with pytest.raises(DataError, match="damaged"):
        Store(tmp_path)
    # The lock is free again: nobody owns a folder that could not be opened.
    (tmp_path / FILE).unlink()
    Store(tmp_path).close()


@pytest.mark.parametrize("name", ["records.parquet", "README.md"])
def test_folder_with_other_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("somebody's")
    with pytest.raises(DataError, match=f"has a {name}"):
        Store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        Store(tmp_path / "file" / "out")
