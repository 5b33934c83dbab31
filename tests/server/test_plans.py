"""Replay and plans: Python, the command line and HTTP give one answer; refusals name the field."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import TypeAdapter
from typer.testing import CliRunner

from cdmpp.cli.main import app as command_line
from cdmpp.compose.request import Request as PlanRequest
from cdmpp.errors import OverloadedError
from cdmpp.planning.registry import PLANNERS, make_plan
from cdmpp.predictor import LatencyPredictor
from cdmpp_server.deadline import Deadline
from cdmpp_server.plan.routes import PlanKinds
from cdmpp_server.planners import Planners
from cdmpp_server.problems import ProblemError
from cdmpp_server.sandbox.supervised import SupervisedWorker
from cdmpp_server.sandbox.worker import Worker, WorkerDiedError, WorkerMemoryError, WorkerTimeoutError
from tests.server.conftest import JSON, LINEAR, problem

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
#: Searched for long enough to be asked about meanwhile.
LONG: dict[str, Any] = {
    "models": [
        {"stages": 16, "micro_batches": 33, "forward_s": 5, "backward_s": 11, "direction": "down"},
        {"stages": 8, "micro_batches": 27, "forward_s": 3, "backward_s": 7.3, "direction": "up"},
    ],
    "ranks": 16,
    "max_activations": 18,
    "budget_s": 60,
    "seed": 0,
}
#: A computation, not a search: no budget cuts it.
CLUSTER: dict[str, Any] = json.loads((EXAMPLES / "cluster.json").read_text())
Post = Callable[..., httpx2.Response]


@pytest.fixture
def post(client: TestClient) -> Post:
    def post(kind: str, value: Any, **headers: str) -> httpx2.Response:
        body = value if isinstance(value, str | bytes) else json.dumps(value)
        found: httpx2.Response = client.post(PLANNERS[kind].path, content=body, headers={**JSON, **headers})
        return found

    return post


def examples() -> list[Any]:
    """Every request of docs/examples, by its kind: ``KIND.json``, ``KIND_more.json``."""
    files = sorted(EXAMPLES.glob("*.json"))
    return [
        pytest.param(file.stem.partition("_")[0], file, id=file.stem)
        for file in files
        if file.stem.partition("_")[0] in PLANNERS
    ]


def test_every_kind_has_an_example_and_an_endpoint(client: TestClient) -> None:
    assert set(PLANNERS) <= {each.values[0] for each in examples()}
    told = PlanKinds.model_validate(client.get("/plans").json()).kinds
    assert [(each.kind, each.path) for each in told] == [(k.name, k.path) for k in PLANNERS.values()]


@pytest.mark.parametrize(("kind", "file"), examples())
def test_three_doors_give_one_answer(
    kind: str,
    file: Path,
    post: Post,
    client: TestClient,
    predictor: LatencyPredictor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CDMPP_MODEL", raising=False)
    value = json.loads(file.read_text())
    if "max_steps" in value:
        # The steps end it, however busy the machine.
        value |= {"budget_s": 600, "max_steps": min(value["max_steps"], 20)}
    here = make_plan(kind, value, predictor)
    over_http = answered(post(kind, value), client)
    assert over_http == json.loads(json.dumps(here))
    words = [kind] if kind == "replay" else ["plan", kind]
    (same := tmp_path / "request.json").write_text(json.dumps(value))
    said = CliRunner().invoke(command_line, [*words, str(same), "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout) == over_http
    # What is answered is what the schema says.
    model = PLANNERS[kind].model_of(value)
    answers = model.answer_model() if issubclass(model, PlanRequest) else model.answer_model
    TypeAdapter(answers).validate_python(over_http)


def answered(response: httpx2.Response, client: TestClient) -> Any:
    """The answer, at once or of the job."""
    if response.status_code == 202:
        return until(client, response.json()["job_id"], "done")["answer"]
    assert response.status_code == 200, response.text
    return response.json()


def test_a_request_that_is_none_is_refused_with_the_place(post: Post) -> None:
    problem(post("pipeline", "[1"), 400, "malformed_json")
    problem(post("pipeline", '{"ranks": NaN}'), 400, "malformed_json")
    assert problem(post("pipeline", "[]"), 422, "invalid_request")["errors"][0]["path"] == ""
    wrong = {**LONG, "models": [{**LONG["models"][0], "micro_batches": 0}]}
    places = problem(post("pipeline", wrong), 422, "invalid_request")["errors"]
    assert [place["path"] for place in places] == ["models.0.micro_batches"]
    response = post("pipeline", "{}", **{"content-type": "text/plain"})
    problem(response, 415, "unsupported_media_type")


def test_what_no_schema_can_say_is_a_conflict_with_the_place(post: Post) -> None:
    # A check of the model itself: two ways of one cost.
    both = {**LONG, "models": [{**LONG["models"][0], "forward": {"programs": [{"program": LINEAR}], "device": "t4"}}]}
    problem(post("pipeline", both), 409, "invalid_field")
    cost = {"programs": [{"program": LINEAR, "count": 2}], "device": "no-such-gpu"}
    model = {"stages": 2, "micro_batches": 2, "forward": cost, "backward_s": 1e-4}
    for broken in (
        {},
        {"program": {"operator": "lstm"}, "device": "t4"},
        {"program": {"operator": "linear", "m": {"a": 1}}, "device": "t4"},
        {"program": {"nonsense": 1}, "device": "t4"},
        {"program": {"hash": "0" * 32}, "device": "t4"},
        {"program": {"tvm_json": "[]"}, "device": "t4"},
        {"program": LINEAR, "device": {"name": "half"}},
        {"program": LINEAR, "device": "/etc/passwd"},
    ):
        if broken:
            cost |= {"programs": [{"program": broken["program"]}], "device": broken["device"]}
        found = problem(post("pipeline", {"models": [model], "ranks": 2}), 409, "invalid_field")
        assert found["errors"][0]["path"].startswith("models.0.forward"), broken


def test_programs_have_every_form_of_predict(post: Post, client: TestClient) -> None:
    (known,) = client.post("/programs", json={"programs": [LINEAR]}).json()["programs"]

    def ask(program: Any) -> dict[str, Any]:
        forward = {"programs": [{"program": program, "count": 3}], "device": "t4", "protocol": "eager"}
        model = {"stages": 2, "micro_batches": 2, "forward": forward, "backward_s": 1e-3}
        response = post("pipeline", {"models": [model], "ranks": 2, "max_steps": 100})
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    assert ask(LINEAR) == ask({"hash": known["hash"]})
    assert ask(LINEAR)["model_id"] == client.get("/readyz").json()["model_id"]


def test_a_wish_makes_a_job_of_anything(post: Post, client: TestClient) -> None:
    at_once = post("cluster", CLUSTER).json()
    response = post("cluster", CLUSTER, Prefer="wait=5, respond-async")
    assert response.status_code == 202, response.text
    submitted = response.json()
    assert response.headers["location"] == f"/jobs/{submitted['job_id']}"
    job = until(client, submitted["job_id"], "done")
    assert job["answer"] == at_once
    assert (job["kind"], job["progress"], job["error"]) == ("cluster", 1.0, None)
    assert client.delete(f"/jobs/{submitted['job_id']}").json() == job


def test_a_long_search_is_a_job_that_can_be_cancelled(post: Post, client: TestClient) -> None:
    response = post("pipeline", LONG)
    assert response.status_code == 202
    id = response.json()["job_id"]
    until(client, id, "running")
    # Others are answered meanwhile, short searches too.
    assert post("cluster", CLUSTER).status_code == 200
    assert client.delete(f"/jobs/{id}").json()["state"] == "cancelled"
    last = client.get(f"/jobs/{id}").json()
    assert last["state"] == "cancelled" and last["progress"] < 1
    for unknown in ("0" * 32, "nonsense", "%2e%2e"):
        problem(client.get(f"/jobs/{unknown}"), 404, "unknown_job")
        problem(client.delete(f"/jobs/{unknown}"), 404, "unknown_job")


def until(client: TestClient, id: str, state: str) -> dict[str, Any]:
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        job: dict[str, Any] = client.get(f"/jobs/{id}").json()
        if job["state"] == state:
            return job
        assert job["state"] in ("queued", "running"), (job["state"], job["error"])
        time.sleep(0.02)
    pytest.fail(f"the job was never {state}")


def test_a_planning_process_that_was_killed_is_replaced(post: Post, app: FastAPI) -> None:
    assert post("cluster", CLUSTER).status_code == 200
    for pid in app.state.planners.pids:
        os.kill(pid, signal.SIGKILL)
    assert post("cluster", CLUSTER).status_code == 200


class Played(Worker):
    """A planning process that a test plays."""

    def __init__(self, plays: list[Any]) -> None:
        super().__init__(0)
        self.plays, self.alive = plays, False

    @property
    def pid(self) -> int | None:
        return 1 if self.alive else None

    async def start(self) -> None:
        self.alive = True

    async def stop(self) -> None:
        self.alive = False

    async def run(self, header: Any, payload: bytes, timeout_s: float, on_progress: Any = None) -> Any:
        play = self.plays.pop(0)
        if isinstance(play, Exception):
            self.alive = False
            raise play
        if play == "wait":
            await asyncio.sleep(timeout_s)
            self.alive = False
            raise WorkerTimeoutError
        if play == "slow":
            await asyncio.sleep(0.1)
            return {}, b"late"
        return play


def played(
    plays: list[Any], ask: Callable[[Planners], Any], max_queued: int = 4, limit_s: float = 0.05
) -> tuple[Any, int]:
    """What ``ask`` gives with one process that is played, and how many were started for it."""
    made: list[Worker] = []

    def make() -> Worker:
        made.append(Played(plays))
        return made[-1]

    async def main() -> Any:
        async with Planners(1, make, max_queued, limit_s) as planners:
            return await ask(planners)

    return asyncio.run(main()), len(made)


def one(deadline_s: float = 5.0) -> Callable[[Planners], Any]:
    async def ask(planners: Planners) -> Any:
        try:
            return await planners.run({}, b"", Deadline(deadline_s))
        except ProblemError as error:
            return error.status, error.problem.code

    return ask


def test_how_processes_end() -> None:
    good = ({}, b"answer")
    assert played([good], one()) == (good, 1)
    assert played([WorkerDiedError(), good], one()) == (good, 2)
    assert played([WorkerDiedError(), WorkerDiedError()], one())[0] == (500, "internal_error")
    assert played([WorkerMemoryError()], one()) == ((409, "plan_too_large"), 2)
    assert played([({"bug": "KeyError"}, b"")], one()) == ((500, "internal_error"), 1)
    assert played(["wait"], one()) == ((504, "deadline_exceeded"), 2)


def test_who_goes_early_costs_no_process() -> None:
    async def twice(planners: Planners) -> Any:
        first = await one(0.01)(planners)
        return first, await one()(planners)

    found, processes = played(["slow", ({}, b"answer")], twice, limit_s=5.0)
    assert found == ((504, "deadline_exceeded"), ({}, b"answer"))
    assert processes == 1


def test_who_finds_the_processes_busy_waits_until_its_deadline_or_is_refused() -> None:
    async def several(planners: Planners) -> Any:
        first = asyncio.create_task(one(0.3)(planners))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(one(0.1)(planners))
        await asyncio.sleep(0.01)
        third = await one()(planners)
        return third, await second, await first

    found, _ = played(["wait", ({}, b"")], several, max_queued=1, limit_s=0.3)
    assert found == ((503, "overloaded"), (504, "deadline_exceeded"), (504, "deadline_exceeded"))


def test_a_start_that_fails_is_tried_again() -> None:
    class Broken(Played):
        async def start(self) -> None:
            raise WorkerDiedError("no")

    made: list[Worker] = [Broken([]), Played([])]

    async def main() -> None:
        worker = SupervisedWorker(lambda: made.pop(0))
        with pytest.raises(OverloadedError):
            await worker.ready()
        assert (await worker.ready()).pid == 1
        await worker.stop()

    asyncio.run(main())
