"""``POST /models/predict``: an ONNX file in, the command line's figures out."""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import jsonschema
import onnx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from onnx import TensorProto, helper

from cdmpp.model.domain.score import label_of_total
from cdmpp_server.onnx import ModelResponse
from tests.server.conftest import problem
from tests.waiting import ROOT, run_python

EXAMPLES = ("small_resnet", "transformer_block")
DEVICES = ("a100-pcie-40gb", "t4")
Upload = Callable[..., httpx2.Response]


@pytest.fixture(scope="module")
def upload(client: TestClient) -> Upload:
    """POST /models/predict with bytes and a query string."""

    def upload(data: bytes, query: str = "device=t4", media: str = "application/octet-stream") -> Any:
        return client.post(f"/models/predict?{query}", content=data, headers={"content-type": media})

    return upload


def example(name: str) -> bytes:
    return (ROOT / "examples" / f"{name}.onnx").read_bytes()


def model(*nodes: Any, batch: int | str = 2) -> bytes:
    """A model x -> y; both are batch x 8."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [batch, 8]) for n in "xy")
    graph = helper.make_graph(list(nodes), "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


# -- figures --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_figures_are_those_of_the_command_line(upload: Upload) -> None:
    query = "&".join(f"device={d}" for d in DEVICES) + "&protocol=eager&framework=pytorch"
    sources = {f"examples/{name}.onnx": upload(example(name), query).json() for name in EXAMPLES}
    options = ["--json", "--protocol=eager", "--framework=pytorch", *(f"--device={d}" for d in DEVICES)]
    there = json.loads(run_python("-m", "cdmpp.cli.main", "predict", *sources, *options).stdout)
    rows = {(r["source"], r["program_hash"], r["device"]): r for r in there["results"]}
    keys = ("implementation", "latency_s", "lower_s", "upper_s", "domain", "domain_score", "roofline_s")
    for source, response in sources.items():
        assert (response["model_id"], response["protocol"]) == (there["model_id"], "eager")
        assert response["framework"] == "pytorch"
        for program in response["programs"]:
            assert [a["device"] for a in program["answers"]] == list(DEVICES)
            for answer in program["answers"]:
                row = rows.pop((source, program["program_hash"], answer["device"]))
                assert (program["name"], program["count"]) == (row["name"], row["count"])
                assert [answer[key] for key in keys] == [row[key] for key in keys]
    assert not rows
    for totals in zip(*(response["devices"] for response in sources.values()), there["totals"], strict=True):
        *mine, theirs = totals
        assert {total["device"] for total in mine} == {theirs["device"]}
        assert sum(total["latency_s"] for total in mine) == pytest.approx(theirs["latency_s"])
        assert sum(total["launches"] for total in mine) == theirs["launches"]
        assert all(total["launches"] == total["launches_predicted"] for total in mine)
        assert not theirs["lower_bound"] and not any(total["lower_bound"] for total in mine)
        for key in ("lower_s", "upper_s"):
            assert sum(total[key] for total in mine) == pytest.approx(theirs[key])
        inside = sum(total["domain_shares"]["in"] * total["latency_s"] for total in mine)
        assert inside / theirs["latency_s"] == pytest.approx(theirs["domain_shares"]["in"])


def test_sums_order_and_ids(app: FastAPI, upload: Upload, ask: Any) -> None:
    response = upload(example("transformer_block"), "device=t4&device=l4").json()
    ModelResponse.model_validate(response)
    for i, total in enumerate(response["devices"]):
        answers = [(p["count"], p["answers"][i]) for p in response["programs"]]
        for key in ("latency_s", "lower_s", "upper_s"):
            assert total[key] == pytest.approx(sum(n * a[key] for n, a in answers))
        for domain, share in total["domain_shares"].items():
            seconds = sum(n * a["latency_s"] for n, a in answers if a["domain"] == domain)
            assert share == pytest.approx(seconds / total["latency_s"])
        assert total["domain"] == label_of_total(total["domain_shares"])
        assert total["lower_bound"] is False
    costs = [sum(p["count"] * a["latency_s"] for a in p["answers"]) for p in response["programs"]]
    assert costs == sorted(costs, reverse=True)

    # A program goes back into /predict as it came, and its id says what was answered.
    program = response["programs"][0]
    (result,) = ask([{"program": program["program"], "device": "l4"}]).json()["results"]
    answer = program["answers"][1]
    assert (result["program_hash"], result["latency_s"]) == (program["program_hash"], answer["latency_s"])
    before = app.state.store.signer.read(answer["prediction_id"])
    assert (before.program_hash, before.device) == (program["program_hash"], "l4")
    assert before.latency_s == answer["latency_s"]


def test_an_alias_and_an_unknown_device(upload: Upload) -> None:
    response = upload(example("small_resnet"), "device=T4&device=t44").json()
    known, unknown = response["devices"]
    assert known["device"] == "t4"
    assert known["latency_s"] > 0
    assert (unknown["device"], unknown["latency_s"], unknown["domain"]) == ("t44", None, None)
    assert (unknown["launches"], unknown["launches_predicted"]) == (known["launches"], 0)
    assert {p["answers"][1]["error"]["code"] for p in response["programs"]} == {"unknown_device"}


def test_dynamic_sizes(upload: Upload) -> None:
    data = model(helper.make_node("Relu", ["x"], ["y"]), batch="batch")
    assert "batch" in problem(upload(data), 409, "invalid_program")["hint"]
    small, large = (upload(data, f"device=t4&dim=batch={n}").json()["programs"][0] for n in (1, 1024))
    assert large["answers"][0]["roofline_s"] > small["answers"][0]["roofline_s"]
    problem(upload(data, "device=t4&dim=batch=1&dim=batch=2"), 409, "invalid_program")
    assert upload(data, "device=t4&dim=batch=2&dim=batch=2").status_code == 200
    problem(upload(data, "device=t4&dim=batch=1&dim=other=2"), 409, "invalid_program")


def test_unsupported_nodes_are_listed_and_in_no_sum(upload: Upload) -> None:
    node = helper.make_node("Mystery", ["x"], ["y"], domain="nowhere")
    response = upload(model(node)).json()
    (unsupported,) = response["unsupported"]
    assert (unsupported["operator"], unsupported["count"]) == ("nowhere::Mystery", 1)
    assert response["programs"] == []
    (total,) = response["devices"]
    assert (total["latency_s"], total["launches"], total["launches_predicted"]) == (None, 0, 0)
    assert (total["domain_shares"], total["lower_bound"]) == (None, True)


# -- refusals -------------------------------------------------------------------------------------------

EXTERNAL = onnx.load_from_string(model(helper.make_node("Reshape", ["x", "shape"], ["y"])))
_shape = TensorProto(name="shape", data_type=TensorProto.INT64, dims=[2], data_location=TensorProto.EXTERNAL)
_shape.external_data.add(key="location", value="/etc/passwd")
EXTERNAL.graph.initializer.append(_shape)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"\x00" * 1000, "not an ONNX model"),
        (b"{}", "not an ONNX model"),
        (example("small_resnet")[:-200], "truncated"),
        (EXTERNAL.SerializeToString(), "external data"),
    ],
)
def test_a_file_that_cannot_be_read(data: bytes, says: str, upload: Upload) -> None:
    body = problem(upload(data), 409, "invalid_program")
    assert says in body["detail"]
    assert "root:" not in json.dumps(body)


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ("", "device"),
        ("device=", "device"),
        ("device=" + "x" * 300, "device"),
        ("&".join(["device=t4"] * 65), "device"),
        ("device=t4&devices=l4", "devices"),
        ("device=t4&protocol=fast", "protocol"),
        ("device=t4&protocol=", "protocol"),
        ("device=t4&protocol=kernel&protocol=eager", "protocol"),
        ("device=t4&framework=null", "framework"),
        ("device=t4&implementation=null", "implementation"),
        ("device=t4&dim=batch", "dim"),
        ("device=t4&dim=batch=0", "dim"),
        ("device=t4&dim=batch=01", "dim"),
        ("device=t4&dim==1", "dim"),
        ("device=t4&dim=batch=9999999999", "dim"),
        ("device=t4&dim=batch=%D9%A1", "dim"),
        ("device=t4&dim=batch=1%0A", "dim"),
        ("device=t4&model=", "model"),
    ],
)
def test_a_query_that_breaks_the_schema(query: str, path: str, upload: Upload) -> None:
    body = problem(upload(example("small_resnet"), query), 422, "invalid_request")
    assert body["errors"][0]["path"] == f"query.{path}"


def test_other_refusals(upload: Upload, app: FastAPI) -> None:
    data = example("small_resnet")
    problem(upload(data, "device=t4&model=nothing"), 404, "unknown_model")
    problem(upload(data, media="application/json"), 415, "unsupported_media_type")
    problem(upload(bytes(app.state.settings.max_body_bytes + 1)), 413, "body_too_large")


def test_the_published_schema_is_that_of_the_answer(upload: Upload, client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    operation = document["paths"]["/models/predict"]["post"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    for data in (example("small_resnet"), model(helper.make_node("Mystery", ["x"], ["y"], domain="nowhere"))):
        response = upload(data, "device=t4&device=t44").json()
        jsonschema.validate(response, {**schema, "components": document["components"]})
    assert set(operation["responses"]) >= {"200", "404", "408", "409", "413", "415", "422", "500", "503", "504"}
