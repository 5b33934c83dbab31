"""Replay and plans: Python, the command line and HTTP return the same answer; errors name the field."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import TypeAdapter
from typer.testing import CliRunner

from cdmpp.cli.main import app as command_line
from cdmpp.errors import OverloadedError
from cdmpp.plan.base.solve import predict_prices
from cdmpp.plan.registry import PLANNERS, make_plan
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.rendering import render
from cdmpp.predict.requests.request import Request as PlanRequest
from cdmpp_server.concurrency import Deadline
from cdmpp_server.plan import work
from cdmpp_server.plan.routes import EXAMPLE_REQUESTS, PlanKinds
from cdmpp_server.plan_limits import DEFAULTS
from cdmpp_server.problems import ProblemError
from cdmpp_server.processes import PLANNING, Processes
from cdmpp_server.queries import encode_prices
from cdmpp_server.sandbox.worker import SupervisedWorker, Worker, WorkerDiedError, WorkerMemoryError, WorkerTimeoutError
from tests.server.conftest import JSON, LINEAR, plan_examples, problem
from tests.waiting import ROOT, run_in_virtual_time, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shipped_model_is_loaded_once")]

EXAMPLES = ROOT / "docs" / "examples"
#: A search that is still running when a test asks for its state; tests cancel it.
LONG: dict[str, Any] = {
    "models": [
        {"stages": 16, "micro_batches": 33, "forward_s": 5, "backward_s": 11, "direction": "down"},
        {"stages": 8, "micro_batches": 27, "forward_s": 3, "backward_s": 7.3, "direction": "up"},
    ],
    "ranks": 16,
    "max_activations": 18,
    "budget_s": 600,
    "seed": 0,
}
#: A computation without a search: no budget ends it early.
CLUSTER: dict[str, Any] = json.loads((EXAMPLES / "cluster.json").read_text())
Post = Callable[..., httpx2.Response]


@pytest.fixture
def post(client: TestClient) -> Post:
    def post(kind: str, value: Any, **headers: str) -> httpx2.Response:
        body = value if isinstance(value, str | bytes) else json.dumps(value)
        return client.post(PLANNERS[kind].path, content=body, headers={**JSON, **headers})

    return post


def test_every_planner_has_an_example_and_an_endpoint(client: TestClient) -> None:
    assert set(PLANNERS) <= {kind for kind, _ in plan_examples()}
    kinds = PlanKinds.model_validate(client.get("/plans").json()).kinds
    assert [(k.kind, k.path) for k in kinds] == [(k.name, k.path) for k in PLANNERS.values()]


@pytest.mark.parametrize(("kind", "file"), [pytest.param(*example, id=example[1].stem) for example in plan_examples()])
def test_python_cli_and_http_return_the_same_answer(
    kind: str, file: Path, post: Post, client: TestClient, predictor: LatencyPredictor, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.delenv("CDMPP_MODEL", raising=False)
    value = json.loads(file.read_text())
    if "max_steps" in value:
        # The number of steps ends the search, however busy the machine is.
        value |= {"budget_s": 600, "max_steps": min(value["max_steps"], 20)}
    here = make_plan(kind, value, predictor)
    check_reliability(kind, value, here, predictor)
    over_http = answered(post(kind, value), client)
    assert over_http == json.loads(json.dumps(here))
    words = [kind] if kind == "replay" else ["plan", kind]
    (same := tmp_path / "request.json").write_text(json.dumps(value))
    cli_result = CliRunner().invoke(command_line, [*words, str(same), "--json"])
    assert cli_result.exit_code == 0, cli_result.output
    assert json.loads(cli_result.stdout) == over_http
    # What is answered is what the schema says.
    model = PLANNERS[kind].model_of(value)
    answers = model.answer_model() if issubclass(model, PlanRequest) else model.answer_model
    TypeAdapter(answers).validate_python(over_http)


def check_reliability(kind: str, value: Any, answer: dict[str, Any], predictor: LatencyPredictor) -> None:
    """A plan says which model priced it, how far from training its costs are, and what holds at their bounds."""
    request = PLANNERS[kind].read(value)
    plan = request.answer_model().model_validate(answer)
    everything = predict_prices(request.price_requests(), predictor)
    prices = request.used_prices(plan, everything)
    reliability, text = plan.reliability, render(plan.report())
    assert reliability is not None and reliability.programs == len(prices)
    if not prices:
        assert reliability.given and "all are given as numbers" in text
        assert (plan.model_id, plan.domain, reliability.ends) == (None, None, None)
        return
    domains = {price.domain for price in prices}
    assert plan.model_id == predictor.model_id and plan.domain == max(domains, key=("in", "near", "out").index)
    assert plan.model_id in text and (plan.domain == "in" or f"worst domain {plan.domain}: " in text)
    assert reliability.domain_share is not None and 0 < reliability.domain_share <= 1
    ends = reliability.ends
    assert ends is not None and "with all predictions at their bounds: " in text
    value_now = attrgetter(ends.figure)(plan)
    assert ends.lower <= value_now <= ends.upper and ends.lower < ends.upper
    # The figure at the ends and the figure of the plan come from one computation.
    again = request.with_prices(everything).figure_of(plan)
    assert again is None or again == pytest.approx(value_now, rel=1e-9)


def answered(response: httpx2.Response, client: TestClient) -> Any:
    """The answer, at once or of the job."""
    if response.status_code == 202:
        return until(client, response.json()["job_id"], "done")["answer"]
    assert response.status_code == 200, response.text
    return response.json()


def test_invalid_request_is_refused_with_its_field(post: Post) -> None:
    problem(post("pipeline", "[1"), 400, "malformed_json")
    problem(post("pipeline", '{"ranks": NaN}'), 400, "malformed_json")
    assert problem(post("pipeline", "[]"), 422, "invalid_request")["errors"][0]["path"] == ""
    wrong = {**LONG, "models": [{**LONG["models"][0], "micro_batches": 0}]}
    refused = problem(post("pipeline", wrong), 422, "invalid_request")
    assert [place["path"] for place in refused["errors"]] == ["models.0.micro_batches"]
    assert refused["hint"] == "GET /openapi.json has the fields and an example of pipeline, under POST /pipeline/search"
    problem(post("pipeline", "{}", **{"content-type": "text/plain"}), 415, "unsupported_media_type")


def test_violation_beyond_the_schema_is_a_conflict_with_its_field(post: Post) -> None:
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
        refusal = problem(post("pipeline", {"models": [model], "ranks": 2}), 409, "invalid_field")
        assert refusal["errors"][0]["path"].startswith("models.0.forward"), broken


def test_programs_have_the_same_forms_as_in_predict(post: Post, client: TestClient) -> None:
    (known,) = client.post("/programs", json={"programs": [LINEAR]}).json()["programs"]

    def ask(program: Any) -> dict[str, Any]:
        forward = {"programs": [{"program": program, "count": 3}], "device": "t4", "protocol": "eager"}
        model = {"stages": 2, "micro_batches": 2, "forward": forward, "backward_s": 1e-3}
        response = post("pipeline", {"models": [model], "ranks": 2, "max_steps": 100})
        assert response.status_code == 200, response.text
        return response.json()

    assert ask(LINEAR) == ask({"hash": known["hash"]})
    assert ask(LINEAR)["model_id"] == client.get("/readyz").json()["model_id"]


def test_prefer_header_turns_any_request_into_a_job(post: Post, client: TestClient) -> None:
    at_once = post("cluster", CLUSTER).json()
    response = post("cluster", CLUSTER, Prefer="wait=5, respond-async")
    assert response.status_code == 202, response.text
    submitted = response.json()
    assert response.headers["location"] == f"/jobs/{submitted['job_id']}"
    job = until(client, submitted["job_id"], "done")
    assert job["answer"] == at_once
    assert (job["kind"], job["progress"], job["error"]) == ("cluster", 1.0, None)
    assert client.post(f"/jobs/{submitted['job_id']}/cancel").json() == job
    removed = client.delete(f"/jobs/{submitted['job_id']}")
    assert (removed.status_code, removed.content) == (204, b"")
    for gone in (client.get, client.delete):
        problem(gone(f"/jobs/{submitted['job_id']}"), 404, "unknown_job")


def test_long_search_becomes_a_job_that_can_be_cancelled(post: Post, client: TestClient) -> None:
    response = post("pipeline", LONG)
    assert response.status_code == 202
    id = response.json()["job_id"]
    until(client, id, "running")
    # Meanwhile other requests are answered.
    assert post("cluster", CLUSTER).status_code == 200
    assert client.post(f"/jobs/{id}/cancel").json()["state"] == "cancelled"
    last = client.get(f"/jobs/{id}").json()
    assert last["state"] == "cancelled" and last["progress"] < 1
    for unknown in ("0" * 32, "nonsense", "%2e%2e"):
        problem(client.get(f"/jobs/{unknown}"), 404, "unknown_job")
        problem(client.delete(f"/jobs/{unknown}"), 404, "unknown_job")
        problem(client.post(f"/jobs/{unknown}/cancel"), 404, "unknown_job")


def test_description_links_a_submitted_job_to_its_operations(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    ids = {operation["operationId"] for methods in paths.values() for operation in methods.values()}
    for spec in PLANNERS.values():
        links = paths[spec.path]["post"]["responses"]["202"]["links"]
        assert {link["operationId"] for link in links.values()} <= ids and len(links) == 3


def test_description_has_an_example_of_every_planner(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    bodies = {
        name: paths[spec.path]["post"]["requestBody"]["content"]["application/json"] for name, spec in PLANNERS.items()
    }
    assert {name: body.get("example") for name, body in bodies.items()} == EXAMPLE_REQUESTS


def test_removed_job_ends_and_frees_its_runner(post: Post, client: TestClient) -> None:
    running = post("pipeline", LONG).json()["job_id"]
    until(client, running, "running")
    assert client.delete(f"/jobs/{running}").status_code == 204
    problem(client.get(f"/jobs/{running}"), 404, "unknown_job")
    # The only runner takes the next job.
    until(client, post("cluster", CLUSTER, Prefer="respond-async").json()["job_id"], "done")


def changed(kind: str, **fields: Any) -> dict[str, Any]:
    return {**json.loads((EXAMPLES / f"{kind}.json").read_text()), **fields}


COMPRESSOR = {"name": "c", "ratio": 0.1}
TENSOR = {"name": "t", "bytes": 1e6, "backward": 1e-3}
PASSES = {"forward_s": 1e-3, "backward_s": 1e-3}


@pytest.mark.parametrize(
    ("kind", "value", "status", "path"),
    [
        ("compress", changed("compress", compressors=[COMPRESSOR]), 422, "compressors.0"),
        ("compress", changed("compress", compressors=[{**COMPRESSOR, "gpu": None}]), 422, "compressors.0"),
        ("compress", changed("compress", tensors=[TENSOR, TENSOR]), 409, "tensors.1.name"),
        ("compress", changed("compress", link={"table": [[1024, 2e-5], [1024, 3e-5]]}), 409, "link.table"),
        ("split", {"layers": [PASSES], "ranks": [{}, {}], "micro_batches": 2}, 409, "ranks"),
        ("pipeline", {**LONG, "models": [*LONG["models"], {**LONG["models"][0], "forward_s": 1e-9}]}, 409, "models"),
        ("simulate", {"stages": [{**PASSES, "weight_s": 1.0}], "micro_batches": 2}, 409, "stages.0.weight_s"),
        ("cluster", {**CLUSTER, "jobs": CLUSTER["jobs"][:1], "gpus": 1, "loans": [], "reclaim": 0}, 409, "gpus"),
    ],
)
def test_faulty_request_is_refused_before_it_becomes_a_job(
    post: Post, kind: str, value: Any, status: int, path: str
) -> None:
    response = post(kind, value, Prefer="respond-async")
    assert response.status_code == status, response.text
    assert [place["path"] for place in response.json()["errors"]] == [path]


@pytest.mark.parametrize("kind", [k for k, spec in PLANNERS.items() if "budget_s" in spec.models()[0].model_fields])
def test_check_of_a_search_does_not_search(
    kind: str, predictor: LatencyPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sound request passes the check before its search has made a step, however large its budget is."""
    value = changed(kind, budget_s=600)
    request = PLANNERS[kind].read(value)
    programs = request.price_requests()
    prices = predict_prices(programs, predictor) if programs else []
    body = json.dumps(value).encode()
    monkeypatch.setattr(work, "CHECK_S", 0.0)  # no timer: only the search itself can end the check
    steps: list[Any] = []
    monkeypatch.setattr(work, "signed", lambda *plan: steps.append(plan))
    assert work.check(work.PlanReader(DEFAULTS), kind, body, encode_prices(prices, range(len(prices)))) == ({}, b"")
    assert not steps


