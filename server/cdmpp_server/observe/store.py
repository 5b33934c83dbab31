"""What must outlive a process: observations, their running error, and programs that clients registered."""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from sqlalchemy import Engine, Row, Select, Update, delete, func, insert, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from cdmpp_server.observe.figures import Figures, Running, Sums
from cdmpp_server.observe.ids import PredictedBefore
from cdmpp_server.observe.tables import (
    SchemaVersionError,
    connect,
    create,
    database_url,
    observations,
    programs,
    running,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

#: Models on devices that :meth:`Store.summaries` gives: those observed last.
MAX_SUMMARIES = 1000
#: Programs are counted, and the least recently used dropped, each time that so many more were kept ...
_CHECK_EACH = 256
#: ... and they count as used again after so long, for a write at each use would cost more than it tells.
_USED_AGAIN_S = 3600.0
# Variables of one statement: SQLite's limit is 32,766.
_AT_ONCE = 5000
#: After a failed try to open the database, the next one waits so long.
_RETRY_S = 1.0


class StoreUnavailableError(Exception):
    """The database cannot be reached, read or written; nothing of the call was kept."""


@dataclass(frozen=True)
class Observation:
    """A measured latency, in seconds, and what had been predicted."""

    predicted: PredictedBefore
    latency_s: float


@dataclass(frozen=True)
class Summary:
    """Error of one model on one device; ``last_at``: Unix time of its last observation."""

    device: str
    device_digest: str
    model_id: str
    figures: Figures
    last_at: float


#: PostgreSQL's code for a transaction that it chose to end a deadlock.
_DEADLOCK = "40P01"
_HASH = re.compile("[0-9a-f]{32}")
_Key = tuple[str, str, str]


class Store:
    """The tables, behind a few calls. They block; safe between threads and processes.

    Parameters
    ----------
    database : str, optional
        As :func:`cdmpp_server.observe.tables.database_url` reads it.
    max_programs, max_program_bytes : int
        Programs kept; the least recently used are dropped (a few more than this may be there for a while).

    Notes
    -----
    Every call raises :class:`StoreUnavailableError` while the database cannot be used, and tries again at
    the next one.
    """

    def __init__(
        self, database: str | None = None, max_programs: int = 100_000, max_program_bytes: int = 2**30
    ) -> None:
        self._engine: Engine = connect(database_url(database))
        self._writing = self._engine.execution_options(write=True)
        upserts = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
        self._upsert: Callable[..., Any] = upserts[self._engine.dialect.name]
        self._max_programs, self._max_program_bytes = max_programs, max_program_bytes
        # The first check is due at once: another process may have left too many.
        self._unchecked = _CHECK_EACH
        self._created = False
        self._failed_at = -_RETRY_S
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def check(self) -> None:
        """Raise :class:`StoreUnavailableError` where the database cannot be opened and read."""
        self.read(partial(_rows, select(programs.c.hash).limit(1)))

    def add(self, observed: Sequence[Observation]) -> list[str]:
        """Keep observations, in one transaction that is on the disk when this returns.

        Returns
        -------
        list of str
            An identity for each (32 hexadecimal digits that sort by the second they were received).
        """
        if not observed:
            return []
        now = time.time()
        moment, random = f"{int(now * 1000) % 2**48:012x}", secrets.token_hex(10 * len(observed))
        ids = [moment + random[20 * i : 20 * (i + 1)] for i in range(len(observed))]
        rows = [
            {
                "id": id,
                "program_hash": o.predicted.program_hash,
                "device": o.predicted.device,
                "device_digest": o.predicted.device_digest,
                "backend": o.predicted.backend,
                "protocol": o.predicted.protocol,
                "framework": o.predicted.framework,
                "model_id": o.predicted.model_id,
                "predicted_s": o.predicted.latency_s,
                "lower_s": o.predicted.lower_s,
                "upper_s": o.predicted.upper_s,
                "latency_s": o.latency_s,
                "received_at": now,
            }
            for id, o in zip(ids, observed, strict=True)
        ]

        def work(connection: Connection) -> None:
            connection.execute(insert(observations), rows)
            # In one order everywhere: two processes never wait for each other's rows.
            for key, group in groupby(sorted(rows, key=_key), key=_key):
                self._run_on(connection, key, list(group), now)

        self.write(work)
        return ids

    def _run_on(self, connection: Connection, key: _Key, rows: list[dict[str, Any]], now: float) -> None:
        device, digest, model = key
        names = {"device": device, "device_digest": digest, "model_id": model}
        empty = {**names, **_columns(Running(), now)}
        connection.execute(self._upsert(running).values(empty).on_conflict_do_nothing())
        mine = tuple_(running.c.device, running.c.device_digest, running.c.model_id) == tuple_(*key)
        # SQLite knows no FOR UPDATE and needs none: SQLAlchemy leaves it out there.
        kept = _running(connection.execute(select(running).where(mine).with_for_update()).one())
        kept.add(*(np.array([row[c] for row in rows]) for c in ("latency_s", "predicted_s", "lower_s", "upper_s")))
        connection.execute(update(running).where(mine).values(**_columns(kept, now)))

    def summaries(self) -> list[Summary]:
        """Error of every model on every device, the last observed first; at most :data:`MAX_SUMMARIES`."""
        query = select(running).order_by(running.c.last_at.desc()).limit(MAX_SUMMARIES)
        return [
            Summary(row.device, row.device_digest, row.model_id, _running(row).figures(), row.last_at)
            for row in self.read(partial(_rows, query))
        ]

    def put_programs(self, registered: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep programs (a form of a ``/predict`` item) by their hash; kept when this returns."""
        if not registered:
            return
        now, rows = time.time(), []
        for hash, program in sorted(registered.items()):
            document = json.dumps(program, separators=(",", ":"))
            rows.append({"hash": hash, "document": document, "size": len(document), "used_at": now})
        put = self._upsert(programs)
        put = put.on_conflict_do_update(index_elements=["hash"], set_={"used_at": put.excluded.used_at})

        def work(connection: Connection) -> None:
            connection.execute(put, rows)
            if self._unchecked + len(rows) >= _CHECK_EACH:
                self._drop_oldest(connection)

        self.write(work)
        with self._lock:
            self._unchecked = (self._unchecked + len(rows)) % _CHECK_EACH

    def get_program(self, hash: str) -> dict[str, Any] | None:
        """The program with this hash, or None."""
        return self.get_programs([hash]).get(hash)

    def get_programs(self, hashes: Collection[str]) -> dict[str, dict[str, Any]]:
        """Those of the hashes that are known, with their programs."""
        found: dict[str, dict[str, Any]] = {}
        used: list[str] = []
        now = time.time()
        for part in _parts(sorted(hash for hash in set(hashes) if _HASH.fullmatch(hash))):
            query = select(programs).where(programs.c.hash.in_(part))
            for row in self.read(partial(_rows, query)):
                found[row.hash] = json.loads(row.document)
                if now - row.used_at > _USED_AGAIN_S:
                    used.append(row.hash)
        for part in _parts(used):
            mark = update(programs).where(programs.c.hash.in_(part)).values(used_at=now)
            # What was read is an answer, also where nothing can be written.
            with suppress(StoreUnavailableError):
                self.write(partial(_execute, mark))
        return found

    def _drop_oldest(self, connection: Connection) -> None:
        count, size = connection.execute(select(func.count(), func.sum(programs.c.size))).one()
        excess = max(count - self._max_programs, 0)
        excess_bytes = (size or 0) - self._max_program_bytes
        if excess == 0 and excess_bytes <= 0:
            return
        oldest = select(programs.c.hash, programs.c.size).order_by(programs.c.used_at, programs.c.hash)
        going: list[str] = []
        rows = connection.execute(oldest.execution_options(yield_per=1000))
        for row in rows:
            if len(going) >= excess and excess_bytes <= 0:
                break
            going.append(row.hash)
            excess_bytes -= row.size
        rows.close()
        for part in _parts(going):
            connection.execute(delete(programs).where(programs.c.hash.in_(part)))

    def _open(self) -> None:
        with self._lock:
            if self._created:
                return
            # Many requests at a time must not each wait for a database that is not there.
            if time.monotonic() - self._failed_at < _RETRY_S:
                raise StoreUnavailableError("the database could not be opened a moment ago")
            try:
                create(self._engine)
            except BaseException:
                self._failed_at = time.monotonic()
                raise
            self._created = True

    def write(self, work: Callable[[Connection], object]) -> None:
        """Run ``work`` in a transaction that writes; it may run twice, when the first was ended."""
        with self._errors("written"):
            self._open()
            for last in (False, True):
                try:
                    with self._writing.begin() as connection:
                        work(connection)
                    return
                except DBAPIError as error:
                    # The database ended this transaction in favour of another one: nothing of it is there.
                    if last or getattr(error.orig, "sqlstate", None) != _DEADLOCK:
                        raise

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` in a transaction that reads."""
        with self._errors("read"):
            self._open()
            with self._engine.begin() as connection:
                return work(connection)

    def _errors(self, what: str) -> _AsUnavailable:
        return _AsUnavailable(f"the database cannot be {what}")


class _AsUnavailable:
    """Errors of the database become :class:`StoreUnavailableError`; its own words go to the log alone."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SQLAlchemyError | OSError | SchemaVersionError):
            # The statement and its parameters are long and say nothing about the fault.
            cause = getattr(error, "orig", None) or error
            _log.error("%s: %s", self._message, str(cause).replace("\n", " ")[:500])
            raise StoreUnavailableError(self._message) from error


def _rows(query: Select[Any], connection: Connection) -> Sequence[Row[Any]]:
    return connection.execute(query).all()


def _execute(statement: Update, connection: Connection) -> None:
    connection.execute(statement)


def _key(row: Mapping[str, Any]) -> _Key:
    return row["device"], row["device_digest"], row["model_id"]


def _parts(values: Sequence[str]) -> Iterable[Sequence[str]]:
    return (values[i : i + _AT_ONCE] for i in range(0, len(values), _AT_ONCE))


def _columns(kept: Running, now: float) -> dict[str, Any]:
    return {
        "number": kept.ratios.count,
        "total": kept.ratios.total,
        "squares": kept.ratios.squares,
        "relative_error": kept.relative_error,
        "covered": kept.covered,
        "recent": kept.recent.astype("<f8").tobytes(),
        "reference_count": kept.reference.count,
        "reference_total": kept.reference.total,
        "reference_squares": kept.reference.squares,
        "last_at": now,
    }


def _running(row: Row[Any]) -> Running:
    return Running(
        Sums(row.number, row.total, row.squares),
        row.relative_error,
        row.covered,
        np.frombuffer(row.recent, "<f8"),
        Sums(row.reference_count, row.reference_total, row.reference_squares),
    )
