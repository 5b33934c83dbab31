"""One application with the shipped model for all tests of the service."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, text

from cdmpp_server.app import create_app
from cdmpp_server.observe.store import ObservationStore
from cdmpp_server.settings import Settings
from tests.server.postgres import running_postgres

LINEAR: dict[str, Any] = {"operator": "linear", "m": 512, "n": 4096, "k": 1024, "dtype": "float16"}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="session")
def app() -> FastAPI:
    return create_app(Settings(model=None, warm_plans=False))


@pytest.fixture(scope="session")
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def ask(client: TestClient) -> Callable[..., httpx2.Response]:
    """POST /predict with items (objects, or a whole body as text or bytes)."""

    def ask(items: Any, **fields: Any) -> httpx2.Response:
        body = items if isinstance(items, str | bytes) else json.dumps({"items": items, **fields})
        response: httpx2.Response = client.post("/predict", content=body, headers=JSON)
        return response

    return ask


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with running_postgres() as server:
        yield server.url


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database: a SQLite file, or PostgreSQL where it is installed."""
    if request.param == "sqlite":
        return str(tmp_path / "folder" / "s.sqlite")
    url: str = request.getfixturevalue("postgres")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return url


@pytest.fixture
def store(database: str) -> Iterator[ObservationStore]:
    opened = ObservationStore(database)
    yield opened
    opened.close()


def without_ids(*results: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of /predict without their prediction_id, which differs between all results."""
    return [{name: value for name, value in result.items() if name != "prediction_id"} for result in results]


def problem(response: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """Check that an answer is a problem+json with this status and code."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert body["code"] == code
    assert body["detail"]
    assert "Traceback" not in response.text
    return body
