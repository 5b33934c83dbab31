"""The binary body of /predict: the same figures as JSON gives, and every body that is none refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdmpp.devices import lookup
from cdmpp.features.encode import encode_operator
from cdmpp.predict.bulk import MEDIA_TYPE, FeatureAnswers, FeaturePart, FeatureQueries
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.operators import make_operator, parse_operator
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.templates import size_names
from tests.server.conftest import LINEAR, problem, service

PROGRAMS = [
    LINEAR,
    {"operator": "softmax", "rows": 4096, "cols": 1024},
    {"operator": "attention_decode", "batch": 4, "past_len": 99, "heads": 8, "kv_heads": 2, "head_dim": 64},
]
OWN = lookup("l4").model_copy(update={"name": "mine"})


def program(i: int) -> dict[str, Any]:
    """Program of the ``i``-th query: a linear layer of another size each time, or one of the others."""
    return {**LINEAR, "m": 1 + i} if i % 3 == 0 else PROGRAMS[i % 3]


def queries(count: int = 3, **fields: Any) -> FeatureQueries:
    parts = []
    for i in range(count):
        operator = make_operator(program(i))
        device = ("t4", OWN)[i % 2]
        parts.append(FeaturePart(encode_operator(operator), operator.operator, device, "library", "eager", "pytorch"))
    return FeatureQueries.of(parts, **fields)


def post(client: TestClient, body: bytes, media: str = MEDIA_TYPE) -> Any:
    return client.post("/predict", content=body, headers={"content-type": media})


def test_the_same_figures_as_in_json(client: TestClient, predictor: LatencyPredictor) -> None:
    sent = queries(300, quantiles=(0.05, 0.5, 0.95))
    response = post(client, sent.to_bytes())
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    answers = FeatureAnswers.from_bytes(response.content)
    assert answers.model_id == predictor.model_id and answers.levels == (0.05, 0.5, 0.95)
    here = predictor.predict_features(sent)
    for name in ("latency_s", "lower_s", "upper_s", "quantiles", "domain", "domain_score", "roofline_s"):
        assert np.array_equal(getattr(answers, name), getattr(here, name)), name
    devices = ("t4", OWN.model_dump(exclude={"aliases"}))
    how = {"protocol": "eager", "framework": "pytorch"}
    items = [{"program": program(i), "device": devices[i % 2], **how} for i in range(9)]
    results = client.post("/predict", json={"items": items, "quantiles": [0.05, 0.5, 0.95]}).json()["results"]
    assert [r["latency_s"] for r in results] == answers.latency_s[:9].tolist()
    assert [r["domain"] for r in results] == answers.labels[:9]


#: Experts, a module with projections of another type, a quantised product: their features depend on sizes and scales.
NARROW_PROGRAMS = [
    "moe:tokens=64,hidden=2048,intermediate=1024,experts=32,topk=4,dtype=fp8,scaling=block128,balance=power_law_1.2",
    "moe:tokens=8,hidden=2048,intermediate=1024,experts=32,topk=4,ep=4,weight_dtype=int4",
    "mla_decode:batch=16,past_len=4096,heads=16,module=true,weight_dtype=fp8,scaling=block128,kv_dtype=fp8",
    "linear:m=64,n=4096,k=4096,dtype=fp8,scaling=channel",
    "linear:m=64,n=4096,k=4096,dtype=fp8",
    "linear:m=64,n=4096,k=4096,dtype=bfloat16,weight_dtype=int4",
]


def narrow_queries() -> FeatureQueries:
    operators = [parse_operator(text) for text in NARROW_PROGRAMS]
    parts = [FeaturePart(encode_operator(o), o.operator, "h100-sxm", "library", "graph", "vllm") for o in operators]
    return FeatureQueries.of(parts)


def test_narrow_types_have_the_same_figures_in_every_interface(client: TestClient, predictor: LatencyPredictor) -> None:
    programs = [TensorProgram.from_operator(text) for text in NARROW_PROGRAMS]
    local = predictor.predict(programs, "h100-sxm", protocol="graph", framework="vllm")
    here = predictor.predict_features(narrow_queries())
    answers = FeatureAnswers.from_bytes(post(client, narrow_queries().to_bytes()).content)
    items = [
        {"program": text, "device": "h100-sxm", "protocol": "graph", "framework": "vllm"} for text in NARROW_PROGRAMS
    ]
    results = client.post("/predict", json={"items": items}).json()["results"]
    for name in ("latency_s", "lower_s", "upper_s", "domain_score"):
        expected = [getattr(p, name) for p in local]
        assert getattr(here, name).tolist() == expected, name
        assert getattr(answers, name).tolist() == expected, name
        assert [result[name] for result in results] == expected, name
    assert [result["domain"] for result in results] == answers.labels == [p.domain for p in local]


@pytest.mark.parametrize(("value", "message"), [(2**31 - 1, "experts exceeds 8192"), (0, "experts is 0")])
def test_sizes_of_experts_are_checked(client: TestClient, value: int, message: str) -> None:
    sent = narrow_queries()
    sent.sizes[0, size_names("moe").index("experts")] = value
    assert message in problem(post(client, sent.to_bytes()), 422, "data_error")["detail"]


def test_what_is_refused(client: TestClient) -> None:
    good = queries()
    bad = good.leaves.copy()
    bad[0, 0, 0] = np.nan
    for body, status, code in (
        (b"", 422, "data_error"),
        (b"\x00" * 64, 422, "data_error"),
        (b"{}", 422, "data_error"),
        (good.to_bytes()[:-1], 422, "data_error"),
        (replace(good, leaves=bad).to_bytes(), 422, "data_error"),
        (replace(good, device=good.device + 5).to_bytes(), 422, "data_error"),
        (replace(good, devices=("t5000x", OWN)).to_bytes(), 404, "unknown_device"),
        (replace(good, model="another").to_bytes(), 404, "unknown_model"),
        (replace(good, quantiles=(0.001, 0.9)).to_bytes(), 422, "data_error"),
        (good.take(np.arange(0)).to_bytes(), 422, "invalid_request"),
    ):
        problem(post(client, body), status, code)
    problem(post(client, good.to_bytes(), "application/octet-stream"), 415, "unsupported_media_type")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.integers(0, 3))
def test_a_changed_byte_is_an_answer_or_a_refusal(client: TestClient, position: int, byte: int, cut: int) -> None:
    body = bytearray(queries().to_bytes())
    body[position % len(body)] = byte
    response = post(client, bytes(body[: len(body) - cut]))
    assert response.status_code in (200, 404, 422), response.text


@pytest.mark.parametrize("rows", [1, 2])
def test_the_number_of_rows_is_that_of_items(rows: int) -> None:
    with service(max_items=1) as client:
        assert post(client, queries(rows).to_bytes()).status_code == (200 if rows == 1 else 422)
