"""State of a collection in one SQLite file, saved after every step; a kill loses only the step in progress.

Tasks, programs and measurements are rows that are written once. A resumed collection reads what is missing.
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
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

from cdmpp.data.folder import STORE as FILE
from cdmpp.data.measure.building import Library
from cdmpp.data.measure.sampling import SampledProgram
from cdmpp.data.measure.timing import TimedRun
from cdmpp.errors import DataError, MeasurementError
from cdmpp.programs.frontends.tasks import TaskList
from cdmpp.programs.tvm_json import MAX_BYTES

_FULL = "no space left on the disk of {}"
_MAKE_ROOM = "free some space and repeat the same command to resume"
#: Free space below which the disk counts as full: a failing linker removes its partial output.
_ROOM_BYTES = 16 * 2**20
LOCK = "collect.lock"
FIRST, SECOND = 0, 1
#: In place of a number of drawn schedules: as many as any call requests.
_NO_DRAWS = 2**62
#: Stands for the operator where a network as a whole cannot be lowered.
WHOLE = "the whole file"
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
CREATE TABLE IF NOT EXISTS built (
    program TEXT NOT NULL, target TEXT NOT NULL, facts TEXT NOT NULL, code BLOB NOT NULL,
    PRIMARY KEY (program, target));
"""

#: The names of a list that is passed as JSON.
_LISTED = "(SELECT value FROM json_each(?))"
#: Tables of a store that define the programs to measure, and the copied columns.
_TABLES = {
    "networks": "name, unsupported",
    "tasks": "hash, name, program, sampled, failure",
    "network_tasks": "network, task, calls",
    "programs": "hash, task, origin, position, program",
}


@dataclass(frozen=True)
class StoredProgram:
    """A program and its task."""

    hash: str
    task: str
    task_name: str
    networks: tuple[str, ...]
    origin: str
    tvm_json: str


@dataclass(frozen=True)
class StoredMeasurement:
    """One measurement; ``latency_s`` is None if and only if ``failure`` has a reason. The fields are the columns of the
    table ``measurements``, in its order."""

    program: str
    device: str
    turn: int  # :data:`FIRST`, or :data:`SECOND` for the repeat, minutes later, that gives the noise floor
    repeats_s: tuple[float, ...] = ()  # seconds per run, one value per repeat
    latency_s: float | None = None
    spread: float | None = None
    number: int | None = None
    once: bool = False
    failure: str = ""
    measured_at: float = 0.0  # seconds since the epoch
    overhead_s: float = 0.0  # wall-clock seconds of building and loading, outside the timed runs

    @classmethod
    def of_run(cls, program: str, device: str, turn: int, library: Library, run: TimedRun) -> Self:
        """Return the measurement of a program that was timed just now."""
        timing, overhead_s = run.timing, library.build_s + run.elapsed_s - run.timed_s
        figures = timing.repeats_s, timing.latency_s, timing.spread, timing.number, timing.once
        return cls(program, device, turn, *figures, measured_at=time.time(), overhead_s=overhead_s)


