"""One application with the shipped model for all tests of the service."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cdmpp_server.app import create_app
from cdmpp_server.settings import Settings

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
