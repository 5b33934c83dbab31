"""POST /curve: the figures of :func:`predict_curve`, errors at their points, and an exact schema."""

import json
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient

from cdmpp.devices import lookup
from cdmpp.predict.curves import Curve, Template, predict_curve
from cdmpp.predict.predictor import LatencyPredictor
from tests.server.conftest import JSON, problem

LINEAR: dict[str, Any] = {"operator": "linear", "n": 4096, "k": 1024, "dtype": "float16"}
GOOD: dict[str, Any] = {"program": LINEAR, "axes": {"m": [1, 2, 4, 8]}, "devices": ["t4"]}


def post(client: TestClient, body: Any) -> httpx2.Response:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return client.post("/curve", content=content, headers=JSON)


@pytest.mark.slow
def test_one_template(client: TestClient, predictor: LatencyPredictor) -> None:
    spec = lookup("l4").model_copy(update={"name": "mine", "l2_bytes": 24e6})
    body = {
        "program": {**LINEAR, "m": "ceil(batch*tokens*density)"},
        "axes": {"batch": [4, 1], "tokens": [1, 3], "density": [0.5, 1], "dtype": ["float32", "int8"]},
        "devices": ["Tesla T4", spec.model_dump(mode="json", exclude_none=True)],
        "protocol": "eager",
        "framework": "pytorch",
        "quantiles": [0.2, 0.6],
        "monotone": ["batch", "tokens"],
    }
    response = post(client, body)
    assert response.status_code == 200, response.text
    options = {name: body[name] for name in ("protocol", "framework", "quantiles", "monotone")}
    expected = predict_curve(predictor, body["program"], body["axes"], ["t4", spec], **options)
    assert response.json() == expected.to_dict()
    assert Curve.from_dict(response.json()) == expected


def test_several_templates(client: TestClient, predictor: LatencyPredictor) -> None:
    programs = [
        {"program": {**LINEAR, "m": "b*16"}, "count": 3.0},
        {"program": {"operator": "softmax", "rows": "b", "cols": 128}},
    ]
    response = post(client, {"programs": programs, "axes": {"b": [1, 2]}, "devices": ["t4"]})
    assert response.status_code == 200, response.text
    templates = [Template(p["program"], int(p.get("count", 1))) for p in programs]
    assert response.json() == predict_curve(predictor, templates, {"b": [1, 2]}, ["t4"]).to_dict()


def test_errors_stand_at_their_points(client: TestClient) -> None:
    response = post(client, {**GOOD, "axes": {"m": [1, 0, 2.5]}, "devices": ["nope", "t4", {"name": "x"}]})
    assert response.status_code == 200, response.text
    points = response.json()["points"]
    codes = [p.get("error", {}).get("code") for p in points]
    assert codes[::3] == ["unknown_device", None, "invalid_device"]
    assert codes[1::3] == codes[2::3] == ["invalid_program"] * 3
    assert [p["device"] for p in points[::3]] == ["nope", "t4", "x"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"axes": {}}, "needs m"),
        ({"axes": {"m": [1], "x": [1]}}, "'x' is not used"),
        ({"program": {**LINEAR, "m": "a**2"}, "axes": {"a": [1]}}, "expression"),
        ({"program": {**LINEAR, "q": 1}}, "has no q"),
        ({"program": {"operator": "lstm"}}, "lstm"),
        ({"monotone": ["n"]}, "monotone"),
        ({"axes": {"m": list(range(1, 1001))}, "devices": ["t4"] * 11}, "11,000"),
    ],
)
def test_parts_that_do_not_fit_together(client: TestClient, change: Any, says: str) -> None:
    response = post(client, {**GOOD, **change})
    assert response.status_code == 409, response.text
    assert says in problem(response, 409, response.json()["code"])["detail"]


@pytest.mark.parametrize(
    "change",
    [
        {"axes": {"m": []}},
        {"axes": {"m": [1, "a"]}},
        {"axes": {"m": [1, 1.0]}},
        {"axes": {"m": [1, None]}},
        {"axes": {"max": [1]}},
        {"axes": {"m m": [1]}},
        {"axes": {"m": 1}},
        {"axes": [1]},
        {"axes": {"m": [1e16]}},
        {"axes": {"m": [[1]]}},
        {"axes": None},
        {"devices": []},
        {"devices": "t4"},
        {"devices": [3]},
        {"programs": [{"program": LINEAR}]},
        {"program": {"tvm_json": "{}"}},
        {"program": None},
        {"x": 1},
        {"monotone": "m"},
        {"quantiles": []},
        {"backend": "cuda"},
        {"protocol": None},
        {"framework": "x"},
    ],
)
def test_a_body_that_breaks_the_schema(client: TestClient, change: Any) -> None:
    problem(post(client, {**GOOD, **change}), 422, "invalid_request")


def test_other_refusals(client: TestClient) -> None:
    problem(post(client, "{"), 400, "malformed_json")
    problem(post(client, "[]"), 422, "invalid_request")
    problem(post(client, json.dumps({**GOOD, "axes": {"m": [float("nan")]}})), 422, "invalid_request")
    problem(post(client, {**GOOD, "model": "no-such-model"}), 404, "unknown_model")
    counted = {"programs": [{"program": {**LINEAR, "m": 1}, "count": 0}], "axes": {}, "devices": ["t4"]}
    problem(post(client, counted), 422, "invalid_request")
    assert client.get("/curve").status_code == 405


def test_the_schema_names_it(client: TestClient) -> None:
    operation = client.get("/openapi.json").json()["paths"]["/curve"]["post"]
    assert set(operation["responses"]) >= {"200", "400", "404", "409", "422", "503", "504"}
    (example,) = [operation["requestBody"]["content"]["application/json"]["example"]]
    assert post(client, example).status_code == 200