def until(client: TestClient, id: str, state: str) -> dict[str, Any]:
    job: dict[str, Any] = {}

    def is_reached() -> bool:
        job.update(client.get(f"/jobs/{id}").json())
        assert job["state"] in ("queued", "running", state), (job["state"], job["error"])
        return job["state"] == state

    wait_until(is_reached, f"state {state} of the job")
    return job


def test_killed_planning_process_is_replaced(post: Post, app: FastAPI) -> None:
    assert post("cluster", CLUSTER).status_code == 200
    for pid in app.state.planners.pids:
        os.kill(pid, signal.SIGKILL)
    assert post("cluster", CLUSTER).status_code == 200


class ScriptedWorker(Worker):
    """A planning process whose outcomes a test lists."""

    def __init__(self, outcomes: list[Any]) -> None:
        super().__init__(0)
        self.outcomes, self.alive = outcomes, False

    @property
    def pid(self) -> int | None:
        return 1 if self.alive else None

    async def start(self) -> None:
        self.alive = True

    async def stop(self) -> None:
        self.alive = False

    async def run(self, header: Any, payload: bytes, timeout_s: float, on_progress: Any = None) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            self.alive = False
            raise outcome
        if outcome == "wait":
            await asyncio.sleep(timeout_s)
            self.alive = False
            raise WorkerTimeoutError
        if outcome == "slow":
            await asyncio.sleep(0.1)
            return {}, b"late"
        return outcome


