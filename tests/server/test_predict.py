"""POST /predict: answers in order, errors item by item, the same figures as in process."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdmpp.devices import lookup
from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.programs.operators import operator_types
from tests.features.test_hostile_json import concrete
from tests.server.conftest import BODY, LINEAR, problem, service, without_ids
from tests.server.conftest import ITEM as GOOD

OWN_DEVICE = lookup("l4").model_dump(exclude={"aliases"})

CONV = {"operator": "conv2d", "n": 1, "c_in": 3, "c_out": 4, "h": 5, "w": 5}
BAD_ITEMS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown operator": ({**GOOD, "program": {"operator": "frobnicate"}}, "unsupported_operator"),
    "empty operator": ({**GOOD, "program": {"operator": ""}}, "unsupported_operator"),
    "missing field": ({**GOOD, "program": {"operator": "linear", "m": 1}}, "invalid_program"),
    "unknown field": ({**GOOD, "program": {**LINEAR, "z": 1}}, "invalid_program"),
    "negative size": ({**GOOD, "program": {**LINEAR, "m": -1}}, "invalid_program"),
    "zero size": ({**GOOD, "program": {**LINEAR, "m": 0}}, "invalid_program"),
    "fractional size": ({**GOOD, "program": {**LINEAR, "m": 1.5}}, "invalid_program"),
    "null size": ({**GOOD, "program": {**LINEAR, "m": None}}, "invalid_program"),
    "NaN size": ({**GOOD, "program": {**LINEAR, "m": math.nan}}, "invalid_program"),
    "infinite size": ({**GOOD, "program": {**LINEAR, "m": math.inf}}, "invalid_program"),
    "size as text": ({**GOOD, "program": {**LINEAR, "m": "512"}}, "invalid_program"),
    "size as truth": ({**GOOD, "program": {**LINEAR, "m": True}}, "invalid_program"),
    "huge size": ({**GOOD, "program": {**LINEAR, "m": 10**30}}, "invalid_program"),
    "product of sizes overflows": ({**GOOD, "program": {**LINEAR, "m": 2**31 - 1, "n": 2**31 - 1}}, "invalid_program"),
    "contradiction": ({**GOOD, "program": {**CONV, "kh": 9, "kw": 9}}, "invalid_program"),
    "unknown dtype": ({**GOOD, "program": {**LINEAR, "dtype": "float12"}}, "invalid_program"),
    "unknown device": ({**GOOD, "device": "t5000x"}, "unknown_device"),
    "a path as device": ({**GOOD, "device": "../../etc/device.toml"}, "unknown_device"),
    "several devices": ({**GOOD, "device": "titan"}, "unknown_device"),
    "incomplete device": ({**GOOD, "device": {"name": "mine"}}, "invalid_device"),
    "impossible device": ({**GOOD, "device": {**OWN_DEVICE, "clock_hz": -1.0}}, "invalid_device"),
    "NaN device": ({**GOOD, "device": {**OWN_DEVICE, "clock_hz": math.nan}}, "invalid_device"),
    "device in wrong units": ({**GOOD, "device": {**OWN_DEVICE, "peak_flops_fp32": 1e8}}, "invalid_device"),
    "not TVM JSON": ({**GOOD, "program": {"tvm_json": "{"}}, "invalid_program"),
    "other JSON": ({**GOOD, "program": {"tvm_json": '{"nodes": [1], "root_index": 0}'}}, "invalid_program"),
    "not TVMScript": ({**GOOD, "program": {"tvmscript": "import os"}}, "invalid_program"),
}


def test_answers_come_in_order_with_ids(ask, predictor: LatencyPredictor) -> None:
    items = [{"id": f"i{m}", "program": {**LINEAR, "m": m}, "device": "t4"} for m in (64, 1, 4096, 64)]
    response = ask(items)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"model_id", "results"}
    assert body["model_id"] == predictor.model_id
    assert [r["id"] for r in body["results"]] == ["i64", "i1", "i4096", "i64"]
    assert [r["name"].split("m=")[1].split(",")[0] for r in body["results"]] == ["64", "1", "4096", "64"]
    for result in body["results"]:
        assert 0 < result["lower_s"] <= result["latency_s"] <= result["upper_s"]
        assert result["domain"] in ("in", "near", "out")
        assert result["roofline_s"] > 0
        assert set(result["quantiles"]) == {"0.1", "0.9"}


def test_the_same_figures_as_in_process(app: FastAPI, ask, predictor: LatencyPredictor) -> None:
    programs = [
        LINEAR,
        {"operator": "softmax", "rows": 4096, "cols": 1024},
        {"operator": "conv2d", "n": 8, "c_in": 64, "c_out": 64, "h": 56, "w": 56, "kh": 3, "kw": 3},
        {"operator": "attention_decode", "batch": 4, "past_len": 99, "heads": 8, "kv_heads": 2, "head_dim": 64},
    ]
    for device in ("a100-pcie-40gb", "l4", OWN_DEVICE):
        items = [{"program": p, "device": device, "protocol": "eager", "framework": "pytorch"} for p in programs]
        over_http = ask(items, quantiles=[0.05, 0.5, 0.95]).json()["results"]
        spec = lookup(device) if isinstance(device, str) else lookup("l4")
        here = predictor.predict(programs, spec, protocol="eager", framework="pytorch", quantiles=(0.05, 0.5, 0.95))
        figures = [{k: v for k, v in r.items() if k not in ("id", "prediction_id")} for r in over_http]
        assert figures == [p.to_dict() for p in here]
        for result in over_http:
            assert app.state.store.signer.read(result["prediction_id"]).latency_s == result["latency_s"]


def test_an_answer_given_before_is_the_same(ask, app: FastAPI, monkeypatch) -> None:
    """And it is found by what was asked, not by how: other words, another id, another order."""
    first = ask([{**GOOD, "id": "first"}], quantiles=[0.2, 0.8]).json()["results"][0]
    words = dict(reversed({**LINEAR, "bias": False}.items()))

    def fail(*_: Any) -> None:
        raise AssertionError("this was asked before")

    monkeypatch.setattr(app.state.service.predictor, "predict_queries", fail)
    for program in (LINEAR, words, {"hash": first["program_hash"]}):
        item = {"protocol": "kernel", "device": GOOD["device"], "id": None, "program": program}
        again = ask([item, {**item, "id": '"ü\\'}], quantiles=[0.2, 0.8]).json()["results"]
        assert without_ids(*again) == without_ids({**first, "id": None}, {**first, "id": '"ü\\'})
    assert ask([{**GOOD, "backend": "tvm"}], quantiles=[0.2, 0.8]).status_code == 500
    assert ask([GOOD], quantiles=[0.2, 0.7]).status_code == 500


def test_programs_are_asked_about_by_their_hash(client: TestClient, ask) -> None:
    tir = json.dumps(concrete("softmax:rows=8,cols=8"))
    forms = [{"operator": "relu", "rows": 77, "cols": 3}, {"tvm_json": tir}, {"operator": "nope"}]
    response = client.post("/programs", json={"programs": forms})
    assert response.status_code == 200, response.text
    relu, softmax, failed = response.json()["programs"]
    assert relu["name"].startswith("relu:")
    assert failed["error"]["code"] == "unsupported_operator"
    forms[2:] = [{"hash": "0" * 32}]
    named = [{"hash": relu["hash"]}, {"hash": softmax["hash"]}, {"hash": "0" * 32}]
    answers = ask([{"program": p, "device": "t4"} for p in named]).json()["results"]
    spelled = ask([{"program": p, "device": "t4"} for p in forms]).json()["results"]
    assert without_ids(*answers[:2]) == without_ids(*spelled[:2])
    assert answers[2]["error"]["code"] == "unknown_program"
    assert "POST /programs" in answers[2]["error"]["hint"]
    problem(ask([{"program": {"hash": "0" * 32}, "device": "t4"}], strict=True), 404, "unknown_program")


@pytest.mark.slow
def test_a_registered_program_outlives_the_process(tmp_path: Path, predictor: LatencyPredictor) -> None:
    database = str(tmp_path / "service.sqlite")
    tir_json = json.dumps(concrete("relu:rows=8,cols=8"))
    forms = [{"operator": "relu", "rows": 79, "cols": 3}, {"tvm_json": tir_json}, "relu:rows=79,cols=3"]
    with service(database=database) as client:
        hashes = [program["hash"] for program in client.post("/programs", json={"programs": forms}).json()["programs"]]
    with service(database=database) as client:
        # What the database holds may be of another version.
        client.app.state.store.put_programs({"1" * 32: {"operator": "nope"}})
        items = [{"program": {"hash": hash}, "device": "intel-xeon-amx-2t-avx2"} for hash in [*hashes, "1" * 32]]
        relu, tir, text, gone = client.post("/predict", json={"items": items}).json()["results"]
    here = predictor.predict([forms[0]], "intel-xeon-amx-2t-avx2")[0]
    assert (relu["latency_s"], relu["backend"]) == (here.latency_s, "library")
    assert without_ids(text) == without_ids(relu)
    assert (tir["program_hash"], tir["backend"]) == (hashes[1], "tvm")
    assert gone["error"]["code"] == "unsupported_operator"


def test_what_programs_are_registered(client: TestClient) -> None:
    for body in ({"programs": []}, {"programs": [{"hash": "0" * 32}]}, {"programs": [1]}, {}, []):
        problem(client.post("/programs", json=body), 422, "invalid_request")


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", ""])
def test_a_client_names_a_deadline_that_is_one(text: str, client: TestClient) -> None:
    problem(client.post("/predict", json=BODY, headers={"x-request-timeout-s": text}), 422, "invalid_request")


def test_past_the_clients_deadline_it_is_refused(client: TestClient) -> None:
    body = {"items": [{**GOOD, "program": {**LINEAR, "m": 4003}}]}
    refused = client.post("/predict", json=body, headers={"x-request-timeout-s": "1e-9"})
    problem(refused, 504, "deadline_exceeded")
    assert refused.headers["retry-after"] == "1"
    assert client.post("/predict", json=body, headers={"x-request-timeout-s": "60"}).status_code == 200


@pytest.mark.parametrize("what", BAD_ITEMS)
def test_a_bad_item_leaves_the_others_alone(what: str, ask) -> None:
    item, code = BAD_ITEMS[what]
    response = ask([GOOD, {"id": "bad", **item}, GOOD])
    assert response.status_code == 200, response.text
    before, bad, after = response.json()["results"]
    assert bad["id"] == "bad"
    assert set(bad) == {"id", "error"}
    assert set(bad["error"]) == {"code", "message", "hint"}
    assert bad["error"]["code"] == code
    assert bad["error"]["message"]
    assert without_ids(before) == without_ids(after) == without_ids(ask([GOOD]).json()["results"][0])


def test_unknown_device_error_names_similar_devices_and_the_remedy(ask) -> None:
    error = ask([{**GOOD, "device": "rtx-4099"}]).json()["results"][0]["error"]
    assert "rtx-4090" in error["message"]
    assert "peak_flops_fp32" in error["hint"]


def test_whole_numbers_may_be_written_as_floats(ask) -> None:
    text = json.dumps({"items": [GOOD]}).replace("512", "512.0")
    assert without_ids(*ask(text).json()["results"]) == without_ids(*ask([GOOD]).json()["results"])


def test_equal_numbers_of_other_types_are_other_programs(ask) -> None:
    linear = {"operator": "linear", "m": 1, "n": 64, "k": 64}
    assert "latency_s" in ask([{"program": linear, "device": "t4"}]).json()["results"][0]
    truth = ask([{"program": {**linear, "m": True}, "device": "t4"}]).json()["results"][0]
    assert truth["error"]["code"] == "invalid_program"


def test_backend_and_protocol_are_part_of_the_query(ask) -> None:
    items = [{**GOOD, "protocol": p} for p in ("kernel", "graph", "eager")] + [{**GOOD, "backend": "tvm"}]
    results = ask(items).json()["results"]
    assert [r["protocol"] for r in results] == ["kernel", "graph", "eager", "kernel"]
    assert [r["backend"] for r in results] == ["library"] * 3 + ["tvm"]
    assert results[2]["latency_s"] > results[0]["latency_s"]
    defaults = {"id": None, "backend": None, "protocol": "kernel", "framework": None, "implementation": None}
    assert without_ids(*ask([{**GOOD, **defaults}]).json()["results"]) == without_ids(results[0])


@pytest.mark.tvm
def test_tir_as_json_and_as_script(ask, predictor: LatencyPredictor) -> None:
    script = (
        "@T.prim_func(s_tir=True)\n"
        'def copy(A: T.Buffer((128, 64), "float32"), B: T.Buffer((128, 64), "float32")):\n'
        "    for i, j in T.grid(128, 64):\n"
        '        with T.sblock("B"):\n'
        '            vi, vj = T.axis.remap("SS", [i, j])\n'
        "            B[vi, vj] = A[vi, vj]\n"
    )
    program = program_from_request({"tvmscript": script})
    items = [
        {"program": {"tvmscript": script}, "device": "intel-xeon-amx-2t-avx2"},
        {"program": {"tvm_json": program.tvm_json}, "device": "intel-xeon-amx-2t-avx2"},
    ]
    by_script, by_json = ask(items).json()["results"]
    assert by_script["backend"] == "tvm"
    assert by_script["program_hash"] == by_json["program_hash"] == program.hash
    here = predictor.predict_queries([Query(program, "intel-xeon-amx-2t-avx2")])[0]
    assert by_script["latency_s"] == by_json["latency_s"] == here.latency_s


@pytest.mark.parametrize("what", BAD_ITEMS)
def test_strict_refuses_the_request(what: str, ask) -> None:
    item, code = BAD_ITEMS[what]
    response = ask([GOOD, {"id": "bad", **item}, GOOD], strict=True)
    body = problem(response, response.status_code, code)
    assert (body["item"], body["id"]) == (1, "bad")
    no_schema_can_say = (
        *("unknown device", "a path as device", "several devices", "device in wrong units", "contradiction"),
        *("product of sizes overflows", "not TVM JSON", "other JSON", "not TVMScript"),
    )
    beyond = 404 if code == "unknown_device" else 409
    assert response.status_code == (beyond if what in no_schema_can_say else 422)


def test_strict_changes_no_figure(ask) -> None:
    items = [GOOD, {**GOOD, "device": OWN_DEVICE}]
    strict, lenient = (ask(items, strict=strict).json()["results"] for strict in (True, False))
    assert without_ids(*strict) == without_ids(*lenient)


def test_strict_takes_no_number_for_a_truth_value(ask) -> None:
    problem(ask([{**GOOD, "program": {**LINEAR, "bias": 1}}], strict=True), 422, "invalid_program")


MANY = {f"f{i}": 1 for i in range(64)}
#: Items that violate the schema, with the code of the error and the path of the fault.
BROKEN_ITEMS: dict[str, tuple[Any, str, str]] = {
    "number": (5, "data_error", ""),
    "null": (None, "data_error", ""),
    "list": ([], "data_error", ""),
    "unknown key": ({**GOOD, "devise": "t4"}, "data_error", "devise"),
    "many keys": ({**GOOD, **MANY}, "data_error", ""),
    "no device": ({"program": LINEAR}, "invalid_device", "device"),
    "no program": ({"device": "t4"}, "invalid_program", "program"),
    "null program": ({**GOOD, "program": None}, "invalid_program", "program"),
    "empty program": ({**GOOD, "program": {}}, "invalid_program", "program"),
    "program as a list": ({**GOOD, "program": [LINEAR]}, "invalid_program", "program"),
    "operator not text": ({**GOOD, "program": {"operator": 5}}, "invalid_program", "program.operator"),
    "nested value": ({**GOOD, "program": {**LINEAR, "m": [512]}}, "invalid_program", "program"),
    "two forms": ({**GOOD, "program": {"tvm_json": "x", "tvmscript": "y"}}, "invalid_program", "program"),
    "short hash": ({**GOOD, "program": {"hash": "0"}}, "invalid_program", "program.hash"),
    "long program key": ({**GOOD, "program": {**LINEAR, "k" * 65: 1}}, "invalid_program", "program"),
    "many program keys": ({**GOOD, "program": {**LINEAR, **MANY}}, "invalid_program", "program"),
    "long TVMScript": ({**GOOD, "program": {"tvmscript": "#" * (2**20 + 1)}}, "invalid_program", "program.tvmscript"),
    "long TVM JSON": ({**GOOD, "program": {"tvm_json": " " * (2**23 + 1)}}, "invalid_program", "program.tvm_json"),
    "device as number": ({**GOOD, "device": 4}, "invalid_device", "device"),
    "device as null": ({**GOOD, "device": None}, "invalid_device", "device"),
    "device as list": ({**GOOD, "device": ["t4"]}, "invalid_device", "device"),
    "twice nested figure": ({**GOOD, "device": {"sustained": {"a": {"b": 1}}}}, "invalid_device", "device.sustained"),
    "long device name": ({**GOOD, "device": "t" * 201}, "invalid_device", "device"),
    "unknown backend": ({**GOOD, "backend": "cuda"}, "data_error", "backend"),
    "backend as truth": ({**GOOD, "backend": True}, "data_error", "backend"),
    "unknown protocol": ({**GOOD, "protocol": "wall"}, "data_error", "protocol"),
    "null protocol": ({**GOOD, "protocol": None}, "data_error", "protocol"),
    "protocol as list": ({**GOOD, "protocol": ["kernel"]}, "data_error", "protocol"),
    "unknown framework": ({**GOOD, "framework": "jax"}, "data_error", "framework"),
    "framework as number": ({**GOOD, "framework": 1}, "data_error", "framework"),
    "unknown implementation": ({**GOOD, "implementation": "unfused"}, "data_error", "implementation"),
    "implementation as list": ({**GOOD, "implementation": ["fused"]}, "data_error", "implementation"),
    "id as number": ({**GOOD, "id": 1}, "data_error", "id"),
    "long id": ({**GOOD, "id": "i" * 201}, "data_error", "id"),
}


@pytest.mark.parametrize("what", BROKEN_ITEMS)
def test_invalid_item_is_an_error_of_this_item_only(what: str, ask) -> None:
    item, code, path = BROKEN_ITEMS[what]
    named = {"id": "bad", **item} if isinstance(item, dict) else item
    response = ask([GOOD, named, GOOD])
    assert response.status_code == 200, response.text
    before, bad, after = response.json()["results"]
    assert bad["id"] == ("bad" if isinstance(item, dict) and "id" not in item else None)
    assert bad["error"]["code"] == code
    assert bad["error"]["message"].startswith(f"{path}: " if path and "." in path else path)
    assert bad["error"]["hint"] and len(json.dumps(bad)) < 1000
    assert without_ids(before) == without_ids(after) and after["latency_s"] > 0
    refused = problem(ask([GOOD, named], strict=True), 422, "invalid_request")
    assert (refused["item"], refused.get("id")) == (1, bad["id"])
    assert all(error["path"].startswith(f"items.1.{path}".rstrip(".")) for error in refused["errors"])
    assert len(json.dumps(refused)) < 4000


def test_error_of_an_invalid_item_names_value_and_allowed_values(ask) -> None:
    bad = ask([{**GOOD, "protocol": "wall"}]).json()["results"][0]["error"]
    assert bad["message"] == "protocol: Input should be 'kernel', 'graph' or 'eager'; it is 'wall'"


BROKEN_BODIES: dict[str, Any] = {
    "empty object": {},
    "not an object": [],
    "items missing": {"quantiles": [0.5]},
    "no items": {"items": []},
    "items not a list": {"items": GOOD},
    "unknown key": {"items": [GOOD], "devices": ["t4"]},
    "many keys": {"items": [GOOD], **MANY},
    "quantile too low": {"items": [GOOD], "quantiles": [0.01]},
    "quantile too high": {"items": [GOOD], "quantiles": [0.99]},
    "NaN quantile": {"items": [GOOD], "quantiles": [math.nan]},
    "quantile as text": {"items": [GOOD], "quantiles": ["0.5"]},
    "no quantiles": {"items": [GOOD], "quantiles": []},
    "many quantiles": {"items": [GOOD], "quantiles": [0.5] * 17},
    "strict as text": {"items": [GOOD], "strict": "yes"},
    "strict as number": {"items": [GOOD], "strict": 1},
    "too many items": {"items": [GOOD] * 10_001},
}


@pytest.mark.parametrize("what", BROKEN_BODIES)
def test_a_body_that_breaks_the_schema_is_refused(what: str, ask) -> None:
    body = problem(ask(json.dumps(BROKEN_BODIES[what])), 422, "invalid_request")
    assert body["errors"]
    assert len(json.dumps(body)) < 4000


@pytest.mark.parametrize(
    "text",
    ["", "{", "nonsense", '{"items": [}', b'{"items": "\xff"}', "[" * 100_000, '{"items": [' + "9" * 5000 + "]}"],
)
def test_a_body_that_is_no_json_is_refused(text: str | bytes, ask) -> None:
    problem(ask(text), 400, "malformed_json")


def test_bug_response_has_no_internal_details(ask, app: FastAPI, monkeypatch, caplog) -> None:
    def explode(*_: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(app.state.service.predictor, "predict_queries", explode)
    with caplog.at_level(logging.ERROR):
        response = ask([{**GOOD, "program": {**LINEAR, "m": 4001}}])
    problem(response, 500, "internal_error")
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


def test_a_figure_that_is_no_number_is_never_sent(ask, app: FastAPI, monkeypatch) -> None:
    predict = app.state.service.predictor.predict_queries

    def broken(*arguments: Any) -> Any:
        answers = predict(*arguments)
        return [replace(answer, latency_s=math.nan) for answer in answers]

    monkeypatch.setattr(app.state.service.predictor, "predict_queries", broken)
    problem(ask([{**GOOD, "program": {**LINEAR, "m": 4002}}]), 500, "internal_error")


scalars = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.text(max_size=20), st.sampled_from([1, 64, "float16"])
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_operator_object_is_answered_item_by_item(data: st.DataObject, ask) -> None:
    name = data.draw(st.sampled_from(sorted(operator_types())))
    fields = [f for f in operator_types()[name].model_fields if f != "operator"]
    program = {"operator": name, **{f: data.draw(scalars) for f in fields if data.draw(st.booleans())}}
    response = ask([{"program": program, "device": "t4"}, GOOD])
    assert response.status_code == 200
    first, second = response.json()["results"]
    assert second["latency_s"] > 0
    assert first["latency_s"] > 0 if "error" not in first else first["error"]["code"] == "invalid_program"
