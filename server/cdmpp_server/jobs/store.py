"""Jobs in the database: any worker of it takes them up, and answers for all."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Row, and_, delete, func, insert, or_, select, update
from sqlalchemy.engine import Connection

from cdmpp_server.jobs.tables import jobs
from cdmpp_server.observe.store import Store

State = Literal["queued", "running", "done", "cancelled", "failed"]
FINISHED: tuple[State, ...] = ("done", "cancelled", "failed")
#: A job whose worker has said nothing for so long is anybody's.
LEASE_S = 6.0
#: A job that so many processes have died of is given up.
MAX_ATTEMPTS = 3
_SHOWN = (
    jobs.c.id,
    jobs.c.kind,
    jobs.c.state,
    jobs.c.progress,
    jobs.c.best,
    jobs.c.bound,
    jobs.c.answer,
    jobs.c.error,
    jobs.c.created_at,
    jobs.c.updated_at,
)


@dataclass(frozen=True)
class Shown:
    """A job as a client sees it; ``answer`` and ``error`` are JSON."""

    id: str
    kind: str
    state: State
    progress: float
    best: float | None
    bound: float | None
    answer: str | None
    error: str | None
    created_at: float
    updated_at: float


@dataclass(frozen=True)
class Taken:
    """A job to be done."""

    id: str
    kind: str
    request: bytes
    prices: bytes
    budget_s: float | None
    attempts: int


class FullError(Exception):
    """As many jobs wait or run as may."""


class JobStore:
    """The jobs. Calls block and raise :class:`cdmpp_server.observe.store.StoreUnavailableError`, as the store's do.

    Parameters
    ----------
    store : Store
        Its database.
    max_jobs : int
        Jobs that may wait or run.
    max_kept : int
        Finished jobs that are kept; the oldest go first.
    keep_s : float
        How long a finished job is kept.
    """

    def __init__(self, store: Store, max_jobs: int, max_kept: int, keep_s: float) -> None:
        self._store = store
        self._max_jobs, self._max_kept, self._keep_s = max_jobs, max_kept, keep_s

    def add(self, kind: str, request: bytes, prices: bytes, budget_s: float | None) -> str:
        """Keep a job; its identity: 128 random bits, which nobody else can guess.

        Raises
        ------
        FullError
        """
        id, now = secrets.token_hex(16), time.time()
        row = {
            "id": id,
            "kind": kind,
            "state": "queued",
            "request": request,
            "prices": prices,
            "budget_s": budget_s,
            "progress": 0.0,
            "created_at": now,
            "updated_at": now,
            "attempts": 0,
        }

        def work(connection: Connection) -> None:
            self._drop_old(connection, now)
            open_jobs = select(func.count()).where(jobs.c.state.in_(("queued", "running")))
            count = connection.execute(open_jobs).scalar() or 0
            if count >= self._max_jobs:
                raise FullError(f"{count} jobs wait or run")
            connection.execute(insert(jobs), row)

        self._store.write(work)
        return id

    def get(self, id: str) -> Shown | None:
        """The job, or None."""
        found = self._store.read(lambda connection: connection.execute(_one(id)).first())
        return None if found is None else _shown(found)

    def cancel(self, id: str) -> Shown | None:
        """End a job that waits or runs, with what it has; any other stays as it is. None: unknown."""
        out: list[Row[Any] | None] = []
        end = (
            update(jobs)
            .where(jobs.c.id == id, jobs.c.state.in_(("queued", "running")))
            .values(state="cancelled", updated_at=time.time())
        )

        def work(connection: Connection) -> None:
            connection.execute(end)
            out.append(connection.execute(_one(id)).first())

        self._store.write(work)
        found = out[-1]
        return None if found is None else _shown(found)

    def waiting(self) -> bool:
        """Whether there is a job to take; reads alone."""
        query = select(jobs.c.id).where(_free(time.time())).limit(1)
        return self._store.read(lambda connection: connection.execute(query).first()) is not None

    def take(self, owner: str) -> Taken | None:
        """Become the worker of the oldest job that has none."""
        out: list[Taken | None] = []

        def work(connection: Connection) -> None:
            now = time.time()
            oldest = select(jobs).where(_free(now)).order_by(jobs.c.created_at).limit(1)
            # SQLite knows no row locks and needs none: SQLAlchemy leaves them out there.
            row = connection.execute(oldest.with_for_update(skip_locked=True)).first()
            if row is None:
                out.append(None)
                return
            values = {"owner": owner, "lease_until": now + LEASE_S, "updated_at": now}
            mine = update(jobs).where(jobs.c.id == row.id)
            connection.execute(mine.values(state="running", attempts=row.attempts + 1, **values))
            out.append(Taken(row.id, row.kind, row.request, row.prices, row.budget_s, row.attempts + 1))

        self._store.write(work)
        return out[-1]

    def beat(self, id: str, owner: str, told: Mapping[str, Any]) -> bool:
        """Say that a job is being done, with what is new of it; False where it is not this worker's any more.

        Parameters
        ----------
        told : mapping
            Columns: progress, best, bound, answer.
        """
        now = time.time()
        values = {**told, "lease_until": now + LEASE_S, "updated_at": now}
        return self._set(and_(_mine(id, owner), jobs.c.state == "running"), values)

    def finish(self, id: str, owner: str, state: State, told: Mapping[str, Any]) -> bool:
        """End a job; False where it has been cancelled or is not this worker's any more."""
        values = {**told, "state": state, "updated_at": time.time(), "owner": None, "lease_until": None}
        return self._set(and_(_mine(id, owner), jobs.c.state == "running"), values)

    def keep(self, id: str, owner: str, told: Mapping[str, Any]) -> None:
        """Put what was found to a job that has been cancelled meanwhile."""
        values = {**told, "updated_at": time.time(), "owner": None, "lease_until": None}
        self._set(and_(_mine(id, owner), jobs.c.state == "cancelled"), values)

    def give_back(self, id: str, owner: str) -> None:
        """Let somebody else do a job: this worker is being stopped."""
        values = {"state": "queued", "owner": None, "lease_until": None, "attempts": jobs.c.attempts - 1}
        self._set(and_(_mine(id, owner), jobs.c.state == "running"), values)

    def _set(self, where: Any, values: Mapping[str, Any]) -> bool:
        changed: list[int] = []
        statement = update(jobs).where(where).values(**values)
        self._store.write(lambda connection: changed.append(connection.execute(statement).rowcount))
        return changed[-1] > 0

    def _drop_old(self, connection: Connection, now: float) -> None:
        finished = jobs.c.state.in_(FINISHED)
        connection.execute(delete(jobs).where(finished, jobs.c.updated_at < now - self._keep_s))
        newest_first = select(jobs.c.id).where(finished).order_by(jobs.c.updated_at.desc())
        too_many = [row.id for row in connection.execute(newest_first.offset(self._max_kept - 1).limit(1000))]
        if too_many:
            connection.execute(delete(jobs).where(jobs.c.id.in_(too_many)))


def _one(id: str) -> Any:
    return select(*_SHOWN).where(jobs.c.id == id)


def _free(now: float) -> Any:
    return or_(jobs.c.state == "queued", and_(jobs.c.state == "running", jobs.c.lease_until < now))


def _mine(id: str, owner: str) -> Any:
    return and_(jobs.c.id == id, jobs.c.owner == owner)


def _shown(row: Row[Any]) -> Shown:
    return Shown(**row._mapping)


def to_json(job: Shown) -> bytes:
    """What a client is sent: the answer goes in as it was stored."""
    fields = {
        "job_id": job.id,
        "kind": job.kind,
        "state": job.state,
        "progress": job.progress,
        "best": job.best,
        "bound": job.bound,
        "created_at": job.created_at,
        "updated_at": job.updated_at,
    }
    text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
    return f'{text[:-1]},"answer":{job.answer or "null"},"error":{job.error or "null"}}}'.encode()
