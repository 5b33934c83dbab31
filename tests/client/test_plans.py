"""Plans and jobs by both clients and ``cdmpp plan --remote``: followed, refused, failed, cancelled."""

import inspect
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from cdmpp.cli import plan as plan_command
from cdmpp.cli.main import app as command_line
from cdmpp.client import PredictorClient, operations
from cdmpp.errors import DataError, DeadlineExceededError, FieldError, InfeasibleError, ServiceError
from cdmpp.plan.registry import PLANNERS, make_plan
from tests.client.conftest import call

pytestmark = pytest.mark.slow

MODEL = {"stages": 2, "micro_batches": 3, "forward_s": 1, "backward_s": 2}
MODELS = [{**MODEL, "direction": direction} for direction in ("down", "up")]
REQUEST: dict[str, Any] = {"models": MODELS, "ranks": 2, "max_steps": 50, "budget_s": 600}


def test_path_of_a_language_model_is_sent_as_its_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    sent = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(200, json={"kinds": [{"kind": "afd", "path": "/afd/size"}]})
        sent.append(json.loads(request.content))
        return httpx2.Response(200, json={})

    call(handler, False, "plan", "afd", {"ffn": {"layer": {"llm": {"config": str(tmp_path)}}}})
    assert sent == [{"ffn": {"layer": {"llm": {"config": {"model_type": "llama"}}}}}]


def job(state: str, answer: Any = None, error: Any = None) -> httpx2.Response:
    fields = {"job_id": "a1", "kind": "pipeline", "state": state, "progress": 0.5, "best": None, "bound": None}
    return httpx2.Response(200, json={**fields, "answer": answer, "error": error})


class Service:
    """Kinds, and what a test says of the rest."""

    def __init__(self, *answers: httpx2.Response) -> None:
        self.answers, self.asked = list(answers), []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/plans":
            kinds = [{"kind": "pipeline", "path": "/pipeline/search", "summary": "x"}]
            return httpx2.Response(200, json={"kinds": kinds})
        self.asked.append((request.method, request.url.path, request.headers.get("prefer")))
        return self.answers.pop(0)


SUBMITTED = {"job_id": "a1", "state": "queued"}


@pytest.fixture(autouse=True)
def _first_look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "FIRST_LOOK_S", 0.001)


def test_a_job_is_followed_to_its_end(asynchronous: bool) -> None:
    at_once = Service(httpx2.Response(200, json={"makespan_s": 3.0}))
    assert call(at_once, asynchronous, "plan", "pipeline", REQUEST) == {"makespan_s": 3.0}
    assert at_once.asked == [("POST", "/pipeline/search", None)]
    late = Service(httpx2.Response(202, json=SUBMITTED), job("queued"), job("running"), job("done", {"x": 1}))
    assert call(late, asynchronous, "plan", "pipeline", REQUEST) == {"x": 1}
    assert [path for _, path, _ in late.asked] == ["/pipeline/search", *["/jobs/a1"] * 3]
    only = Service(httpx2.Response(202, json=SUBMITTED))
    assert call(only, asynchronous, "submit", "pipeline", REQUEST) == "a1"
    assert only.asked == [("POST", "/pipeline/search", "respond-async")]
    looks = Service(job("running"), job("cancelled", {"x": 1}))
    assert call(looks, asynchronous, "job", "a1")["state"] == "running"
    assert call(looks, asynchronous, "cancel", "a1")["answer"] == {"x": 1}
    assert looks.asked == [("GET", "/jobs/a1", None), ("POST", "/jobs/a1/cancel", None)]
    lists = Service(httpx2.Response(200, json={"jobs": [{"job_id": "a1"}]}))
    assert call(lists, asynchronous, "jobs") == [{"job_id": "a1"}]
    assert lists.asked == [("GET", "/jobs", None)]
    gone = httpx2.Response(404, json={"code": "unknown_job", "detail": "no such job", "hint": ""})
    removes = Service(httpx2.Response(204), gone)
    assert call(removes, asynchronous, "remove", "a1") is None
    with pytest.raises(ServiceError, match="no such job"):
        call(removes, asynchronous, "remove", "a1")
    assert removes.asked == [("DELETE", "/jobs/a1", None)] * 2


