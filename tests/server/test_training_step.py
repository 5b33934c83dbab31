"""POST /training-step: the steps of :func:`cdmpp.llm.training_step`, its errors, and the client's method."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cdmpp.client.operations import Operations
from cdmpp.llm import training_step
from cdmpp.llm.engines.profile import load_training_engine
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.training import TrainingStepAnswer
from tests.server.conftest import EXAMPLES, LLAMA, problem

OPTIONS: dict[str, Any] = {"gpus": 8, "sharding": "fsdp", "micro_batch": 1, "global_batch": 16, "sequence": 2048}
GOOD: dict[str, Any] = {"config": LLAMA, "device": "h100-sxm", **OPTIONS}


def post(client: TestClient, body: Any) -> Any:
    return client.post("/training-step", json=body)


@pytest.mark.parametrize(
    ("name", "device", "options"),
    [
        ("llama-3.1-8b", "h100-sxm", {"products": "float8_e4m3", "network": "roce-200", "overlap": "none"}),
        ("qwen3-30b-a3b", "gb200", {"ep": 8, "sharding": "optimizer", "engine": "megatron-26.06"}),
        ("llama-3.1-8b", "h100-sxm", {"tp": 2, "pp": 2, "virtual_pp": 4, "sharding": "optimizer", "network": 1e10}),
    ],
)
def test_answer_equals_the_python_result(
    client: TestClient, predictor: LatencyPredictor, name: str, device: str, options: dict[str, Any]
) -> None:
    config = json.loads((EXAMPLES / f"{name}.json").read_text())
    options = {**OPTIONS, **options}
    response = post(client, {"config": config, "device": device, **options})
    assert response.status_code == 200, response.text
    assert response.json() == training_step(config, device, predictor=predictor, **options).to_dict()
    TrainingStepAnswer.model_validate(response.json())


def test_engine_may_be_the_fields_of_a_profile(client: TestClient) -> None:
    slow = load_training_engine("megatron").model_copy(update={"kernel_factor": 2.0, "name": "slow"})
    response = post(client, {**GOOD, "engine": slow.model_dump(mode="json", exclude_none=True)})
    assert response.status_code == 200, response.text
    assert response.json()["engine"] == "slow"
    assert response.json()["step_s"] > 1.5 * post(client, GOOD).json()["step_s"]


@pytest.mark.parametrize(
    ("change", "status", "code", "says"),
    [
        ({"device": "t4"}, 409, "infeasible", "needs"),
        ({"device": "nope"}, 404, "unknown_device", "nope"),
        ({"tp": 3}, 409, "invalid_field", "gpus"),
        ({"config": {"model_type": "unknown"}}, 409, "invalid_field", "unknown"),
        ({"engine": "/etc/hostname"}, 409, "data_error", "no engine profile"),
        ({"engine": "vllm"}, 409, "invalid_field", "serving engine"),
    ],
)
def test_errors_are_problems(client: TestClient, change: dict[str, Any], status: int, code: str, says: str) -> None:
    assert says in problem(post(client, {**GOOD, **change}), status, code)["detail"]


def test_body_that_breaks_the_schema_is_refused(client: TestClient) -> None:
    assert post(client, {**GOOD, "gpus": 0}).status_code == 422
    assert post(client, {**GOOD, "speed": 1}).status_code == 422


def test_client_sends_the_request_of_its_arguments() -> None:
    call = next(Operations(None, 60.0).training_step(LLAMA, "h100-sxm", **OPTIONS))
    assert (call.method, call.path) == ("POST", "/training-step")
    assert json.loads(call.body or b"") == {**GOOD, "engine": "megatron", "model": None}
