"""Tables of the service's database, a SQLite file or PostgreSQL by URL: their creation, upgrade and errors.

SQLite runs in WAL mode with ``synchronous=FULL``: a confirmed transaction is on disk, even after a power
failure. Several workers share the file. Each write transaction takes the lock at its beginning, because
SQLite does not wait for a lock that a transaction requests later.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from secrets import token_bytes
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    delete,
    event,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateColumn

from cdmpp.errors import MissingDependencyError
from cdmpp_server.observe.figures import RATIO_LIMIT
from cdmpp_server.problems import ProblemError

SCHEMA_VERSION = 2
#: Time limit for a connection or a lock, in seconds.
WAIT_S = 5

metadata = MetaData()

#: One row: version of the tables.
schema_version = Table("cdmpp_schema", metadata, Column("version", Integer, primary_key=True))

#: One row: the key that signs prediction ids; all workers of the database have it.
secrets = Table(
    "cdmpp_secrets",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("signing_key", LargeBinary, nullable=False),
)

#: Measured and predicted latencies; rows are never changed. Beyond a limit the oldest of the sender with most are
#: deleted.
observations = Table(
    "cdmpp_observations",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("program_hash", String(32), nullable=False),
    Column("device", Text, nullable=False),
    Column("device_digest", String(16), nullable=False),
    Column("backend", String(16), nullable=False),
    Column("protocol", String(16), nullable=False),
    Column("framework", String(16)),
    Column("model_id", Text, nullable=False),
    Column("predicted_s", Double, nullable=False),
    Column("lower_s", Double, nullable=False),
    Column("upper_s", Double, nullable=False),
    Column("latency_s", Double, nullable=False),
    Column("received_at", Double, nullable=False),
    # Who reported it, and the receipt of its prediction: each counts once.
    Column("sender", String(32), nullable=False, server_default=""),
    Column("receipt", String(16)),
)
Index("cdmpp_observations_sender", observations.c.sender, observations.c.id)
Index("cdmpp_observations_receipt", observations.c.receipt, unique=True)

#: :class:`cdmpp_server.observe.figures.Running` of each model on each device, updated with the observations.
running = Table(
    "cdmpp_running",
    metadata,
    Column("device", Text, primary_key=True),
    Column("device_digest", String(16), primary_key=True),
    Column("model_id", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("total", Double, nullable=False),
    Column("squares", Double, nullable=False),
    Column("relative_error", Double, nullable=False),
    Column("covered", BigInteger, nullable=False),
    Column("recent", LargeBinary, nullable=False),
    Column("reference_count", Integer, nullable=False),
    Column("reference_total", Double, nullable=False),
    Column("reference_squares", Double, nullable=False),
    Column("last_at", Double, nullable=False),
    # Empty for a known device and the loaded model; else the sender whose observation created the row.
    Column("sender", String(32), nullable=False, server_default=""),
)
Index("cdmpp_running_last", running.c.last_at)

#: Registered programs, by structural hash.
programs = Table(
    "cdmpp_programs",
    metadata,
    Column("hash", String(32), primary_key=True),
    Column("document", Text, nullable=False),
    Column("size", Integer, nullable=False),
    Column("used_at", Double, nullable=False),
)
# Covers the query for the least recently used programs.
Index("cdmpp_programs_used", programs.c.used_at, programs.c.size)


class SchemaVersionError(Exception):
    """The database has the schema of another version of the service."""


def connect(url: URL) -> Engine:
    """Create an engine; it opens no connection yet.

    Its transactions read; transactions of ``engine.execution_options(write=True)`` write.

    Raises MissingDependencyError: PostgreSQL's driver is not installed.
    """
    if url.get_dialect().name == "postgresql":
        try:
            return create_engine(
                url,
                connect_args={
                    "connect_timeout": WAIT_S,
                    "application_name": "cdmpp",
                    # Give up a server that no longer responds, instead of waiting for hours.
                    "tcp_user_timeout": 1000 * 2 * WAIT_S,
                    "keepalives_idle": WAIT_S,
                    "keepalives_interval": WAIT_S,
                    "keepalives_count": 2,
                },
                # Replace a connection that the database has closed.
                pool_pre_ping=True,
                pool_timeout=WAIT_S,
            )
        except ImportError as error:
            raise MissingDependencyError(
                f"the driver of this database is not installed: {error}",
                hint="pip install '.[postgres]' in a checkout of cdmpp, and a URL that begins with postgresql+psycopg://",
            ) from None
    engine = create_engine(url, connect_args={"timeout": WAIT_S}, pool_timeout=WAIT_S)

    @event.listens_for(engine, "connect")
    def set_up(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # `begin` below starts transactions
        _to_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _to_wal(connection: sqlite3.Connection) -> None:
    # The change of mode of a new file does not wait for the lock, unlike other statements.
    give_up = time.monotonic() + WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(0.02)


# Key of PostgreSQL's advisory lock around the creation of the tables; any constant.
_CREATION_LOCK = 0x63646D70
#: Versions of the schema that are upgraded.
_UPGRADED = (1,)
_KEY_BYTES = 32


def create(engine: Engine) -> bytes:
    """Create or upgrade the tables; several workers may call it at a time.

    Returns the key that signs prediction ids; the first caller creates it.
    Raises SchemaVersionError: the database was written by a later version of the service.
    """
    if engine.dialect.name == "sqlite":
        Path(engine.url.database or "").parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with engine.execution_options(write=True).begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _CREATION_LOCK})
        metadata.create_all(connection)
        version = connection.execute(select(schema_version.c.version)).scalar()
        if version is None:
            connection.execute(insert(schema_version), {"version": SCHEMA_VERSION})
        elif version in _UPGRADED:
            _upgrade(connection)
            connection.execute(update(schema_version).values(version=SCHEMA_VERSION))
        elif version != SCHEMA_VERSION:
            raise SchemaVersionError(
                f"the database has schema version {version}, this service needs version {SCHEMA_VERSION}"
            )
        key: bytes | None = connection.execute(select(secrets.c.signing_key)).scalar()
        if key is None:
            key = token_bytes(_KEY_BYTES)
            connection.execute(insert(secrets), {"id": 1, "signing_key": key})
        return bytes(key)


def _upgrade(connection: Connection) -> None:
    """Add missing columns and indexes, and remove error figures that no clipped ratios can give.

    Workers of the earlier version continue to work: added columns have a default in the database.
    """
    inspector = inspect(connection)
    preparer = connection.dialect.identifier_preparer
    for table in metadata.sorted_tables:
        known = {column["name"] for column in inspector.get_columns(table.name)}
        for column in table.columns:
            if column.name not in known:
                definition = CreateColumn(column).compile(dialect=connection.dialect)
                connection.exec_driver_sql(f"ALTER TABLE {preparer.format_table(table)} ADD COLUMN {definition}")
        indexes = {index["name"] for index in inspector.get_indexes(table.name)}
        for index in table.indexes:
            if index.name not in indexes:
                index.create(connection)
    largest_gap = (RATIO_LIMIT - 1) * (1 + 1e-9)
    connection.execute(delete(running).where(running.c.relative_error > largest_gap * running.c.number))


_log = logging.getLogger(__name__)
#: Minimum time between two lines about failed calls, in seconds.
SAY_AGAIN_S = 60.0


class StoreUnavailableError(ProblemError):
    """The database cannot be reached, read or written; nothing of the call was stored (503)."""

    def __init__(self, detail: str) -> None:
        super().__init__("store_unavailable", detail, "nothing of this request was stored; retry after some seconds")


class AsUnavailable:
    """Context that converts errors of the database to :class:`StoreUnavailableError`. Safe between threads.

    The log gets the original message of the first failure, at most one more line per :data:`SAY_AGAIN_S` with the
    number of failures, and one line when calls succeed again.

    ``verb``: what the calls do: "read" or "written". ``clock``: returns monotonic seconds.
    """

    def __init__(self, verb: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._verb, self._clock = verb, clock
        self._lock = threading.Lock()
        self._said_at: float | None = None
        self._unsaid = 0
        self._out = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            if self._out:
                self._back()
        elif isinstance(error, SQLAlchemyError | OSError | SchemaVersionError):
            # `orig` omits the statement and its parameters, which are long.
            self._failed(getattr(error, "orig", None) or error)
            raise StoreUnavailableError(f"the database cannot be {self._verb}") from error

    def _failed(self, cause: BaseException) -> None:
        with self._lock:
            now = self._clock()
            if self._said_at is not None and now - self._said_at < SAY_AGAIN_S:
                self._unsaid += 1
                return
            before = f" ({self._unsaid} more calls failed since the last such line)" if self._unsaid else ""
            self._said_at, self._unsaid, self._out = now, 0, True
        _log.error("the database cannot be %s: %s%s", self._verb, str(cause).replace("\n", " ")[:500], before)

    def _back(self) -> None:
        with self._lock:
            if not self._out:
                return
            self._out, failed = False, self._unsaid
            self._unsaid = 0
        _log.warning("the database can be %s again; %d more calls had failed", self._verb, failed)
