"""Requests that the service refuses: too large, too slow, wrong media type, too many."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx2
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from cdmpp_server.app import create_app
from cdmpp_server.body import MAX_VALUES, parse_json
from cdmpp_server.concurrency import ConcurrencyLimiter, Deadline, cancel_on_disconnect
from cdmpp_server.predict.service import CHUNK_ITEMS, PredictionService
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings
from tests.server.conftest import JSON, LINEAR, problem
from tests.waiting import PATIENCE_S

BODY = json.dumps({"items": [{"program": LINEAR, "device": "t4"}]}).encode()
Messages = list[dict[str, Any]]


def call(
    app: FastAPI, receive: Callable[[], Awaitable[dict[str, Any]]], headers: dict[str, str], path: str = "/predict"
) -> tuple[int, dict[str, Any]]:
    """Send one request to the application; ``receive`` decides which parts of the body arrive, and when."""
    sent: Messages = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    anyio.run(app, scope, receive, send)
    body = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    return sent[0]["status"], json.loads(body)


class Endless:
    """An endless body of 64 KiB chunks that counts how many were read."""

    def __init__(self) -> None:
        self.chunks = 0

    async def __call__(self) -> dict[str, Any]:
        self.chunks += 1
        return {"type": "http.request", "body": b" " * 65536, "more_body": True}


def small_app(**settings: Any) -> FastAPI:
    """An application without a model, for requests that are refused before a prediction."""
    return create_app(Settings(**settings))


def test_endless_body_is_refused_at_the_limit() -> None:
    body = Endless()
    status, answer = call(small_app(max_body_bytes=2**20), body, JSON)
    assert (status, answer["code"]) == (413, "body_too_large")
    assert body.chunks == 17


def test_declared_length_above_the_limit_is_refused_before_reading() -> None:
    body = Endless()
    status, answer = call(small_app(), body, {**JSON, "content-length": str(2**31)})
    assert (status, answer["code"]) == (413, "body_too_large")
    assert body.chunks == 0


def test_limit_holds_if_the_declared_length_is_too_small() -> None:
    body = Endless()
    status, _ = call(small_app(max_body_bytes=2**20), body, {**JSON, "content-length": "10"})
    assert status == 413
    assert body.chunks == 17


@pytest.mark.parametrize("length", ["9" * 400, "-5", "ten", "²"])
def test_invalid_declared_length_is_handled(length: str) -> None:
    assert call(small_app(max_body_bytes=2**20), Endless(), {**JSON, "content-length": length})[0] == 413


def test_body_that_does_not_arrive_in_time_is_refused() -> None:
    async def silence() -> dict[str, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    status, answer = call(small_app(body_timeout_s=0.05), silence, JSON)
    assert (status, answer["code"]) == (408, "body_timeout")


def test_disconnected_client_is_handled() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    assert call(small_app(), gone, JSON)[0] == 408


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
    at_limit = client.post("/predict", content=BODY + b" " * (limit - len(BODY)), headers=JSON)
    assert at_limit.status_code == 200
    above = client.post("/predict", content=BODY + b" " * (limit - len(BODY) + 1), headers=JSON)
    problem(above, 413, "body_too_large")


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
    app = small_app(max_items=2)
    schema = app.openapi()["components"]["schemas"]["PredictRequest"]
    assert schema["properties"]["items"]["maxItems"] == 2


async def test_full_limiter_refuses_with_retry_after() -> None:
    limiter, go, begun = ConcurrencyLimiter(max_concurrent=1, max_queued=1), threading.Event(), threading.Event()
    done: list[str] = []

    def work() -> None:
        begun.set()
        go.wait()

    async def enter(name: str) -> None:
        await limiter.run(work)
        done.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter, "computing")
        await anyio.to_thread.run_sync(begun.wait)
        tasks.start_soon(enter, "waiting")
        await anyio.lowlevel.checkpoint()
        with pytest.raises(ProblemError) as refused:
            await limiter.run(go.wait)
        assert refused.value.status == 503
        assert refused.value.headers == {"retry-after": "1"}
        go.set()
    assert done == ["computing", "waiting"]
    assert await limiter.run(lambda: "free again") == "free again"


async def test_waiting_for_a_thread_ends_at_the_deadline() -> None:
    limiter, go, begun = ConcurrencyLimiter(max_concurrent=1, max_queued=5), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(limiter.run, work)
        await anyio.to_thread.run_sync(begun.wait)
        with pytest.raises(ProblemError) as refused:
            await limiter.run(lambda: None, Deadline(0.02))
        assert (refused.value.status, refused.value.problem.code) == (504, "deadline_exceeded")
        go.set()
    assert await limiter.run(lambda: "in time", Deadline(PATIENCE_S)) == "in time"


async def test_cancelled_caller_does_not_free_a_running_thread() -> None:
    # Otherwise disconnecting clients could start any number of threads.
    limiter, go, begun = ConcurrencyLimiter(max_concurrent=1, max_queued=5), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait()

    first = asyncio.ensure_future(limiter.run(work))
    await asyncio.to_thread(begun.wait)
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
    go.set()
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
    answers: list[httpx2.Response] = []
    unseen = json.dumps({"items": [{"program": {**LINEAR, "m": 4004}, "device": "t4"}]})
    thread = threading.Thread(target=lambda: answers.append(client.post("/predict", content=unseen, headers=JSON)))
    thread.start()
    try:
        assert entered.wait(PATIENCE_S)
        assert client.get("/healthz").json() == {"status": "ok"}
        assert not answers
    finally:
        go.set()
        thread.join()
    assert answers[0].status_code == 200


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
