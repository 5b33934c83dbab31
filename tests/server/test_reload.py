"""A service of several processes: stopping, and a new model, without a failed request."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cdmpp.demo import Server, running_server
from cdmpp.predictor import LatencyPredictor, default_model
from cdmpp_server.app import create_app
from cdmpp_server.operate.access import new_key
from cdmpp_server.settings import Settings
from tests.server.conftest import JSON, LINEAR, problem


@pytest.fixture(scope="module")
def adapted(predictor: LatencyPredictor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with another identity."""
    sizes = [{**LINEAR, "m": 32 * (i + 1), "dtype": "float32"} for i in range(12)]
    rows = [(p, 1.7 * (a.latency_s or 0)) for p, a in zip(sizes, predictor.predict(sizes, "t4"), strict=True)]
    folder = tmp_path_factory.mktemp("models") / "adapted"
    predictor.adapt(rows, "t4").save(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The configured model folder, with the shipped model in it."""
    return Path(shutil.copytree(default_model(), tmp_path / "model"))


def put(folder: Path, new: Path) -> None:
    """Put another model in the place of a folder, as an operator would: whole, by renaming."""
    aside = Path(shutil.copytree(new, folder.with_name("new")))
    folder.rename(folder.with_name(f"old{time.monotonic_ns()}"))
    aside.rename(folder)


def model_id(folder: Path) -> str:
    identity: str = json.loads((folder / "manifest.json").read_text())["model_id"]
    return identity


class Trickle(threading.Thread):
    """Asks all the time, on several connections, new and old queries; remembers every answer."""

    def __init__(self, port: int, number: int = 0) -> None:
        super().__init__()
        self.port, self.number = port, number
        self.models: list[str] = []
        self.failures: list[str] = []
        self.stop = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        count = 0
        while not self.stop.wait(0.005):
            count += 1
            items = [{"program": {**LINEAR, "m": m}, "device": "t4"} for m in (7, 1000 * self.number + count)]
            try:
                connection.request("POST", "/predict", json.dumps({"items": items}), JSON)
                response = connection.getresponse()
                body = json.loads(response.read())
                assert response.status == 200, body
                assert {r["model_id"] for r in body["results"]} == {body["model_id"]}
                self.models.append(body["model_id"])
            except Exception as error:
                self.failures.append(repr(error))
                connection.close()
        connection.close()


@pytest.fixture
def trickle() -> Iterator[Callable[[int], list[Trickle]]]:
    started: list[Trickle] = []

    def start(port: int) -> list[Trickle]:
        for number in (1, 2, 3):
            started.append(Trickle(port, number))
            started[-1].start()
        return started

    yield start
    for thread in started:
        thread.stop.set()
        thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sighup_puts_a_new_model_in_place_and_no_request_fails(
    workers: int, folder: Path, adapted: Path, trickle: Callable[[int], list[Trickle]]
) -> None:
    old, new = model_id(folder), model_id(adapted)
    with running_server("--workers", str(workers), "--model", str(folder)) as server:
        asking = trickle(server.port)
        wait_until(lambda: all(len(t.models) > 5 for t in asking))
        put(folder, adapted)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: all(t.models[-1] == new for t in asking))
        # A model that is none is refused, and the one before goes on.
        (folder / "manifest.json").write_text("{}")
        server.process.send_signal(signal.SIGHUP)
        time.sleep(1.5)
        asked = [len(t.models) for t in asking]
        wait_until(lambda: all(len(t.models) > n + 5 for t, n in zip(asking, asked, strict=True)))
        for t in asking:
            t.stop.set()
            t.join()
            assert not t.failures
            assert set(t.models) == {old, new}
            assert set(t.models[t.models.index(new) :]) == {new} or workers > 1
            assert t.models[-1] == new


@pytest.mark.slow
def test_an_administrator_reloads_all_workers(folder: Path, adapted: Path) -> None:
    key, hash = new_key()
    new = model_id(adapted)
    settings = {"CDMPP_ADMIN_KEY_HASHES": json.dumps({"operator": hash})}

    def reload(server: Server, key: str | None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        with closing(connection):
            connection.request("POST", "/models/reload", headers=headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    with running_server("--workers", "2", "--model", str(folder), environment=settings) as server:
        assert reload(server, None)[0] == 401
        assert reload(server, "wrong")[0] == 401
        put(folder, adapted)
        assert reload(server, key) == (200, {"model_id": new, "workers": 2})
        for _ in range(8):  # whoever answers
            assert server.request("GET", "/readyz")["model_id"] == new
        (folder / "manifest.json").unlink()
        status, body = reload(server, key)
        assert (status, body["code"]) == (409, "reload_refused")
        assert server.request("GET", "/readyz")["model_id"] == new


def test_without_an_administrator_there_is_no_administration(client: TestClient) -> None:
    problem(client.post("/models/reload"), 404, "not_found")
    assert "/models/reload" not in client.get("/openapi.json").json()["paths"]
    with_keys = create_app(Settings(model=None, admin_key_hashes={"operator": new_key()[1]}))
    assert set(with_keys.openapi()["paths"]["/models/reload"]["post"]["responses"]) >= {"200", "409", "504"}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stopping_finishes_what_was_taken(workers: int) -> None:
    """A request of thousands of new queries is in the queue when the service is told to end."""
    items = [{"program": {**LINEAR, "m": m, "n": workers}, "device": "t4"} for m in range(1, 1500)]
    answers: list[tuple[int, int]] = []
    with running_server("--workers", str(workers), environment={"CDMPP_DEADLINE_S": "120"}) as server:

        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=150)
            with closing(connection):
                connection.request("POST", "/predict", json.dumps({"items": items}), JSON)
                sent.set()
                response = connection.getresponse()
                answers.append((response.status, len(json.loads(response.read())["results"])))

        sent = threading.Event()
        thread = threading.Thread(target=ask)
        thread.start()
        assert sent.wait(20)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) in (0, -signal.SIGTERM)
        thread.join()
    assert answers == [(200, len(items))]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_service_that_ends_refuses_new_connections_and_answers_what_was_begun(workers: int) -> None:
    body = json.dumps({"items": [{"program": LINEAR, "device": "t4"}]}).encode()
    head = (
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    with running_server("--workers", str(workers)) as server:
        address = ("127.0.0.1", server.port)
        with socket.create_connection(address, timeout=60) as begun:
            begun.sendall(head)
            # A worker has it, and waits for the body.
            assert begun.recv(4096).startswith(b"HTTP/1.1 100 ")
            server.process.send_signal(signal.SIGTERM)
            refused = False
            for _ in range(200):
                try:
                    socket.create_connection(address, timeout=60).close()
                except ConnectionRefusedError:
                    refused = True
                    break
                time.sleep(0.05)
            begun.sendall(body)
            answer = begun.recv(4096)
            assert refused
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in answer
        assert server.process.wait(60) in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced() -> None:
    with running_server("--workers", "2") as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        if not children.exists():
            pytest.skip("needs /proc to see processes")

        def workers() -> set[int]:
            found = map(int, children.read_text().split())
            return {p for p in found if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()}

        before = workers()
        assert len(before) == 2
        os.kill(min(before), signal.SIGKILL)
        wait_until(lambda: len(workers()) == 2 and workers() != before)
        assert server.request("GET", "/readyz")["status"] == "ready"


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells a process of its parent's end")
def test_workers_end_with_their_supervisor() -> None:
    with running_server("--workers", "2") as server:
        server.process.kill()
        refused = False
        for _ in range(400):
            try:
                socket.create_connection(("127.0.0.1", server.port), timeout=60).close()
            except ConnectionRefusedError:
                refused = True
                break
            time.sleep(0.05)
        assert refused


def test_a_service_that_cannot_start_says_so_and_ends(tmp_path: Path) -> None:
    from cdmpp.demo import DemoError

    with (
        pytest.raises(DemoError, match="status 1"),
        running_server("--workers", "2", "--model", str(tmp_path / "nothing")),
    ):
        raise AssertionError("it cannot be ready")
