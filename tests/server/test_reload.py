"""Services of one and of several processes: stopping and loading a new model without a failed request."""

import http.client
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient

from benchmarks.serving.process import running
from cdmpp.cli.demo import DemoError, Server, running_server
from cdmpp.predict.predictor import LatencyPredictor, default_model
from cdmpp_server.app import create_app
from cdmpp_server.operate.access import new_key
from cdmpp_server.settings import Settings
from tests.server.conftest import BODY, JSON, LINEAR, problem
from tests.waiting import PATIENCE_S, PATIENT, wait_until

pytestmark = pytest.mark.slow

#: Messages in the log of a service, one from each worker.
LOADED, NOT_LOADED = "the model was reloaded", "the model was not reloaded"


@pytest.fixture(scope="module")
def adapted(predictor: LatencyPredictor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with another model id."""
    sizes = [{**LINEAR, "m": 32 * (i + 1), "dtype": "float32"} for i in range(12)]
    rows = [(p, 1.7 * (a.latency_s or 0)) for p, a in zip(sizes, predictor.predict(sizes, "t4"), strict=True)]
    folder = tmp_path_factory.mktemp("models") / "adapted"
    predictor.adapt(rows, "t4").save(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The configured model folder, which contains the shipped model."""
    return Path(shutil.copytree(default_model(), tmp_path / "model"))


def replace(folder: Path, new: Path) -> None:
    """Replace a model folder by a copy of another one, by renaming."""
    copy = Path(shutil.copytree(new, folder.with_name("new")))
    folder.rename(folder.with_name("old"))
    copy.rename(folder)


def model_id(folder: Path) -> str:
    return json.loads((folder / "manifest.json").read_text())["model_id"]


class Client(threading.Thread):
    """Sends requests on one connection until stopped and records the model of each response.

    Each request has a query that was sent before and a new one.
    """

    def __init__(self, port: int, number: int = 0) -> None:
        super().__init__()
        self.port, self.number = port, number
        self.models: list[str] = []
        self.failures: list[str] = []
        self.stop = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
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
def start_clients() -> Iterator[Callable[[int], list[Client]]]:
    started: list[Client] = []

    def start(port: int) -> list[Client]:
        for number in (1, 2, 3):
            started.append(Client(port, number))
            started[-1].start()
        return started

    yield start
    for client in started:
        client.stop.set()
        client.join()


def refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    return False


@pytest.mark.parametrize("workers", [1, 2])
def test_sighup_replaces_the_model_and_no_request_fails(
    workers: int, folder: Path, adapted: Path, start_clients: Callable[[int], list[Client]], tmp_path: Path
) -> None:
    old, new = model_id(folder), model_id(adapted)
    log = tmp_path / "log"
    with running("--workers", str(workers), "--model", str(folder), environment=PATIENT, log=log) as server:
        clients = start_clients(server.port)
        wait_until(lambda: all(len(c.models) > 5 for c in clients))
        replace(folder, adapted)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: all(c.models[-1] == new for c in clients) and log.read_text().count(LOADED) == workers)
        # An invalid model is refused, and the loaded one stays in use.
        (folder / "manifest.json").write_text("{}")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: log.read_text().count(NOT_LOADED) == workers)
        counts = [len(c.models) for c in clients]
        wait_until(lambda: all(len(c.models) > n + 5 for c, n in zip(clients, counts, strict=True)))
        for c in clients:
            c.stop.set()
            c.join()
            assert not c.failures
            assert set(c.models) == {old, new}
            assert set(c.models[c.models.index(new) :]) == {new} or workers > 1
            assert c.models[-1] == new


def worker_processes(server: Server) -> set[int]:
    """The workers of a service with several, by their process ids."""
    pids = set()
    for pid in map(int, Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()):
        with suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.add(pid)
    return pids


def reload(server: Server, key: str | None) -> tuple[int, dict[str, Any]]:
    """Status and body of ``POST /models/reload``."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = httpx2.post(f"http://127.0.0.1:{server.port}/models/reload", headers=headers, timeout=PATIENCE_S)
    return response.status_code, response.json()


def test_all_workers_reload_a_killed_one_is_replaced_and_they_end_with_their_supervisor(
    folder: Path, adapted: Path
) -> None:
    key, hash = new_key()
    new = model_id(adapted)
    settings = {"CDMPP_ADMIN_KEY_HASHES": json.dumps({"operator": hash})}
    with running_server("--workers", "2", "--model", str(folder), environment=settings | PATIENT) as server:
        assert reload(server, None)[0] == 401
        assert reload(server, "wrong")[0] == 401
        replace(folder, adapted)
        assert reload(server, key) == (200, {"model_id": new, "workers": 2})
        for _ in range(8):  # any worker may respond
            assert server.request("GET", "/readyz")["model_id"] == new
        if sys.platform == "linux":  # with /proc to list processes
            wait_until(lambda: len(worker_processes(server)) == 2)
            killed = min(worker_processes(server))
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: len(worker_processes(server)) == 2 and killed not in worker_processes(server))
            assert server.request("GET", "/readyz")["status"] == "ready"
        (folder / "manifest.json").rename(folder / "aside.json")
        status, body = reload(server, key)
        assert (status, body["code"]) == (409, "reload_refused")
        assert server.request("GET", "/readyz")["model_id"] == new
        if sys.platform == "linux":  # which alone can end a process with its parent
            server.process.kill()
            wait_until(lambda: refuses_connections(server.port))


def test_reload_endpoint_exists_only_with_administrators(client: TestClient) -> None:
    problem(client.post("/models/reload"), 404, "not_found")
    assert "/models/reload" not in client.get("/openapi.json").json()["paths"]
    with_keys = create_app(Settings(model=None, admin_key_hashes={"operator": new_key()[1]}))
    assert set(with_keys.openapi()["paths"]["/models/reload"]["post"]["responses"]) >= {"200", "409", "504"}


def waiting_rows(server: Server) -> float:
    """Rows that wait to be computed, in all workers."""
    text = httpx2.get(f"http://127.0.0.1:{server.port}/metrics", timeout=PATIENCE_S).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("cdmpp_queue_rows"))


@pytest.mark.parametrize("workers", [1, 2])
def test_stopping_service_refuses_connections_and_answers_what_has_begun_or_waits(workers: int) -> None:
    items = [{"program": {**LINEAR, "m": m, "n": workers}, "device": "t4"} for m in range(1, 1500)]
    body = json.dumps(BODY).encode()
    head = (
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    with ThreadPoolExecutor(1) as pool, running_server("--workers", str(workers), environment=PATIENT) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as begun:
            begun.sendall(head)
            # A worker has read the head and waits for the body.
            assert begun.recv(4096).startswith(b"HTTP/1.1 100 ")
            url = f"http://127.0.0.1:{server.port}/predict"
            waiting = pool.submit(httpx2.post, url, json={"items": items}, timeout=PATIENCE_S)
            wait_until(lambda: waiting_rows(server) > 0 or waiting.done())
            server.process.send_signal(signal.SIGTERM)
            # A worker that is still loading its model keeps the port open until it has loaded it.
            wait_until(lambda: refuses_connections(server.port))
            begun.sendall(body)
            response = begun.recv(4096)
            assert response.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in response
        assert server.process.wait(PATIENCE_S) in (0, -signal.SIGTERM)
        assert (waiting.result().status_code, len(waiting.result().json()["results"])) == (200, len(items))


def test_service_that_cannot_start_ends_with_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(DemoError, match="status 1"),
        running_server("--workers", "2", "--model", str(tmp_path / "missing")),
    ):
        raise AssertionError("the service must not become ready")