def run_planners(
    outcomes: list[Any], ask: Callable[[Processes], Any], max_queued: int = 4, limit_s: float = 0.05
) -> tuple[Any, int]:
    """Return the result of ``ask`` with one scripted process at a time, and how many processes were started."""
    made: list[Worker] = []

    def make() -> Worker:
        made.append(ScriptedWorker(outcomes))
        return made[-1]

    async def main() -> Any:
        async with Processes(PLANNING, 1, make, max_queued, limit_s) as planners:
            return await ask(planners)

    return run_in_virtual_time(main()), len(made)


def plan_once(deadline_s: float = 5.0) -> Callable[[Processes], Any]:
    async def ask(planners: Processes) -> Any:
        try:
            return await planners.run({}, b"", Deadline(deadline_s))
        except ProblemError as error:
            return error.status, error.problem.code

    return ask


def test_each_end_of_a_process_has_its_response() -> None:
    good = ({}, b"answer")
    assert run_planners([good], plan_once()) == (good, 1)
    assert run_planners([WorkerDiedError(), good], plan_once()) == (good, 2)
    assert run_planners([WorkerDiedError(), WorkerDiedError()], plan_once())[0] == (500, "internal_error")
    assert run_planners([WorkerMemoryError()], plan_once()) == ((409, "plan_too_large"), 2)
    assert run_planners([({"bug": "KeyError"}, b"")], plan_once()) == ((500, "internal_error"), 1)
    assert run_planners(["wait"], plan_once()) == ((504, "deadline_exceeded"), 2)


