"""The process of POST /adapt: killed at the deadline and when the client leaves; records are charged before the work.

The process is stopped by SIGSTOP, so that it never answers, however fast the machine is.
"""

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
from cdmpp_server.operate.metrics import Metrics
from cdmpp_server.operate.middleware import RequestMiddleware, count_items
from cdmpp_server.settings import Settings
from tests.server.conftest import BODY, http_scope, problem, service
from tests.server.test_adapt import DEVICE, adapt, records
from tests.waiting import is_running, wait_until, wait_until_async

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with service(job_workers=0) as client:
        yield client


@pytest.fixture
def body(predictor: LatencyPredictor) -> dict[str, Any]:
    return {"device": DEVICE, "records": records(predictor)}


@pytest.fixture
def stopped(app: FastAPI, client: TestClient, body: dict[str, Any]) -> int:
    """Process id of the adapting process, which does not answer any more."""
    assert client.post("/adapt", json=body).status_code == 200
    (pid,) = app.state.adapting.pids
    os.kill(pid, signal.SIGSTOP)
    return int(pid)


def test_process_is_killed_at_the_deadline_and_other_requests_are_answered_meanwhile(
    app: FastAPI, client: TestClient, body: dict[str, Any], stopped: int
) -> None:
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(client.post, "/adapt", json=body, headers={"x-request-timeout-s": "2"})
        wait_until(lambda: app.state.adapting.busy, "the adaptation has begun")
        assert client.post("/predict", json=BODY).status_code == 200
        refusal = problem(late.result(), 504, "deadline_exceeded")
    assert "within 2 s" in refusal["detail"] and "fewer records" in refusal["hint"]
    wait_until(lambda: not is_running(stopped), "the process is killed")
    assert client.post("/adapt", json=body).status_code == 200


def test_process_is_killed_when_the_client_leaves(
    app: FastAPI, client: TestClient, body: dict[str, Any], stopped: int
) -> None:
    messages: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await wait_until_async(lambda: app.state.adapting.busy)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    client.portal.call(app, http_scope("/adapt"), receive, send)
    wait_until(lambda: not is_running(stopped), "the process is killed")
    wait_until(lambda: not app.state.adapting.busy, "the job has ended")
    assert client.post("/adapt", json=body).status_code == 200


def test_records_are_charged_to_the_rate_of_items(predictor: LatencyPredictor) -> None:
    with service(job_workers=0, items_per_s=1e-3) as client:
        assert adapt(client, records(predictor)).status_code == 200
        problem(client.post("/predict", json=BODY), 429, "rate_limited")


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

        await middleware(http_scope(path), receive, send)

    asyncio.run(request("/first"))
    assert statuses == [429, 200]
