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
    # The body as sent and the prices of its programs (JSON): enough to repeat the search.
    Column("request", LargeBinary, nullable=False),
    Column("prices", LargeBinary, nullable=False),
    Column("budget_s", Double),
    Column("progress", Double, nullable=False),
    Column("best", Double),
    Column("bound", Double),
    # JSON: the best answer so far, at the end the final one.
    Column("answer", Text),
    # JSON: the reason of a failure.
    Column("error", Text),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    # The runner that executes the job, and the time at which its lease ends unless it is renewed.
    Column("owner", String(32)),
    Column("lease_until", Double),
    Column("attempts", Integer, nullable=False),
    # Who submitted the job, and its place in the order between senders.
    Column("sender", String(32), nullable=False, server_default=""),
    Column("turn", Double, nullable=False, server_default="0"),
)
Index("cdmpp_jobs_state", jobs.c.state, jobs.c.created_at)
