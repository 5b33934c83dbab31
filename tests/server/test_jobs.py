"""Jobs: kept by the same rules on SQLite and PostgreSQL, taken up by any worker, cancelled, given up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text, update

from cdmpp_server.jobs.runner import Runner
from cdmpp_server.jobs.schema import Job
from cdmpp_server.jobs.store import MAX_ATTEMPTS, FullError, JobStore, Shown, to_json
from cdmpp_server.jobs.tables import jobs
from cdmpp_server.observe.store import Store
from cdmpp_server.operate.metrics import Metrics
from cdmpp_server.sandbox.worker import OnProgress, Worker, WorkerDiedError
from tests.server.postgres import running_postgres


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with running_postgres() as server:
        yield server.url


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    database = str(tmp_path / "s.sqlite")
    if request.param == "postgresql":
        database = request.getfixturevalue("postgres")
        engine = create_engine(database)
        with engine.begin() as connection:
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        engine.dispose()
    opened = Store(database)
    yield opened
    opened.close()


def job_store(store: Store, max_jobs: int = 10, max_kept: int = 10, keep_s: float = 60.0) -> JobStore:
    return JobStore(store, max_jobs, max_kept, keep_s)


def shown(kept: JobStore, id: str) -> Shown:
    found = kept.get(id)
    assert found is not None
    # What a client is sent is what the schema says.
    Job.model_validate_json(to_json(found), strict=True)
    return found


def expire(store: Store, id: str) -> None:
    """As if the worker had not been heard of for a while."""
    old = update(jobs).where(jobs.c.id == id).values(lease_until=time.time() - 1)
    store.write(lambda connection: connection.execute(old))


def test_a_job_from_its_beginning_to_its_end(store: Store) -> None:
    kept = job_store(store)
    assert not kept.waiting() and kept.take("me") is None
    first = kept.add("pipeline", b"{}", b"", 3.0)
    second = kept.add("rl", b"[]", b"prices", None)
    assert shown(kept, first).state == "queued" and kept.waiting()
    taken = kept.take("me")
    assert taken is not None
    assert (taken.id, taken.kind, taken.request, taken.prices) == (first, "pipeline", b"{}", b"")
    assert (taken.budget_s, taken.attempts) == (3.0, 1)
    other = kept.take("other")
    assert other is not None and other.id == second and other.prices == b"prices"
    assert kept.take("third") is None and not kept.waiting()
    assert kept.beat(first, "me", {"progress": 0.5, "best": 7.0, "bound": 6.0, "answer": '{"a":1}'})
    assert not kept.beat(first, "other", {"progress": 0.9})
    on_the_way = shown(kept, first)
    assert (on_the_way.state, on_the_way.progress, on_the_way.best, on_the_way.bound) == ("running", 0.5, 7.0, 6.0)
    assert json.loads(to_json(on_the_way))["answer"] == {"a": 1}
    assert not kept.finish(first, "other", "failed", {})
    assert kept.finish(first, "me", "done", {"progress": 1.0, "answer": '{"a":2}'})
    assert (shown(kept, first).state, shown(kept, first).answer) == ("done", '{"a":2}')
    assert kept.cancel(first) == shown(kept, first)
    assert kept.get("0" * 32) is None and kept.cancel("0" * 32) is None


def test_cancelling(store: Store) -> None:
    kept = job_store(store)
    waiting, running = kept.add("a", b"", b"", 1.0), kept.add("b", b"", b"", 1.0)
    cancelled = kept.cancel(waiting)
    assert cancelled is not None and cancelled.state == "cancelled"
    taken = kept.take("me")
    assert taken is not None and taken.id == running
    kept.cancel(running)
    assert not kept.beat(running, "me", {})
    assert not kept.finish(running, "me", "done", {"answer": "{}"})
    kept.keep(running, "me", {"answer": '{"best":1}'})
    assert (shown(kept, running).state, shown(kept, running).answer) == ("cancelled", '{"best":1}')
    assert kept.take("me") is None


def test_what_a_dead_worker_leaves_is_taken_up(store: Store) -> None:
    kept = job_store(store)
    id = kept.add("a", b"", b"", 1.0)
    assert kept.take("dead") is not None
    assert kept.take("me") is None
    expire(store, id)
    assert kept.waiting()
    again = kept.take("me")
    assert again is not None and (again.id, again.attempts) == (id, 2)
    assert not kept.beat(id, "dead", {}) and not kept.finish(id, "dead", "done", {})
    assert kept.beat(id, "me", {})
    # Given back by a worker that is being stopped: no attempt that failed.
    kept.give_back(id, "me")
    third = kept.take("other")
    assert third is not None and third.attempts == 2


def test_what_is_kept_is_bounded(store: Store) -> None:
    kept = job_store(store, max_jobs=3, max_kept=2)
    ids = [kept.add("a", b"", b"", 1.0) for _ in range(3)]
    with pytest.raises(FullError, match="3 jobs"):
        kept.add("a", b"", b"", 1.0)
    for id in ids:
        kept.cancel(id)
    newest = kept.add("a", b"", b"", 1.0)
    assert [kept.get(id) is not None for id in [*ids, newest]] == [False, False, True, True]
    late = job_store(store, keep_s=0.0)
    time.sleep(0.01)
    late.add("a", b"", b"", 1.0)
    assert kept.get(ids[2]) is None and kept.get(newest) is not None


class Search(Worker):
    """A planning process that a test plays."""

    def __init__(self, play: Callable[[Search, OnProgress], Any]) -> None:
        super().__init__(0)
        self._play, self.alive, self.interrupted = play, False, asyncio.Event()
        self.asked: list[tuple[dict[str, Any], bytes]] = []

    @property
    def pid(self) -> int | None:
        return 1 if self.alive else None

    async def start(self) -> None:
        self.alive = True

    async def stop(self) -> None:
        self.alive = False

    def interrupt(self) -> None:
        self.interrupted.set()

    async def run(self, header: Any, payload: bytes, timeout_s: float, on_progress: Any = None) -> Any:
        self.asked.append((dict(header), payload))
        return await self._play(self, on_progress)


def run_jobs(kept: JobStore, play: Callable[[Search, OnProgress], Any], until: Callable[[Runner], Any]) -> list[Search]:
    """A runner whose searches are played, until a coroutine says so."""
    made: list[Search] = []

    def make() -> Worker:
        made.append(Search(play))
        return made[-1]

    async def main() -> None:
        runner = Runner(kept, make, Metrics())
        serving = asyncio.create_task(runner.serve())
        try:
            async with asyncio.timeout(20):
                await until(runner)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(main())
    return made


def ended(kept: JobStore, id: str, *states: str) -> Callable[[Runner], Any]:
    async def wait(_: Runner) -> None:
        while shown(kept, id).state not in (states or ("done", "failed", "cancelled")):
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[JobStore]:
    store = Store(str(tmp_path / "s.sqlite"))
    yield job_store(store)
    store.close()


def test_a_runner_does_jobs_one_after_the_other(kept: JobStore) -> None:
    async def play(search: Search, tell: OnProgress) -> Any:
        tell({"progress": 0.2, "best": 5.0, "bound": 4.0}, b'{"x":5}')
        header, payload = search.asked[-1]
        assert payload[: header["body"]] == b"body"
        assert payload[header["body"] :] == b"prices"
        if header["kind"] == "bad":
            return {
                "refused": {
                    "status": 409,
                    "code": "infeasible",
                    "message": "no",
                    "hint": "more",
                    "errors": [{"path": "a.b", "message": "no"}],
                }
            }, b""
        return {"best": 4.5, "bound": 4.5}, b'{"x":4.5}'

    good, bad = kept.add("good", b"body", b"prices", 1.0), kept.add("bad", b"body", b"prices", None)
    (search,) = run_jobs(kept, play, ended(kept, bad))
    assert [header["kind"] for header, _ in search.asked] == ["good", "bad"]
    done = shown(kept, good)
    assert (done.state, done.progress, done.best, done.bound, done.answer) == ("done", 1.0, 4.5, 4.5, '{"x":4.5}')
    failed = json.loads(to_json(shown(kept, bad)))
    assert failed["state"] == "failed" and failed["answer"] == {"x": 5}
    assert failed["error"] == {"code": "infeasible", "message": "no", "hint": "more", "path": "a.b"}


def test_a_cancelled_search_ends_and_keeps_its_best_answer(kept: JobStore) -> None:
    async def play(search: Search, tell: OnProgress) -> Any:
        tell({"progress": 0.2, "best": 5.0, "bound": 4.0}, b'{"x":5}')
        await search.interrupted.wait()
        return {}, b'{"x":4.8}'

    id = kept.add("a", b"", b"", 60.0)

    async def cancel(runner: Runner) -> None:
        await ended(kept, id, "running")(runner)
        await asyncio.sleep(0.05)
        kept.cancel(id)
        runner.cancelled(id)
        while shown(kept, id).answer != '{"x":4.8}':
            await asyncio.sleep(0.01)

    (search,) = run_jobs(kept, play, cancel)
    assert search.interrupted.is_set()
    last = shown(kept, id)
    assert (last.state, last.progress, last.best) == ("cancelled", 0.2, 5.0)


def test_a_runner_that_is_stopped_leaves_its_job_to_the_next(kept: JobStore) -> None:
    async def play(search: Search, tell: OnProgress) -> Any:
        await asyncio.Event().wait()

    id = kept.add("a", b"", b"", 60.0)
    (search,) = run_jobs(kept, play, ended(kept, id, "running"))
    assert not search.alive
    assert shown(kept, id).state == "queued"

    async def quick(search: Search, tell: OnProgress) -> Any:
        return {}, b"{}"

    run_jobs(kept, quick, ended(kept, id))
    assert shown(kept, id).state == "done"


def test_what_kills_its_process_is_given_up(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "s.sqlite"))
    kept = job_store(store)

    async def die(search: Search, tell: OnProgress) -> Any:
        search.alive = False
        raise WorkerDiedError("gone")

    crashing = kept.add("a", b"", b"", 1.0)
    assert len(run_jobs(kept, die, ended(kept, crashing))) == 1
    error = json.loads(to_json(shown(kept, crashing)))["error"]
    assert error["code"] == "internal_error"
    # And so is one that takes the whole service down with it, each time.
    fatal = kept.add("a", b"", b"", 1.0)
    for _ in range(MAX_ATTEMPTS):
        assert kept.take("dead") is not None
        expire(store, fatal)
    assert run_jobs(kept, die, ended(kept, fatal)) == []
    assert shown(kept, fatal).state == "failed"
    store.close()
