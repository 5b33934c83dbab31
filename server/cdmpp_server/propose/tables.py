"""The table of proposals, in the database of the service."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, Index, LargeBinary, String, Table, Text

from cdmpp_server.observe.tables import metadata

#: At most one proposal of each model on each device.
proposals = Table(
    "cdmpp_proposals",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("device", Text, nullable=False),
    Column("device_digest", String(16), nullable=False),
    # The served model, whose predictions were observed.
    Column("model_id", Text, nullable=False),
    # Observations of that model on the device when the job was submitted.
    Column("number", BigInteger, nullable=False),
    Column("job_id", String(32)),
    # The adapted model: its base, and the contents of its two files.
    Column("base_model_id", Text),
    Column("manifest", Text),
    Column("adapter", LargeBinary),
    # When an administrator took it; null again when another one or none was taken.
    Column("taken_at", Double),
    Column("created_at", Double, nullable=False),
)
Index("cdmpp_proposals_key", proposals.c.device, proposals.c.device_digest, proposals.c.model_id, unique=True)
Index("cdmpp_proposals_job", proposals.c.job_id)
