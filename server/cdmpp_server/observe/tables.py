"""The database behind the service: SQLite in a file of its own, or PostgreSQL by URL.

SQLite runs in WAL mode with ``synchronous=FULL``: a transaction that was answered for is on the disk, also
when the power fails. Several workers share the file; each write transaction takes the lock at its
beginning, so that it can wait for it (a lock asked for later cannot be waited for).
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
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
    event,
    insert,
    make_url,
    select,
    text,
)
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from cdmpp.errors import MissingDependencyError

SCHEMA_VERSION = 1
#: How long a connection or a lock is waited for.
WAIT_S = 5
# Any number, the same in every worker: PostgreSQL's lock around the creation of the tables.
_CREATION_LOCK = 0x63646D70

metadata = MetaData()

#: One row: what the tables look like.
schema_version = Table("cdmpp_schema", metadata, Column("version", Integer, primary_key=True))

#: Measured latencies beside what was predicted; never changed, never deleted.
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
)

#: :class:`cdmpp_server.observe.figures.Running` of each model on each device, written with the observations.
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
)
Index("cdmpp_running_last", running.c.last_at)

#: Programs that clients registered, by structural hash.
programs = Table(
    "cdmpp_programs",
    metadata,
    Column("hash", String(32), primary_key=True),
    Column("document", Text, nullable=False),
    Column("size", Integer, nullable=False),
    Column("used_at", Double, nullable=False),
)
# It covers what the choice of the least recently used reads.
Index("cdmpp_programs_used", programs.c.used_at, programs.c.size)


class SchemaVersionError(Exception):
    """The database belongs to another version of the service."""


def database_url(database: str | None) -> URL:
    """The URL of a ``database`` setting: nothing, the path of a SQLite file, or an SQLAlchemy URL.

    Raises
    ------
    ValueError
        It is neither a path nor a URL of SQLite or PostgreSQL; or there is none, and no home folder.
    """
    if database is None:
        state = os.environ.get("XDG_STATE_HOME", "")
        # The XDG specification: a relative path is to be ignored.
        try:
            folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
        except RuntimeError:
            raise ValueError("there is no home folder for the database: set `database`") from None
        return URL.create("sqlite", database=str(folder / "cdmpp" / "service.sqlite"))
    if "://" not in database and database not in ("", ":memory:"):
        return URL.create("sqlite", database=database)
    try:
        url = make_url(database)
        dialect = url.get_dialect().name
    except (ArgumentError, NoSuchModuleError):
        dialect = ""
    # SQLite without a file would forget what was accepted.
    if dialect not in ("sqlite", "postgresql") or url.database in (None, "", ":memory:"):
        # Without the text: it may hold a password.
        raise ValueError("database should be a path, sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME")
    return url


def check_database(database: str | None) -> str | None:
    """The setting as it is; raises what :func:`database_url` raises."""
    database_url(database)
    return database


def connect(url: URL) -> Engine:
    """An engine whose connections are set up; nothing is opened yet.

    Its transactions read; those of ``engine.execution_options(write=True)`` write.

    Raises
    ------
    MissingDependencyError
        PostgreSQL's driver is not installed.
    """
    if url.get_dialect().name == "postgresql":
        try:
            return create_engine(
                url,
                connect_args={
                    "connect_timeout": WAIT_S,
                    "application_name": "cdmpp",
                    # A server that went away without a word is given up, not waited for for hours.
                    "tcp_user_timeout": 1000 * 2 * WAIT_S,
                    "keepalives_idle": WAIT_S,
                    "keepalives_interval": WAIT_S,
                    "keepalives_count": 2,
                },
                # A connection that the database closed meanwhile is replaced, not an error.
                pool_pre_ping=True,
                pool_timeout=WAIT_S,
            )
        except ImportError as error:
            raise MissingDependencyError(
                f"this database needs a driver: {error}",
                hint="pip install '.[postgres]' in a checkout of cdmpp, and a URL that begins with postgresql+psycopg://",
            ) from None
    engine = create_engine(url, connect_args={"timeout": WAIT_S}, pool_timeout=WAIT_S)

    @event.listens_for(engine, "connect")
    def set_up(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # transactions are begun below
        _to_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _to_wal(connection: sqlite3.Connection) -> None:
    # Changing the mode of a new file does not wait for a lock as everything else does.
    give_up = time.monotonic() + WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(0.02)


def create(engine: Engine) -> None:
    """Create the tables where they are missing; any number of workers may do so at a time.

    Raises
    ------
    SchemaVersionError
        The database was written by another version of the service.
    """
    if engine.dialect.name == "sqlite":
        Path(engine.url.database or "").parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with engine.execution_options(write=True).begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _CREATION_LOCK})
        metadata.create_all(connection)
        found = connection.execute(select(schema_version.c.version)).scalar()
        if found is None:
            connection.execute(insert(schema_version), {"version": SCHEMA_VERSION})
        elif found != SCHEMA_VERSION:
            raise SchemaVersionError(
                f"the database has schema version {found}, this service reads version {SCHEMA_VERSION}"
            )