def test_request_past_its_deadline_does_not_end_the_process() -> None:
    async def twice(planners: Processes) -> Any:
        first = await plan_once(0.01)(planners)
        return first, await plan_once()(planners)

    responses, processes = run_planners(["slow", ({}, b"answer")], twice, limit_s=5.0)
    assert responses == ((504, "deadline_exceeded"), ({}, b"answer"))
    assert processes == 1


def test_request_waits_for_a_busy_process_until_its_deadline_or_is_refused() -> None:
    async def several(planners: Processes) -> Any:
        first = asyncio.create_task(plan_once(0.3)(planners))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(plan_once(0.1)(planners))
        await asyncio.sleep(0.01)
        third = await plan_once()(planners)
        return third, await second, await first

    responses, _ = run_planners(["wait", ({}, b"")], several, max_queued=1, limit_s=0.3)
    assert responses == ((503, "overloaded"), (504, "deadline_exceeded"), (504, "deadline_exceeded"))


async def test_failed_start_is_tried_again() -> None:
    class Broken(ScriptedWorker):
        async def start(self) -> None:
            raise WorkerDiedError("no")

    made: list[Worker] = [Broken([]), ScriptedWorker([])]

    worker = SupervisedWorker(lambda: made.pop(0))
    with pytest.raises(OverloadedError):
        await worker.ready()
    assert (await worker.ready()).pid == 1
    await worker.stop()


