"""The clock of the database as a SQL expression: all workers of a database use it instead of their own clocks."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction


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
