"""POST /llm: the estimates of :func:`cdmpp.llm.estimate`, errors by device, and an exact schema."""

import json
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient

from cdmpp.devices import lookup
from cdmpp.errors import DataError
from cdmpp.llm import estimate, simulate
from cdmpp.llm.serving.calibrate import fit_engine
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.llm import CalibrateAnswer, Estimates, LlmAnswer, LlmAnswers, LlmDevicesRequest, SimulateAnswer
from tests.server.conftest import EXAMPLES, LLAMA, problem

GOOD: dict[str, Any] = {"config": LLAMA, "device": "h100-sxm", "output": 8}


def post(client: TestClient, body: Any, path: str = "/llm") -> httpx2.Response:
    return client.post(path, json=body)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-3.1-70b", {"tp": 4, "batch": 8, "input": 200, "output": 30, "weights": "float8_e4m3"}),
        ("qwen3-30b-a3b", {"tp": 2, "ep": 4, "framework": "sglang", "cuda_graph": False}),
        ("deepseek-v3", {"tp": 8, "pp": 2, "output": 1}),
    ],
)
def test_answer_equals_the_python_result(
    client: TestClient, predictor: LatencyPredictor, name: str, options: dict[str, Any]
) -> None:
    config = json.loads((EXAMPLES / f"{name}.json").read_text())
    response = post(client, {"config": config, "device": "h100-sxm", **options})
    assert response.status_code == 200, response.text
    assert response.json() == estimate(config, "h100-sxm", predictor=predictor, **options).to_dict()
    LlmAnswer.model_validate(response.json())


def test_types_have_the_other_names_that_they_have_in_python(client: TestClient, predictor: LatencyPredictor) -> None:
    response = post(client, {**GOOD, "dtype": "bf16", "weights": "fp8"})
    assert response.status_code == 200, response.text
    here = estimate(LLAMA, "h100-sxm", output=8, dtype="bf16", weights="fp8", predictor=predictor)
    assert response.json() == here.to_dict()


def test_errors_stand_at_their_devices(client: TestClient, predictor: LatencyPredictor) -> None:
    mine = lookup("l40s").model_copy(update={"name": "mine"}).model_dump(mode="json", exclude_none=True)
    body = {"config": LLAMA, "devices": ["h100", "t4", "nope", mine, {"name": "x"}], "output": 4}
    response = post(client, body)
    assert response.status_code == 200, response.text
    LlmAnswers.model_validate(response.json())
    answers = response.json()["answers"]
    assert [answer["device"] for answer in answers] == ["h100-sxm", "t4", "nope", "mine", "x"]
    codes = [answer.get("error", {}).get("code") for answer in answers]
    assert codes == [None, "infeasible", "unknown_device", None, "invalid_device"]
    assert answers[0] == estimate(LLAMA, "h100-sxm", output=4, predictor=predictor).to_dict()


@pytest.mark.parametrize(
    ("change", "status", "code", "says"),
    [
        ({"device": "t4"}, 409, "infeasible", "at least 2 devices are needed"),
        ({"device": "nope"}, 404, "unknown_device", "nope"),
        ({"device": {"name": "x"}}, 409, "invalid_device", "vendor"),
        ({"tp": 3}, 409, "invalid_field", "tp: 3 does not divide"),
        ({"config": {"model_type": "mamba"}}, 409, "invalid_field", "'mamba' is not known"),
        ({"config": {**LLAMA, "hidden_size": -1}}, 409, "invalid_field", "config.hidden_size"),
        ({"model": "absent"}, 404, "unknown_model", "absent"),
    ],
)
def test_refusals_name_the_reason(client: TestClient, change: Any, status: int, code: str, says: str) -> None:
    body = problem(post(client, {**GOOD, **change}), status, code)
    assert says in body["detail"]
    assert body["hint"]


def test_refusal_has_the_path_of_the_field(client: TestClient) -> None:
    body = problem(post(client, {**GOOD, "config": {**LLAMA, "num_attention_heads": 0}}), 409, "invalid_field")
    assert body["errors"][0]["path"] == "config.num_attention_heads"


@pytest.mark.parametrize(
    "change",
    [
        # A path of this machine is not read for a client.
        {"config": str(EXAMPLES / "llama-3.1-8b.json")},
        {"config": None},
        {"devices": ["t4"]},
        {"device": None},
        {"device": 3},
        {"tp": 0},
        {"tp": "2"},
        {"batch": 10**9},
        {"output": 1.5},
        {"dtype": "int8"},
        {"weights": "int3"},
        {"framework": "nccl"},
        {"cuda_graph": 1},
        {"quantiles": [0.1]},
    ],
)
def test_requests_outside_the_schema_are_refused(client: TestClient, change: Any) -> None:
    problem(post(client, {**GOOD, **change}), 422, "invalid_request")


