"""Jobs on SQLite and PostgreSQL: stored, executed by any worker, cancelled, retried, failed."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from cdmpp_server.jobs.routes import Job
from cdmpp_server.jobs.runner import Runner
from cdmpp_server.jobs.store import FINISHED, MAX_ATTEMPTS, FullError, JobState, JobStore, QuotaError, jobs, to_json
from cdmpp_server.observe.store import ObservationStore
from cdmpp_server.operate.metrics import Metrics
from cdmpp_server.sandbox.worker import OnProgress, Worker, WorkerDiedError
from tests.waiting import PATIENCE_S


def job_store(
    store: ObservationStore, max_jobs: int = 10, max_kept: int = 10, keep_s: float = 60.0, max_of_sender: int = 10
) -> JobStore:
    return JobStore(store, max_jobs, max_of_sender, max_kept, keep_s)


def state_of(jobs: JobStore, id: str) -> JobState:
    """The state of a job; its JSON must match the response model."""
    state = jobs.get(id)
    assert state is not None
    Job.model_validate_json(to_json(state), strict=True)
    return state


def expire(store: ObservationStore, id: str) -> None:
    """End the lease of a job, as if its worker had stopped renewing it."""
    old = update(jobs).where(jobs.c.id == id).values(lease_until=time.time() - 1)
    store.write(lambda connection: connection.execute(old))


def test_job_runs_from_submission_to_answer(store: ObservationStore) -> None:
    queue = job_store(store)
    assert not queue.waiting() and queue.take("worker") is None
    first = queue.add("pipeline", b"{}", b"", 3.0)
    second = queue.add("rl", b"[]", b"prices", None)
    assert state_of(queue, first).state == "queued" and queue.waiting()
    leased = queue.take("worker")
    assert (leased.id, leased.kind, leased.request, leased.prices) == (first, "pipeline", b"{}", b"")
    assert (leased.budget_s, leased.attempts) == (3.0, 1)
    other = queue.take("other")
    assert (other.id, other.prices) == (second, b"prices")
    assert queue.take("third") is None and not queue.waiting()
    assert queue.beat(first, "worker", {"progress": 0.5, "best": 7.0, "bound": 6.0, "answer": '{"a":1}'})
    assert not queue.beat(first, "other", {"progress": 0.9})
    running = state_of(queue, first)
    assert (running.state, running.progress, running.best, running.bound) == ("running", 0.5, 7.0, 6.0)
    assert json.loads(to_json(running))["answer"] == {"a": 1}
    assert not queue.finish(first, "other", "failed", {})
    assert queue.finish(first, "worker", "done", {"progress": 1.0, "answer": '{"a":2}'})
    assert (state_of(queue, first).state, state_of(queue, first).answer) == ("done", '{"a":2}')
    assert queue.cancel(first) == state_of(queue, first)
    assert queue.get("0" * 32) is None and queue.cancel("0" * 32) is None


def test_cancelled_job_keeps_its_best_answer(store: ObservationStore) -> None:
    queue = job_store(store)
    waiting, running = queue.add("a", b"", b"", 1.0), queue.add("b", b"", b"", 1.0)
    assert queue.cancel(waiting).state == "cancelled"
    assert queue.take("worker").id == running
    queue.cancel(running)
    assert not queue.beat(running, "worker", {})
    assert not queue.finish(running, "worker", "done", {"answer": "{}"})
    queue.keep(running, "worker", {"answer": '{"best":1}'})
    assert (state_of(queue, running).state, state_of(queue, running).answer) == ("cancelled", '{"best":1}')
    assert queue.take("worker") is None


def test_senders_take_turns(store: ObservationStore) -> None:
    queue = job_store(store, max_jobs=100, max_of_sender=100)

    def add(sender: str, budget_s: float | None = 10.0) -> str:
        return f"{sender}{queue.add('a', b'', b'', budget_s, sender)}"

    added = [add("first") for _ in range(6)]
    for _ in range(2):
        leased = queue.take("worker")
        assert leased.id == added.pop(0)[5:]
        queue.finish(leased.id, "worker", "done", {})
    # Another sender comes later: from now on, they take turns. Its short jobs run several at a turn.
    others = [add("other") for _ in range(2)] + [add("third", 5.0) for _ in range(2)]
    order = []
    while (leased := queue.take("worker")) is not None:
        order.append(leased.id)
        queue.finish(leased.id, "worker", "done", {})
    senders = {id[5:]: id[:5] for id in [*added, *others]}
    assert [senders[id] for id in order] == ["first", "third", "first", "other", "third", "first", "other", "first"]
    # The jobs of one sender keep their order; a sender that was absent has saved up nothing.
    assert [id for id in order if senders[id] == "first"] == [id[5:] for id in added]
    late, early = add("first"), add("first")
    assert [queue.take("worker").id, queue.take("worker").id] == [late[5:], early[5:]]


def test_places_of_one_sender_are_limited(store: ObservationStore) -> None:
    queue = job_store(store, max_jobs=4, max_of_sender=2)
    first = queue.add("a", b"", b"", 1.0, "one")
    queue.add("a", b"", b"", 1.0, "one")
    with pytest.raises(QuotaError, match="2 jobs of this sender"):
        queue.add("a", b"", b"", 1.0, "one")
    queue.add("a", b"", b"", 1.0, "two")
    queue.cancel(first)
    queue.add("a", b"", b"", 1.0, "one")
    with pytest.raises(FullError):
        [queue.add("a", b"", b"", 1.0, "three") for _ in range(2)]


def test_submissions_at_a_time_keep_the_limit_of_a_sender(store: ObservationStore) -> None:
    queue = job_store(store, max_of_sender=3)
    with ThreadPoolExecutor(8) as pool:
        submitted = [pool.submit(queue.add, "a", b"", b"", 1.0, "one") for _ in range(8)]
    assert sum(isinstance(one.exception(), QuotaError) for one in submitted) == 5


def test_removed_job_is_unknown_and_its_worker_loses_it(store: ObservationStore) -> None:
    queue = job_store(store)
    running, waiting = queue.add("a", b"", b"", 1.0), queue.add("b", b"", b"", 1.0)
    assert queue.take("worker") is not None
    assert queue.remove(running) and queue.remove(waiting)
    assert not queue.remove(running) and not queue.remove("0" * 32)
    assert queue.get(running) is None and not queue.waiting()
    assert not queue.beat(running, "worker", {}) and not queue.finish(running, "worker", "done", {})


def test_job_is_taken_again_when_its_lease_has_ended(store: ObservationStore) -> None:
    queue = job_store(store)
    id = queue.add("a", b"", b"", 1.0)
    assert queue.take("dead") is not None
    assert queue.take("worker") is None
    expire(store, id)
    assert queue.waiting()
    again = queue.take("worker")
    assert (again.id, again.attempts) == (id, 2)
    assert not queue.beat(id, "dead", {}) and not queue.finish(id, "dead", "done", {})
    assert queue.beat(id, "worker", {})
    # A worker that is being stopped gives the job back: this is not counted as a failed attempt.
    queue.give_back(id, "worker")
    assert queue.take("other").attempts == 2


@pytest.mark.parametrize("error_s", [-3600.0, 3600.0])
def test_leases_do_not_depend_on_the_clock_of_the_worker(
    store: ObservationStore, error_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, genuine = job_store(store), time.time
    id = queue.add("a", b"", b"", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: genuine() + error_s)
        assert queue.take("wrong clock") is not None and queue.beat(id, "wrong clock", {})
        # Neither this worker nor one whose clock is right takes a job that is being executed.
        assert not queue.waiting() and queue.take("wrong clock too") is None
        later = queue.add("b", b"", b"", 1.0)
        assert queue.get(later) is not None
    assert queue.take("right clock").id == later
    assert queue.take("right clock") is None
    for name in (id, later, queue.add("c", b"", b"", 1.0)):
        state = state_of(queue, name)
        assert abs(state.created_at - genuine()) < 600 and abs(state.updated_at - genuine()) < 600
    # A worker that has died is replaced once its lease has ended, not an hour later.
    expire(store, id)
    assert queue.take("right clock").id == id


def test_open_and_finished_jobs_are_limited(store: ObservationStore) -> None:
    queue = job_store(store, max_jobs=3, max_kept=2)
    ids = [queue.add("a", b"", b"", 1.0) for _ in range(3)]
    with pytest.raises(FullError, match="3 jobs"):
        queue.add("a", b"", b"", 1.0)
    for id in ids:
        queue.cancel(id)
    newest = queue.add("a", b"", b"", 1.0)
    assert [queue.get(id) is not None for id in [*ids, newest]] == [False, False, True, True]
    hour_ago = update(jobs).where(jobs.c.state == "cancelled").values(updated_at=time.time() - 3600)
    store.write(lambda connection: connection.execute(hour_ago))
    job_store(store, keep_s=1800.0).add("a", b"", b"", 1.0)
    assert queue.get(ids[2]) is None and queue.get(newest) is not None


class Search(Worker):
    """A planning process whose answers are scripted by a coroutine."""

    def __init__(self, script: Callable[[Search, OnProgress], Any]) -> None:
        super().__init__(0)
        self._script, self.alive = script, False
        self.started, self.interrupted = asyncio.Event(), asyncio.Event()
        self.requests: list[tuple[dict[str, Any], bytes]] = []

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
        self.requests.append((dict(header), payload))
        self.started.set()
        return await self._script(self, on_progress)


def run_jobs(
    queue: JobStore, script: Callable[[Search, OnProgress], Any], scenario: Callable[[Runner, Search], Any]
) -> Search:
    """Run a runner with one scripted planning process; it is stopped when ``scenario`` returns."""

    async def main() -> Search:
        search = Search(script)
        unused = [search]
        runner = Runner(queue, lambda: unused.pop(), Metrics())
        serving = asyncio.create_task(runner.serve())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scenario(runner, search)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        return search

    return asyncio.run(main())


def until_finished(queue: JobStore, id: str) -> Callable[[Runner, Search], Any]:
    async def wait(runner: Runner, search: Search) -> None:
        while state_of(queue, id).state not in FINISHED:
            await asyncio.sleep(0.01)

    return wait


async def until_started(runner: Runner, search: Search) -> None:
    await search.started.wait()


@pytest.fixture
def observed(tmp_path: Path) -> Iterator[ObservationStore]:
    store = ObservationStore(str(tmp_path / "s.sqlite"))
    yield store
    store.close()


@pytest.fixture
def queue(observed: ObservationStore) -> JobStore:
    return job_store(observed)


def test_runner_executes_jobs_one_after_the_other(queue: JobStore) -> None:
    async def script(search: Search, on_progress: OnProgress) -> Any:
        on_progress({"progress": 0.2, "best": 5.0, "bound": 4.0}, b'{"x":5}')
        header, payload = search.requests[-1]
        assert payload[: header["body"]] == b"body"
        assert payload[header["body"] :] == b"prices"
        if header["kind"] == "bad":
            refusal = {"status": 409, "code": "infeasible", "message": "no", "hint": "more"}
            return {"refused": {**refusal, "errors": [{"path": "a.b", "message": "no"}]}}, b""
        return {"best": 4.5, "bound": 4.5}, b'{"x":4.5}'

    good, bad = queue.add("good", b"body", b"prices", 1.0), queue.add("bad", b"body", b"prices", None)
    search = run_jobs(queue, script, until_finished(queue, bad))
    assert [header["kind"] for header, _ in search.requests] == ["good", "bad"]
    done = state_of(queue, good)
    assert (done.state, done.progress, done.best, done.bound, done.answer) == ("done", 1.0, 4.5, 4.5, '{"x":4.5}')
    failed = json.loads(to_json(state_of(queue, bad)))
    assert failed["state"] == "failed" and failed["answer"] == {"x": 5}
    assert failed["error"] == {"code": "infeasible", "message": "no", "hint": "more", "path": "a.b"}


def test_cancelled_search_ends_and_keeps_its_best_answer(queue: JobStore) -> None:
    async def script(search: Search, on_progress: OnProgress) -> Any:
        on_progress({"progress": 0.2, "best": 5.0, "bound": 4.0}, b'{"x":5}')
        await search.interrupted.wait()
        return {}, b'{"x":4.8}'

    id = queue.add("a", b"", b"", 60.0)

    async def cancel(runner: Runner, search: Search) -> None:
        await search.started.wait()
        queue.cancel(id)
        runner.interrupt(id)
        while state_of(queue, id).answer != '{"x":4.8}':
            await asyncio.sleep(0.01)

    search = run_jobs(queue, script, cancel)
    assert search.interrupted.is_set()
    last = state_of(queue, id)
    assert (last.state, last.progress, last.best) == ("cancelled", 0.2, 5.0)


async def never_ends(search: Search, on_progress: OnProgress) -> Any:
    await asyncio.Event().wait()


async def ends_at_once(search: Search, on_progress: OnProgress) -> Any:
    return {}, b"{}"


def test_a_runner_that_is_stopped_leaves_its_job_to_the_next(queue: JobStore) -> None:
    id = queue.add("a", b"", b"", 60.0)
    search = run_jobs(queue, never_ends, until_started)
    assert len(search.requests) == 1 and not search.alive
    assert state_of(queue, id).state == "queued"
    run_jobs(queue, ends_at_once, until_finished(queue, id))
    assert state_of(queue, id).state == "done"


def test_job_leased_while_its_runner_stops_returns_to_the_queue(
    queue: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner is stopped after the database has leased it a job and before it can start the search."""
    leased, stopped = threading.Event(), threading.Event()
    take = queue.take

    def slow_take(owner: str) -> Any:
        job = take(owner)
        leased.set()
        assert stopped.wait(PATIENCE_S)
        return job

    async def stop_after_lease(runner: Runner, search: Search) -> None:
        await asyncio.to_thread(leased.wait, PATIENCE_S)
        asyncio.get_running_loop().call_soon(stopped.set)

    id = queue.add("a", b"", b"", 60.0)
    with monkeypatch.context() as patch:
        patch.setattr(queue, "take", slow_take)
        search = run_jobs(queue, ends_at_once, stop_after_lease)
    assert search.requests == []
    assert state_of(queue, id).state == "queued"
    assert queue.take("next").attempts == 1


def test_job_whose_process_dies_fails(queue: JobStore, observed: ObservationStore) -> None:
    async def die(search: Search, on_progress: OnProgress) -> Any:
        search.alive = False
        raise WorkerDiedError("gone")

    crashing = queue.add("a", b"", b"", 1.0)
    assert len(run_jobs(queue, die, until_finished(queue, crashing)).requests) == 1
    error = json.loads(to_json(state_of(queue, crashing)))["error"]
    assert error["code"] == "internal_error"
    # So does a job during which the whole service ended, in each attempt.
    fatal = queue.add("a", b"", b"", 1.0)
    for _ in range(MAX_ATTEMPTS):
        assert queue.take("dead") is not None
        expire(observed, fatal)
    assert run_jobs(queue, die, until_finished(queue, fatal)).requests == []
    assert state_of(queue, fatal).state == "failed"
