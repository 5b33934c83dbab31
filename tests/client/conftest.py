"""A real server on loopback, in a thread, and a stand-in for the network, for the tests of the clients."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import uvicorn

from benchmarks.serving.process import free_port
from cdmpp.client import AsyncPredictorClient, PredictorClient
from cdmpp_server.app import create_app
from cdmpp_server.settings import Settings
from tests.waiting import PATIENCE_S, wait_until

Serve = Callable[..., str]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """``serve(max_items=10)``: URL of a server with these settings; it ends with the tests."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(**settings: object) -> str:
        port = free_port()
        database = str(tmp_path_factory.mktemp("service") / "service.sqlite")
        app = create_app(Settings(**{"database": database, **settings}))
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


URL = "http://service.invalid"
Handler = Callable[[httpx2.Request], httpx2.Response]


def call(handler: Handler, asynchronous: bool, method: str, *arguments: Any, **options: Any) -> Any:
    """One operation of a client over a stand-in for the network."""
    mock = httpx2.MockTransport(handler)
    if not asynchronous:
        with PredictorClient(URL, transport=mock, **options) as client:
            return getattr(client, method)(*arguments)

    async def main() -> Any:
        async with AsyncPredictorClient(URL, transport=mock, **options) as client:
            return await getattr(client, method)(*arguments)

    return asyncio.run(main())


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return request.param
