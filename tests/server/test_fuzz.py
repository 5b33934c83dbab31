"""A few hundred malformed requests to a real service, and tests of the fuzzing harness."""

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from benchmarks.fuzz import drive, mutate, seeds
from benchmarks.fuzz.__main__ import SMALL
from benchmarks.fuzz.cases import OCTETS, SURFACES, TENSORS
from benchmarks.fuzz.drive import FuzzRun
from benchmarks.fuzz.models import adversarial, examples
from benchmarks.serving.process import Served, free_port, running
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

PROBLEM = "application/problem+json"
RESULT = {"latency_s": 2.0, "lower_s": 1.0, "upper_s": 3.0}
ERROR = {"error": {"code": "invalid_program", "message": "no", "hint": ""}}


@pytest.mark.nightly
@pytest.mark.load
def test_fuzzing_finds_no_fault() -> None:
    with running(environment=SMALL) as served:
        document = served.ask("GET", "/openapi.json")[1]
        # Without TVMScript, because TVM's start takes longer than this test; the full run includes it.
        surfaces = [s for s in SURFACES if s.path in document["paths"] and s.name != "TVMScript"]
        assert {s.path for s in surfaces} >= {"/predict", "/models/predict", "/observe", "/curve", "/programs"}
        report = FuzzRun(served, surfaces, cases=300, seed=1, seconds=60.0).run()
    assert not report.findings, report.findings[:5]
    assert report.total() >= 300
    assert set(report.cases) == {s.name for s in surfaces}
    # If parsing refused all mutations, the test would not reach the code behind it.
    assert report.statuses[200] > 20


def test_fuzz_seeds_are_valid_requests(client: TestClient) -> None:
    """If the seeds were refused, the mutations would test parsing only."""
    tir = [{"program": {"tvm_json": json.dumps(d)}, "device": "intel-xeon-amx-2t-avx2"} for d in seeds.tir_documents()]
    body = seeds.predict_body(len(seeds.OPERATORS))
    for items in (body["items"], tir):
        results = client.post("/predict", json={**body, "items": items}).json()["results"]
        assert [result["latency_s"] > 0 for result in results] == [True] * len(items)
    features = client.post("/predict", content=seeds.feature_body(), headers={"content-type": TENSORS})
    assert (features.status_code, features.headers["content-type"]) == (200, TENSORS)
    points = client.post("/curve", json=seeds.curve_body()).json()["points"]
    assert len(points) == 24
    assert not [point for point in points if "error" in point]
    assert all(answer["total_s"] > 0 for answer in client.post("/llm", json=seeds.llm_body()).json()["answers"])
    signed_elsewhere, stored = client.post("/observe", json=seeds.observe_body()).json()["results"]
    assert signed_elsewhere["error"]["code"] == "invalid_prediction_id" and "observation_id" in stored
    programs = {"programs": [dict(p) for p in seeds.operators()]}
    assert not [p for p in client.post("/programs", json=programs).json()["programs"] if "error" in p]
    assert client.post("/adapt", json=seeds.adapt_body()).status_code == 200
    for model in examples():
        response = client.post("/models/predict?device=t4", content=model, headers={"content-type": OCTETS})
        assert response.json()["devices"][0]["latency_s"] > 0
    assert len({bytes(model) for model in adversarial()}) > 35


@pytest.mark.tvm
@pytest.mark.parametrize("script", seeds.SCRIPTS)
def test_fuzz_scripts_are_programs(script: str) -> None:
    from cdmpp.programs.frontends.tir import program_from_tvmscript

    assert program_from_tvmscript(script).hash


@pytest.mark.parametrize("surface", SURFACES, ids=lambda s: s.name)
def test_seed_reproduces_its_case(surface) -> None:
    first, again, other = (surface.make(random.Random(seed)) for seed in ("a", "a", "b"))
    assert first == again
    assert first.body != other.body
    paths = {surface.path, "/predict", "/curve", "/observe", "/programs", *(path for path, _ in seeds.plan_bodies())}
    assert first.path.partition("?")[0] in paths


def test_mutations_do_not_change_their_seed() -> None:
    document = {"a": [1, {"b": "c"}], "d": None}
    before = json.dumps(document)
    changed = [json.dumps(mutate.json_value(random.Random(i), document)) for i in range(50)]
    assert json.dumps(document) == before
    assert len(set(changed)) > 30
    assert len({mutate.octets(random.Random(i), b"0123456789") for i in range(50)}) > 30


@pytest.mark.parametrize(
    ("status", "media", "body", "cases"),
    [
        (500, PROBLEM, {"status": 500, "code": "internal_error", "detail": "x"}, 1),
        (302, "text/html", {}, 1),
        (422, "application/json", {"status": 422, "code": "x", "detail": "x"}, 1),
        (422, PROBLEM, {"status": 400, "code": "x", "detail": "x"}, 1),
        (503, PROBLEM, {"detail": "no reason"}, 1),
        (200, "application/json", {"results": [RESULT]}, 2),
        (200, "application/json", {"results": [RESULT, {**RESULT, "latency_s": 9.0}]}, 2),
        (200, "application/json", {"results": [{**RESULT, "lower_s": 0.0}]}, 1),
        (200, "application/json", {"results": [{"error": {"code": "internal_error", "message": "x"}}]}, 1),
        (200, "application/json", {"results": [{"error": {"code": "x", "message": "Traceback"}}]}, 1),
        (200, "application/json", {"results": [{"error": {}}]}, 1),
        (200, "application/json", {"value": float("nan")}, 1),
        (200, "application/json", {"points": [RESULT, {**RESULT, "upper_s": 0.5}]}, 1),
        (200, "application/json", {"programs": [{"answers": [{**RESULT, "latency_s": -1.0}]}]}, 1),
        (200, TENSORS, {}, 1),
    ],
)
def test_invalid_response_is_a_finding(status: int, media: str, body: object, cases: int) -> None:
    assert drive.problems(status, media, json.dumps(body).encode(), cases)


@pytest.mark.parametrize(
    ("status", "media", "body", "cases"),
    [
        (200, "application/json", {"results": [RESULT, ERROR]}, 2),
        (200, "application/json", {"accepted": 0}, 1),
        (200, "application/json", {"programs": 3}, 1),
        (504, PROBLEM, {"status": 504, "code": "deadline_exceeded", "detail": "x"}, 16),
    ],
)
def test_valid_response_is_not_a_finding(status: int, media: str, body: object, cases: int) -> None:
    assert drive.problems(status, media, json.dumps(body).encode(), cases) == []
    assert drive.problems(200, "text/html", b"<html>", 1)


def test_unresponsive_service_is_a_finding() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(PATIENCE_S)
    gone = Served(free_port(), process)
    surface = replace(SURFACES[0], share=1.0)
    report = FuzzRun(gone, [surface], cases=64, seed=0, seconds=10.0, connections=1).run()
    assert {finding.what.split(":")[0] for finding in report.findings} >= {"no answer", "it is not alive at the end"}
