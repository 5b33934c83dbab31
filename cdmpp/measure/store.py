"""What a collection knows, on disk after every step: one SQLite file; a kill costs what was in flight.

Tasks, programs and measurements are rows that are written once. Whoever starts again reads what is missing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import sqlite3
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cdmpp.data.folder import STORE as FILE
from cdmpp.errors import DataError, MeasurementError
from cdmpp.frontends.tasks import TaskList
from cdmpp.measure.sampling import SampledProgram

LOCK = "collect.lock"
FIRST, SECOND = 0, 1
_FULL = "no space left on the disk of {}"
_MAKE_ROOM = "make room and give the same command again: it goes on"
#: A linker that fails for want of room leaves some: it removes what it had written.
_ROOM_BYTES = 16 * 2**20

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS devices (name TEXT PRIMARY KEY, description TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS networks (name TEXT PRIMARY KEY, unsupported TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tasks (
    hash TEXT PRIMARY KEY, name TEXT NOT NULL, program BLOB NOT NULL, sampled INTEGER NOT NULL DEFAULT -1,
    tuned INTEGER NOT NULL DEFAULT 0,
    failure TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS network_tasks (
    network TEXT NOT NULL, task TEXT NOT NULL, calls INTEGER NOT NULL, PRIMARY KEY (network, task));
CREATE TABLE IF NOT EXISTS programs (
    hash TEXT PRIMARY KEY, task TEXT NOT NULL, origin TEXT NOT NULL, position INTEGER NOT NULL,
    program BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS measurements (
    program TEXT NOT NULL, device TEXT NOT NULL, turn INTEGER NOT NULL, repeats TEXT NOT NULL,
    latency_s REAL, spread REAL, number INTEGER, once INTEGER NOT NULL DEFAULT 0, failure TEXT NOT NULL,
    measured_at REAL NOT NULL, overhead_s REAL NOT NULL, PRIMARY KEY (program, device, turn));
"""


@dataclass(frozen=True)
class StoredProgram:
    """A program with what is known of its task."""

    hash: str
    task: str
    task_name: str
    networks: tuple[str, ...]
    origin: str
    tvm_json: str


@dataclass(frozen=True)
class StoredMeasurement:
    """One measurement: ``latency_s`` is None exactly when ``failure`` says why.

    Attributes
    ----------
    turn : int
        :data:`FIRST`, or :data:`SECOND` for the repeat, minutes later, that gives the noise floor.
    repeats_s : tuple of float
        Seconds a run.
    measured_at : float
        Seconds since the epoch.
    overhead_s : float
        Wall-clock seconds of building and loading, outside the timed runs.
    """

    program: str
    device: str
    turn: int
    repeats_s: tuple[float, ...] = ()
    latency_s: float | None = None
    spread: float | None = None
    number: int | None = None
    once: bool = False
    failure: str = ""
    measured_at: float = 0.0
    overhead_s: float = 0.0


