"""Persistent store of observations, their running error, and registered programs."""

from __future__ import annotations

import json
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
from sqlalchemy.exc import DBAPIError

from cdmpp_server.database_url import database_url
from cdmpp_server.observe.figures import Figures, Running, Sums
from cdmpp_server.observe.ids import PredictedBefore
from cdmpp_server.observe.outage import AsUnavailable, StoreUnavailableError
from cdmpp_server.observe.tables import connect, create, observations, programs, running

T = TypeVar("T")

#: Maximum number of entries of :meth:`Store.summaries`, most recently observed first.
MAX_SUMMARIES = 1000
#: Number of stored programs after which the limits are checked.
_CHECK_EACH = 256
#: Minimum time between two updates of a program's time of last use, because a write per use is expensive.
_USED_AGAIN_S = 3600.0
# Variables per statement; SQLite's limit is 32,766.
_AT_ONCE = 5000
#: Time between two attempts to open the database, in seconds.
_RETRY_S = 1.0


@dataclass(frozen=True)
class Observation:
    """A measured latency, in seconds, and its prediction."""

    predicted: PredictedBefore
    latency_s: float


@dataclass(frozen=True)
class Summary:
    """Error of one model on one device; ``last_at``: Unix time of the last observation."""

    device: str
    device_digest: str
    model_id: str
    figures: Figures
    last_at: float


#: PostgreSQL's error code of a transaction that it aborted to end a deadlock.
_DEADLOCK = "40P01"
_HASH = re.compile("[0-9a-f]{32}")
_Key = tuple[str, str, str]


