"""The database of the service: its URL, from the setting, and its clock."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Double, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

from cdmpp.model.artifact.folder import default_model


def default_database(model: Path | None) -> str:
    """Path of the SQLite file of services of one model folder, in the user's state folder.

    Each model folder has a file of its own, so that a service shows no observations, programs and jobs of another.

    ``model``: None is the model in the package.
    Raises ValueError: there is no home folder.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    try:
        folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        raise ValueError("there is no home folder for the database: set CDMPP_DATABASE") from None
    path = (model or default_model()).resolve()
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    return str(folder / "cdmpp" / f"service-{re.sub('[^A-Za-z0-9._-]', '_', path.name)[:64]}-{digest}.sqlite")


def database_url(database: str) -> URL:
    """Return the URL of a database: path of a SQLite file, or SQLAlchemy URL.

    Raises ValueError: it is neither a path nor a URL of SQLite or PostgreSQL.
    """
    if "://" not in database and database not in ("", ":memory:"):
        return URL.create("sqlite", database=database)
    try:
        url = make_url(database)
        dialect = url.get_dialect().name
    except (ArgumentError, NoSuchModuleError):
        dialect = ""
    # SQLite in memory would lose accepted observations.
    if dialect not in ("sqlite", "postgresql") or url.database in (None, "", ":memory:"):
        # The message omits the URL: it may contain a password.
        raise ValueError("database should be a path, sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME")
    return url


def check_database(database: str | None) -> str | None:
    """Return the setting unchanged; raises as :func:`database_url`."""
    if database is not None:
        database_url(database)
    return database


class now_s(GenericFunction[float]):  # noqa: N801  # a SQL function
    """Seconds since 1970 by the database's clock, to the millisecond at least."""

    type = Double()
    inherit_cache = True


@compiles(now_s, "postgresql")
def _postgresql(element: now_s, compiler: Any, **options: Any) -> str:
    # Not now(), which is the beginning of the transaction: it may have waited for a lock since.
    return "extract(epoch FROM clock_timestamp())::double precision"


@compiles(now_s, "sqlite")
def _sqlite(element: now_s, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"
