"""A real server on loopback, in a thread, for the tests of the clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn

from benchmarks.serving.process import free_port
from cdmpp_server.app import create_app
from cdmpp_server.settings import Settings
from tests.waiting import PATIENCE_S, wait_until

Serve = Callable[..., str]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """``serve(max_items=10)``: URL of a server with these settings; it ends with the tests."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(**settings: object) -> str:
        folder: Path = tmp_path_factory.mktemp("service")
        port = free_port()
        chosen = {"database": str(folder / "service.sqlite"), "warm_plans": False, **settings}
        app = create_app(Settings(**chosen))  # type: ignore[arg-type]
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        wait_until(lambda: server.started, "the start of the server")
        return f"http://127.0.0.1:{port}"

    yield start
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(PATIENCE_S)


@pytest.fixture(scope="session")
def url(serve: Serve) -> str:
    """A server with default settings."""
    return serve()
