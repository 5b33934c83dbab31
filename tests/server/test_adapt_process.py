"""The process of POST /adapt: killed at the deadline and when the client leaves; records are charged before the work.

The process is stopped by SIGSTOP, so that it never answers, however fast the machine is.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.app import create_app
from cdmpp_server.operate.metrics import Metrics
from cdmpp_server.operate.middleware import RequestMiddleware, count_items
from cdmpp_server.settings import Settings
from tests.server.conftest import JSON, LINEAR, problem
from tests.server.test_adapt import DEVICE, records
from tests.waiting import is_running, wait_until, wait_until_async

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app(Settings(model=None, warm_plans=False, job_workers=0))


@pytest.fixture(scope="module")
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def body(predictor: LatencyPredictor) -> bytes:
    return json.dumps({"device": DEVICE, "records": records(predictor)}).encode()


@pytest.fixture
def stopped(app: FastAPI, client: TestClient, body: bytes) -> int:
    """Process id of the adapting process, which does not answer any more."""
    assert client.post("/adapt", content=body, headers=JSON).status_code == 200
    (pid,) = app.state.adapting.pids
    os.kill(pid, signal.SIGSTOP)
    return int(pid)


def test_process_is_killed_at_the_deadline_and_other_requests_are_answered_meanwhile(
    app: FastAPI, client: TestClient, body: bytes, stopped: int
) -> None:
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(client.post, "/adapt", content=body, headers={**JSON, "x-request-timeout-s": "2"})
        wait_until(lambda: app.state.adapting.busy, "the adaptation has begun")
        items = [{"program": LINEAR, "device": "t4"}]
        assert client.post("/predict", json={"items": items}).status_code == 200
        refusal = problem(late.result(), 504, "deadline_exceeded")
    assert "within 2 s" in refusal["detail"] and "fewer records" in refusal["hint"]
    wait_until(lambda: not is_running(stopped), "the process is killed")
    assert client.post("/adapt", content=body, headers=JSON).status_code == 200


def test_process_is_killed_when_the_client_leaves(app: FastAPI, client: TestClient, body: bytes, stopped: int) -> None:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await wait_until_async(lambda: app.state.adapting.busy)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/adapt",
        "raw_path": b"/adapt",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(b"content-type", b"application/json"), (b"host", b"testserver")],
        "client": ("testclient", 1),
        "server": ("testserver", 80),
    }

    async def leave() -> None:
        await app(scope, receive, send)

    assert client.portal is not None
    client.portal.call(leave)
    wait_until(lambda: not is_running(stopped), "the process is killed")
    wait_until(lambda: not app.state.adapting.busy, "the job has ended")
    assert client.post("/adapt", content=body, headers=JSON).status_code == 200


def test_records_are_charged_to_the_rate_of_items(predictor: LatencyPredictor) -> None:
    app = create_app(Settings(model=None, warm_plans=False, job_workers=0, items_per_s=1e-3))
    with TestClient(app, raise_server_exceptions=False) as client:
        sent = json.dumps({"device": DEVICE, "records": records(predictor)})
        assert client.post("/adapt", content=sent, headers=JSON).status_code == 200
        items = [{"program": LINEAR, "device": "t4"}]
        problem(client.post("/predict", json={"items": items}), 429, "rate_limited")


def test_items_are_charged_before_the_work() -> None:
    statuses: list[int] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/first":
            count_items(Request(scope), 10)
            await request("/second")  # while the first request is worked on
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    middleware = RequestMiddleware(inner, Settings(items_per_s=1e-3), Metrics())

    async def request(path: str) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b""}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope: dict[str, Any] = {
            "type": "http",
            "method": "GET",
            "path": path,
            "headers": [],
            "client": ("10.0.0.1", 1),
        }
        await middleware(scope, receive, send)

    asyncio.run(request("/first"))
    assert statuses == [429, 200]
