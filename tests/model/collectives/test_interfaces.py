"""Collectives through Python, the command line and HTTP: the same numbers; tables are evaluated."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from cdmpp.cli.main import app
from cdmpp.data.load import load_table
from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.programs.program import TensorProgram
from cdmpp.train.evaluation.tables import evaluate
from cdmpp_server.app import create_app
from cdmpp_server.settings import Settings

REDUCE = "all_reduce:bytes=67108864,ranks=8"
FIELDS = {"operator": "all_reduce", "bytes": 67108864, "ranks": 8}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(Settings(model=None))) as found:
        yield found


def test_text_object_and_query_give_one_prediction(predictor: LatencyPredictor) -> None:
    program = TensorProgram.from_operator(REDUCE)
    first, second = predictor.predict([REDUCE, FIELDS], "h100-sxm")
    [third] = predictor.predict_queries([Query(program, "h100-sxm")])
    assert first.latency_s == second.latency_s == third.latency_s
    assert first.domain == "in"
    assert first.domain_reason is None
    assert first.lower_s < first.latency_s < first.upper_s
    assert first.roofline_s == pytest.approx(67108864 * 1.75 / 450e9)
    assert list(first.quantiles) == ["0.1", "0.9"]


def test_collectives_and_programs_are_answered_in_order(predictor: LatencyPredictor) -> None:
    linear = "linear:m=512,n=512,k=512,dtype=float16"
    mixed = predictor.predict([linear, REDUCE, "all_reduce:bytes=0,ranks=8", linear], "h100-sxm")
    assert mixed[0].latency_s == mixed[3].latency_s == predictor.predict([linear], "h100-sxm")[0].latency_s
    assert mixed[1].latency_s == predictor.predict([REDUCE], "h100-sxm")[0].latency_s
    assert mixed[2].error is not None
    assert mixed[2].error.code == "invalid_program"


def test_cached_prediction_is_the_same(predictor: LatencyPredictor) -> None:
    text = "all_to_all:bytes=123456,ranks=8"
    first = LatencyPredictor(predictor.artifact).predict([text], "mi300x")[0]
    again = LatencyPredictor(predictor.artifact)
    assert again.predict([text], "mi300x")[0] == again.predict([text], "mi300x")[0] == first
    assert first.domain != "in"
    assert "no collective was measured" in (first.domain_reason or "")


def test_framework_names_the_library_where_the_program_does_not(predictor: LatencyPredictor) -> None:
    stated = predictor.predict([f"{REDUCE},library=sglang"], "h200", protocol="graph")[0]
    by_framework = predictor.predict([REDUCE], "h200", protocol="graph", framework="sglang")[0]
    assert stated.latency_s == by_framework.latency_s


def test_http_gives_the_same_numbers(predictor: LatencyPredictor, client: TestClient) -> None:
    items = [
        {"program": REDUCE, "device": "h100-sxm"},
        {"program": {**FIELDS, "library": "vllm"}, "device": "h200", "protocol": "graph"},
        {"program": {"operator": "all_gather", "bytes": 4096, "ranks": 4, "link": "100GB/s"}, "device": "b200"},
    ]
    for strict in (False, True):
        response = client.post("/predict", json={"items": items, "strict": strict})
        assert response.status_code == 200, response.text
        for item, result in zip(items, response.json()["results"], strict=True):
            protocol = item.get("protocol", "kernel")
            [local] = predictor.predict([item["program"]], str(item["device"]), protocol=protocol)
            assert result["latency_s"] == local.latency_s
            assert result["upper_s"] == local.upper_s
            assert result.get("domain_reason") == local.domain_reason


def test_features_of_a_collective_are_refused_with_a_way_out(predictor: LatencyPredictor) -> None:
    with pytest.raises(ValueError, match="collective") as caught:
        predictor.encode(TensorProgram.from_operator(REDUCE))
    assert "POST /predict" in caught.value.hint  # type: ignore[attr-defined]


def test_command_line_predicts(predictor: LatencyPredictor) -> None:
    result = CliRunner().invoke(app, ["predict", REDUCE, "--device", "h100-sxm", "--json"])
    assert result.exit_code == 0, result.output
    text = json.dumps(json.loads(result.output))
    assert repr(predictor.predict([REDUCE], "h100-sxm")[0].latency_s) in text


def test_tables_are_evaluated_with_the_predictions(predictor: LatencyPredictor, table_file: Path) -> None:
    table = load_table(table_file)
    result = evaluate(predictor, [table])
    assert result["overall"]["n"] == 7
    assert result["unsupported"] == []
    errors = []
    for row in range(len(table)):
        fields = table.program_fields(int(table.program_key[row]))
        protocol = table.protocol[row]
        [prediction] = predictor.predict([fields], table.device[row], protocol=protocol)  # type: ignore[arg-type]
        errors.append(abs(prediction.latency_s / table.latency_s[row] - 1))
    assert result["overall"]["mape"] == pytest.approx(np.mean(errors), rel=1e-9)


def test_planner_s_cost_is_the_prediction(predictor: LatencyPredictor) -> None:
    cost = predictor.predict([{**FIELDS, "ranks_per_node": 8, "link": "nvlink4"}], "h100-sxm")[0]
    assert cost.latency_s > 0
    assert cost.error is None


def test_framework_of_collectives_is_their_library_and_refused_for_products(predictor: LatencyPredictor) -> None:
    collective, product = predictor.predict([REDUCE, "linear:m=8,n=8,k=8"], "h100-sxm", framework="nccl")
    assert collective.latency_s == predictor.predict([f"{REDUCE},library=nccl"], "h100-sxm")[0].latency_s
    assert product.error is not None
    assert "'nccl' runs collectives" in product.error.message


def test_framework_of_collectives_is_accepted_over_http(client: TestClient) -> None:
    item = {"program": FIELDS, "device": "h100-sxm", "framework": "nccl"}
    [result] = client.post("/predict", json={"items": [item]}).json()["results"]
    assert result["framework"] == "nccl"
    assert result["latency_s"] > 0