class Store:
    """The collector's file in a folder; a context manager that locks the folder while it is open. A DataError if
    another process has locked it, it has files of another origin, or the disk is full or read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.is_dir() and not (folder / FILE).exists():
            foreign = sorted(p.name for p in folder.iterdir() if p.name not in (LOCK, f"{FILE}-journal"))
            if foreign:
                raise DataError(
                    f"{folder} has a {foreign[0]} that was not written by a collection",
                    hint="choose a new or an empty folder: --out",
                )
        with disk_errors(folder / FILE):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(folder / LOCK)
        try:
            with disk_errors(folder / FILE):
                self._db = sqlite3.connect(folder / FILE, isolation_level=None)
                self._db.execute("PRAGMA journal_mode=WAL")
                # A killed process loses nothing; a power failure may lose the last transactions, but does not
                # damage the file.
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
        """Unlock the folder; the operating system also does so when the process ends."""
        self._db.close()
        os.close(self._lock)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the writes of the block in one transaction."""
        with disk_errors(self.folder / FILE):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:  # on a full disk SQLite rolls back itself
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _write(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        with self.transaction():
            self._db.executemany(statement, rows)

    # Settings

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Store the settings of this collection; one that differs from that of earlier calls is a DataError."""
        known = dict(self._db.execute("SELECT key, value FROM meta"))
        given = {key: json.dumps(value, sort_keys=True) for key, value in settings.items()}
        for key, value in given.items():
            if known.get(key, value) != value:
                raise DataError(
                    f"{self.folder} was started with {key} = {known[key]}, not {value}",
                    hint="use the same options to resume, or another --out",
                )
        self._write("INSERT OR IGNORE INTO meta VALUES (?, ?)", given.items())

    def forget_settings(self) -> None:
        """Remove the settings of :meth:`settle` if the folder has no program yet."""
        if not self.count_programs():
            with self.transaction():
                self._db.execute("DELETE FROM meta")
                self._db.execute("DELETE FROM devices")

    def settings(self) -> dict[str, Any]:
        """Return the settings stored by :meth:`settle`."""
        return {key: json.loads(value) for key, value in self._db.execute("SELECT key, value FROM meta")}

    def devices(self) -> dict[str, dict[str, Any]]:
        """Return the descriptions of :meth:`remember_devices` by name."""
        rows = self._db.execute("SELECT name, description FROM devices ORDER BY rowid")
        return {name: json.loads(text) for name, text in rows}

    def remember_devices(self, described: Mapping[str, Mapping[str, Any]]) -> None:
        """Store the descriptions of devices; an earlier description of a name stays."""
        rows = [(name, json.dumps(about, sort_keys=True)) for name, about in described.items()]
        self._write("INSERT OR IGNORE INTO devices VALUES (?, ?)", rows)

    # Networks and tasks

    def left_out(self) -> list[tuple[str, str, str]]:
        """Return what could not be collected: (network or task, operator or "schedules", reason)."""
        skipped_operators = [(name, what, why) for name, skipped in self.networks().items() for what, why in skipped]
        rows = self._db.execute("SELECT name, failure FROM tasks WHERE failure != '' ORDER BY rowid")
        return skipped_operators + [(name, "schedules", why) for name, why in rows]

    def skipped(self) -> dict[str, str]:
        """Return the networks that could not be lowered, with the reasons."""
        return {name: why for name, parts in self.networks().items() for what, why in parts if what == WHOLE}

    def networks(self) -> dict[str, list[tuple[str, str]]]:
        """Return the lowered networks, each with its unsupported operators as (name, reason)."""
        rows = self._db.execute("SELECT name, unsupported FROM networks ORDER BY rowid")
        return {name: [tuple(item) for item in json.loads(text)] for name, text in rows}

    def add_network(self, name: str, tasks: TaskList) -> None:
        """Store the tasks of a network; networks share equal tasks."""
        with self.transaction():
            self._db.execute("INSERT OR REPLACE INTO networks VALUES (?, ?)", (name, json.dumps(tasks.unsupported)))
            for task in tasks.tasks:
                self._db.execute(
                    "INSERT OR IGNORE INTO tasks (hash, name, program) VALUES (?, ?, ?)",
                    (task.hash, task.name, _pack(task.tvm_json)),
                )
                self._db.execute("INSERT OR IGNORE INTO network_tasks VALUES (?, ?, ?)", (name, task.hash, task.calls))

    def tasks_by_network(self) -> dict[str, list[str]]:
        """Return the hashes of each network's tasks, in the order of lowering."""
        tasks: dict[str, list[str]] = {}
        for network, task in self._db.execute("SELECT network, task FROM network_tasks ORDER BY rowid"):
            tasks.setdefault(network, []).append(task)
        return tasks

    def tasks(self) -> list[tuple[str, str, str]]:
        """Return all tasks: hash, name, and the unscheduled program as TVM JSON."""
        return self._tasks("?", True)

    def unsampled(self, count: int) -> list[tuple[str, str, str]]:
        """Return the tasks (hash, name, TVM JSON) with fewer than ``count`` sampled schedules."""
        return self._tasks("sampled < ? AND failure = ''", count)

    def add_programs(
        self, task: str, programs: Sequence[SampledProgram], drawn: int | None, *, failure: str = ""
    ) -> None:
        """Store programs of a task; known programs stay unchanged.

        ``drawn``: number of requested schedules; None for programs of a search. ``failure``: why the task has no
        schedules but its default.
        """
        with self.transaction():
            count = "SELECT COUNT(*) FROM programs WHERE task = ?"
            start = 0 if drawn is not None else self._db.execute(count, (task,)).fetchone()[0]
            self._db.executemany(
                "INSERT OR IGNORE INTO programs VALUES (?, ?, ?, ?, ?)",
                [(p.hash, task, p.origin, i, _pack(p.tvm_json)) for i, p in enumerate(programs, start)],
            )
            if drawn is not None:
                self._db.execute("UPDATE tasks SET sampled = ?, failure = ? WHERE hash = ?", (drawn, failure, task))

    def add_given(self, programs: Sequence[StoredProgram]) -> None:
        """Store programs in the given order, and their tasks, for which no schedules are drawn."""
        with self.transaction():
            for position, p in enumerate(programs):
                blob = _pack(p.tvm_json)
                row = (p.task, p.task_name, blob, _NO_DRAWS)
                self._db.execute("INSERT OR IGNORE INTO tasks (hash, name, program, sampled) VALUES (?, ?, ?, ?)", row)
                self._db.execute(
                    "INSERT INTO programs VALUES (?, ?, ?, ?, ?)", (p.hash, p.task, p.origin, position, blob)
                )
                self._db.executemany(
                    "INSERT OR IGNORE INTO network_tasks VALUES (?, ?, 1)", [(name, p.task) for name in p.networks]
                )

    def take_programs(self, path: Path) -> None:
        """Add the missing tasks and programs of another store's file, which is only read."""
        with disk_errors(self.folder / FILE), closing(sqlite3.connect(self.folder / FILE, uri=True)) as db:
            db.execute("ATTACH ? AS job", (f"{path.resolve().as_uri()}?mode=ro&immutable=1",))
            with db:
                for table, columns in _TABLES.items():
                    db.execute(f"INSERT OR IGNORE INTO {table} ({columns}) SELECT {columns} FROM job.{table}")

    def untuned(self, trials: int) -> list[tuple[str, str, str]]:
        """Return the tasks (hash, name, TVM JSON) whose last search had fewer trials.

        Tasks with a single schedule are omitted, because there is nothing to search.
        """
        several = "(SELECT COUNT(*) FROM programs p WHERE p.task = t.hash) > 2"
        return self._tasks(f"tuned < ? AND failure = '' AND {several}", trials)

    def _tasks(self, condition: str, number: int) -> list[tuple[str, str, str]]:
        query = f"SELECT hash, name, program FROM tasks t WHERE {condition} ORDER BY rowid"
        return [(digest, name, _unpack(blob)) for digest, name, blob in self._db.execute(query, (number,))]

    def tuned(self, task: str, trials: int) -> None:
        """Mark a task's search as completed."""
        self._write("UPDATE tasks SET tuned = ? WHERE hash = ?", [(trials, task)])

    def latencies(self, programs: Sequence[str], device: str) -> dict[str, float]:
        """Return the first measurements of programs on a device in seconds, without failed ones."""
        query = f"""SELECT program, latency_s FROM measurements WHERE turn = {FIRST} AND failure = ''
            AND device = ? AND program IN {_LISTED}"""
        return dict(self._db.execute(query, (device, json.dumps(programs))))

    # Built programs of jobs for other machines

    def built(self) -> dict[tuple[str, str], tuple[dict[str, Any], bytes]]:
        """Return facts and code of :meth:`add_built` by program and target."""
        rows = self._db.execute("SELECT program, target, facts, code FROM built")
        return {(program, target): (json.loads(facts), code) for program, target, facts, code in rows}

    def add_built(self, program: str, target: str, facts: Mapping[str, Any], code: bytes = b"") -> None:
        """Store a built program: facts about it, and its code if that is no file."""
        self._write("INSERT INTO built VALUES (?, ?, ?, ?)", [(program, target, json.dumps(facts), code)])

    # Measurements

    def missing(self, devices: Sequence[str], limit: int) -> list[StoredProgram]:
        """Return at most ``limit`` programs that lack the first measurement on one of the devices.

        The order interleaves tasks: a partial collection has schedules of every task, and the measurements of
        a task are spread over time.
        """
        return self._programs(
            f"""WHERE (SELECT COUNT(*) FROM measurements m WHERE m.program = p.hash AND m.turn = {FIRST}
                AND m.device IN {_LISTED}) < {len(devices)} ORDER BY p.position, t.rowid LIMIT {limit}""",
            devices,
        )

    def programs(self, hashes: Iterable[str]) -> list[StoredProgram]:
        """Return programs by hash."""
        return self._programs(f"WHERE p.hash IN {_LISTED} ORDER BY p.position, t.rowid", list(hashes))

    def count_programs(self) -> int:
        """Return the number of programs."""
        return int(self._db.execute("SELECT COUNT(*) FROM programs").fetchone()[0])

    def all_programs(self) -> Iterator[StoredProgram]:
        """Yield all programs, grouped by task."""
        yield from self._programs("ORDER BY t.rowid, p.position")

    def add_measurements(self, measurements: Iterable[StoredMeasurement]) -> None:
        """Store measurements; an earlier one of the same program, device and turn stays."""
        rows = [(*astuple(m)[:3], json.dumps(m.repeats_s), *astuple(m)[4:]) for m in measurements]
        self._write("INSERT OR IGNORE INTO measurements VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def measurements(self, turn: int | None = None) -> Iterator[StoredMeasurement]:
        """Yield all measurements, or those of one turn."""
        rows = self._db.execute("SELECT * FROM measurements WHERE turn = ifnull(?, turn) ORDER BY rowid", (turn,))
        for program, device, at, repeats, *rest in rows:
            yield StoredMeasurement(program, device, at, tuple(json.loads(repeats)), *rest)

    def once_measured(self, devices: Sequence[str]) -> list[tuple[str, str, float]]:
        """Return (program, device, Unix time) of successful first measurements without a second one."""
        query = f"""SELECT program, device, measured_at FROM measurements m WHERE turn = {FIRST} AND failure = ''
            AND once = 0 AND device IN {_LISTED} AND NOT EXISTS (SELECT 1 FROM measurements s WHERE
            s.program = m.program AND s.device = m.device AND s.turn = {SECOND})"""
        return list(self._db.execute(query, (json.dumps(devices),)))

    def measured(self, devices: Sequence[str], turn: int) -> set[tuple[str, str]]:
        """Return (program, device) of all measurements of a turn, including failed ones."""
        query = f"SELECT program, device FROM measurements WHERE turn = ? AND device IN {_LISTED}"
        return set(self._db.execute(query, (turn, json.dumps(devices))))

    def _programs(self, rest: str, names: Sequence[str] | None = None) -> list[StoredProgram]:
        """Return programs; ``rest`` ends the query, and ``names`` is what it lists."""
        rows = self._db.execute(
            f"""SELECT p.hash, p.task, t.name, p.origin, p.program,
                (SELECT GROUP_CONCAT(network, ';') FROM
                    (SELECT network FROM network_tasks n WHERE n.task = p.task ORDER BY network))
                FROM programs p JOIN tasks t ON t.hash = p.task {rest}""",
            () if names is None else (json.dumps(names),),
        )
        return [
            StoredProgram(digest, task, name, tuple((networks or "").split(";")), origin, _unpack(blob))
            for digest, task, name, origin, blob, networks in rows
        ]


def _pack(text: str) -> bytes:
    return zlib.compress(text.encode(), 6)


def _unpack(blob: bytes) -> str:
    reader = zlib.decompressobj()
    text = reader.decompress(blob, MAX_BYTES)
    if not reader.eof:
        raise DataError(f"a stored program has more than {MAX_BYTES:,} bytes, or is cut", hint="collect it again")
    return text.decode()


def take_lock(path: Path) -> int:
    """Lock the folder until this process ends; the system releases the lock even after a kill."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise DataError(
            f"{path.parent} is in use by {owner}", hint="wait for it, stop it, or choose another --out"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


@contextmanager
def disk_errors(file: Path) -> Iterator[None]:
    """Convert errors of the disk to errors with a hint; earlier writes stay."""
    folder = file.parent
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error):
            raise DataError(_FULL.format(folder), hint=_MAKE_ROOM) from None
        raise DataError(f"{file}: {error}", hint="check that the disk is neither full nor read-only") from None
    except sqlite3.IntegrityError:
        raise  # a bug in this package, not a damaged file
    except sqlite3.DatabaseError as error:
        raise DataError(f"{file} is damaged: {error}", hint="move it away; records.parquet is not affected") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DataError(_FULL.format(folder), hint=_MAKE_ROOM) from None
        raise DataError(f"cannot write {folder}: {error.strerror or error}", hint="choose another --out") from None


def is_disk_full(folder: Path) -> bool:
    """Whether the disk of a folder, or of the compilers' temporary files, is full."""
    return any(shutil.disk_usage(path).free < _ROOM_BYTES for path in (folder, Path(tempfile.gettempdir())))


def disk_full_error(folder: Path) -> MeasurementError:
    """Error for a full disk during a build, which no program has caused."""
    return MeasurementError(_FULL.format(folder), hint=_MAKE_ROOM, transient=True)
