"""Applications with the shipped model, and what the tests of the service share."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import Executable, Row, create_engine, select, text

from cdmpp.plan.registry import PLANNERS
from cdmpp_server.app import create_app
from cdmpp_server.database import database_url
from cdmpp_server.observe.store import ObservationStore
from cdmpp_server.observe.tables import observations
from cdmpp_server.settings import Settings
from tests.server.postgres import running_postgres
from tests.waiting import ROOT

EXAMPLES = ROOT / "examples" / "llm"
LLAMA: dict[str, Any] = json.loads((EXAMPLES / "llama-3.1-8b.json").read_text())
LINEAR: dict[str, Any] = {"operator": "linear", "m": 512, "n": 4096, "k": 1024, "dtype": "float16"}
ITEM = {"program": LINEAR, "device": "t4"}
BODY = {"items": [ITEM]}
JSON = {"content-type": "application/json"}


def service(**settings: Any) -> TestClient:
    """A client of an application with these settings; ``with`` starts and stops it."""
    return TestClient(create_app(Settings(**settings)), raise_server_exceptions=False)


@pytest.fixture(scope="session")
def client() -> Iterator[TestClient]:
    with service() as client:
        yield client


@pytest.fixture
def app(client: TestClient) -> FastAPI:
    """The application of ``client``."""
    return client.app


@pytest.fixture(scope="session")
def ask(client: TestClient) -> Callable[..., httpx2.Response]:
    """POST /predict with items (objects, or a whole body as text or bytes)."""

    def ask(items: Any, **fields: Any) -> httpx2.Response:
        body = items if isinstance(items, str | bytes) else json.dumps({"items": items, **fields})
        return client.post("/predict", content=body, headers=JSON)

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
    execute(url, text("DROP SCHEMA public CASCADE"), text("CREATE SCHEMA public"))
    return url


@pytest.fixture
def store(database: str) -> Iterator[ObservationStore]:
    opened = ObservationStore(database)
    yield opened
    opened.close()


def http_scope(path: str, headers: dict[str, str] = JSON) -> dict[str, Any]:
    """The scope of a POST request to an application that is called directly."""
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
    }


def plan_examples() -> list[tuple[str, Path]]:
    """All requests of docs/examples, by planner: ``KIND.json``, ``KIND_more.json``."""
    named = [(path.stem.partition("_")[0], path) for path in sorted((ROOT / "docs" / "examples").glob("*.json"))]
    return [(kind, path) for kind, path in named if kind in PLANNERS]


def execute(database: str, *statements: Executable) -> None:
    """Change a database as another program would."""
    engine = create_engine(database_url(database))
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(statement)
    engine.dispose()


def stored(database: str) -> dict[str, Row]:
    """The observations of a database by their ids."""
    engine = create_engine(database_url(database))
    with engine.connect() as connection:
        rows = {row.id: row for row in connection.execute(select(observations))}
    engine.dispose()
    return rows


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
