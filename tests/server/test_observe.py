"""POST and GET /observe: storage of observations, errors of items, and running figures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, select

from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.app import create_app
from cdmpp_server.database import database_url
from cdmpp_server.observe.ids import Signer
from cdmpp_server.observe.tables import observations
from cdmpp_server.settings import Settings
from tests.server.conftest import LINEAR, problem

OTHER = {"operator": "softmax", "rows": 4096, "cols": 1024}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("observe") / "s.sqlite")


@pytest.fixture(scope="module")
def app(database: str) -> FastAPI:
    return create_app(Settings(database=database))


@pytest.fixture(scope="module")
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def predicted(client: TestClient, program: dict[str, Any] = LINEAR, device: Any = "t4") -> dict[str, Any]:
    return results_of(client, 1, program, device)[0]


def results_of(
    client: TestClient, count: int, program: dict[str, Any] = LINEAR, device: Any = "t4"
) -> list[dict[str, Any]]:
    """Results of equal items; each counts once."""
    item = {"program": program, "device": device, "protocol": "eager", "framework": "pytorch"}
    results: list[dict[str, Any]] = client.post("/predict", json={"items": [item] * count}).json()["results"]
    return results


def errors(client: TestClient) -> dict[str, dict[str, Any]]:
    return {row["device"]: row for row in client.get("/observe").json()["devices"]}


def kept(database: str) -> dict[str, Any]:
    engine = create_engine(database_url(database))
    with engine.connect() as connection:
        rows = {row.id: row for row in connection.execute(select(observations))}
    engine.dispose()
    return rows


def test_observation_needs_only_id_and_latency(client: TestClient, database: str) -> None:
    before, again = results_of(client, 2)
    seconds = [1.5 * before["latency_s"], 3.0 * before["latency_s"]]
    measured = list(zip((before, again), seconds, strict=True))
    body = {"observations": [{"prediction_id": r["prediction_id"], "latency_s": x} for r, x in measured]}
    response = client.post("/observe", json=body)
    assert response.status_code == 200
    answer = response.json()
    assert answer["accepted"] == 2
    rows = kept(database)
    for result, latency_s in zip(answer["results"], seconds, strict=True):
        row = rows[result["observation_id"]]
        assert row.latency_s == latency_s
        for column, field in (("predicted_s", "latency_s"), ("lower_s", "lower_s"), ("upper_s", "upper_s")):
            assert getattr(row, column) == before[field]
        for field in ("program_hash", "device", "backend", "protocol", "framework", "model_id"):
            assert getattr(row, field) == before[field]
    shown = errors(client)["t4"]
    assert shown["count"] == 2
    assert shown["bias"] == pytest.approx(math.sqrt(1.5 * 3.0) - 1)
    assert shown["mape"] == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert shown["drift"] is None and shown["drifting"] is False
    assert shown["model_id"] == before["model_id"]


def test_observation_without_id_is_predicted_first(client: TestClient, database: str) -> None:
    query = {"program": OTHER, "device": "l4", "protocol": "eager", "framework": "pytorch"}
    answer = client.post("/observe", json={"observations": [{**query, "latency_s": 5e-5}]}).json()
    row = kept(database)[answer["results"][0]["observation_id"]]
    before = predicted(client, OTHER, "l4")
    assert (row.program_hash, row.predicted_s) == (before["program_hash"], before["latency_s"])
    norm = {"operator": "rmsnorm", "rows": 1024, "cols": 4096}
    for framework, implementation, kernels_of in (("vllm", "composed", "pytorch"), ("pytorch", "fused", None)):
        query = {"program": norm, "device": "l4", "framework": framework, "implementation": implementation}
        answer = client.post("/observe", json={"observations": [{**query, "latency_s": 5e-5}]}).json()
        assert kept(database)[answer["results"][0]["observation_id"]].framework == kernels_of


def test_devices_of_one_name_are_separated_by_their_figures(client: TestClient) -> None:
    listed = {d["name"]: d for d in client.get("/devices").json()["devices"]}
    custom_device = {k: v for k, v in listed["l40"].items() if k != "trained"}
    twice = {**custom_device, "mem_bandwidth_bytes_per_s": 2 * custom_device["mem_bandwidth_bytes_per_s"]}
    for device in (custom_device, twice):
        body = {"observations": [{"program": LINEAR, "device": device, "latency_s": 1e-4}]}
        assert client.post("/observe", json=body).json()["accepted"] == 1
    rows = [row for row in client.get("/observe").json()["devices"] if row["device"] == "l40"]
    assert [row["count"] for row in rows] == [1, 1]
    assert len({row["device_digest"] for row in rows}) == 2


def test_invalid_observation_does_not_affect_others(client: TestClient, database: str) -> None:
    before, count = predicted(client)["prediction_id"], len(kept(database))
    answer = client.post(
        "/observe",
        json={
            "observations": [
                {"prediction_id": before[:-3], "latency_s": 1e-4},
                {"prediction_id": before, "latency_s": 1e-4},
                {"program": {"operator": "liner"}, "device": "t4", "latency_s": 1e-4},
                {"program": LINEAR, "device": "t5", "latency_s": 1e-4},
                {"program": {"hash": "0" * 32}, "device": "t4", "latency_s": 1e-4},
                {"program": OTHER, "device": "t4", "latency_s": 1e-4},
            ]
        },
    ).json()
    assert "results" in answer, answer
    codes = [result.get("error", {}).get("code") for result in answer["results"]]
    assert codes == ["invalid_prediction_id", None, "unsupported_operator", "unknown_device", "unknown_program", None]
    assert answer["accepted"] == 2
    assert len(kept(database)) == count + 2


@pytest.mark.parametrize(
    "observation",
    [
        {},
        {"prediction_id": "x"},
        {"prediction_id": "x", "latency_s": 0},
        {"prediction_id": "x", "latency_s": "1e-4"},
        {"prediction_id": "x" * 401, "latency_s": 1e-4},
        {"prediction_id": "x", "latency_s": 1e-4, "device": "t4"},
        {"program": LINEAR, "latency_s": 1e-4},
        {"program": LINEAR, "device": "t4", "latency_s": -1e-4},
        {"program": LINEAR, "device": "t4", "latency_s": 1e-4, "protocol": "x"},
        17,
    ],
)
def test_schema_violation_refuses_the_request(client: TestClient, observation: Any) -> None:
    problem(client.post("/observe", json={"observations": [observation]}), 422, "invalid_request")


def test_empty_list_and_invalid_json_are_refused(client: TestClient) -> None:
    problem(client.post("/observe", json={"observations": []}), 422, "invalid_request")
    body = b'{"observations": [{"prediction_id": "x", "latency_s": NaN}]}'
    response = client.post("/observe", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 422)


def test_drift_is_reported(client: TestClient) -> None:
    def tell(factor: float, count: int) -> dict[str, Any]:
        observed = [
            {"prediction_id": result["prediction_id"], "latency_s": result["latency_s"] * factor * (1 + i % 7 / 50)}
            for i, result in enumerate(results_of(client, count, device="a30"))
        ]
        assert client.post("/observe", json={"observations": observed}).json()["accepted"] == count
        return errors(client)["a30"]

    assert tell(1.5, 1000)["drifting"] is False
    shown = tell(1.9, 150)
    assert shown["drifting"] is True and shown["drift"] > 5
    assert shown["recent_bias"] > shown["bias"] > 0.4


def observe(client: TestClient, *observed: tuple[str, float]) -> list[dict[str, Any]]:
    body = {"observations": [{"prediction_id": id, "latency_s": latency_s} for id, latency_s in observed]}
    results: list[dict[str, Any]] = client.post("/observe", json=body).json()["results"]
    return results


def counts(client: TestClient) -> list[tuple[str, int]]:
    return [(row["device"], row["count"]) for row in client.get("/observe").json()["devices"]]


def test_invented_prediction_is_refused(client: TestClient) -> None:
    """The token of a client with another key: a device that does not exist, and a latency of 1e18 s."""
    before, invented = counts(client), Signer(b"a key of the client's own")
    prediction = LatencyPredictor.load().predict([LINEAR], "t4")[0]
    forged = replace(prediction, device="invented", latency_s=1e18, lower_s=1e18, upper_s=1e18)
    genuine = predicted(client)["prediction_id"]
    tokens = [
        invented.receipts(1)[0] + invented.content(forged, "0" * 16),
        genuine[:28] + invented.content(forged, "0" * 16),
        genuine[:-1] + ("A" if genuine[-1] != "A" else "Q"),
        ("B" if genuine[0] != "B" else "C") + genuine[1:],
    ]
    results = observe(client, *((token, 1e-6) for token in tokens))
    assert [result["error"]["code"] for result in results] == ["invalid_prediction_id"] * len(tokens)
    assert counts(client) == before


def test_prediction_counts_once(client: TestClient, database: str) -> None:
    result = predicted(client, device="l40s")
    id, latency_s = result["prediction_id"], 1.5 * result["latency_s"]
    first, again, other = observe(client, (id, latency_s), (id, latency_s), (id, 2 * latency_s))
    assert first == again and "observation_id" in first
    assert other["error"]["code"] == "already_observed" and first["observation_id"] in other["error"]["message"]
    stored = len(kept(database))
    replayed = observe(client, *[(id, latency_s)] * 1000)
    assert replayed == [first] * 1000
    shown = errors(client)["l40s"]
    assert (shown["count"], len(kept(database))) == (1, stored)
    assert shown["bias"] == pytest.approx(0.5)
    # Another result of the same query counts, too.
    again = predicted(client, device="l40s")
    assert again["latency_s"] == result["latency_s"] and again["prediction_id"] != id
    observe(client, (again["prediction_id"], latency_s))
    assert errors(client)["l40s"]["count"] == 2


def test_one_outlier_does_not_dominate_the_mean_error(client: TestClient) -> None:
    results = results_of(client, 100, device="h100-sxm")
    factors = [0.02 if i == 0 else 1.0 for i in range(100)]
    observe(client, *((r["prediction_id"], r["latency_s"] * f) for r, f in zip(results, factors, strict=True)))
    shown = errors(client)["h100-sxm"]
    assert shown["mape"] == pytest.approx(9 / 100)
    assert shown["bias"] == pytest.approx(10 ** (-1 / 100) - 1)


def test_ten_thousand_observations_in_one_request(client: TestClient, database: str) -> None:
    results, count = results_of(client, 10_000), len(kept(database))
    body = json.dumps({"observations": [{"prediction_id": r["prediction_id"], "latency_s": 1e-3} for r in results]})
    answer = client.post("/observe", content=body, headers={"content-type": "application/json"}).json()
    assert answer["accepted"] == 10_000
    assert len({result["observation_id"] for result in answer["results"]}) == 10_000
    assert len(kept(database)) == count + 10_000
    too_many = json.dumps({"observations": [{"prediction_id": "x", "latency_s": 1e-3}] * 10_001})
    refused = client.post("/observe", content=too_many, headers={"content-type": "application/json"})
    problem(refused, 422, "invalid_request")


def test_predictions_work_without_the_database(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("in the way")
    app = create_app(Settings(database=str(tmp_path / "folder" / "s.sqlite")))
    with TestClient(app, raise_server_exceptions=False) as client:
        before = predicted(client)
        assert before["latency_s"] > 0 and before["prediction_id"] is None
        body = {"observations": [{"prediction_id": "x", "latency_s": 1e-4}]}
        refused = client.post("/observe", json=body)
        problem(refused, 503, "store_unavailable")
        assert refused.headers["retry-after"] == "5"
        for refused in (
            client.get("/observe"),
            client.post("/programs", json={"programs": [LINEAR]}),
            client.post("/predict", json={"items": [{"program": {"hash": "0" * 32}, "device": "t4"}]}),
            client.get("/jobs/" + "0" * 32),
        ):
            problem(refused, 503, "store_unavailable")
            assert refused.headers["retry-after"] == "5"
        ready = client.get("/readyz")
        assert ready.status_code == 200
        assert ready.json()["observations"] == "unavailable"
        assert "cdmpp_store_up 0.0" in client.get("/metrics").text


@pytest.mark.slow
def test_observations_survive_a_restart(client: TestClient, app: FastAPI, database: str) -> None:
    def rows(service: TestClient) -> list[dict[str, Any]]:
        # A proposal goes on meanwhile.
        listed = service.get("/observe").json()["devices"]
        return [{name: value for name, value in row.items() if name != "proposal"} for row in listed]

    before = rows(client)
    with TestClient(create_app(Settings(database=database))) as later:
        assert rows(later) == before
        assert later.get("/readyz").json()["observations"] == "ready"


def test_allow_header_lists_both_methods(client: TestClient) -> None:
    refused = client.put("/observe")
    problem(refused, 405, "method_not_allowed")
    assert refused.headers["allow"] == "GET, POST"


@pytest.mark.slow
def test_services_share_one_database(client: TestClient, database: str) -> None:
    """Behind a load balancer, each service reports the observations that another one received."""
    program = {"operator": "softmax", "rows": 333, "cols": 77}
    with TestClient(create_app(Settings(database=database))) as other:
        (registered,) = other.post("/programs", json={"programs": [program]}).json()["programs"]
        by_hash, in_full = client.post(
            "/predict",
            json={"items": [{"program": p, "device": "t4"} for p in ({"hash": registered["hash"]}, program)]},
        ).json()["results"]
        assert by_hash["latency_s"] == in_full["latency_s"] > 0
        body = {"observations": [{"prediction_id": by_hash["prediction_id"], "latency_s": 1e-4}]}
        assert other.post("/observe", json=body).json()["accepted"] == 1
        assert counts(client) == counts(other)
