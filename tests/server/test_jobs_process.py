"""Jobs of a service that is killed, and jobs of a service with several workers."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.serving.process import Served, running
from tests.server.test_plans import LONG
from tests.waiting import PATIENCE_S, is_running, wait_until

pytestmark = pytest.mark.slow

MODEL = {"stages": 4, "micro_batches": 8, "forward_s": 1, "backward_s": 2}
SHORT: dict[str, Any] = {"models": [MODEL], "ranks": 4, "budget_s": 600, "max_steps": 20}


def submit(served: Served, value: dict[str, Any]) -> str:
    # The first plan waits for the start of a planning process.
    response = httpx2.post(f"http://127.0.0.1:{served.port}/pipeline/search", json=value, timeout=PATIENCE_S)
    assert response.status_code == 202, response.text
    return str(response.json()["job_id"])


def wait(served: Served, id: str, *states: str) -> dict[str, Any]:
    job: dict[str, Any] = {}

    def is_reached() -> bool:
        status, body = served.ask("GET", f"/jobs/{id}")
        assert status == 200, body
        job.update(body)
        return job["state"] in states

    wait_until(is_reached, f"state {states} of the job")
    return job


def test_job_survives_the_kill_of_its_service(tmp_path: Path) -> None:
    environment = {"CDMPP_DATABASE": str(tmp_path / "s.sqlite")}
    with running(environment=environment) as served:
        long, short = submit(served, LONG), submit(served, SHORT)
        wait(served, long, "running")
        processes = served.processes()
        assert len(processes) > 1 or not Path("/proc").exists()
        served.process.kill()
        served.process.wait()
        # The planning processes end with the service.
        wait_until(lambda: not any(map(is_running, processes)), "the end of the processes")
    with running(environment=environment) as again:
        before = again.ask("GET", f"/jobs/{long}")[1]
        assert before["state"] == "running" and before["answer"] is None
        # After the end of its lease the job is taken again.
        wait_until(lambda: again.ask("GET", f"/jobs/{long}")[1]["updated_at"] != before["updated_at"])
        cancelled = again.ask("POST", f"/jobs/{long}/cancel")[1]
        assert cancelled["state"] == "cancelled", cancelled["error"]
        done = wait(again, short, "done")
        assert done["answer"]["makespan_s"] >= done["answer"]["lower_bound_s"]


def test_any_worker_reports_on_a_job() -> None:
    with running("--workers", "2") as served:
        id = submit(served, SHORT)
        # Any of the two may respond, whichever of them runs the job.
        jobs = [wait(served, id, "done") for _ in range(12)]
    assert len({json.dumps(job["answer"], sort_keys=True) for job in jobs}) == 1
