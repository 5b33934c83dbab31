"""From observing to adapting: drift starts a job, the job proposes a model, an administrator takes it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from cdmpp_server.operate.access import new_key
from tests.server.conftest import problem, service
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

DEVICE = "t4"
ADMIN, ADMIN_HASH = new_key()
HEADERS = {"authorization": f"Bearer {ADMIN}"}
PROGRAMS = [{"operator": "linear", "m": 64 * i, "n": 1024, "k": 512, "dtype": "float16"} for i in range(1, 17)]
#: Rounds of observations of all programs that fill the recent window of 200.
ROUNDS = 13


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"database": str(tmp_path / "s.sqlite"), "admin_key_hashes": {"boss": ADMIN_HASH}}


@pytest.fixture
def serve(settings: dict[str, Any]) -> Iterator[Callable[..., TestClient]]:
    """Start the service; an earlier one of the test is stopped."""
    with ExitStack() as running:

        def start(**changes: Any) -> TestClient:
            running.close()
            return running.enter_context(service(**settings, **changes))

        yield start


def predict(client: TestClient) -> list[dict[str, Any]]:
    items = [{"program": program, "device": DEVICE} for program in PROGRAMS]
    answer = client.post("/predict", json={"items": items})
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


def observe(client: TestClient, true_s: list[float], factor: float, seed: int) -> None:
    """Report measured latencies of the device, which are ``factor`` times ``true_s``, with a scatter of 3 %."""
    rng = np.random.default_rng(seed)
    for _ in range(ROUNDS):
        measured = factor * np.array(true_s) * np.exp(rng.normal(0, 0.03, len(true_s)))
        observations = [
            {"prediction_id": result["prediction_id"], "latency_s": latency_s}
            for result, latency_s in zip(predict(client), measured.tolist(), strict=True)
        ]
        answer = client.post("/observe", json={"observations": observations})
        assert answer.json()["accepted"] == len(PROGRAMS), answer.text


def figures(client: TestClient, model_id: str) -> dict[str, Any]:
    (row,) = [device for device in client.get("/observe").json()["devices"] if device["model_id"] == model_id]
    assert row["device"] == DEVICE
    return dict(row)


def finished(client: TestClient, model_id: str) -> dict[str, Any]:
    """The job that proposes a model for the device, when it has ended."""
    wait_until(lambda: figures(client, model_id)["proposal"], "a job is submitted")
    path = f"/jobs/{figures(client, model_id)['proposal']}"
    wait_until(lambda: client.get(path).json()["state"] in ("done", "failed"), "the job ends")
    return dict(client.get(path).json())


@pytest.fixture
def other_worker(settings: dict[str, Any]) -> Iterator[TestClient]:
    """Another process of the service would share its database."""
    with service(**settings) as client:
        yield client


def test_drift_starts_a_proposal_that_an_administrator_loads(
    serve: Callable[..., TestClient], other_worker: TestClient
) -> None:
    client = serve()
    base_id = client.get("/readyz").json()["model_id"]
    true_s = [result["latency_s"] for result in predict(client)]
    observe(client, true_s, 1.0, seed=0)
    before = figures(client, base_id)
    assert not before["drifting"] and before["proposal"] is None

    observe(client, true_s, 1.5, seed=1)
    assert figures(client, base_id)["drifting"]
    job = finished(client, base_id)
    assert job["state"] == "done", job
    answer = job["answer"]
    assert answer["proposed"] and answer["replaces"] == answer["base_model_id"] == base_id
    assert answer["held_back"]["programs"] == len(PROGRAMS) // 4
    assert answer["held_back"]["after"] < 0.1 < 0.25 < answer["held_back"]["before"]
    # Never swapped by itself, and not by users.
    assert client.get("/readyz").json()["model_id"] == base_id
    problem(client.post("/models/reload", json={"proposal": job["job_id"]}), 401, "unauthorized")
    assert figures(client, base_id)["proposal"] == job["job_id"]

    taken = client.post("/models/reload", json={"proposal": job["job_id"]}, headers=HEADERS)
    assert taken.status_code == 200 and taken.json()["model_id"] == answer["model_id"] != base_id, taken.text
    assert other_worker.post("/models/reload", headers=HEADERS).json()["model_id"] == answer["model_id"]
    for result, latency_s in zip(predict(client), true_s, strict=True):
        assert result["latency_s"] == pytest.approx(1.5 * latency_s, rel=0.1)
    for seed in (2, 3):
        observe(client, true_s, 1.5, seed)
    after = figures(client, answer["model_id"])
    assert after["count"] == 2 * ROUNDS * len(PROGRAMS)
    assert not after["drifting"] and abs(after["recent_bias"]) < 0.1 and after["proposal"] is None

    # The proposal is kept over a restart, until it is put back.
    client = serve()
    assert client.get("/readyz").json()["model_id"] == answer["model_id"]
    for nothing in (None, {}):
        assert client.post("/models/reload", json=nothing, headers=HEADERS).json()["model_id"] == answer["model_id"]
    assert client.post("/models/reload", json={"proposal": None}, headers=HEADERS).json()["model_id"] == base_id
    assert [result["latency_s"] for result in predict(client)] == true_s


def test_device_that_was_never_inside_its_interval_gets_a_proposal(serve: Callable[..., TestClient]) -> None:
    client = serve()
    base_id = client.get("/readyz").json()["model_id"]
    true_s = [result["latency_s"] for result in predict(client)]
    observe(client, true_s, 3.0, seed=0)
    row = figures(client, base_id)
    assert not row["drifting"] and row["coverage"] == 0
    assert finished(client, base_id)["answer"]["proposed"]


def test_observations_without_their_programs_fail_the_job_and_name_the_remedy(serve: Callable[..., TestClient]) -> None:
    # The worker that predicted has gone, and the programs were not registered.
    client = serve(propose_models=False)
    base_id = client.get("/readyz").json()["model_id"]
    ids = [[result["prediction_id"] for result in predict(client)] for _ in range(ROUNDS)]
    true_s = [result["latency_s"] for result in predict(client)]
    client = serve()
    for round in ids:
        observations = [{"prediction_id": i, "latency_s": 3 * s} for i, s in zip(round, true_s, strict=True)]
        assert client.post("/observe", json={"observations": observations}).status_code == 200
    job = finished(client, base_id)
    assert job["state"] == "failed" and job["answer"] is None
    assert "0 different programs" in job["error"]["message"] and "POST /programs" in job["error"]["hint"]
    problem(client.post("/models/reload", json={"proposal": job["job_id"]}, headers=HEADERS), 404, "unknown_proposal")


def test_reload_of_an_unknown_proposal_is_refused(serve: Callable[..., TestClient]) -> None:
    client = serve()
    for body, status, code in (
        ({"proposal": "0" * 32}, 404, "unknown_proposal"),
        ({"proposal": "../model"}, 422, "invalid_request"),
        ({"proposal": None, "model": "x"}, 422, "invalid_request"),
    ):
        problem(client.post("/models/reload", json=body, headers=HEADERS), status, code)