class Store:
    """The collector's file in a folder; a context manager that owns the folder while it is open.

    Raises
    ------
    DataError
        Another process owns the folder, it holds files that no collection wrote, or the disk is full or not
        writable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.is_dir() and not (folder / FILE).exists():
            foreign = sorted(p.name for p in folder.iterdir() if p.name not in (LOCK, f"{FILE}-journal"))
            if foreign:
                raise DataError(
                    f"{folder} has a {foreign[0]} that no collection there wrote",
                    hint="choose a new or an empty folder: --out",
                )
        with _disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(folder / LOCK)
        try:
            with _disk(folder):
                self._db = sqlite3.connect(folder / FILE, isolation_level=None)
                self._db.execute("PRAGMA journal_mode=WAL")
                # A kill of the process loses nothing so; a power cut may lose the last moments, never the
                # file.
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.executescript(_SCHEMA)
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder back. The operating system does so too, when the process dies."""
        self._db.close()
        os.close(self._lock)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the writes inside, or none."""
        with _disk(self.folder):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:  # a full disk makes SQLite roll back by itself
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # What was asked for

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Remember how this collection measures, or make sure that it still does so.

        Raises
        ------
        DataError
            A setting differs from what the folder was begun with; the message names it.
        """
        known = dict(self._db.execute("SELECT key, value FROM meta"))
        given = {key: json.dumps(value, sort_keys=True) for key, value in settings.items()}
        for key, value in given.items():
            if known.get(key, value) != value:
                raise DataError(
                    f"{self.folder} was begun with {key} = {known[key]}, not {value}",
                    hint="give the same options to go on, or another --out",
                )
        with self.transaction():
            self._db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", given.items())

    def forget_settings(self) -> None:
        """Forget what :meth:`settle` was told, in a folder that has no program yet."""
        if not self.count_programs():
            with self.transaction():
                self._db.execute("DELETE FROM meta")
                self._db.execute("DELETE FROM devices")

    def settings(self) -> dict[str, Any]:
        """What :meth:`settle` remembered."""
        return {key: json.loads(value) for key, value in self._db.execute("SELECT key, value FROM meta")}

    def devices(self) -> dict[str, dict[str, Any]]:
        """What :meth:`remember_devices` was told, by name."""
        rows = self._db.execute("SELECT name, description FROM devices ORDER BY rowid")
        return {name: json.loads(text) for name, text in rows}

    def remember_devices(self, described: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep the descriptions of devices; the first of a name stays."""
        with self.transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO devices VALUES (?, ?)",
                [(name, json.dumps(about, sort_keys=True)) for name, about in described.items()],
            )

    # Networks and tasks

    def left_out(self) -> list[tuple[str, str, str]]:
        """What could not be collected: (network or task, operator or "schedules", reason)."""
        found = [(name, what, why) for name, skipped in self.networks().items() for what, why in skipped]
        rows = self._db.execute("SELECT name, failure FROM tasks WHERE failure != '' ORDER BY rowid")
        return found + [(name, "schedules", why) for name, why in rows]

    def networks(self) -> dict[str, list[tuple[str, str]]]:
        """Networks that were lowered, each with what could not be: (name, reason)."""
        rows = self._db.execute("SELECT name, unsupported FROM networks ORDER BY rowid")
        return {name: [tuple(item) for item in json.loads(text)] for name, text in rows}

    def add_network(self, name: str, tasks: TaskList) -> None:
        """A network's tasks; tasks that another network has too are shared."""
        with self.transaction():
            self._db.execute("INSERT INTO networks VALUES (?, ?)", (name, json.dumps(tasks.unsupported)))
            for task in tasks.tasks:
                self._db.execute(
                    "INSERT OR IGNORE INTO tasks (hash, name, program) VALUES (?, ?, ?)",
                    (task.hash, task.name, _pack(task.tvm_json)),
                )
                self._db.execute("INSERT OR IGNORE INTO network_tasks VALUES (?, ?, ?)", (name, task.hash, task.calls))

    def unsampled(self, count: int) -> list[tuple[str, str, str]]:
        """Tasks (hash, name, TVM JSON) with fewer schedules drawn than ``count``."""
        rows = self._db.execute(
            "SELECT hash, name, program FROM tasks WHERE sampled < ? AND failure = '' ORDER BY rowid", (count,)
        )
        return [(digest, name, _unpack(blob)) for digest, name, blob in rows]

    def add_programs(self, task: str, programs: Sequence[SampledProgram], drawn: int | None) -> None:
        """Programs of a task; known ones are left as they are.

        ``drawn``: how many schedules were asked for, None for programs that a search found.
        """
        with self.transaction():
            have = self._db.execute("SELECT COUNT(*) FROM programs WHERE task = ?", (task,)).fetchone()[0]
            offset = 0 if drawn is not None else have
            for position, program in enumerate(programs):
                self._db.execute(
                    "INSERT OR IGNORE INTO programs VALUES (?, ?, ?, ?, ?)",
                    (program.hash, task, program.origin, offset + position, _pack(program.tvm_json)),
                )
            if drawn is not None:
                self._db.execute("UPDATE tasks SET sampled = ? WHERE hash = ?", (drawn, task))

    def untuned(self, trials: int) -> list[tuple[str, str, str]]:
        """Tasks (hash, name, TVM JSON) whose last search, if any, had fewer trials; without those of one
        program, where there is nothing to search."""
        rows = self._db.execute(
            """SELECT hash, name, program FROM tasks t WHERE tuned < ? AND failure = ''
               AND (SELECT COUNT(*) FROM programs p WHERE p.task = t.hash) > 2 ORDER BY rowid""",
            (trials,),
        )
        return [(digest, name, _unpack(blob)) for digest, name, blob in rows]

    def tuned(self, task: str, trials: int) -> None:
        """A task's search is over."""
        with self.transaction():
            self._db.execute("UPDATE tasks SET tuned = ? WHERE hash = ?", (trials, task))

    def latencies(self, programs: Sequence[str], device: str) -> dict[str, float]:
        """First measurements of some programs on a device, in seconds; without failed ones."""
        marks = ",".join("?" * len(programs))
        rows = self._db.execute(
            f"""SELECT program, latency_s FROM measurements WHERE turn = {FIRST} AND failure = ''
                AND device = ? AND program IN ({marks})""",
            (device, *programs),
        )
        return dict(rows)

    def fail_task(self, task: str, reason: str) -> None:
        """A task of which no schedule can be drawn."""
        with self.transaction():
            self._db.execute("UPDATE tasks SET failure = ? WHERE hash = ?", (reason, task))

    # Measurements

    def missing(self, devices: Sequence[str], limit: int) -> list[StoredProgram]:
        """Up to ``limit`` programs that lack the first measurement on one of the devices.

        Interleaved over tasks: a collection that is stopped early holds some schedules of every task, and no
        task's figures come all from one moment.
        """
        marks = ",".join("?" * len(devices))
        return self._programs(
            f"""WHERE (SELECT COUNT(*) FROM measurements m WHERE m.program = p.hash AND m.turn = {FIRST}
                AND m.device IN ({marks})) < {len(devices)} ORDER BY p.position, t.rowid LIMIT {limit}""",
            tuple(devices),
        )

    def programs(self, hashes: Iterable[str]) -> list[StoredProgram]:
        """Programs by hash."""
        wanted = tuple(hashes)
        marks = ",".join("?" * len(wanted))
        return self._programs(f"WHERE p.hash IN ({marks}) ORDER BY p.position, t.rowid", wanted)

    def count_programs(self) -> int:
        """How many programs there are."""
        return int(self._db.execute("SELECT COUNT(*) FROM programs").fetchone()[0])

    def all_programs(self) -> Iterator[StoredProgram]:
        """Every program, those of a task together."""
        yield from self._programs("ORDER BY t.rowid, p.position", ())

    def add_measurements(self, found: Iterable[StoredMeasurement]) -> None:
        """Keep measurements; the first of a program, device and turn stays."""
        with self.transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO measurements VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        m.program,
                        m.device,
                        m.turn,
                        json.dumps(m.repeats_s),
                        m.latency_s,
                        m.spread,
                        m.number,
                        int(m.once),
                        m.failure,
                        m.measured_at,
                        m.overhead_s,
                    )
                    for m in found
                ],
            )

    def measurements(self, turn: int | None = None) -> Iterator[StoredMeasurement]:
        """All measurements, or those of one turn."""
        where, values = ("", ()) if turn is None else ("WHERE turn = ?", (turn,))
        rows = self._db.execute(f"SELECT * FROM measurements {where} ORDER BY rowid", values)
        for program, device, at, repeats, latency, spread, number, once, failure, when, overhead in rows:
            yield StoredMeasurement(
                program,
                device,
                at,
                tuple(json.loads(repeats)),
                latency,
                spread,
                number,
                bool(once),
                failure,
                when,
                overhead,
            )

    def once_measured(self, devices: Sequence[str]) -> list[tuple[str, str, float]]:
        """(program, device, seconds since the epoch) of good first measurements without a second one."""
        marks = ",".join("?" * len(devices))
        rows = self._db.execute(
            f"""SELECT program, device, measured_at FROM measurements m WHERE turn = {FIRST} AND failure = ''
                AND once = 0 AND device IN ({marks}) AND NOT EXISTS (SELECT 1 FROM measurements s WHERE
                s.program = m.program AND s.device = m.device AND s.turn = {SECOND})""",
            tuple(devices),
        )
        return list(rows)

    def measured(self, devices: Sequence[str], turn: int) -> set[tuple[str, str]]:
        """(program, device) of all measurements of a turn, failed ones included."""
        marks = ",".join("?" * len(devices))
        query = f"SELECT program, device FROM measurements WHERE turn = ? AND device IN ({marks})"
        return set(self._db.execute(query, (turn, *devices)))

    def _programs(self, rest: str, values: Sequence[Any]) -> list[StoredProgram]:
        rows = self._db.execute(
            f"""SELECT p.hash, p.task, t.name, p.origin, p.program,
                (SELECT GROUP_CONCAT(network, ';') FROM
                    (SELECT network FROM network_tasks n WHERE n.task = p.task ORDER BY network))
                FROM programs p JOIN tasks t ON t.hash = p.task {rest}""",
            values,
        )
        return [
            StoredProgram(digest, task, name, tuple((networks or "").split(";")), origin, _unpack(blob))
            for digest, task, name, origin, blob, networks in rows
        ]


