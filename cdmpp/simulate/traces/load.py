"""Reading traces: which files are traces, of which tool; SQLite exports of Nsight Systems as records.

Tables and columns of an export (``nsys export --type sqlite``) are those of NVIDIA's documented schema. Tables are made
on demand, so each may be missing. There are no operators and no shapes in them; NVTX ranges take the place of
annotations.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from cdmpp.errors import DataError
from cdmpp.simulate.traces.chrome import opened, read_torch
from cdmpp.simulate.traces.records import EventKind, RankTrace, Sync, TraceEvent, TraceLane
from cdmpp.utils.files import open_file

MAGIC = b"SQLite format 3\x00"
_KERNELS, _RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_HINT = "export the report with: nsys export --type sqlite report.nsys-rep"
#: ``syncType`` -> kind, as CUPTI numbers them.
_SYNCS = {1: "event", 2: "stream_wait", 3: "stream", 4: "device"}
#: NVTX ranges of one thread (pushed and popped), and ranges by id.
_RANGES = (59, 60)
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_VERSION = re.compile(r"_v\d+$")
#: Kernel columns that hold names, best first.
_NAMES = ("demangledName", "shortName", "mangledName")


def is_sqlite(path: Path) -> bool:
    """Whether a file is an SQLite database."""
    try:
        with open_file(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_nsys(path: str | Path) -> RankTrace:
    """Read an SQLite export of Nsight Systems.

    Raises DataError: the database is damaged, lacks the tables of kernels and of runtime calls, or has other columns.
    """
    path = Path(path)
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            return _Reader(path, database).read()
    except sqlite3.Error as error:
        raise DataError(f"{path}: not a usable SQLite export: {error}", hint=_HINT) from None


class _Reader:
    """Tables of one database."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self._database = path, database
        tables = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self._tables = {row["name"] for row in tables}
        self._strings: dict[int, str] = {}
        self._origin_ns: int | None = None
        self._without_end = 0
        self.trace = RankTrace(str(path), "nsys")

    def read(self) -> RankTrace:
        """All events."""
        missing = [name for name in (_KERNELS, _RUNTIME) if name not in self._tables]
        if missing:
            raise DataError(
                f"{self.path}: no table {' and no table '.join(missing)}: not a profile of CUDA work",
                hint=f"profile with nsys profile --trace=cuda,nvtx; {_HINT}",
            )
        self._strings = {row["id"]: row["value"] for row in self._rows("StringIds", "id", "value")}
        for row in self._rows("TARGET_INFO_GPU", "id", "name"):
            self.trace.devices[str(row["id"])] = str(row["name"])
        self._runtime()
        self._device_work()
        self._synchronisations()
        self._ranges()
        for row in self._rows("ThreadNames", "globalTid", "nameId"):
            self.trace.threads[_thread(row["globalTid"])] = self._strings.get(row["nameId"], "")
        self.trace.origin_s = (self._origin_ns or 0) * 1e-9
        if self._without_end:
            self.trace.remarks.append(
                f"events without an end after their start, which count as 0 s: {self._without_end:,}"
            )
        return self.trace

    def _runtime(self) -> None:
        for row in self._rows(_RUNTIME, "start", "end", "globalTid", "correlationId", "nameId"):
            name = _VERSION.sub("", self._strings.get(row["nameId"], "runtime call"))
            self._add("runtime", name, _thread(row["globalTid"]), row, row["correlationId"])

    def _device_work(self) -> None:
        name = next((column for column in _NAMES if column in self._columns(_KERNELS)), None)
        if name is None:
            raise DataError(f"{self.path}: {_KERNELS} has none of the columns {', '.join(_NAMES)}", hint=_HINT)
        columns = ("start", "end", "deviceId", "streamId", "correlationId")
        for row in self._rows(_KERNELS, *columns, name):
            self._add("kernel", self._strings.get(row[name], "kernel"), _stream(row), row, row["correlationId"])
        copies = "CUPTI_ACTIVITY_KIND_MEMCPY"
        for row in self._rows(copies, *columns, "copyKind"):
            kind = _COPIES.get(row["copyKind"], f"kind {row['copyKind']}")
            self._add("copy", f"Memcpy {kind}", _stream(row), row, row["correlationId"])
        for row in self._rows("CUPTI_ACTIVITY_KIND_MEMSET", *columns):
            self._add("copy", "Memset", _stream(row), row, row["correlationId"])

    def _synchronisations(self) -> None:
        table = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
        if "syncType" not in self._columns(table):
            return
        for row in self._rows(table, "start", "end", "deviceId", "streamId", "correlationId", "syncType"):
            kind = _SYNCS.get(row["syncType"])
            if kind is not None:
                lane = _stream(row)
                stream = lane.name if 0 <= int(row["streamId"] or 0) < 2**31 else ""
                event = self._add("sync", kind, lane, row, row["correlationId"])
                event.detail = Sync(kind, stream)  # type: ignore[arg-type]

    def _ranges(self) -> None:
        if not {"text", "eventType"} <= self._columns("NVTX_EVENTS"):
            return
        by_id = "textId" if "textId" in self._columns("NVTX_EVENTS") else "NULL AS textId"
        for row in self._rows("NVTX_EVENTS", "start", "end", "globalTid", "text", "eventType", by_id):
            if row["eventType"] in _RANGES:
                name = row["text"] or self._strings.get(row["textId"], "")
                self._add("annotation", name, _thread(row["globalTid"]), row, -1)

    def _add(
        self, kind: EventKind, name: str, lane: TraceLane, row: sqlite3.Row, correlation: int | None
    ) -> TraceEvent:
        start, end = row["start"], row["end"]
        if self._origin_ns is None:
            self._origin_ns = start
        if end is None or end < start:
            self._without_end += 1
            end = start
        seconds = (end - start) * 1e-9
        event = TraceEvent(kind, name, lane, (start - self._origin_ns) * 1e-9, seconds)
        event.correlation = -1 if correlation is None else int(correlation)
        self.trace.events.append(event)
        return event

    def _columns(self, table: str) -> set[str]:
        if table not in self._tables:
            return set()
        return {row["name"] for row in self._database.execute(f"PRAGMA table_info({table})")}

    def _rows(self, table: str, *columns: str) -> Iterator[sqlite3.Row]:
        """Rows of a table that may be missing. Raises DataError: the table lacks a column."""
        if table not in self._tables:
            return iter(())
        there = self._columns(table)
        lacking = [name for name in columns if " AS " not in name and name not in there]
        if lacking:
            raise DataError(f"{self.path}: table {table} has no column {', '.join(lacking)}", hint=_HINT)
        chosen = ", ".join(name if " AS " in name else f'"{name}"' for name in columns)
        return iter(self._database.execute(f"SELECT {chosen} FROM {table}"))


