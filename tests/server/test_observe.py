"""POST and GET /observe: storage of observations, errors of items, and running figures."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.observe.ids import Signer
from tests.server.conftest import ITEM, JSON, LINEAR, problem, service, stored

OTHER = {"operator": "softmax", "rows": 4096, "cols": 1024}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("observe") / "s.sqlite")


@pytest.fixture(scope="module")
def client(database: str) -> Iterator[TestClient]:
    with service(database=database) as client:
        yield client


def predicted(client: TestClient, program: dict[str, Any] = LINEAR, device: Any = "t4") -> dict[str, Any]:
    return results_of(client, 1, program, device)[0]


def results_of(
    client: TestClient, count: int, program: dict[str, Any] = LINEAR, device: Any = "t4"
) -> list[dict[str, Any]]:
    """Results of equal items; each counts once."""
    item = {"program": program, "device": device, "protocol": "eager", "framework": "pytorch"}
    return client.post("/predict", json={"items": [item] * count}).json()["results"]


def observe(client: TestClient, *observed: tuple[str, float]) -> dict[str, Any]:
    """The answer to observations, each with the id of a prediction and its seconds."""
    body = {"observations": [{"prediction_id": id, "latency_s": latency_s} for id, latency_s in observed]}
    response = client.post("/observe", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def errors(client: TestClient) -> dict[str, dict[str, Any]]:
    return {row["device"]: row for row in client.get("/observe").json()["devices"]}


def test_observation_needs_only_id_and_latency(client: TestClient, database: str) -> None:
    before, again = results_of(client, 2)
    seconds = [1.5 * before["latency_s"], 3.0 * before["latency_s"]]
    answer = observe(client, *zip((before["prediction_id"], again["prediction_id"]), seconds, strict=True))
    assert answer["accepted"] == 2
    rows = stored(database)
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
    row = stored(database)[answer["results"][0]["observation_id"]]
    before = predicted(client, OTHER, "l4")
    assert (row.program_hash, row.predicted_s) == (before["program_hash"], before["latency_s"])
    norm = {"operator": "rmsnorm", "rows": 1024, "cols": 4096}
    for framework, implementation, kernels_of in (("vllm", "composed", "pytorch"), ("pytorch", "fused", None)):
        query = {"program": norm, "device": "l4", "framework": framework, "implementation": implementation}
        answer = client.post("/observe", json={"observations": [{**query, "latency_s": 5e-5}]}).json()
        assert stored(database)[answer["results"][0]["observation_id"]].framework == kernels_of


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
    before, count = predicted(client)["prediction_id"], len(stored(database))
    observed = [
        {"prediction_id": before[:-3]},
        {"prediction_id": before},
        {"program": {"operator": "liner"}, "device": "t4"},
        {"program": LINEAR, "device": "t5"},
        {"program": {"hash": "0" * 32}, "device": "t4"},
        {"program": OTHER, "device": "t4"},
    ]
    answer = client.post("/observe", json={"observations": [{**o, "latency_s": 1e-4} for o in observed]}).json()
    assert "results" in answer, answer
    codes = [result.get("error", {}).get("code") for result in answer["results"]]
    assert codes == ["invalid_prediction_id", None, "unsupported_operator", "unknown_device", "unknown_program", None]
    assert answer["accepted"] == 2
    assert len(stored(database)) == count + 2


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
    assert client.post("/observe", content=body, headers=JSON).status_code in (400, 422)


def test_drift_is_reported(client: TestClient) -> None:
    def tell(factor: float, count: int) -> dict[str, Any]:
        observed = (
            (result["prediction_id"], result["latency_s"] * factor * (1 + i % 7 / 50))
            for i, result in enumerate(results_of(client, count, device="a30"))
        )
        assert observe(client, *observed)["accepted"] == count
        return errors(client)["a30"]

    assert tell(1.5, 1000)["drifting"] is False
    shown = tell(1.9, 150)
    assert shown["drifting"] is True and shown["drift"] > 5
    assert shown["recent_bias"] > shown["bias"] > 0.4


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
    results = observe(client, *((token, 1e-6) for token in tokens))["results"]
    assert [result["error"]["code"] for result in results] == ["invalid_prediction_id"] * len(tokens)
    assert counts(client) == before


def test_prediction_counts_once(client: TestClient, database: str) -> None:
    result = predicted(client, device="l40s")
    id, latency_s = result["prediction_id"], 1.5 * result["latency_s"]
    first, again, other = observe(client, (id, latency_s), (id, latency_s), (id, 2 * latency_s))["results"]
    assert first == again and "observation_id" in first
    assert other["error"]["code"] == "already_observed" and first["observation_id"] in other["error"]["message"]
    count = len(stored(database))
    assert observe(client, *[(id, latency_s)] * 1000)["results"] == [first] * 1000
    shown = errors(client)["l40s"]
    assert (shown["count"], len(stored(database))) == (1, count)
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
    results, count = results_of(client, 10_000), len(stored(database))
    answer = observe(client, *((r["prediction_id"], 1e-3) for r in results))
    assert answer["accepted"] == 10_000
    assert len({result["observation_id"] for result in answer["results"]}) == 10_000
    assert len(stored(database)) == count + 10_000
    too_many = {"observations": [{"prediction_id": "x", "latency_s": 1e-3}] * 10_001}
    problem(client.post("/observe", json=too_many), 422, "invalid_request")


def test_predictions_work_without_the_database(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("in the way")
    with service(database=str(tmp_path / "folder" / "s.sqlite")) as client:
        before = predicted(client)
        assert before["latency_s"] > 0 and before["prediction_id"] is None
        unseen = {"program": {"hash": "0" * 32}, "device": "t4"}
        for refused in (
            client.post("/observe", json={"observations": [{"prediction_id": "x", "latency_s": 1e-4}]}),
            client.get("/observe"),
            client.post("/programs", json={"programs": [LINEAR]}),
            client.post("/predict", json={"items": [ITEM, unseen]}),
            client.get("/jobs/" + "0" * 32),
        ):
            problem(refused, 503, "store_unavailable")
            assert refused.headers["retry-after"] == "5"
        ready = client.get("/readyz")
        assert ready.status_code == 200
        assert ready.json()["observations"] == "unavailable"
        assert "cdmpp_store_up 0.0" in client.get("/metrics").text
        # What this worker remembers it knows by its hash all the same.
        assert predicted(client, {"hash": before["program_hash"]}) == before


@pytest.mark.slow
def test_observations_survive_a_restart(client: TestClient, database: str) -> None:
    def rows(service: TestClient) -> list[dict[str, Any]]:
        # A proposal goes on meanwhile.
        listed = service.get("/observe").json()["devices"]
        return [{name: value for name, value in row.items() if name != "proposal"} for row in listed]

    before = rows(client)
    with service(database=database) as later:
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
    with service(database=database) as other:
        (registered,) = other.post("/programs", json={"programs": [program]}).json()["programs"]
        items = [{"program": p, "device": "t4"} for p in ({"hash": registered["hash"]}, program)]
        by_hash, in_full = client.post("/predict", json={"items": items}).json()["results"]
        assert by_hash["latency_s"] == in_full["latency_s"] > 0
        assert observe(other, (by_hash["prediction_id"], 1e-4))["accepted"] == 1
        assert counts(client) == counts(other)
