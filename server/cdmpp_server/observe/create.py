"""Creation of the tables, and upgrade of a database that an earlier version of the service created."""

from __future__ import annotations

from pathlib import Path
from secrets import token_bytes

from sqlalchemy import Engine, delete, insert, inspect, select, text, update
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateColumn

from cdmpp_server.observe.figures import RATIO_LIMIT
from cdmpp_server.observe.tables import SCHEMA_VERSION, SchemaVersionError, metadata, running, schema_version, secrets

# Key of PostgreSQL's advisory lock around the creation of the tables; any constant.
_CREATION_LOCK = 0x63646D70
#: Versions of the schema that are upgraded.
_UPGRADED = (1,)
_KEY_BYTES = 32


def create(engine: Engine) -> bytes:
    """Create or upgrade the tables; several workers may call it at a time.

    Returns
    -------
    bytes
        The key that signs prediction ids; the first caller creates it.

    Raises
    ------
    SchemaVersionError
        The database was written by a later version of the service.
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
    most = (RATIO_LIMIT - 1) * (1 + 1e-9)
    connection.execute(delete(running).where(running.c.relative_error > most * running.c.number))
