"""Several services with one PostgreSQL database, which stops and starts."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.server.conftest import BODY, ITEM, problem, service
from tests.server.postgres import Postgres, running_postgres
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def clients(postgres: Postgres) -> Iterator[tuple[TestClient, TestClient]]:
    with service(database=postgres.url) as first, service(database=postgres.url) as second:
        yield first, second


def tell(client: TestClient, item: Any = ITEM, count: int = 1) -> Any:
    results = client.post("/predict", json={"items": [item] * count}).json()["results"]
    observed = [{"prediction_id": result["prediction_id"], "latency_s": 1e-4} for result in results]
    return client.post("/observe", json={"observations": observed})


def test_services_share_observations_and_programs(clients: tuple[TestClient, TestClient]) -> None:
    first, second = clients
    program = {"operator": "softmax", "rows": 333, "cols": 77}
    (registered,) = first.post("/programs", json={"programs": [program]}).json()["programs"]
    named = {"program": {"hash": registered["hash"]}, "device": "t4"}
    (result,) = second.post("/predict", json={"items": [named]}).json()["results"]
    assert result["latency_s"] > 0
    for client, count in ((first, 3), (second, 4), (first, 5)):
        assert tell(client, named, count).json()["accepted"] == count
    shown = [client.get("/observe").json()["devices"] for client in clients]
    assert shown[0] == shown[1]
    assert [row["count"] for row in shown[0]] == [12]


def test_accepted_observations_survive_a_crash_of_the_database(
    clients: tuple[TestClient, TestClient], postgres: Postgres
) -> None:
    client, _ = clients
    (result,) = client.post("/predict", json=BODY).json()["results"]

    def count() -> int:
        return sum(row["count"] for row in client.get("/observe").json()["devices"])

    before = count()
    assert tell(client, count=50).status_code == 200
    postgres.stop()
    try:
        problem(tell(client), 503, "store_unavailable")
        problem(client.get("/observe"), 503, "store_unavailable")
        (again,) = client.post("/predict", json=BODY).json()["results"]
        assert again["latency_s"] == result["latency_s"]
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["observations"]) == (200, "unavailable")
    finally:
        postgres.start()
    wait_until(lambda: tell(client, count=7).status_code == 200, "a stored observation")
    assert count() == before + 57
    assert client.get("/readyz").json()["observations"] == "ready"
