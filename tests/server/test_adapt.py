"""POST /adapt: the adapted model, its use by /predict, refusals, and persistence."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cdmpp.predict.predictor import LatencyPredictor
from tests.server.conftest import LINEAR, problem, service, without_ids

pytestmark = pytest.mark.slow

DEVICE = "h200"
HOW = {"protocol": "eager", "framework": "pytorch"}


def records(predictor: LatencyPredictor, count: int = 12, by: float = 1.6) -> list[dict[str, Any]]:
    sizes = [{**LINEAR, "m": 32 * (i + 1), "dtype": "float32"} for i in range(count)]
    predictions = predictor.predict(sizes, DEVICE, **HOW)
    return [{"program": p, "latency_s": by * a.latency_s, **HOW} for p, a in zip(sizes, predictions, strict=True)]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with service(adapted_dir=tmp_path_factory.mktemp("adapted")) as client:
        yield client


def adapt(client: TestClient, records: Any, **fields: Any) -> Any:
    return client.post("/adapt", json={"device": DEVICE, "records": records, **fields})


def predict(client: TestClient, model: str | None) -> Any:
    item = {"program": {**LINEAR, "m": 100, "dtype": "float32"}, **HOW}
    items = [{**item, "device": device} for device in (DEVICE, "t4")]
    return client.post("/predict", json={"items": items, "model": model})


def test_adapted_model_is_accepted_by_predict(client: TestClient, predictor: LatencyPredictor) -> None:
    answer = adapt(client, records(predictor))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["device"] == DEVICE and body["k"] == 12 and body["weight"] == 1
    assert body["cross_validated"]["after"] < 0.5 * body["cross_validated"]["before"]
    before, after = (predict(client, model).json() for model in (None, body["adapted_model"]))
    assert before["model_id"] == body["base_model_id"] and after["model_id"] == body["adapted_model"]
    h200, t4 = zip(before["results"], after["results"], strict=True)
    assert h200[1]["latency_s"] > 1.4 * h200[0]["latency_s"]
    assert t4[1]["latency_s"] == t4[0]["latency_s"]
    listed = {m["model_id"]: m for m in client.get("/models").json()["models"]}
    assert listed[body["adapted_model"]]["adapted_device"] == DEVICE
    assert listed[body["base_model_id"]]["default"] and not listed[body["adapted_model"]]["default"]
    # Equal to the result in process.
    adapted = predictor.adapt([(r["program"], r["latency_s"]) for r in records(predictor)], DEVICE, **HOW)
    here = adapted.predict([{**LINEAR, "m": 100, "dtype": "float32"}], DEVICE, **HOW)
    assert here[0].latency_s == h200[1]["latency_s"]


def test_k_records_are_selected(client: TestClient, predictor: LatencyPredictor) -> None:
    body = adapt(client, records(predictor), k=6, sampler="random", seed=3).json()
    assert len(set(body["selected"])) == 6 and max(body["selected"]) < 12
    assert body["before"]["overall"]["n"] == body["after"]["overall"]["n"] == 6


def test_oldest_models_are_removed_and_the_rest_survive_a_restart(predictor: LatencyPredictor, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"adapted_dir": tmp_path / "adapted", "max_adapted": 2}
    with service(**settings) as client:
        names = [adapt(client, records(predictor, by=by)).json()["adapted_model"] for by in (1.4, 1.6, 1.8)]
        assert len(set(names)) == 3
        problem(predict(client, names[0]), 404, "unknown_model")
        assert len(list(settings["adapted_dir"].glob("*/*/manifest.json"))) == 2
        figures = without_ids(*predict(client, names[2]).json()["results"])
    with service(**settings) as again:
        assert without_ids(*predict(again, names[2]).json()["results"]) == figures
        problem(predict(again, names[0]), 404, "unknown_model")


def test_model_name_is_never_opened_as_a_path(client: TestClient, tmp_path: Path) -> None:
    for name in ("../../models/base", str(tmp_path), "models/base", "", "\0", "x" * 200):
        problem(predict(client, name), 404, "unknown_model")


def test_invalid_requests_are_refused(client: TestClient, predictor: LatencyPredictor) -> None:
    good = records(predictor)
    for body, status, code in (
        ({"device": DEVICE, "records": []}, 422, "invalid_request"),
        ({"device": DEVICE}, 422, "invalid_request"),
        ({"device": DEVICE, "records": [{**good[0], "latency_s": -1.0}]}, 422, "invalid_request"),
        ({"device": DEVICE, "records": [{**good[0], "latency_s": "1"}]}, 422, "invalid_request"),
        ({"device": DEVICE, "records": good, "k": 0}, 422, "invalid_request"),
        ({"device": DEVICE, "records": good, "out": "/tmp/x"}, 422, "invalid_request"),
        ({"device": "t5000x", "records": good}, 404, "unknown_device"),
        ({"device": "../t4.toml", "records": good}, 404, "unknown_device"),
        ({"device": {"name": "mine"}, "records": good}, 409, "invalid_device"),
        ({"device": DEVICE, "records": good, "k": 13}, 409, "data_error"),
        ({"device": DEVICE, "records": [{**r, "latency_s": 1e-9} for r in good]}, 409, "data_error"),
    ):
        problem(client.post("/adapt", json=body), status, code)
    unknown = {**good[0], "program": {"operator": "frob"}}
    body = problem(adapt(client, [*good, unknown]), 409, "unsupported_operator")
    assert body["item"] == 12 and body["detail"].startswith("records.12")


def test_service_of_an_adapted_model_adapts_its_base(predictor: LatencyPredictor, tmp_path: Path) -> None:
    given = [(r["program"], r["latency_s"]) for r in records(predictor)]
    predictor.adapt(given, "l4", **HOW).save(tmp_path / "mine")
    with service(model=tmp_path / "mine") as client:
        answer = adapt(client, records(predictor))
        assert answer.status_code == 200, answer.text
        assert answer.json()["base_model_id"] == predictor.model_id
        assert predict(client, answer.json()["adapted_model"]).status_code == 200


def test_answer_states_that_nothing_was_gained(client: TestClient, predictor: LatencyPredictor) -> None:
    given = records(predictor, by=1.0)
    for position, record in enumerate(given):
        record["latency_s"] *= (1.2, 0.8)[position % 2]
    body = adapt(client, given).json()
    assert body["weight"] == 0 and "no_gain" in [warning["code"] for warning in body["warnings"]]
    assert body["cross_validated"]["after"] == body["cross_validated"]["before"]
    before, after = (predict(client, model).json()["results"] for model in (None, body["adapted_model"]))
    same = ("latency_s", "lower_s", "upper_s", "domain")
    assert [[r[name] for name in same] for r in before] == [[r[name] for name in same] for r in after]


def test_too_many_records_are_refused(predictor: LatencyPredictor) -> None:
    with service(max_items=5) as client:
        problem(adapt(client, records(predictor, 6)), 422, "invalid_request")
