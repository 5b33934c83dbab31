"""Jobs in the database: any worker can execute them and report on all of them.

All times are of the database's clock: workers whose own clocks disagree still agree on which lease has ended.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from sqlalchemy import (
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    Row,
    String,
    Table,
    Text,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.engine import Connection

from cdmpp_server.database import now_s
from cdmpp_server.observe.store import ObservationStore
from cdmpp_server.observe.tables import metadata
from cdmpp_server.problems import ProblemError

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


State = Literal["queued", "running", "done", "cancelled", "failed"]
OPEN: tuple[State, ...] = ("queued", "running")
FINISHED: tuple[State, ...] = ("done", "cancelled", "failed")
#: Time limit of a search without a budget.
DEFAULT_BUDGET_S = 600.0
#: A job whose worker has not renewed its lease for this long can be taken by another worker.
LEASE_S = 6.0
#: A job fails after this many attempts whose process ended.
MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class ListedJob:
    """A job in the list of its sender, without its answer, which may be large."""

    id: str
    kind: str
    state: State
    progress: float
    best: float | None
    bound: float | None
    created_at: float
    updated_at: float


@dataclass(frozen=True)
class JobState(ListedJob):
    """A job as a client sees it; ``answer`` and ``error`` are JSON texts."""

    answer: str | None
    error: str | None


#: Columns of a job in a list, and of one as a client sees it.
_LISTED, _SHOWN = ([jobs.c[field.name] for field in fields(job)] for job in (ListedJob, JobState))


@dataclass(frozen=True)
class LeasedJob:
    """A job that a worker has taken and executes."""

    id: str
    kind: str
    request: bytes
    prices: bytes
    budget_s: float | None
    attempts: int


class FullError(ProblemError):
    """The limit of queued and running jobs is reached (503), or that of one sender (429)."""

    def __init__(self, detail: str, code: str = "overloaded", hint: str = "retry when some jobs have ended") -> None:
        super().__init__(code, detail, hint, headers={"retry-after": "10"})


class QuotaError(FullError):
    """The sender has as many queued and running jobs as one sender may have."""

    def __init__(self, detail: str) -> None:
        hint = "retry when some of them have ended, or remove them: DELETE /jobs/{id}"
        super().__init__(detail, "quota_exceeded", hint)


#: Key of PostgreSQL's advisory lock around the submission of a job; any constant.
_SUBMISSION_LOCK = 0x6A6F6273


class JobStore:
    """The queue of jobs. Calls block and raise :class:`cdmpp_server.observe.tables.StoreUnavailableError`.

    ``max_jobs``: limit of queued and running jobs; ``max_of_sender``: of those of one sender; ``max_kept``: of finished
    jobs, of which the oldest are deleted first. ``keep_s``: time after which a finished job is deleted.

    Senders take turns. A job gets a tag when it is submitted: its own budget, after the tag of the sender's job before
    it, or after that of the job that is due now. The job with the smallest tag is next. So the jobs of a sender keep
    their order, each sender gets an equal share of the time, and an absent one saves up nothing. This is self-clocked
    fair queueing (Golestani, INFOCOM 1994).
    """

    def __init__(
        self, store: ObservationStore, max_jobs: int, max_of_sender: int, max_kept: int, keep_s: float
    ) -> None:
        self._store = store
        self._max_jobs, self._max_of_sender = max_jobs, max_of_sender
        self._max_kept, self._keep_s = max_kept, keep_s

    def add(self, kind: str, request: bytes, prices: bytes, budget_s: float | None, sender: str = "") -> str:
        """Store a job and return its id: 128 random bits, which nobody can guess; raises FullError or QuotaError."""
        id = secrets.token_hex(16)
        row = {
            "id": id,
            "kind": kind,
            "state": "queued",
            "request": request,
            "prices": prices,
            "budget_s": budget_s,
            "progress": 0.0,
            "attempts": 0,
            "sender": sender,
        }
        cost_s = DEFAULT_BUDGET_S if budget_s is None else budget_s

        def work(connection: Connection) -> None:
            if connection.dialect.name == "postgresql":
                # Concurrent submissions would not see each other in the count.
                connection.execute(select(func.pg_advisory_xact_lock(_SUBMISSION_LOCK)))
            self._drop_old(connection)
            columns = (func.count(), func.max(jobs.c.created_at), func.min(jobs.c.turn), func.max(jobs.c.turn), now_s())
            of_all = select(*columns).where(jobs.c.state.in_(OPEN))
            of_sender, _, _, last_own, _ = connection.execute(of_all.where(jobs.c.sender == sender)).one()
            if of_sender >= self._max_of_sender:
                raise QuotaError(
                    f"{of_sender} jobs of this sender wait or run; one sender may have {self._max_of_sender}"
                )
            count, newest, due, _, now = connection.execute(of_all).one()
            if count >= self._max_jobs:
                raise FullError(f"{count} jobs wait or run")
            turn = (max(due, last_own or due) if count else 0.0) + cost_s
            # After every job that waits, also within a millisecond and after the clock was set back.
            now = max(now, (newest or 0.0) + 1e-6)
            connection.execute(insert(jobs), {**row, "turn": turn, "created_at": now, "updated_at": now})

        self._store.write(work)
        return id

    def get(self, id: str) -> JobState | None:
        """Return the state of a job; None if the id is unknown."""
        row = self._store.read(lambda connection: connection.execute(_by_id(id)).first())
        return None if row is None else _state(row)

    def list_of(self, sender: str, limit: int) -> list[ListedJob]:
        """Return the jobs of one sender, newest first, at most ``limit``."""
        query = (
            select(*_LISTED).where(jobs.c.sender == sender).order_by(jobs.c.created_at.desc(), jobs.c.id).limit(limit)
        )
        rows = self._store.read(lambda connection: connection.execute(query).all())
        return [ListedJob(**row._mapping) for row in rows]

    def cancel(self, id: str) -> JobState | None:
        """Cancel a queued or running job; a finished one stays unchanged. None if the id is unknown."""
        rows: list[Row[Any] | None] = []
        end = update(jobs).where(jobs.c.id == id, jobs.c.state.in_(OPEN)).values(state="cancelled", updated_at=now_s())

        def work(connection: Connection) -> None:
            connection.execute(end)
            rows.append(connection.execute(_by_id(id)).first())

        self._store.write(work)
        row = rows[-1]
        return None if row is None else _state(row)

    def remove(self, id: str) -> bool:
        """Delete a job in any state; False if the id is unknown. A worker that executes it loses its lease."""
        removed: list[int] = []
        self._store.write(
            lambda connection: removed.append(connection.execute(delete(jobs).where(jobs.c.id == id)).rowcount)
        )
        return removed[-1] > 0

    def waiting(self) -> bool:
        """Return whether a job can be taken, without writing."""
        query = select(jobs.c.id).where(_free()).limit(1)
        return self._store.read(lambda connection: connection.execute(query).first()) is not None

    def take(self, owner: str) -> LeasedJob | None:
        """Lease the next job that has no worker; None if there is none."""
        leased: list[LeasedJob | None] = []

        def work(connection: Connection) -> None:
            following = select(jobs).where(_free()).order_by(jobs.c.turn, jobs.c.created_at).limit(1)
            # SQLite has no row locks and needs none: SQLAlchemy omits them there.
            row = connection.execute(following.with_for_update(skip_locked=True)).first()
            if row is None:
                leased.append(None)
                return
            values = {"owner": owner, "lease_until": now_s() + LEASE_S, "updated_at": now_s()}
            lease = update(jobs).where(jobs.c.id == row.id)
            connection.execute(lease.values(state="running", attempts=row.attempts + 1, **values))
            leased.append(LeasedJob(row.id, row.kind, row.request, row.prices, row.budget_s, row.attempts + 1))

        self._store.write(work)
        return leased[-1]

    def beat(self, id: str, owner: str, changes: Mapping[str, Any]) -> bool:
        """Renew the lease of a job and store what has changed; False if ``owner`` has lost the job.

        ``changes``: new values of the columns progress, best, bound and answer.
        """
        values = {**changes, "lease_until": now_s() + LEASE_S, "updated_at": now_s()}
        return self._set(and_(_owned(id, owner), jobs.c.state == "running"), values)

    def finish(self, id: str, owner: str, state: State, changes: Mapping[str, Any]) -> bool:
        """Finish a job; False if it was cancelled or ``owner`` has lost it."""
        values = {**changes, "state": state, "updated_at": now_s(), "owner": None, "lease_until": None}
        return self._set(and_(_owned(id, owner), jobs.c.state == "running"), values)

    def keep(self, id: str, owner: str, changes: Mapping[str, Any]) -> None:
        """Store the results of a job that was cancelled meanwhile."""
        values = {**changes, "updated_at": now_s(), "owner": None, "lease_until": None}
        self._set(and_(_owned(id, owner), jobs.c.state == "cancelled"), values)

    def give_back(self, id: str, owner: str) -> None:
        """Return a job to the queue, because its worker is being stopped; this does not count as an attempt."""
        values = {"state": "queued", "owner": None, "lease_until": None, "attempts": jobs.c.attempts - 1}
        self._set(and_(_owned(id, owner), jobs.c.state == "running"), values)

    def _set(self, where: Any, values: Mapping[str, Any]) -> bool:
        changed: list[int] = []
        statement = update(jobs).where(where).values(**values)
        self._store.write(lambda connection: changed.append(connection.execute(statement).rowcount))
        return changed[-1] > 0

    def _drop_old(self, connection: Connection) -> None:
        finished = jobs.c.state.in_(FINISHED)
        connection.execute(delete(jobs).where(finished, jobs.c.updated_at < now_s() - self._keep_s))
        newest_first = select(jobs.c.id).where(finished).order_by(jobs.c.updated_at.desc(), jobs.c.created_at.desc())
        too_many = [row.id for row in connection.execute(newest_first.offset(self._max_kept - 1).limit(1000))]
        if too_many:
            connection.execute(delete(jobs).where(jobs.c.id.in_(too_many)))


def _by_id(id: str) -> Any:
    return select(*_SHOWN).where(jobs.c.id == id)


def _free() -> Any:
    return or_(jobs.c.state == "queued", and_(jobs.c.state == "running", jobs.c.lease_until < now_s()))


def _owned(id: str, owner: str) -> Any:
    return and_(jobs.c.id == id, jobs.c.owner == owner)


def _state(row: Row[Any]) -> JobState:
    return JobState(**row._mapping)


def summary_fields(job: ListedJob) -> dict[str, Any]:
    """Fields of :class:`cdmpp_server.jobs.routes.JobSummary`."""
    shown = {field.name: getattr(job, field.name) for field in fields(ListedJob)}
    return {"job_id": shown.pop("id"), **shown}


def to_json(job: JobState) -> bytes:
    """Encode the response to a client; the answer is inserted as it was stored."""
    text = json.dumps(summary_fields(job), allow_nan=False, separators=(",", ":"))
    return f'{text[:-1]},"answer":{job.answer or "null"},"error":{job.error or "null"}}}'.encode()
