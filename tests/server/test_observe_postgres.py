"""Several services with one PostgreSQL database, which stops and starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cdmpp_server.app import create_app
from cdmpp_server.settings import Settings
from tests.server.conftest import LINEAR, problem
from tests.server.postgres import Postgres, running_postgres
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ITEM = {"program": LINEAR, "device": "t4"}


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def clients(postgres: Postgres) -> Iterator[tuple[TestClient, TestClient]]:
    settings = Settings(database=postgres.url)
    with TestClient(create_app(settings)) as one, TestClient(create_app(settings)) as other:
        yield one, other


def tell(client: TestClient, item: Any = ITEM, count: int = 1) -> Any:
    results = client.post("/predict", json={"items": [item] * count}).json()["results"]
    observed = [{"prediction_id": result["prediction_id"], "latency_s": 1e-4} for result in results]
    return client.post("/observe", json={"observations": observed})


def test_services_share_observations_and_programs(clients: tuple[TestClient, TestClient]) -> None:
    one, other = clients
    program = {"operator": "softmax", "rows": 333, "cols": 77}
    (registered,) = one.post("/programs", json={"programs": [program]}).json()["programs"]
    named = {"program": {"hash": registered["hash"]}, "device": "t4"}
    (result,) = other.post("/predict", json={"items": [named]}).json()["results"]
    assert result["latency_s"] > 0
    for client, count in ((one, 3), (other, 4), (one, 5)):
        assert tell(client, named, count).json()["accepted"] == count
    shown = [client.get("/observe").json()["devices"] for client in clients]
    assert shown[0] == shown[1]
    assert [row["count"] for row in shown[0]] == [12]


def test_accepted_observations_survive_a_crash_of_the_database(
    clients: tuple[TestClient, TestClient], postgres: Postgres
) -> None:
    client, _ = clients
    (result,) = client.post("/predict", json={"items": [ITEM]}).json()["results"]

    def count() -> int:
        devices = client.get("/observe").json()["devices"]
        return sum(row["count"] for row in devices)

    before = count()
    assert tell(client, count=50).status_code == 200
    postgres.stop()
    try:
        problem(tell(client), 503, "store_unavailable")
        problem(client.get("/observe"), 503, "store_unavailable")
        (again,) = client.post("/predict", json={"items": [ITEM]}).json()["results"]
        assert again["latency_s"] == result["latency_s"]
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["observations"]) == (200, "unavailable")
    finally:
        postgres.start()
    wait_until(lambda: tell(client, count=7).status_code == 200, "a stored observation")
    assert count() == before + 57
    assert client.get("/readyz").json()["observations"] == "ready"
