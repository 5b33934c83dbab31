"""Reading traces: which files are traces, and of which tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cdmpp.errors import DataError
from cdmpp.simulate.traces.chrome import read_torch
from cdmpp.simulate.traces.json_stream import opened
from cdmpp.simulate.traces.nsys import is_sqlite, read_nsys
from cdmpp.simulate.traces.records import RankTrace

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
    return head.startswith(b"{") and b'"traceEvents"' in head


def read_trace(path: str | Path) -> RankTrace:
    """Read a trace of ``torch.profiler`` (Chrome JSON, gzip or not) or of Nsight Systems (SQLite).

    Raises
    ------
    DataError
        The file is missing, cut, damaged or no trace; the message says which.
    """
    path = Path(path)
    if path.suffix.lower() in (".nsys-rep", ".qdrep"):
        raise DataError(f"{path}: a report of Nsight Systems", hint=f"export it: nsys export --type sqlite {path.name}")
    return read_nsys(path) if is_sqlite(path) else read_torch(path)


def read_ranks(paths: Sequence[str | Path]) -> list[RankTrace]:
    """Read the files of all ranks, sorted by rank.

    Files without a rank get the lowest free numbers in the order given.

    Raises
    ------
    DataError
        As :func:`read_trace`; no file, a file given twice, or two files of one rank.
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