def test_predictions_of_one_request_are_limited(predictor: LatencyPredictor) -> None:
    request = LlmDevicesRequest.model_validate({"config": LLAMA, "devices": ["h100-sxm", "h200"], "output": 8})
    rows = len(Estimates(request, predictor.artifact.device, 1000).queries)
    with pytest.raises(DataError, match=f"more than {rows - 1} predictions"):
        Estimates(request, predictor.artifact.device, rows - 1)


@pytest.mark.slow
def test_schema_describes_request_and_answer(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    operation = document["paths"]["/llm"]["post"]
    choices = operation["requestBody"]["content"]["application/json"]["schema"]["oneOf"]
    assert [choice["$ref"].rpartition("/")[2] for choice in choices] == ["LlmRequest", "LlmDevicesRequest"]
    assert {"404", "409", "422"} <= set(operation["responses"])
    assert set(document["components"]["schemas"]["LlmAnswer"]["properties"]) == set(post(client, GOOD).json())


def test_plans_take_no_path_from_a_client(client: TestClient) -> None:
    request = json.loads((EXAMPLES.parents[1] / "docs" / "examples" / "application_llm.json").read_text())
    request["engines"][1]["curve"]["llm"]["config"] = str(EXAMPLES / "llama-3.1-8b.json")
    assert "config" in problem(post(client, request, "/application/plan"), 422, "invalid_request")["errors"][0]["path"]


@pytest.mark.slow
def test_calibration_equals_the_python_result(client: TestClient, predictor: LatencyPredictor) -> None:
    rows = [{"batch": n, "input": 128, "output": 32, "total_s": s} for n, s in ((1, 0.5), (32, 0.9))]
    body = {"config": LLAMA, "device": "h100-sxm", "measurements": rows}
    response = post(client, body, "/llm/calibrate")
    assert response.status_code == 200, response.text
    CalibrateAnswer.model_validate(response.json())
    assert response.json() == fit_engine(LLAMA, "h100-sxm", rows, predictor=predictor).to_dict()
    assert post(client, {**GOOD, "engine": response.json()["profile"]}).json()["engine"] == "vllm-calibrated"
    loads = [
        {**rows[0], "closed_loop": True},
        {"rate": 2.0, "input": 128, "output": 32, "ttft_s": 0.1, "prefix_hit": 0.5},
    ]
    loaded = post(client, {**body, "measurements": loads}, "/llm/calibrate")
    assert loaded.json() == fit_engine(LLAMA, "h100-sxm", loads, predictor=predictor).to_dict()
    for change, message, code in (
        ({"measurements": [rows[0], {**rows[1], "total_s": 1e-6}]}, "row 2: total_s 1e-06 is below", "data_error"),
        ({"measurements": [{**rows[0], "config": "/etc/passwd"}, rows[1]]}, "row 1: config is no object", "data_error"),
        ({"engine": "/etc/passwd.toml"}, "no engine profile named", "data_error"),
    ):
        assert message in problem(post(client, {**body, **change}, "/llm/calibrate"), 409, code)["detail"]


@pytest.mark.slow
def test_simulation_equals_the_python_result(client: TestClient, predictor: LatencyPredictor) -> None:
    load = {"concurrency": 4, "input": 128, "output": 16, "count": 12}

    def answer(**changes: Any) -> httpx2.Response:
        return post(client, {"config": LLAMA, "device": "h100-sxm", **load, **changes}, "/llm/simulate")

    for options in (
        {},
        {"mtp": 1, "acceptance": 0.5, "prefill_pool": {"tp": 2, "device": "h200"}},
        {"warmup": 2, "framework": "sglang", "cuda_graph": False},
        {"pp": 16, "network": "roce-100"},
    ):
        response = answer(**options)
        assert response.status_code == 200, response.text
        SimulateAnswer.model_validate(response.json())
        assert response.json() == simulate(LLAMA, "h100-sxm", predictor=predictor, **load, **options).to_dict()
    faster = simulate(LLAMA, "h100-sxm", network=400e9, pp=16, predictor=predictor, **load)
    assert response.json()["duration_s"] > faster.duration_s
    assert answer(concurrency=None, requests=[[0.0, 100, 4], [0.5, 200, 8]]).json()["requests"] == 2
    assert "exactly one" in problem(answer(rate=1.0), 409, "invalid_field")["hint"]
    assert "at most 50,000,000" in problem(answer(output=100_000, count=600), 409, "data_error")["detail"]
