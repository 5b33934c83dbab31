"""Endpoints whose work planning processes do: bounds, admission, shares, and the end of work that nobody waits for."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cdmpp.devices import lookup
from cdmpp.errors import FieldError
from cdmpp.llm import EstimatePlan, read_config
from cdmpp.llm.serving import simulate as serving
from cdmpp.llm.serving.simulate import ServingPlan
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.load import FIRST_S, SHARE, ExpectedWork
from cdmpp_server.operate.access import current_sender
from cdmpp_server.planned import ENDPOINTS, PlannedJobs
from cdmpp_server.predict.admission import RefusedError
from cdmpp_server.queries import decode_prices, decode_queries, encode_prices, encode_queries
from cdmpp_server.sandbox.worker import LONG_S, SandboxPool, SupervisedWorker
from tests.server.conftest import EXAMPLES, LLAMA, problem
from tests.waiting import PATIENCE_S, wait_until

BASE: dict[str, Any] = {"config": LLAMA, "device": "h100-sxm"}
ENGINE = {"name": "mine", "framework": "vllm"}
DEEP = {**LLAMA, "num_hidden_layers": 10_000}
TRAINING = {**BASE, "micro_batch": 1, "global_batch": 10_000, "sequence": 4096}
#: Some seconds of work, below the bound.
SLOW = {**BASE, "rate": 1.0, "count": 300, "input": 1000, "output": 100, "engine": {**ENGINE, "token_budget": 1}}


def post(client: TestClient, path: str, body: Any, **headers: str) -> Any:
    return client.post(path, json=body, headers=headers)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/llm", {**BASE, "engine": {**ENGINE, "also": ["sglang"] * 10_000}}, "10,000 entries"),
        ("/llm", {**BASE, "engine": {**ENGINE, "also": ["sglang", "sglang"]}}, "each name once"),
        ("/llm", {**BASE, "engine": {**ENGINE, "fused": ["x"] * 65}}, "65 entries"),
        ("/llm", {**BASE, "engine": {**ENGINE, "source": {"a": "b" * 3000}}}, "2000 characters"),
        ("/llm/simulate", {**SLOW, "input": 130_000}, "more work than"),
        ("/llm/simulate", {**SLOW, "input": 130_000, "prefill_pool": {"dp": 2}}, "more work than"),
        ("/training-step", {**TRAINING, "config": DEEP, "gpus": 10_000, "pp": 10_000}, "the step needs"),
    ],
)
def test_sizes_are_bounded(client: TestClient, path: str, body: Any, says: str) -> None:
    response = post(client, path, body)
    assert response.status_code == 409, response.text
    assert says in response.json()["detail"]


def test_simulation_beyond_its_bound_is_refused_before_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "StepCosts", None)
    options = {name: value for name, value in SLOW.items() if name not in BASE}
    with pytest.raises(FieldError, match="more work than 1,000,000"):
        ServingPlan(read_config(LLAMA), lookup("h100-sxm"), most_work=1e6, **options)


@pytest.mark.slow
def test_calibration_is_refused_before_its_last_rows(client: TestClient) -> None:
    rows = [{"batch": 1, "input": 1000 + i, "output": 100, "total_s": 9.0} for i in range(499)]
    body = problem(post(client, "/llm/calibrate", {**BASE, "measurements": [*rows, {"batch": 0}]}), 409, "data_error")
    assert "more than 10,000 predictions" in body["detail"]


@pytest.mark.slow
def test_job_past_its_deadline_ends_and_its_process_stays(
    client: TestClient, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert post(client, "/llm", BASE).status_code == 200  # the process has started
    pids, replies, run = set(app.state.planners.pids), [], SupervisedWorker.run

    async def recorded(*arguments: Any) -> Any:
        reply = await run(*arguments)
        replies.append(reply[0])
        return reply

    monkeypatch.setattr(SupervisedWorker, "run", recorded)
    # Listing the queries takes a part of this time, and serving the requests ten times as much.
    assert problem(post(client, "/llm/simulate", SLOW, **{"x-request-timeout-s": "2"}), 504, "deadline_exceeded")
    wait_until(lambda: app.state.planners.busy == 0, "the end of the job")
    assert replies[-1] == {"given_up": True}
    assert post(client, "/llm", BASE).status_code == 200
    assert pids <= set(app.state.planners.pids)


def test_stop_ends_the_job_of_a_process_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = PlannedJobs()
    endpoint = ENDPOINTS["/llm"]
    body = json.dumps(BASE).encode()
    sizes = {"prices": 0, "body": len(body)}
    header = {"do": "list", "kind": "/llm", "most": 10_000, "model": None, "model_id": "m", **sizes}

    def stopped(*_: Any) -> Any:
        jobs.stop()

    jobs.stop()  # between two jobs
    assert jobs.run(header, body) == ({"needs": None}, b"")
    monkeypatch.setitem(ENDPOINTS, "/llm", replace(endpoint, plan_of=stopped))
    assert jobs.run(header, body + b"{}") == ({"given_up": True}, b"")
    monkeypatch.undo()
    assert decode_queries(jobs.run(header, body)[1])


def test_queries_and_predictions_are_the_same_behind_the_pipe(predictor: LatencyPredictor) -> None:
    config = json.loads((EXAMPLES / "deepseek-v3.json").read_text())
    mine = lookup("b200").model_copy(update={"name": "mine"})
    queries = EstimatePlan(read_config(config), mine, tp=8, ep=16, weights="fp8", output=8).queries
    assert decode_queries(encode_queries(queries)) == queries
    predictions = predictor.predict_queries(queries)
    failed = predictor.predict_queries([queries[0].__class__(queries[0].program, "no such device")])
    assert failed[0].error is not None
    assert decode_prices(encode_prices([*predictions, *failed])) == [*predictions, *failed]


@pytest.mark.slow
def test_adapted_model_answers(client: TestClient) -> None:
    layer = "linear:m=512,n=4096,k={},dtype=bfloat16"
    records = [
        {"program": layer.format(k), "latency_s": k * 2e-8, "protocol": "kernel"} for k in (1024, 2048, 4096, 8192)
    ]
    adapted = post(client, "/adapt", {"device": "h100-sxm", "records": records}).json()["adapted_model"]
    for _ in range(2):
        assert post(client, "/llm", {**BASE, "model": adapted}).json()["model_id"] == adapted
    assert post(client, "/llm", BASE).json()["model_id"] != adapted


def test_request_that_would_be_late_is_refused_and_other_senders_are_not() -> None:
    load = ExpectedWork(2)
    load.end(first := load.admit("a", "simulate", 1.0, 10.0), done=True)
    assert first.used_s == 0
    first.used_s = 1.0
    load.end(first, done=True)
    mean = load.seconds(load.admit("a", "simulate", 1.0, 10.0))
    assert 0 < mean < 1
    admitted = 1
    with pytest.raises(RefusedError) as refused:
        for _ in range(1000):
            load.admit("a", "simulate", 1.0, 10.0)
            admitted += 1
    assert admitted == int(SHARE * 10.0 * 2 / mean)
    assert 0 < refused.value.retry_after_s <= mean
    # Another sender waits for its share only, also with a kind that was never measured.
    load.admit("b", "simulate", 1.0, 10.0)
    load.end(load.admit("b", "llm", 1.0, 4 * FIRST_S + 2 * mean), done=True)


def test_sender_of_long_jobs_leaves_a_process_for_others() -> None:
    order: list[str] = []
    end = asyncio.Event()

    async def send(pool: SandboxPool, sender: str, cost: float) -> None:
        current_sender.set(sender)

        async def job(_: SupervisedWorker) -> None:
            order.append(sender)
            if cost > LONG_S:
                await end.wait()

        await pool.run(job, cost=cost)

    async def main() -> None:
        pool = SandboxPool(2, lambda: None, 64)
        long = [asyncio.create_task(send(pool, "a", 2 * LONG_S)) for _ in range(3)]
        await asyncio.sleep(0)
        await send(pool, "b", 0.1)
        await send(pool, "a", 0.1)
        assert order == ["a", "b", "a"]
        end.set()
        await asyncio.gather(*long)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert order == ["a", "b", "a", "a", "a"]


def test_further_job_of_a_request_is_next() -> None:
    order: list[str] = []

    async def main() -> None:
        pool = SandboxPool(1, lambda: None, 64)

        async def send(name: str, first: bool) -> None:
            async def job(_: SupervisedWorker) -> None:
                order.append(name)
                await asyncio.sleep(0)

            await pool.run(job, cost=1.0, first=first)

        await asyncio.gather(send("x", True), send("y", True), send("z", True), send("x again", False))

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert order == ["x", "x again", "y", "z"]