def test_what_is_wrong_with_a_request_names_the_field(asynchronous: bool) -> None:
    places = [{"path": "models.0.stages", "message": "too few"}]
    body = {"title": "x", "detail": "models.0.stages: too few", "hint": "more", "errors": places}
    for status, code, kind in (
        (422, "invalid_request", FieldError),
        (409, "invalid_field", FieldError),
        (409, "infeasible", InfeasibleError),
    ):
        answer = httpx2.Response(status, json={**body, "status": status, "code": code})
        with pytest.raises(kind, match="too few") as raised:
            call(Service(answer), asynchronous, "plan", "pipeline", REQUEST)
        assert (type(raised.value), raised.value.path, raised.value.hint) == (kind, "models.0.stages", "more")
    with pytest.raises(FieldError, match="no plan is called 'pipelin'"):
        call(Service(), asynchronous, "plan", "pipelin", REQUEST)
    with pytest.raises(FieldError, match="no JSON"):
        call(Service(), asynchronous, "submit", "pipeline", {"ranks": float("nan")})
    with pytest.raises(DataError, match="loaded"):
        call(Service(), asynchronous, "plan", "pipeline", REQUEST, model="mine")
    with pytest.raises(ServiceError, match="names no job"):
        call(Service(), asynchronous, "job", "../readyz")


def test_how_jobs_end_without_an_answer(asynchronous: bool) -> None:
    def end(state: str, **error: str) -> Service:
        job_error = {"code": "", "message": "m", "hint": "h", "path": "p", **error} if error else None
        return Service(httpx2.Response(202, json=SUBMITTED), job(state, error=job_error))

    with pytest.raises(InfeasibleError, match="m") as raised:
        call(end("failed", code="infeasible"), asynchronous, "plan", "pipeline", REQUEST)
    assert raised.value.path == "p"
    with pytest.raises(DeadlineExceededError):
        call(end("failed", code="deadline_exceeded"), asynchronous, "plan", "pipeline", REQUEST)
    for ended, code in ((end("failed", code="plan_too_large"), "plan_too_large"), (end("cancelled"), "cancelled")):
        with pytest.raises(ServiceError) as failed:
            call(ended, asynchronous, "plan", "pipeline", REQUEST)
        assert failed.value.problem == code


def test_a_job_that_takes_too_long_is_left(asynchronous: bool) -> None:
    def handler(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET" and request.url.path != "/plans":
            return job("running")
        return Service(httpx2.Response(202, json=SUBMITTED))(request)

    with pytest.raises(DeadlineExceededError):
        call(handler, asynchronous, "plan", "pipeline", {**REQUEST, "budget_s": 0.05}, timeout_s=0.05)
    assert "timeout_s" in inspect.signature(PredictorClient.plan).parameters


def test_a_service_answers_as_python_does(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = make_plan("pipeline", REQUEST)
    with PredictorClient(url) as client:
        assert client.plan("pipeline", REQUEST) == here
    (file := tmp_path / "r.json").write_text(json.dumps(REQUEST))
    monkeypatch.setattr(plan_command, "_POLL_S", 0.02)
    arguments = ["plan", "pipeline", str(file), "--json", "--url", url]
    for more in ([], ["--remote"]):
        cli_result = CliRunner().invoke(command_line, [*arguments, *more])
        assert cli_result.exit_code == 0, cli_result.output
        assert json.loads(cli_result.stdout) == here
    cli_result = CliRunner().invoke(command_line, ["plan", "pipeline", str(file), "--remote"])
    assert isinstance(cli_result.exception, DataError) or "--url" in cli_result.output


def test_an_interrupt_cancels_the_job(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"stages": 16, "micro_batches": 33, "forward_s": 5, "backward_s": 11, "direction": "down"}
    second = {"stages": 8, "micro_batches": 27, "forward_s": 3, "backward_s": 7.3, "direction": "up"}
    long = {"models": [first, second], "ranks": 16, "max_activations": 18, "budget_s": 600}
    monkeypatch.setattr(plan_command, "_POLL_S", 0.02)
    monkeypatch.setattr(plan_command, "_CANCEL_S", 30.0)

    def interrupt(progress: Any) -> None:
        if progress.done > 0:
            raise KeyboardInterrupt

    plan = plan_command.solve_remotely(PLANNERS["pipeline"], long, url, interrupt)
    assert plan["makespan_s"] >= plan["lower_bound_s"] > 0
