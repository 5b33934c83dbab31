"""The service killed in the middle of a job: the next one takes it up; and several workers share the jobs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.process import Served, running
from tests.server.test_plans import LONG

SHORT = {**LONG, "max_activations": None, "max_steps": 20, "budget_s": 60}


def submit(served: Served, value: dict[str, Any]) -> str:
    status, answer = served.ask("POST", "/pipeline/search", value)
    assert status == 202, answer
    id: str = answer["job_id"]
    return id


def wait(served: Served, id: str, *states: str, seconds: float = 90) -> dict[str, Any]:
    give_up = time.monotonic() + seconds
    while True:
        status, job = served.ask("GET", f"/jobs/{id}")
        assert status == 200, job
        if job["state"] in states:
            found: dict[str, Any] = job
            return found
        assert time.monotonic() < give_up, job
        time.sleep(0.1)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_job_outlives_kill_9(tmp_path: Path) -> None:
    environment = {"CDMPP_DATABASE": str(tmp_path / "s.sqlite")}
    with running(environment=environment) as served:
        long, short = submit(served, LONG), submit(served, SHORT)
        wait(served, long, "running")
        processes = served.processes()
        assert len(processes) > 1 or not Path("/proc").exists()
        served.process.kill()
        served.process.wait()
        # What plans ends with the service.
        give_up = time.monotonic() + 20
        while any(map(lives, processes)):
            assert time.monotonic() < give_up
            time.sleep(0.05)
    with running(environment=environment) as again:
        before = again.ask("GET", f"/jobs/{long}")[1]
        assert before["state"] == "running" and before["answer"] is None
        # Its lease ends, and it goes on.
        give_up = time.monotonic() + 60
        while (job := again.ask("GET", f"/jobs/{long}")[1])["updated_at"] == before["updated_at"]:
            assert time.monotonic() < give_up, job
            time.sleep(0.1)
        cancelled = again.ask("DELETE", f"/jobs/{long}")[1]
        assert cancelled["state"] == "cancelled", cancelled["error"]
        done = wait(again, short, "done")
        assert done["answer"]["makespan_s"] >= done["answer"]["lower_bound_s"]


@pytest.mark.slow
def test_any_worker_answers_for_a_job() -> None:
    with running("--workers", "2") as served:
        ids = [submit(served, SHORT) for _ in range(3)]
        jobs = [wait(served, id, "done") for id in ids for _ in range(4)]
    # The same request, whoever did it.
    assert len({json.dumps(job["answer"], sort_keys=True) for job in jobs}) == 1
