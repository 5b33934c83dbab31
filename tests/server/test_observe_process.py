"""Observations that a service accepted before it was killed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import create_engine, select

from benchmarks.serving.process import free_port
from cdmpp_server.database import database_url
from cdmpp_server.observe.tables import observations
from tests.server.conftest import LINEAR
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SENDERS, EACH, ENOUGH = 4, 50, 60


def start(database: Path, port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "cdmpp_server", "--port", str(port)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "CDMPP_DATABASE": str(database)},
    )

    def is_ready() -> bool:
        assert process.poll() is None, "the service ended"
        try:
            return httpx2.get(f"http://127.0.0.1:{port}/readyz", timeout=PATIENCE_S).status_code == 200
        except httpx2.TransportError:
            return False

    wait_until(is_ready, "readiness of the service")
    return process


@pytest.mark.nightly
@pytest.mark.load
def test_accepted_observations_survive_a_kill_under_load(tmp_path: Path) -> None:
    database, port = tmp_path / "s.sqlite", free_port()
    url = f"http://127.0.0.1:{port}"
    process = start(database, port)
    sizes = itertools.count(1)  # the id of a prediction counts once
    accepted: list[str] = []
    requests = 0
    enough = threading.Event()

    def send() -> None:
        nonlocal requests
        with httpx2.Client(timeout=PATIENCE_S) as client:
            while True:
                try:
                    items = [{"program": {**LINEAR, "m": next(sizes)}, "device": "t4"} for _ in range(EACH)]
                    results = client.post(f"{url}/predict", json={"items": items}).json()["results"]
                    measured = [{"prediction_id": result["prediction_id"], "latency_s": 1e-4} for result in results]
                    body = json.dumps({"observations": measured})
                    response = client.post(f"{url}/observe", content=body, headers={"content-type": "application/json"})
                except httpx2.TransportError:
                    return  # killed: what was under way was not accepted
                assert response.status_code == 200
                answer: dict[str, Any] = response.json()
                assert answer["accepted"] == EACH
                accepted.extend(result["observation_id"] for result in answer["results"])
                requests += 1
                if requests >= ENOUGH:
                    enough.set()

    senders = [threading.Thread(target=send) for _ in range(SENDERS)]
    for sender in senders:
        sender.start()
    try:
        assert enough.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        for sender in senders:
            sender.join(PATIENCE_S)
    again = start(database, port)
    try:
        shown = httpx2.get(f"{url}/observe").json()["devices"]
    finally:
        again.kill()
        again.wait(PATIENCE_S)
    engine = create_engine(database_url(str(database)))
    with engine.connect() as connection:
        kept = set(connection.execute(select(observations.c.id)).scalars())
    engine.dispose()
    assert len(accepted) == len(set(accepted)) >= ENOUGH * EACH
    assert set(accepted) <= kept
    # Requests that were on the disk when their answer could no longer be sent are all that may be more.
    assert len(kept) - len(accepted) <= SENDERS * EACH
    assert [row["count"] for row in shown] == [len(kept)]