@pytest.mark.parametrize("kind", [kind for kind in PLANNERS if kind not in ("replay", "simulate")])
def test_finished_plan_reports_its_objective_and_bound(kind: str, predictor: LatencyPredictor) -> None:
    body = json.dumps(EXAMPLE_REQUESTS[kind]).encode()
    prices = predict_prices(PLANNERS[kind].read(EXAMPLE_REQUESTS[kind]).price_requests(), predictor)
    encoded = encode_prices(prices, range(len(prices))) if prices else b""
    reply, text = work.solve(work.PlanReader(DEFAULTS), kind, body, encoded, lambda _: None)
    answer = json.loads(text)
    assert reply["best"] >= reply["bound"] > 0
    assert reply["best"] / reply["bound"] - 1 == pytest.approx(answer["gap"])


@pytest.mark.parametrize("kind", PLANNERS)
def test_example_of_each_kind_has_a_figure_and_five_sentences(client: TestClient, kind: str) -> None:
    listed = {spec["kind"]: spec for spec in client.get("/plans").json()["kinds"]}[kind]
    answer = client.post(f"{listed['path']}?figure=svg", json=listed["example"])
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert plan.pop("figure").lstrip().startswith("<?xml") and 3 <= len(plan["summary"]) <= 5
    assert any(line.endswith(": this is optimal") for line in plan["summary"]) == (plan["gap"] <= 1e-6)
    assert plan == client.post(listed["path"], json=listed["example"]).json()


def test_figure_of_another_format_or_of_a_job_is_refused(client: TestClient) -> None:
    path, example = PLANNERS["pipeline"].path, EXAMPLE_REQUESTS["pipeline"]
    assert "svg" in problem(client.post(f"{path}?figure=png", json=example), 422, "invalid_request")["hint"]
    refusal = problem(client.post(f"{path}?figure=svg", json={**example, "budget_s": 60}), 409, "invalid_field")
    assert "budget_s" in refusal["hint"]


def test_figure_is_xml_with_every_name(client: TestClient) -> None:
    names = ["$\\frac{", "$x_{$", "a\x01b", "<script>", "a-->b"]
    jobs = [{"name": name, "workers": [1], "remaining_samples": 9, "samples_per_s": [1]} for name in names]
    answer = client.post(f"{PLANNERS['cluster'].path}?figure=svg", json={"gpus": 5, "jobs": jobs})
    assert answer.status_code == 200, answer.text
    assert not list(ElementTree.fromstring(answer.json()["figure"]).iter("script"))
