"""The URL of the service's database, from its setting."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError


def database_url(database: str | None) -> URL:
    """Return the URL of a ``database`` setting: None, path of a SQLite file, or SQLAlchemy URL.

    Raises
    ------
    ValueError
        It is neither a path nor a URL of SQLite or PostgreSQL; or it is None and there is no home folder.
    """
    if database is None:
        state = os.environ.get("XDG_STATE_HOME", "")
        # The XDG specification: a relative path is to be ignored.
        try:
            folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
        except RuntimeError:
            raise ValueError("there is no home folder for the database: set CDMPP_DATABASE") from None
        return URL.create("sqlite", database=str(folder / "cdmpp" / "service.sqlite"))
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
    database_url(database)
    return database
