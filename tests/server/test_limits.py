"""Requests that the service refuses: too large, too slow, wrong media type, too many."""

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from cdmpp_server.app import create_app
from cdmpp_server.body import MAX_VALUES, parse_json
from cdmpp_server.concurrency import THRESHOLDS, ConcurrencyLimiter, Deadline, cancel_on_disconnect, infrequent_gc
from cdmpp_server.predict.service import CHUNK_ITEMS, PredictionService
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings
from tests.server import conftest
from tests.server.conftest import JSON, LINEAR, http_scope, problem
from tests.waiting import PATIENCE_S

BODY = json.dumps(conftest.BODY).encode()


def call(receive: Callable[[], Awaitable[dict[str, Any]]], headers: dict[str, str], **settings: Any) -> tuple[int, str]:
    """Status and code for one request to an application without a model; ``receive`` returns parts of the body."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    anyio.run(create_app(Settings(**settings)), http_scope("/predict", headers), receive, send)
    body = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    return sent[0]["status"], json.loads(body)["code"]


@pytest.mark.parametrize(
    ("length", "limit", "chunks"),
    [
        (None, 2**20, 17),
        (str(2**31), 2**24, 0),
        ("10", 2**20, 17),
        *((invalid, 2**20, None) for invalid in ("9" * 400, "-5", "ten", "²")),
    ],
)
def test_endless_body_is_refused_whatever_its_declared_length(
    length: str | None, limit: int, chunks: int | None
) -> None:
    """At the limit, or before any of it is read if the declared length is above the limit."""
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b" " * 65536, "more_body": True}

    headers = JSON if length is None else {**JSON, "content-length": length}
    assert call(receive, headers, max_body_bytes=limit) == (413, "body_too_large")
    assert chunks in (read, None)


def test_body_that_does_not_arrive_in_time_is_refused() -> None:
    async def silence() -> dict[str, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    assert call(silence, JSON, body_timeout_s=0.05) == (408, "body_timeout")


def test_disconnected_client_is_handled() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    assert call(gone, JSON)[0] == 408


async def test_work_for_a_disconnected_client_is_cancelled() -> None:
    gone, ended = anyio.Event(), anyio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            gone.set()
            await anyio.sleep_forever()
        finally:
            ended.set()

    async def quick() -> str:
        return "an answer"

    request = Request({"type": "http"}, receive)
    assert await cancel_on_disconnect(request, quick()) == "an answer"
    with pytest.raises(ProblemError) as refused:
        await cancel_on_disconnect(request, work())
    assert refused.value.status == 499
    with anyio.fail_after(PATIENCE_S):
        await ended.wait()


def test_body_of_exactly_the_limit_is_accepted(client: TestClient) -> None:
    limit = Settings(model=None).max_body_bytes
    assert client.post("/predict", content=BODY + b" " * (limit - len(BODY)), headers=JSON).status_code == 200
    problem(client.post("/predict", content=BODY + b" " * (limit - len(BODY) + 1), headers=JSON), 413, "body_too_large")


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", ""]
)
def test_unsupported_media_type_is_refused(kind: str | None, client: TestClient) -> None:
    response = client.post("/predict", content=BODY, headers={} if kind is None else {"content-type": kind})
    problem(response, 415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON;charset=UTF-8"])
def test_json_may_declare_its_charset(kind: str, client: TestClient) -> None:
    assert client.post("/predict", content=BODY, headers={"content-type": kind}).status_code == 200


def test_unknown_paths_and_methods(client: TestClient) -> None:
    problem(client.get("/nope"), 404, "not_found")
    response = client.get("/predict")
    problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


def test_item_limit_is_a_setting_and_in_the_schema() -> None:
    schema = create_app(Settings(max_items=2)).openapi()["components"]["schemas"]["PredictRequest"]
    assert schema["properties"]["items"]["maxItems"] == 2


class Work:
    """Work that a test ends, for the only thread of a limiter."""

    def __init__(self, max_queued: int) -> None:
        self.limiter = ConcurrencyLimiter(max_concurrent=1, max_queued=max_queued)
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        self.go.wait()


async def test_full_limiter_refuses_with_retry_after() -> None:
    work = Work(max_queued=1)
    limiter = work.limiter
    done: list[str] = []

    async def enter(name: str) -> None:
        await limiter.run(work)
        done.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter, "computing")
        await anyio.to_thread.run_sync(work.begun.wait)
        tasks.start_soon(enter, "waiting")
        await anyio.lowlevel.checkpoint()
        with pytest.raises(ProblemError) as refused:
            await limiter.run(work)
        assert refused.value.status == 503
        assert refused.value.headers == {"retry-after": "1"}
        work.go.set()
    assert done == ["computing", "waiting"]
    assert await limiter.run(lambda: "free again") == "free again"


async def test_waiting_for_a_thread_ends_at_the_deadline() -> None:
    work = Work(max_queued=5)
    limiter = work.limiter
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(limiter.run, work)
        await anyio.to_thread.run_sync(work.begun.wait)
        with pytest.raises(ProblemError) as refused:
            await limiter.run(lambda: None, Deadline(0.02))
        assert (refused.value.status, refused.value.problem.code) == (504, "deadline_exceeded")
        work.go.set()
    assert await limiter.run(lambda: "in time", Deadline(PATIENCE_S)) == "in time"


async def test_cancelled_caller_does_not_free_a_running_thread() -> None:
    # Otherwise disconnecting clients could start any number of threads.
    work = Work(max_queued=5)
    limiter = work.limiter
    first = asyncio.ensure_future(limiter.run(work))
    await asyncio.to_thread(work.begun.wait)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    ran = []
    second = asyncio.ensure_future(limiter.run(lambda: ran.append(2)))
    waiting = asyncio.ensure_future(limiter.run(lambda: ran.append(3)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not ran
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    work.go.set()
    await second
    assert ran == [2]
    assert await limiter.run(lambda: "free again") == "free again"


def test_healthz_answers_while_predictions_are_computed(app: FastAPI, client: TestClient, monkeypatch) -> None:
    entered, go = threading.Event(), threading.Event()
    predict = app.state.service.predictor.predict_queries

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert go.wait(PATIENCE_S)
        return predict(*arguments)

    monkeypatch.setattr(app.state.service.predictor, "predict_queries", slow)
    unseen = {"items": [{"program": {**LINEAR, "m": 4004}, "device": "t4"}]}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/predict", json=unseen)
        try:
            assert entered.wait(PATIENCE_S)
            assert client.get("/healthz").json() == {"status": "ok"}
            assert not answer.done()
        finally:
            go.set()
    assert answer.result().status_code == 200


def test_event_loop_has_turns_between_chunks_of_bodies(app: FastAPI, client: TestClient) -> None:
    """Bodies that arrive together are read one chunk per turn, so connections are accepted meanwhile."""
    state = app.state
    turns, chunks = 0, []

    async def scenario() -> None:
        nonlocal turns
        service = PredictionService(state.models, state.settings, state.batcher, state.sandbox, state.metrics)
        deadline = Deadline(PATIENCE_S)

        async def read(body: int) -> None:
            def work(positions: Sequence[int]) -> None:
                chunks.append((turns, body, list(positions)))

            await service._in_chunks(work, range(10, 60), True, deadline)

        async with asyncio.TaskGroup() as tasks:
            bodies = [tasks.create_task(read(body)) for body in range(3)]
            while not all(task.done() for task in bodies):
                turns += 1
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    of_turns = [turn for turn, _, _ in chunks]
    assert len(set(of_turns)) == len(of_turns) == 3 * 4
    assert [body for _, body, _ in chunks] == sorted(body for _, body, _ in chunks)
    for body in range(3):
        read = [positions for _, of_body, positions in chunks if of_body == body]
        assert max(map(len, read)) == CHUNK_ITEMS
        assert [position for positions in read for position in positions] == list(range(10, 60))


def test_body_with_too_many_values_is_refused_before_it_is_parsed(client: TestClient, monkeypatch) -> None:
    lists = b'{"items":[' + b"[]," * (MAX_VALUES // 2) + b"[]]}"
    with monkeypatch.context() as context:
        context.setattr("cdmpp_server.body.from_json", None)
        problem(client.post("/predict", content=lists, headers=JSON), 413, "body_too_large")
    # Commas and brackets inside a text are no values; a quote after an escaped backslash ends the text.
    for text in (",[{" * MAX_VALUES, '\\",' * MAX_VALUES, "," * MAX_VALUES + "\\\\"):
        assert parse_json(json.dumps({"a": text, "b": [1, "x"]}).encode()) == {"a": text, "b": [1, "x"]}


def test_thresholds_are_higher_inside_and_restored_afterwards() -> None:
    before = gc.get_threshold()
    with infrequent_gc():
        assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_cycles_are_still_collected() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self

    with infrequent_gc():
        node = weakref.ref(Node())
        # New objects that stay alive trigger a collection. Other threads may free objects and so delay it.
        alive: list[list[None]] = []
        while node() is not None and len(alive) < 100 * THRESHOLDS[0]:
            alive.append([])
        assert node() is None