def _thread(identity: Any) -> TraceLane:
    """Lane of a serialized thread id: 24 bits of process id, then 24 of thread id."""
    number = int(identity or 0)
    return TraceLane("host", str((number >> 24) & 0xFFFFFF), str(number & 0xFFFFFF))


def _stream(row: sqlite3.Row) -> TraceLane:
    return TraceLane("device", str(row["deviceId"]), str(row["streamId"]))


#: Bytes from the beginning in which a trace shows itself: Kineto writes devices and process groups first.
_HEAD = 1 << 20


def is_trace(path: str | Path) -> bool:
    """Whether a file looks like a trace, by its first bytes. False for files that cannot be read."""
    path = Path(path)
    if not path.is_file():
        return False
    if is_sqlite(path) or path.suffix.lower() == ".gz":
        return True
    try:
        with opened(path) as file:
            head = file.read(_HEAD).lstrip(b"\xef\xbb\xbf \t\r\n")
    except (DataError, EOFError, OSError):
        return path.suffix.lower() == ".gz"
    if head.startswith(b"["):
        return head[1:].lstrip().startswith((b"{", b"]"))
    return head.startswith(b"{") and any(part in head for part in (b'"traceEvents"', b"-chakra.", b'"ctrl_deps"'))


def read_trace(path: str | Path) -> RankTrace:
    """Read a trace of ``torch.profiler`` (Chrome JSON, gzip or not) or of Nsight Systems (SQLite).

    Raises DataError: the file is missing, cut, damaged or no trace; the message says which.
    """
    path = Path(path)
    if path.suffix.lower() in (".nsys-rep", ".qdrep"):
        raise DataError(f"{path}: a report of Nsight Systems", hint=f"export it: nsys export --type sqlite {path.name}")
    trace = read_nsys(path) if is_sqlite(path) else read_torch(path)
    launched = {event.correlation for event in trace.events if event.kind == "kernel"} - {-1}
    working = [e for e in trace.events if (e.kind == "runtime" and e.correlation in launched) or e.kind == "op"]
    kind = "runtime" if trace.on_device and any(event.kind == "runtime" for event in working) else "op"
    owners = dict.fromkeys(event.lane.owner for event in working if event.kind == kind)
    if len(owners) > 1:
        raise DataError(
            f"{path}: events of {len(owners)} processes ({', '.join(list(owners)[:8])}): several ranks in one file",
            hint="give the file that the profiler wrote on each rank (one for each), or split this one by pid",
        )
    return trace


def read_ranks(paths: Sequence[str | Path]) -> list[RankTrace]:
    """Read the files of all ranks, sorted by rank.

    Files without a rank get the lowest free numbers in the order given.

    Raises DataError: as :func:`read_trace`; no file, a file given twice, or two files of one rank.
    """
    if not paths:
        raise DataError("no trace", hint="give the path of a trace, or of one for each rank")
    seen: dict[Path, str] = {}
    for path in paths:
        place = Path(path).absolute()
        if place in seen:
            raise DataError(f"{path}: given twice", hint="give each rank's file once")
        seen[place] = str(path)
    traces = [read_trace(path) for path in paths]
    owners: dict[int, str] = {}
    for trace in traces:
        if trace.rank is not None:
            if trace.rank in owners:
                raise DataError(
                    f"{trace.path}: rank {trace.rank}, like {owners[trace.rank]}", hint="give one file for each rank"
                )
            owners[trace.rank] = trace.path
    free = (number for number in range(len(traces) + len(owners)) if number not in owners)
    for trace in traces:
        if trace.rank is None:
            trace.rank = next(free)
    return sorted(traces, key=lambda trace: trace.rank or 0)
