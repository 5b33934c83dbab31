"""Tables of the service's database: a SQLite file, or PostgreSQL by URL.

SQLite runs in WAL mode with ``synchronous=FULL``: a confirmed transaction is on disk, even after a power
failure. Several workers share the file. Each write transaction takes the lock at its beginning, because
SQLite does not wait for a lock that a transaction requests later.
"""

from __future__ import annotations

import sqlite3
import time
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
)
from sqlalchemy.engine import URL, Connection

from cdmpp.errors import MissingDependencyError

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
