"""The store on SQLite and PostgreSQL: concurrent writers, limits, and an unavailable database."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from cdmpp.errors import MissingDependencyError
from cdmpp.model.artifact.folder import default_model
from cdmpp_server.database import database_url, default_database
from cdmpp_server.observe.figures import Running
from cdmpp_server.observe.ids import PredictedBefore
from cdmpp_server.observe.store import Observation, ObservationStore, Writer
from cdmpp_server.observe.tables import SAY_AGAIN_S, AsUnavailable, StoreUnavailableError
from cdmpp_server.problems import ProblemError
from tests.server.conftest import execute, stored
from tests.waiting import PATIENCE_S, ROOT

pytestmark = pytest.mark.slow


def observation(latency_s: float, device: str = "t4", model: str = "m", n: int = 0) -> Observation:
    predicted = PredictedBefore(f"{n:032x}", device, "0" * 16, "library", "kernel", None, model, 1e-4, 8e-5, 1.2e-4)
    return Observation(predicted, latency_s)


def test_observations_are_stored_with_their_query(store: ObservationStore, database: str) -> None:
    ids = [row.id for row in store.add([observation(2e-4), observation(1e-4, "l4", n=1), observation(3e-4)])]
    assert len(set(ids)) == 3
    kept = stored(database)
    assert set(kept) == set(ids)
    assert [kept[id].latency_s for id in ids] == [2e-4, 1e-4, 3e-4]
    assert kept[ids[1]].device == "l4" and kept[ids[1]].program_hash == f"{1:032x}"
    assert (kept[ids[0]].predicted_s, kept[ids[0]].lower_s, kept[ids[0]].upper_s) == (1e-4, 8e-5, 1.2e-4)
    assert store.add([]) == []


def test_figures_match_all_stored_observations(store: ObservationStore, database: str) -> None:
    random = np.random.default_rng(0)
    for size in (1, 250, 40, 1300):
        store.add([observation(1e-4 * x, device) for device in ("t4", "l4") for x in random.lognormal(size=size)])
    by_device = {s.device: s for s in store.summaries()}
    assert set(by_device) == {"t4", "l4"}
    for device, summary in by_device.items():
        expected = Running()
        # Ids sort by time, but rows of one batch have no order.
        device_rows = [row for row in stored(database).values() if row.device == device]
        columns = ("latency_s", "predicted_s", "lower_s", "upper_s")
        expected.add(*(np.array([getattr(row, c) for row in device_rows]) for c in columns))
        figures = expected.figures()
        for name in ("count", "mape", "bias", "coverage"):
            assert getattr(summary.figures, name) == pytest.approx(getattr(figures, name))
        assert summary.figures.drift is not None
        assert summary.last_at == max(row.received_at for row in device_rows)


def test_models_and_devices_of_one_name_are_separate(store: ObservationStore) -> None:
    other = observation(1e-4)
    other.predicted.__dict__["device_digest"] = "f" * 16
    store.add([observation(1e-4), observation(1e-4, model="n"), other])
    assert sorted((s.device_digest, s.model_id, s.figures.count) for s in store.summaries()) == [
        ("0" * 16, "m", 1),
        ("0" * 16, "n", 1),
        ("f" * 16, "m", 1),
    ]


def test_concurrent_writers_lose_nothing(store: ObservationStore, database: str) -> None:
    def write(seed: int) -> int:
        # Every writer has another order of devices; the store locks rows in a fixed order.
        devices = [f"d{(seed + i) % 5}" for i in range(5)]
        for i in range(10):
            store.add([observation(1e-4, device, n=seed * 1000 + i) for device in devices])
        return 50

    with ThreadPoolExecutor(4) as pool:
        written = sum(pool.map(write, range(6)))
    assert len(stored(database)) == written == sum(s.figures.count for s in store.summaries())


def test_processes_can_create_the_tables_concurrently(database: str) -> None:
    code = (
        "import sys; from cdmpp_server.observe.store import ObservationStore as S; s = S(sys.argv[1]);"
        "s.put_programs({32 * 'a': {'operator': 'relu'}}); s.check()"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, database], cwd=ROOT, stderr=subprocess.PIPE) for _ in range(3)
    ]
    for process in started:
        _, error = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, error.decode()


def test_programs_are_found_by_hash(store: ObservationStore) -> None:
    programs: dict[str, Any] = {
        "0" * 31 + "a": {"operator": "linear", "m": 1},
        "0" * 31 + "b": {"tvmscript": "ü\x00\ud800"},
    }
    assert store.get_programs(programs) == {}
    store.put_programs(programs)
    store.put_programs(programs)
    store.put_programs({})
    assert store.get_programs([*programs, "0" * 32, "no hash\x00", "x" * 5000]) == programs


def test_least_recently_used_programs_are_removed(database: str) -> None:
    store = ObservationStore(database, max_programs=300)
    hashes = [f"{i:032x}" for i in range(600)]
    for start in range(0, 600, 50):
        store.put_programs({hash: {"operator": "relu"} for hash in [hashes[0], *hashes[start : start + 50]]})
    kept = set(store.get_programs(hashes))
    store.close()
    assert 300 <= len(kept) <= 300 + 256
    assert hashes[0] in kept, "named again with every call"
    assert set(hashes[-250:]) <= kept
    assert hashes[1] not in kept


def test_total_size_of_programs_is_bounded(database: str) -> None:
    store = ObservationStore(database, max_program_bytes=100_000)
    for i in range(20):
        store.put_programs({f"{100 * i + j:032x}": {"tvmscript": "x" * 1000} for j in range(100)})
    kept = store.get_programs([f"{i:032x}" for i in range(2000)])
    store.close()
    assert f"{1999:032x}" in kept
    assert 50 <= len(kept) <= 100 + 256 + 100


def test_other_schema_version_is_refused(database: str) -> None:
    first = ObservationStore(database)
    first.add([observation(1e-4)])
    first.close()
    execute(database, text("UPDATE cdmpp_schema SET version = 99"))
    later = ObservationStore(database)
    with pytest.raises(StoreUnavailableError):
        later.add([observation(1e-4)])
    later.close()
    assert len(stored(database)) == 1


def test_database_is_used_once_it_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdmpp_server.observe.store._RETRY_S", 0.0)
    (tmp_path / "folder").write_text("in the way")
    store = ObservationStore(str(tmp_path / "folder" / "s.sqlite"))
    for call in (store.check, store.summaries, lambda: store.add([observation(1.0)])):
        with pytest.raises(StoreUnavailableError):
            call()
    (tmp_path / "folder").unlink()
    store.check()
    assert len(store.add([observation(1.0)])) == 1
    store.close()


def test_file_that_is_not_a_database_is_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a database, but somebody's notes. " * 100)
    store = ObservationStore(str(file))
    with pytest.raises(StoreUnavailableError):
        store.check()
    store.close()
    assert file.read_text().startswith("not a database")


def test_outage_logs_a_few_lines(store: ObservationStore, database: str, caplog: pytest.LogCaptureFixture) -> None:
    store.check()
    execute(database, text("ALTER TABLE cdmpp_programs RENAME TO elsewhere"))
    for _ in range(50):
        with pytest.raises(StoreUnavailableError, match="cannot be read"):
            store.check()
    (line,) = caplog.messages
    assert line.startswith("the database cannot be read: ") and "cdmpp_programs" in line
    execute(database, text("ALTER TABLE elsewhere RENAME TO cdmpp_programs"))
    for _ in range(3):
        store.check()
    assert caplog.messages[1:] == ["the database can be read again; 49 more calls had failed"]


def test_long_outage_is_logged_again_with_the_number_of_failures(caplog: pytest.LogCaptureFixture) -> None:
    seconds = 0.0
    errors = AsUnavailable("written", lambda: seconds)
    for second in range(int(3 * SAY_AGAIN_S)):
        seconds = float(second)
        with pytest.raises(StoreUnavailableError), errors:
            raise OSError("disk full")
        # A call that fails in between does not make the log longer.
        if second % 10 == 5:
            with errors:
                pass
    failed = [line for line in caplog.messages if "cannot be written: disk full" in line]
    assert len(failed) == 3
    assert len(caplog.messages) - len(failed) == len([line for line in caplog.messages if "again" in line]) <= 3


def test_unreachable_database_is_reported() -> None:
    pytest.importorskip("psycopg", reason="needs psycopg (pip install '.[postgres]')")
    store = ObservationStore("postgresql+psycopg://nobody:secret@127.0.0.1:1/none")
    with pytest.raises(StoreUnavailableError) as refused:
        store.summaries()
    assert "secret" not in str(refused.value)
    store.close()


def test_missing_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingDependencyError, match="psycopg") as refused:
        ObservationStore("postgresql+psycopg://u:secret@h/n")
    assert "postgres]" in refused.value.hint and "secret" not in str(refused.value)


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_default_database_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    shipped = Path(default_database(None))
    assert shipped.parent == tmp_path / "cdmpp" and re.fullmatch(r"service-base-[0-9a-f]{8}\.sqlite", shipped.name)
    assert default_database(default_model()) == str(shipped)
    # Each model folder has a file of its own, by whatever path it is named.
    monkeypatch.chdir(tmp_path)
    others = [default_database(Path(name)) for name in ("mine", "a/mine", "a/b", "a/../a/b", "x y/ü")]
    assert len({str(shipped), *others}) == 5 and others[2] == others[3]
    assert all(re.fullmatch(r"service-[A-Za-z0-9._-]+-[0-9a-f]{8}\.sqlite", Path(other).name) for other in others)
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Path(default_database(None)) == tmp_path / ".local" / "state" / "cdmpp" / shipped.name
    monkeypatch.setattr(Path, "home", _no_home)
    with pytest.raises(ValueError, match="set CDMPP_DATABASE"):
        default_database(None)
    assert database_url("/a/b").database == "/a/b"
    assert database_url("postgresql+psycopg://u:p@h/n").host == "h"


@pytest.mark.parametrize("database", ["mysql://u:secret@h/n", "://", ":memory:", "sqlite://", "", "oracle+x://"])
def test_unsupported_databases_are_refused(database: str) -> None:
    with pytest.raises(ValueError, match="database should be") as refused:
        database_url(database)
    assert "secret" not in str(refused.value)


def test_concurrent_writes_share_a_transaction_and_full_queue_refuses() -> None:
    entered, go = threading.Event(), threading.Event()
    calls: list[int] = []

    def add(observed: Any) -> list[Any]:
        calls.append(len(observed))
        entered.set()
        assert go.wait(PATIENCE_S)
        return [f"{o.latency_s:g}" for o in observed]

    async def scenario() -> None:
        writer = Writer(add, max_waiting=30)
        first = asyncio.create_task(writer.write([observation(0.0)]))
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        later = [asyncio.create_task(writer.write([observation(float(i))] * 5)) for i in range(1, 6)]
        await asyncio.sleep(0)
        with pytest.raises(ProblemError, match="wait to be written"):
            await writer.write([observation(9.0)] * 5)
        later[2].cancel()
        await asyncio.sleep(0)
        go.set()
        assert await first == ["0"]
        for i in (0, 1, 3, 4):
            assert await later[i] == [str(i + 1)] * 5
        # If nothing waits, a call larger than the queue is accepted.
        assert len(await writer.write([observation(1.0)] * 40)) == 40
        await asyncio.to_thread(writer.close)
        with pytest.raises(StoreUnavailableError):
            await writer.write([observation(1.0)])

    asyncio.run(scenario())
    assert calls == [1, 25, 40]


async def test_failed_transaction_fails_all_its_writes() -> None:
    def add(observed: Any) -> list[Any]:
        raise StoreUnavailableError("gone")

    writer = Writer(add, max_waiting=30)
    for answer in await asyncio.gather(*(writer.write([observation(1.0)]) for _ in range(3)), return_exceptions=True):
        assert isinstance(answer, StoreUnavailableError)
    await asyncio.to_thread(writer.close)


KILLED = """
import sys, threading
from cdmpp_server.observe.store import ObservationStore
from tests.server.test_store import observation
store = ObservationStore(sys.argv[1])
lock = threading.Lock()
def write(seed):
    n = 0
    while True:
        ids = [row.id for row in store.add([observation(1e-4, f"d{seed}", n=n + i) for i in range(7)])]
        n += 7
        with lock:
            sys.stdout.write("".join(id + "\\n" for id in ids))
            sys.stdout.flush()
for seed in range(3):
    threading.Thread(target=write, args=(seed,), daemon=True).start()
threading.Event().wait()
"""


def test_accepted_observations_survive_kill_9(database: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, database],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as writer:
        assert writer.stdout is not None
        accepted = [writer.stdout.readline().strip() for _ in range(700)]
        writer.kill()
        # The last line may be incomplete.
        accepted += [line for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    accepted = [id.strip() for id in accepted]
    kept = set(stored(database))
    assert len(accepted) >= 700 and set(accepted) <= kept
    store = ObservationStore(database)
    assert sum(s.figures.count for s in store.summaries()) == len(kept)
    store.add([observation(1e-4)])
    store.close()
