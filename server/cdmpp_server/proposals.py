"""Proposals: adapted models that a job has made. An administrator may take one; all workers then load it.

They are in the database, so any worker can make one.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Column, Double, Index, LargeBinary, String, Table, Text, delete, select, update
from sqlalchemy.engine import Connection

from cdmpp.errors import CdmppError
from cdmpp.model.artifact.load import ADAPTER, on_base, without_adapter
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.observe.figures import RECENT
from cdmpp_server.observe.store import ObservationStore
from cdmpp_server.observe.tables import StoreUnavailableError, metadata

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


#: Maximum number of proposals that were not taken; the oldest are removed first.
MAX_KEPT = 100


class Key(NamedTuple):
    """A served model on a device."""

    device: str
    device_digest: str
    model_id: str


@dataclass(frozen=True)
class Proposal:
    """An adapted model that can be taken: the contents of its two files."""

    job_id: str
    base_model_id: str
    manifest: str
    adapter: bytes


class ProposalStore:
    """Access to the proposals. Calls block and raise :class:`cdmpp_server.observe.tables.StoreUnavailableError`.

    ``store``: holds the database connection.
    """

    def __init__(self, store: ObservationStore) -> None:
        self._store = store

    def is_due(self, key: Key, number: int) -> bool:
        """Whether :meth:`claim` would reserve the proposal, without writing."""
        row = self._first(select(proposals.c.number, proposals.c.taken_at).where(_is(key)))
        return row is None or (row.taken_at is None and row.number <= number - RECENT)

    def claim(self, key: Key, number: int) -> str | None:
        """Reserve the proposal of a model on a device and return its id; None where there is one already.

        An earlier proposal that was not taken is replaced after as many further observations as the drift is measured
        from; ``number``: observations of the model on the device.
        """
        id, now = secrets.token_hex(16), time.time()
        row = {"id": id, **key._asdict(), "number": number, "created_at": now}
        old_or_none = proposals.c.taken_at.is_(None) & (proposals.c.number <= number - RECENT)
        empty = dict.fromkeys(("job_id", "base_model_id", "manifest", "adapter"))
        claimed: list[bool] = []

        def work(connection: Connection) -> None:
            connection.execute(self._store.upsert(proposals).values(row).on_conflict_do_nothing())
            connection.execute(update(proposals).where(_is(key), old_or_none).values(**row, **empty))
            # Not the row counts: a driver may not know them.
            claimed.append(connection.execute(select(proposals.c.id).where(_is(key))).scalar() == id)
            untaken = select(proposals.c.id).where(proposals.c.taken_at.is_(None))
            extra = untaken.order_by(proposals.c.created_at.desc()).offset(MAX_KEPT).limit(MAX_KEPT)
            ids = [untaken_row.id for untaken_row in connection.execute(extra)]
            if ids:
                connection.execute(delete(proposals).where(proposals.c.id.in_(ids)))

        self._store.write(work)
        return id if claimed[-1] else None

    def submitted(self, id: str, job_id: str) -> None:
        """Store the job of a reserved proposal."""
        self._set(id, {"job_id": job_id})

    def release(self, id: str) -> None:
        """Remove a reserved proposal whose job could not be submitted."""
        self._store.write(lambda connection: connection.execute(delete(proposals).where(proposals.c.id == id)))

    def finish(self, id: str, base_model_id: str, manifest: str, adapter: bytes) -> None:
        """Store the adapted model of a proposal."""
        self._set(id, {"base_model_id": base_model_id, "manifest": manifest, "adapter": adapter})

    def key(self, id: str) -> Key | None:
        """Model and device of a proposal; None if it was replaced or removed."""
        row = self._first(select(proposals).where(proposals.c.id == id))
        return None if row is None else Key(row.device, row.device_digest, row.model_id)

    def jobs(self) -> dict[Key, str]:
        """Jobs of the proposals, by model and device."""
        query = select(proposals.c.device, proposals.c.device_digest, proposals.c.model_id, proposals.c.job_id)
        query = query.where(proposals.c.job_id.is_not(None))
        rows = self._store.read(lambda connection: connection.execute(query).all())
        return {Key(row.device, row.device_digest, row.model_id): row.job_id for row in rows}

    def get(self, job_id: str) -> Proposal | None:
        """The adapted model that a job has proposed; None if there is none."""
        return _proposal(self._first(select(proposals).where(proposals.c.job_id == job_id)))

    def taken(self) -> Proposal | None:
        """The proposal that was taken; None if there is none."""
        return _proposal(self._first(select(proposals).where(proposals.c.taken_at.is_not(None))))

    def take(self, job_id: str | None) -> None:
        """Take the proposal of a job instead of the one that was taken before; None: take none."""

        def work(connection: Connection) -> None:
            connection.execute(update(proposals).values(taken_at=None))
            if job_id is not None:
                mark = update(proposals).where(proposals.c.job_id == job_id)
                connection.execute(mark.values(taken_at=time.time()))

        self._store.write(work)

    def _first(self, query: Any) -> Any:
        return self._store.read(lambda connection: connection.execute(query).first())

    def _set(self, id: str, values: dict[str, Any]) -> None:
        statement = update(proposals).where(proposals.c.id == id).values(**values)
        self._store.write(lambda connection: connection.execute(statement))


def _is(key: Key) -> Any:
    device = (proposals.c.device == key.device) & (proposals.c.device_digest == key.device_digest)
    return device & (proposals.c.model_id == key.model_id)


def _proposal(row: Any) -> Proposal | None:
    if row is None or row.adapter is None:
        return None
    return Proposal(row.job_id, row.base_model_id, row.manifest, row.adapter)


_log = logging.getLogger(__name__)


def with_taken(predictor: LatencyPredictor, proposals: ProposalStore) -> tuple[LatencyPredictor, str | None]:
    """A loaded model with the proposal that was taken, and the proposal's job, at the start of the service.

    The service starts without the proposal if that cannot be read or applied; the log has the reason.
    """
    try:
        proposal = proposals.taken()
    except StoreUnavailableError:
        _log.error("the database is unavailable: a proposal that was taken is not loaded")
        return predictor, None
    job_id = None if proposal is None else proposal.job_id
    try:
        return with_proposal(predictor, proposal), job_id
    except CdmppError as error:
        _log.error("the proposal of job %s cannot be loaded: %s", job_id, error)
        return predictor, job_id


def with_proposal(predictor: LatencyPredictor, proposal: Proposal | None) -> LatencyPredictor:
    """A loaded model with a proposal instead of its adapter; the model itself if the proposal is for another base.

    Raises ArtifactError: the proposal was made by another version of the service.
    """
    if proposal is None:
        return predictor
    base = without_adapter(predictor.artifact)
    if base.model_id != proposal.base_model_id:
        _log.warning("job %s proposed a model on %s: not loaded", proposal.job_id, proposal.base_model_id)
        return predictor
    adapted = on_base(base, proposal.adapter, json.loads(proposal.manifest), Path(ADAPTER))
    return LatencyPredictor(adapted, cache=predictor.cache)
