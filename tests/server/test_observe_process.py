"""Observations that a service accepted before it was killed."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from benchmarks.serving.process import running
from tests.server.conftest import LINEAR, stored
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SENDERS, EACH, ENOUGH = 4, 50, 60


@pytest.mark.nightly
@pytest.mark.load
def test_accepted_observations_survive_a_kill_under_load(tmp_path: Path) -> None:
    environment = {"CDMPP_DATABASE": str(tmp_path / "s.sqlite")}
    sizes = itertools.count(1)  # the id of a prediction counts once
    accepted: list[str] = []
    requests = 0
    enough = threading.Event()

    def send(url: str) -> None:
        nonlocal requests
        with httpx2.Client(timeout=PATIENCE_S) as client:
            while True:
                try:
                    items = [{"program": {**LINEAR, "m": next(sizes)}, "device": "t4"} for _ in range(EACH)]
                    results = client.post(f"{url}/predict", json={"items": items}).json()["results"]
                    measured = [{"prediction_id": result["prediction_id"], "latency_s": 1e-4} for result in results]
                    response = client.post(f"{url}/observe", json={"observations": measured})
                except httpx2.TransportError:
                    return  # killed: what was under way was not accepted
                assert response.status_code == 200
                answer = response.json()
                assert answer["accepted"] == EACH
                accepted.extend(result["observation_id"] for result in answer["results"])
                requests += 1
                if requests >= ENOUGH:
                    enough.set()

    with ThreadPoolExecutor(SENDERS) as pool, running(environment=environment, ready_s=PATIENCE_S) as served:
        senders = [pool.submit(send, f"http://127.0.0.1:{served.port}") for _ in range(SENDERS)]
        assert enough.wait(PATIENCE_S)
        served.process.kill()
        for sender in senders:
            sender.result(PATIENCE_S)
    with running(environment=environment, ready_s=PATIENCE_S) as served:
        shown = served.ask("GET", "/observe")[1]["devices"]
    kept = set(stored(environment["CDMPP_DATABASE"]))
    assert len(accepted) == len(set(accepted)) >= ENOUGH * EACH
    assert set(accepted) <= kept
    # Requests that were on the disk when their answer could no longer be sent are all that may be more.
    assert len(kept) - len(accepted) <= SENDERS * EACH
    assert [row["count"] for row in shown] == [len(kept)]
