"""An operator as text over HTTP: accepted wherever a program is, as in Python and on the command line."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cdmpp.plan.registry import make_plan
from cdmpp.predict.predictor import LatencyPredictor
from tests.server.conftest import LINEAR, problem, without_ids
from tests.waiting import ROOT

TEXT = "linear:m=512,n=4096,k=1024,dtype=float16"
INVALID = ["", "linear", "linear:m=512", "linear:m", "lstm:m=1", "linear:m=512,m=512,n=1,k=1", "m=512,n=4096,k=1024"]


def test_text_is_predicted_as_its_object(ask, predictor: LatencyPredictor) -> None:
    items = [{"program": form, "device": "t4"} for form in (TEXT, LINEAR, TEXT)]
    for _ in range(2):  # new, and from the cache
        first, second, third = without_ids(*ask(items).json()["results"])
        assert first == second == third
    assert first["latency_s"] == predictor.predict([TEXT], "t4")[0].latency_s
    assert first["name"] == "linear:dtype=float16,m=512,n=4096,k=1024"


@pytest.mark.parametrize("text", INVALID)
def test_invalid_text_is_an_error_of_its_item_only(text: str, ask, client: TestClient) -> None:
    items = [{"program": form, "device": "t4"} for form in (LINEAR, text, TEXT)]
    first, failed, third = ask(items).json()["results"]
    assert first["latency_s"] == third["latency_s"] > 0
    assert failed["error"]["code"] in ("invalid_program", "unsupported_operator")
    problem(ask(items, strict=True), 409, failed["error"]["code"])
    registered = client.post("/programs", json={"programs": [TEXT, text]}).json()["programs"]
    assert "hash" in registered[0] and registered[1]["error"]["code"] == failed["error"]["code"]
    observed = [{"program": form, "device": "t4", "latency_s": 1e-4} for form in (text, TEXT)]
    failed, stored = client.post("/observe", json={"observations": observed}).json()["results"]
    assert "error" in failed and "observation_id" in stored


@pytest.mark.slow
def test_text_that_is_too_long_violates_the_schema(ask, client: TestClient) -> None:
    long = "linear:" + "m=1," * 500
    failed, valid = ask([{"program": form, "device": "t4"} for form in (long, TEXT)]).json()["results"]
    assert failed["error"]["code"] == "invalid_program" and valid["latency_s"] > 0
    problem(ask([{"program": long, "device": "t4"}], strict=True), 422, "invalid_request")
    plan = {"layers": [{"forward": {"programs": [{"program": long}]}, "backward_s": 1}], "ranks": [{"device": "t4"}]}
    problem(client.post("/pipeline/split", json=plan), 422, "invalid_request")


def test_curve_of_a_text(client: TestClient) -> None:
    def curve(**fields: Any) -> Any:
        return client.post("/curve", json={"axes": {"batch": [1, 2]}, "devices": ["t4"], **fields})

    text = "linear:m=max(batch*128,min(64,batch)),n=4096,k=1024"
    fields = {"operator": "linear", "m": "max(batch*128,min(64,batch))", "n": 4096, "k": 1024}
    assert curve(program=text).json() == curve(program=fields).json()
    several = [{"program": text, "count": 2}, {"program": "softmax:rows=batch*8,cols=64"}]
    assert all(point["latency_s"] > 0 for point in curve(programs=several).json()["points"])
    for invalid in INVALID:
        refused = problem(curve(program=invalid), 409, curve(program=invalid).json()["code"])
        assert refused["code"] in ("invalid_program", "unsupported_operator", "data_error")


@pytest.mark.slow
def test_adapt_with_texts(client: TestClient) -> None:
    records = [
        {"program": f"linear:m=512,n=4096,k={k},dtype=float16", "latency_s": 1e-4 * k / 256} for k in (256, 512, 1024)
    ]
    response = client.post("/adapt", json={"device": "t4", "records": records})
    assert response.status_code == 200, response.text
    records[1]["program"] = "linear:m"
    refused = problem(client.post("/adapt", json={"device": "t4", "records": records}), 409, "invalid_program")
    assert refused["item"] == 1


@pytest.mark.slow
def test_costs_of_plans_with_texts(client: TestClient, predictor: LatencyPredictor) -> None:
    def simulate(program: Any) -> dict[str, Any]:
        cost = {"programs": [{"program": program, "count": 2}], "device": "t4"}
        return {"stages": [{"forward": cost, "backward_s": 1e-3}] * 2, "micro_batches": 4}

    plan = client.post("/pipeline/simulate", json=simulate(TEXT))
    assert plan.status_code == 200, plan.text
    for other in (
        client.post("/pipeline/simulate", json=simulate(LINEAR)).json(),
        make_plan("simulate", simulate(TEXT), predictor),
    ):
        assert {**plan.json(), "cache": None} == {**other, "cache": None}
    refused = problem(client.post("/pipeline/simulate", json=simulate("linear:m")), 409, "invalid_field")
    assert "program" in refused["errors"][0]["path"]
    # A curve over batch sizes: its values are expressions.
    request = json.loads((ROOT / "docs" / "examples" / "afd.json").read_text())
    expected = client.post("/afd/size", json=request).json()
    for side in ("attention", "ffn"):
        for work in request[side]["layer"]["programs"]:
            fields = work["program"]
            values = ",".join(f"{k}={v}" for k, v in fields.items() if k != "operator")
            work["program"] = f"{fields['operator']}:{values}"
    assert client.post("/afd/size", json=request).json() == expected
    nodes = [{"id": "a", "program": TEXT, "device": "t4"}]
    assert client.post("/replay", json={"nodes": nodes}).json()["makespan_s"] > 0
