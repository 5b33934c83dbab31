"""Persistent store of observations, their running error, and registered programs.

Concurrent writes of observations of one process share a transaction, because a commit waits for the disk.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
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

from cdmpp_server.concurrency import excess
from cdmpp_server.database import database_url
from cdmpp_server.observe.figures import MeasuredErrors, Running, Sums
from cdmpp_server.observe.ids import PredictedBefore, Signer
from cdmpp_server.observe.tables import (
    AsUnavailable,
    StoreUnavailableError,
    connect,
    create,
    observations,
    programs,
    running,
)
from cdmpp_server.problems import ProblemError

#: Maximum number of devices and models with a running error; beyond it, the least recently observed of the sender with
#: most are removed.
MAX_RUNNING = 1000
# Variables per statement; SQLite's limit is 32,766.
AT_ONCE = 5000
_Key = tuple[str, str, str]


@dataclass(frozen=True)
class Observation:
    """A measured latency and its prediction."""

    predicted: PredictedBefore
    #: Measured, in seconds.
    latency_s: float
    #: Who reports it.
    sender: str = ""
    #: Whether the device and the model are the service's own: every sender's observations of them are counted in one
    #: row, which belongs to no sender.
    shared: bool = True


@dataclass(frozen=True)
class Stored:
    """Result of an observation."""

    #: 32 hexadecimal digits that sort by time. For a receipt that was observed before, the id of that observation.
    id: str
    #: The stored measurement; it differs from the sent one if the receipt was observed before with another latency.
    latency_s: float
    #: Whether this observation was counted.
    new: bool


def add_observations(
    connection: Connection, observed: Sequence[Observation], now: float, upsert: Callable[..., Any]
) -> list[Stored]:
    """Store observations whose receipt is new, and update the running errors."""
    rows = [_row(id, observation, now) for id, observation in zip(_ids(len(observed), now), observed, strict=True)]
    receipts = sorted({row["receipt"] for row in rows if row["receipt"] is not None})
    seen: dict[str, Stored] = {}
    for part in parts(receipts):
        columns = (observations.c.receipt, observations.c.id, observations.c.latency_s)
        for receipt, id, latency_s in connection.execute(select(*columns).where(columns[0].in_(part))):
            seen[receipt] = Stored(id, latency_s, new=False)
    results, new = [], []
    for row in rows:
        stored = seen.get(row["receipt"])
        if stored is None:
            new.append(row)
            stored = Stored(row["id"], row["latency_s"], new=True)
            if row["receipt"] is not None:
                seen[row["receipt"]] = Stored(row["id"], row["latency_s"], new=False)
        results.append(stored)
    if new:
        owners = {key_of(row): "" if o.shared else o.sender for row, o in zip(rows, observed, strict=True)}
        connection.execute(insert(observations), new)
        # A fixed order, so that two processes cannot deadlock.
        created = [
            _update_running(connection, key, owners[key], list(group), now, upsert)
            for key, group in groupby(sorted(new, key=key_of), key=key_of)
        ]
        if any(created):
            _drop(connection, running, MAX_RUNNING, running.c.last_at)
    return results


def drop_oldest(connection: Connection, max_rows: int) -> None:
    """Keep at most ``max_rows`` observations; the senders with most lose their oldest."""
    _drop(connection, observations, max_rows, observations.c.id)


def running_errors(connection: Connection) -> Iterable[tuple[Row[Any], Running]]:
    """Rows of all running errors with their state, most recently observed first."""
    query: Select[Any] = select(running).order_by(running.c.last_at.desc()).limit(MAX_RUNNING)
    return [(row, _running(row)) for row in connection.execute(query)]


def _ids(count: int, now: float) -> list[str]:
    moment, random = f"{int(now * 1000) % 2**48:012x}", secrets.token_hex(10 * count)
    return [moment + random[20 * i : 20 * (i + 1)] for i in range(count)]


def _row(id: str, observation: Observation, now: float) -> dict[str, Any]:
    predicted = observation.predicted
    return {
        **vars(predicted),
        "id": id,
        "predicted_s": predicted.latency_s,
        "latency_s": observation.latency_s,
        "received_at": now,
        "sender": observation.sender,
    }


def _update_running(
    connection: Connection, key: _Key, owner: str, rows: list[dict[str, Any]], now: float, upsert: Callable[..., Any]
) -> bool:
    """Add observations of a device and a model to their running error; returns whether its row is new."""
    device, digest, model = key
    names = {"device": device, "device_digest": digest, "model_id": model, "sender": owner}
    empty = {**names, **_columns(Running(), now)}
    new_row = upsert(running).values(empty).on_conflict_do_nothing().returning(running.c.device)
    created = connection.execute(new_row).first() is not None
    key_matches = tuple_(running.c.device, running.c.device_digest, running.c.model_id) == tuple_(*key)
    # SQLAlchemy omits FOR UPDATE for SQLite, which does not need it.
    state = _running(connection.execute(select(running).where(key_matches).with_for_update()).one())
    state.add(*(np.array([row[c] for row in rows]) for c in ("latency_s", "predicted_s", "lower_s", "upper_s")))
    connection.execute(update(running).where(key_matches).values(**_columns(state, now)))
    return created


def _drop(connection: Connection, table: Any, max_rows: int, age: Any) -> None:
    """Delete the rows with the smallest ``age`` of the senders with most rows, until ``max_rows`` rows are left."""
    newest = func.max(age)
    counts = select(table.c.sender, func.count()).group_by(table.c.sender).order_by(newest)
    for sender, number in excess({sender: count for sender, count in connection.execute(counts)}, max_rows).items():
        # An alias: the inner query must not refer to the row of the outer one.
        inner = table.alias()
        oldest = select(*(inner.c[column.name] for column in table.primary_key))
        oldest = oldest.where(inner.c.sender == sender).order_by(inner.c[age.name]).limit(number)
        connection.execute(delete(table).where(tuple_(*table.primary_key).in_(oldest)))


def key_of(row: Mapping[str, Any]) -> _Key:
    """Device, its digest and the model of a row."""
    return row["device"], row["device_digest"], row["model_id"]


def parts(values: Sequence[str]) -> Iterable[Sequence[str]]:
    """Parts that fit into one statement."""
    return (values[i : i + AT_ONCE] for i in range(0, len(values), AT_ONCE))


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


T = TypeVar("T")

#: Number of stored programs after which the limits are checked.
_CHECK_EACH = 256
#: Minimum time between two updates of a program's time of last use, because a write per use is expensive.
_USED_AGAIN_S = 3600.0
#: Time between two attempts to open the database, in seconds.
_RETRY_S = 1.0


@dataclass(frozen=True)
class Summary:
    """Error of one model on one device; ``last_at``: Unix time of the last observation."""

    device: str
    device_digest: str
    model_id: str
    figures: MeasuredErrors
    last_at: float


#: PostgreSQL's error codes of a transaction that it aborted to end a deadlock, and of one that stored the same receipt
#: at the same time as another. The next attempt succeeds.
_ABORTED = ("40P01", "23505")
_HASH = re.compile("[0-9a-f]{32}")


class ObservationStore:
    """Access to the tables. The methods block, and are safe between threads and processes.

    Every method raises :class:`StoreUnavailableError` while the database is unavailable; the next call tries again.
    ``database``: as :func:`cdmpp_server.database.database_url` reads it. ``max_programs``, ``max_program_bytes``: of
    stored programs, exceeded by a few for a while; the least recently used are removed first. ``max_observations``:
    exceeded by 1 % for a while; the senders with most lose their oldest. Attribute ``signer``, which makes and reads
    prediction ids, is None until the database was opened for the first time.
    """

    def __init__(
        self,
        database: str,
        max_programs: int = 100_000,
        max_program_bytes: int = 2**30,
        max_observations: int = 1_000_000,
    ) -> None:
        self._engine: Engine = connect(database_url(database))
        self._writing = self._engine.execution_options(write=True)
        upserts = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
        self.upsert: Callable[..., Any] = upserts[self._engine.dialect.name]
        self._max_programs, self._max_program_bytes = max_programs, max_program_bytes
        self._max_observations = max_observations
        self._check_observations_each = max(1, max_observations // 100)
        # Check at the first write: another process may have stored too many.
        self._unchecked, self._unchecked_observations = _CHECK_EACH, self._check_observations_each
        self.signer: Signer | None = None
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

    def add(self, observed: Sequence[Observation]) -> list[Stored]:
        """Store observations in one transaction, which is on disk when this returns; results are in order."""
        if not observed:
            return []
        results: list[list[Stored]] = []

        def work(connection: Connection) -> None:
            results.append(add_observations(connection, observed, time.time(), self.upsert))
            if self._unchecked_observations + len(observed) >= self._check_observations_each:
                drop_oldest(connection, self._max_observations)

        self.write(work)
        with self._lock:
            unchecked = self._unchecked_observations + len(observed)
            self._unchecked_observations = unchecked % self._check_observations_each
        return results[-1]

    def summaries(self) -> list[Summary]:
        """Return the error of each model on each device, most recent first."""
        return [
            Summary(row.device, row.device_digest, row.model_id, state.figures(), row.last_at)
            for row, state in self.read(running_errors)
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

    def get_programs(self, hashes: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the programs of the known hashes."""
        documents: dict[str, dict[str, Any]] = {}
        used: list[str] = []
        now = time.time()
        for part in parts(sorted(hash for hash in set(hashes) if _HASH.fullmatch(hash))):
            query = select(programs).where(programs.c.hash.in_(part))
            for row in self.read(partial(_rows, query)):
                documents[row.hash] = json.loads(row.document)
                if now - row.used_at > _USED_AGAIN_S:
                    used.append(row.hash)
        for part in parts(used):
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
        for part in parts(removed):
            connection.execute(delete(programs).where(programs.c.hash.in_(part)))

    def _open(self) -> None:
        with self._lock:
            if self._created:
                return
            # Concurrent requests must not each wait for an unavailable database.
            if time.monotonic() - self._failed_at < _RETRY_S:
                raise StoreUnavailableError("the database could not be opened a moment ago")
            try:
                self.signer = Signer(create(self._engine))
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
                    if last or getattr(error.orig, "sqlstate", None) not in _ABORTED:
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