def _pack(text: str) -> bytes:
    return zlib.compress(text.encode(), 6)


def _unpack(blob: bytes) -> str:
    return zlib.decompress(blob).decode()


def _take_lock(path: Path) -> int:
    """Own the folder until this process ends, however it ends: a lock of the dead is nobody's."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise DataError(
            f"{path.parent} belongs to {owner}, which is at work there",
            hint="wait for it, stop it, or choose another --out",
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Troubles of the disk as errors that say what to do; what was written before stays."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error):
            raise _full(folder) from None
        raise DataError(f"{folder / FILE}: {error}", hint="is the disk full or read-only?") from None
    except sqlite3.IntegrityError:
        raise  # a mistake in this package, and no damage to the file
    except sqlite3.DatabaseError as error:
        raise DataError(
            f"{folder / FILE} is damaged: {error}", hint="move it away; records.parquet is not touched"
        ) from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _full(folder) from None
        raise DataError(f"cannot write {folder}: {error.strerror or error}", hint="choose another --out") from None


def is_disk_full(folder: Path) -> bool:
    """Whether writing to a folder, or to where compilers put their files, failed for want of room."""
    places = (folder, Path(tempfile.gettempdir()))
    return any(shutil.disk_usage(place).free < _ROOM_BYTES for place in places)


def no_room(folder: Path) -> MeasurementError:
    """The disk is full where something is built: nothing of it is a program's fault."""
    return MeasurementError(_FULL.format(folder), hint=_MAKE_ROOM, transient=True)


def _full(folder: Path) -> DataError:
    return DataError(_FULL.format(folder), hint=_MAKE_ROOM)
