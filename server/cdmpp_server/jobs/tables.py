"""The table of jobs, in the database of the service."""

from __future__ import annotations

from sqlalchemy import Column, Double, Index, Integer, LargeBinary, String, Table, Text

from cdmpp_server.observe.tables import metadata

jobs = Table(
    "cdmpp_jobs",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("kind", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    # The body as sent and the prices of its programs (JSON): all that doing it again needs.
    Column("request", LargeBinary, nullable=False),
    Column("prices", LargeBinary, nullable=False),
    Column("budget_s", Double),
    Column("progress", Double, nullable=False),
    Column("best", Double),
    Column("bound", Double),
    # JSON: the best so far, then the answer.
    Column("answer", Text),
    # JSON: why there is none.
    Column("error", Text),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    # The process that does it, and until when that is believed without a word from it.
    Column("owner", String(32)),
    Column("lease_until", Double),
    Column("attempts", Integer, nullable=False),
)
Index("cdmpp_jobs_state", jobs.c.state, jobs.c.created_at)