#: Maximum number of observations in one transaction.
MAX_ROWS = 20_000


class Writer:
    """A thread that writes all waiting observations in one transaction.

    ``add``: :meth:`cdmpp_server.observe.store.ObservationStore.add`. ``max_waiting``: maximum number of waiting
    observations; a larger call is accepted if nothing waits.
    """

    def __init__(self, add: Callable[[Sequence[Observation]], list[Stored]], max_waiting: int) -> None:
        self._add, self._max_waiting = add, max_waiting
        self._waiting: deque[tuple[Sequence[Observation], Future[list[Stored]]]] = deque()
        self._rows = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="observations", daemon=True)
        self._thread.start()

    async def write(self, observed: Sequence[Observation]) -> list[Stored]:
        """Store observations and return their results once they are on disk.

        Raises ProblemError: 503 if too many observations wait.
        Raises StoreUnavailableError: the database cannot be written; none of the observations was stored.
        """
        future: Future[list[Stored]] = Future()
        with self._changed:
            if self._closed:
                raise StoreUnavailableError("the service is being stopped")
            if self._rows and self._rows + len(observed) > self._max_waiting:
                detail = f"{self._rows} observations wait to be written"
                raise ProblemError("overloaded", detail, "retry after a second")
            self._waiting.append((observed, future))
            self._rows += len(observed)
            self._changed.notify()
        # Shielded: observations are written even if the client disconnects.
        return await asyncio.shield(asyncio.wrap_future(future))

    def close(self) -> None:
        """Write the waiting observations, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                calls = [self._waiting.popleft()]
                rows = len(calls[0][0])
                while self._waiting and rows + len(self._waiting[0][0]) <= MAX_ROWS:
                    calls.append(self._waiting.popleft())
                    rows += len(calls[-1][0])
            error: Exception | None = None
            results: list[Stored] = []
            try:
                results = self._add([observation for observed, _ in calls for observation in observed])
            except Exception as failure:
                error = failure
            # Before the callers continue: their rows no longer take room in the queue.
            with self._changed:
                self._rows -= rows
            for observed, future in calls:
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(results[: len(observed)])
                    results = results[len(observed) :]