class Store:
    """Access to the tables. The methods block, and are safe between threads and processes.

    Parameters
    ----------
    database : str
        As :func:`cdmpp_server.database_url.database_url` reads it.
    max_programs, max_program_bytes : int
        Maximum number and size of stored programs, exceeded by a few for a while. The least recently used are
        removed first.

    Notes
    -----
    Every method raises :class:`StoreUnavailableError` while the database is unavailable; the next call tries
    again.
    """

    def __init__(self, database: str, max_programs: int = 100_000, max_program_bytes: int = 2**30) -> None:
        self._engine: Engine = connect(database_url(database))
        self._writing = self._engine.execution_options(write=True)
        upserts = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
        self.upsert: Callable[..., Any] = upserts[self._engine.dialect.name]
        self._max_programs, self._max_program_bytes = max_programs, max_program_bytes
        # Check at the first write: another process may have stored too many.
        self._unchecked = _CHECK_EACH
        self._created = False
        self._failed_at = -_RETRY_S
        self._lock = threading.Lock()
        self._read_errors, self._write_errors = AsUnavailable("read"), AsUnavailable("written")

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def check(self) -> None:
        """Raise :class:`StoreUnavailableError` if the database cannot be opened and read."""
        self.read(partial(_rows, select(programs.c.hash).limit(1)))

    def add(self, observed: Sequence[Observation]) -> list[str]:
        """Store observations in one transaction, which is on disk when this returns.

        Returns
        -------
        list of str
            Id of each observation: 32 hexadecimal digits that sort by time.
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
            # A fixed order, so that two processes cannot deadlock.
            for key, group in groupby(sorted(rows, key=_key), key=_key):
                self._update_running(connection, key, list(group), now)

        self.write(work)
        return ids

    def _update_running(self, connection: Connection, key: _Key, rows: list[dict[str, Any]], now: float) -> None:
        device, digest, model = key
        names = {"device": device, "device_digest": digest, "model_id": model}
        empty = {**names, **_columns(Running(), now)}
        connection.execute(self.upsert(running).values(empty).on_conflict_do_nothing())
        key_matches = tuple_(running.c.device, running.c.device_digest, running.c.model_id) == tuple_(*key)
        # SQLAlchemy omits FOR UPDATE for SQLite, which does not need it.
        state = _running(connection.execute(select(running).where(key_matches).with_for_update()).one())
        state.add(*(np.array([row[c] for row in rows]) for c in ("latency_s", "predicted_s", "lower_s", "upper_s")))
        connection.execute(update(running).where(key_matches).values(**_columns(state, now)))

    def summaries(self) -> list[Summary]:
        """Return the error of each model on each device, most recent first; at most :data:`MAX_SUMMARIES`."""
        query = select(running).order_by(running.c.last_at.desc()).limit(MAX_SUMMARIES)
        return [
            Summary(row.device, row.device_digest, row.model_id, _running(row).figures(), row.last_at)
            for row in self.read(partial(_rows, query))
        ]

    def put_programs(self, registered: Mapping[str, Mapping[str, Any]]) -> None:
        """Store programs (forms of a ``/predict`` item) by hash; they are stored when this returns."""
        if not registered:
            return
        now, rows = time.time(), []
        for hash, program in sorted(registered.items()):
            document = json.dumps(program, separators=(",", ":"))
            rows.append({"hash": hash, "document": document, "size": len(document), "used_at": now})
        put = self.upsert(programs)
        put = put.on_conflict_do_update(index_elements=["hash"], set_={"used_at": put.excluded.used_at})

        def work(connection: Connection) -> None:
            connection.execute(put, rows)
            if self._unchecked + len(rows) >= _CHECK_EACH:
                self._drop_oldest(connection)

        self.write(work)
        with self._lock:
            self._unchecked = (self._unchecked + len(rows)) % _CHECK_EACH

    def get_program(self, hash: str) -> dict[str, Any] | None:
        """Return the program with this hash, or None."""
        return self.get_programs([hash]).get(hash)

    def get_programs(self, hashes: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the programs of the known hashes."""
        documents: dict[str, dict[str, Any]] = {}
        used: list[str] = []
        now = time.time()
        for part in _parts(sorted(hash for hash in set(hashes) if _HASH.fullmatch(hash))):
            query = select(programs).where(programs.c.hash.in_(part))
            for row in self.read(partial(_rows, query)):
                documents[row.hash] = json.loads(row.document)
                if now - row.used_at > _USED_AGAIN_S:
                    used.append(row.hash)
        for part in _parts(used):
            mark = update(programs).where(programs.c.hash.in_(part)).values(used_at=now)
            # A failed write must not fail the read.
            with suppress(StoreUnavailableError):
                self.write(partial(_execute, mark))
        return documents

    def _drop_oldest(self, connection: Connection) -> None:
        count, size = connection.execute(select(func.count(), func.sum(programs.c.size))).one()
        excess = max(count - self._max_programs, 0)
        excess_bytes = (size or 0) - self._max_program_bytes
        if excess == 0 and excess_bytes <= 0:
            return
        oldest = select(programs.c.hash, programs.c.size).order_by(programs.c.used_at, programs.c.hash)
        removed: list[str] = []
        rows = connection.execute(oldest.execution_options(yield_per=1000))
        for row in rows:
            if len(removed) >= excess and excess_bytes <= 0:
                break
            removed.append(row.hash)
            excess_bytes -= row.size
        rows.close()
        for part in _parts(removed):
            connection.execute(delete(programs).where(programs.c.hash.in_(part)))

    def _open(self) -> None:
        with self._lock:
            if self._created:
                return
            # Concurrent requests must not each wait for an unavailable database.
            if time.monotonic() - self._failed_at < _RETRY_S:
                raise StoreUnavailableError("the database could not be opened a moment ago")
            try:
                create(self._engine)
            except BaseException:
                self._failed_at = time.monotonic()
                raise
            self._created = True

    def write(self, work: Callable[[Connection], object]) -> None:
        """Run ``work`` in a write transaction; it runs again if the database aborted the first one."""
        with self._write_errors:
            self._open()
            for last in (False, True):
                try:
                    with self._writing.begin() as connection:
                        work(connection)
                    return
                except DBAPIError as error:
                    # The database rolled this transaction back in favour of another one.
                    if last or getattr(error.orig, "sqlstate", None) != _DEADLOCK:
                        raise

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` in a read transaction."""
        with self._read_errors:
            self._open()
            with self._engine.begin() as connection:
                return work(connection)


def _rows(query: Select[Any], connection: Connection) -> Sequence[Row[Any]]:
    return connection.execute(query).all()


def _execute(statement: Update, connection: Connection) -> None:
    connection.execute(statement)


def _key(row: Mapping[str, Any]) -> _Key:
    return row["device"], row["device_digest"], row["model_id"]


def _parts(values: Sequence[str]) -> Iterable[Sequence[str]]:
    return (values[i : i + _AT_ONCE] for i in range(0, len(values), _AT_ONCE))


def _columns(state: Running, now: float) -> dict[str, Any]:
    return {
        "number": state.ratios.count,
        "total": state.ratios.total,
        "squares": state.ratios.squares,
        "relative_error": state.relative_error,
        "covered": state.covered,
        "recent": state.recent.astype("<f8").tobytes(),
        "reference_count": state.reference.count,
        "reference_total": state.reference.total,
        "reference_squares": state.reference.squares,
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
