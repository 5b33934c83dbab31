"""Persistent store of observations, their running error, and registered programs."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Engine, Row, Select, Update, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from cdmpp_server.database_url import database_url
from cdmpp_server.observe import records
from cdmpp_server.observe.create import create
from cdmpp_server.observe.figures import Figures
from cdmpp_server.observe.ids import Signer
from cdmpp_server.observe.outage import AsUnavailable, StoreUnavailableError
from cdmpp_server.observe.records import Observation, Stored, parts
from cdmpp_server.observe.tables import connect, programs

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
    figures: Figures
    last_at: float


#: PostgreSQL's error codes of a transaction that it aborted to end a deadlock, and of one that stored the same receipt
#: at the same time as another. The next attempt succeeds.
_ABORTED = ("40P01", "23505")
_HASH = re.compile("[0-9a-f]{32}")


class Store:
    """Access to the tables. The methods block, and are safe between threads and processes.

    Parameters
    ----------
    database : str
        As :func:`cdmpp_server.database_url.database_url` reads it.
    max_programs, max_program_bytes : int
        Maximum number and size of stored programs, exceeded by a few for a while. The least recently used are
        removed first.
    max_observations : int
        Maximum number of observations, exceeded by 1 % for a while. The senders with most lose their oldest.

    Attributes
    ----------
    signer : Signer or None
        Makes and reads prediction ids; None until the database was opened for the first time.

    Notes
    -----
    Every method raises :class:`StoreUnavailableError` while the database is unavailable; the next call tries
    again.
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
            results.append(records.add(connection, observed, time.time(), self.upsert))
            if self._unchecked_observations + len(observed) >= self._check_observations_each:
                records.drop_oldest(connection, self._max_observations)

        self.write(work)
        with self._lock:
            unchecked = self._unchecked_observations + len(observed)
            self._unchecked_observations = unchecked % self._check_observations_each
        return results[-1]

    def summaries(self) -> list[Summary]:
        """Return the error of each model on each device, most recent first."""
        return [
            Summary(row.device, row.device_digest, row.model_id, state.figures(), row.last_at)
            for row, state in self.read(records.summaries)
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
