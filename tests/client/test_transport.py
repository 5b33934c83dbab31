"""What the clients do when a service is busy, gone, slow, or takes less at once."""

import asyncio
import json
import time
from itertools import chain, repeat
from typing import Any
from unittest.mock import DEFAULT, Mock

import httpx2
import numpy as np
import pytest

from cdmpp.client import AsyncPredictorClient, PredictorClient, transport
from cdmpp.errors import CdmppError, DataError, DeadlineExceededError, OverloadedError, ServiceError
from cdmpp.features.encode import encode_operator
from cdmpp.predict.bulk import MEDIA_TYPE, FeaturePart, FeatureQueries
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.operators import parse_operator
from tests.client.conftest import URL, Serve, call
from tests.waiting import ROOT, run_python

pytestmark = pytest.mark.slow

PREDICTION = Prediction(
    *("x", "0" * 32, "t4", "library", "kernel", None, "m"),
    **{"latency_s": 1.0, "lower_s": 0.5, "upper_s": 2.0, "quantiles": {"0.1": 0.5, "0.9": 2.0}},
    **{"domain": "in", "domain_score": 0.0, "roofline_s": 0.1},
)
RESULT: dict[str, Any] = {**PREDICTION.to_dict(), "id": None, "prediction_id": "abc"}


def problem(status: int, code: str, headers: dict[str, str] | None = None, **more: Any) -> httpx2.Response:
    body = {"title": "x", "status": status, "code": code, "detail": f"what {code} says", "hint": "a hint"}
    return httpx2.Response(status, json={**body, **more}, headers=headers)


def answered(request: httpx2.Request) -> httpx2.Response:
    items = json.loads(request.content)["items"]
    results = [{**RESULT, "latency_s": float(item["program"]["m"])} for item in items]
    return httpx2.Response(200, json={"model_id": "m", "results": results})


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clients wait between attempts, without waiting."""
    waited_s: list[float] = []

    async def later(seconds: float) -> None:
        waited_s.append(seconds)

    monkeypatch.setattr("cdmpp.client.clients.sleep", waited_s.append)
    monkeypatch.setattr("cdmpp.client.clients.sleep_async", later)
    return waited_s


def linears(*sizes: int) -> list[str]:
    return [f"linear:m={m},n=1,k=1" for m in sizes]


def test_a_busy_service_is_asked_again_later_each_time(asynchronous: bool, waits: list[float]) -> None:
    seen: list[httpx2.Request] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return answered(request) if len(seen) == 4 else problem(503, "overloaded")

    (prediction,) = call(handler, asynchronous, "predict", linears(5), "t4")
    assert (prediction.latency_s, prediction.prediction_id, prediction.model_id) == (5.0, "abc", "m")
    assert len({request.content for request in seen}) == 1
    first = transport.FIRST_WAIT_S
    for wait, step in zip(waits, (first, 2 * first, 4 * first), strict=True):
        assert 0.5 * step <= wait <= step


def test_retry_after_is_respected(asynchronous: bool, waits: list[float]) -> None:
    left = [problem(503, "overloaded", {"retry-after": "3"}), problem(429, "rate_limited", {"retry-after": "7"})]
    call(lambda r: left.pop(0) if left else answered(r), asynchronous, "predict", linears(1), "t4")
    assert 3 <= waits[0] < 3.2 and 7 <= waits[1] < 7.4


def test_measurements_that_may_have_arrived_are_not_sent_again(asynchronous: bool, waits: list[float]) -> None:
    requested_paths: list[str] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        requested_paths.append(request.url.path)
        return httpx2.Response(502, text="Bad Gateway")

    with pytest.raises(ServiceError) as caught:
        call(handler, asynchronous, "observe", [("abc", 1.0)])
    assert (caught.value.status, len(requested_paths)) == (502, 1)
    with pytest.raises(ServiceError):
        call(handler, asynchronous, "predict", linears(1), "t4", retries=2)
    assert requested_paths[1:] == ["/predict"] * 3


def test_service_that_stays_busy_is_an_overloaded_error(asynchronous: bool, waits: list[float]) -> None:
    attempts: list[int] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        attempts.append(1)
        return problem(503, "overloaded")

    with pytest.raises(OverloadedError, match="what overloaded says") as caught:
        call(handler, asynchronous, "predict", linears(1), "t4", retries=2)
    assert caught.value.hint == "a hint"
    assert len(attempts) == 3
    # No time for what Retry-After asks: not waited for.
    waits.clear()
    busy = problem(503, "overloaded", {"retry-after": "60"})
    with pytest.raises(OverloadedError):
        call(lambda r: busy, asynchronous, "predict", linears(1), "t4", timeout_s=50.0)
    assert waits == []


@pytest.mark.parametrize(
    "error", [httpx2.ConnectError, httpx2.ReadError, httpx2.RemoteProtocolError, httpx2.WriteError]
)
def test_a_broken_connection_is_tried_again(asynchronous: bool, waits: list[float], error: type[Exception]) -> None:
    handler = Mock(side_effect=chain([error("gone")], repeat(DEFAULT)), wraps=answered)
    assert call(handler, asynchronous, "predict", linears(3), "t4")[0].latency_s == 3.0
    assert len(waits) == 1


def test_a_service_that_is_not_there(asynchronous: bool, waits: list[float]) -> None:
    with pytest.raises(ServiceError, match="refused") as caught:
        call(Mock(side_effect=httpx2.ConnectError("refused")), asynchronous, "predict", linears(3), "t4", retries=2)
    assert isinstance(caught.value, ConnectionError)
    assert "readyz" in caught.value.hint
    assert len(waits) == 2


def test_a_measurement_is_not_sent_twice_unless_it_was_refused(asynchronous: bool, waits: list[float]) -> None:
    sent: list[Any] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        sent.append(json.loads(request.content))
        if len(sent) == 1:
            raise httpx2.ConnectError("not sent")
        if len(sent) == 2:
            return problem(503, "store_unavailable")
        if len(sent) == 3:
            return httpx2.Response(200, json={"accepted": 1, "results": [{"observation_id": "o1"}]})
        raise httpx2.ReadError("sent, and no answer")

    (kept,) = call(handler, asynchronous, "observe", [("abc", 1e-4)])
    assert (kept.observation_id, kept.error) == ("o1", None)
    assert sent[-1] == {"observations": [{"prediction_id": "abc", "latency_s": 1e-4}]}
    with pytest.raises(ServiceError, match="may have been received"):
        call(handler, asynchronous, "observe", [("abc", 1e-4)])
    assert len(sent) == 4


def test_the_time_is_for_all_attempts(asynchronous: bool) -> None:
    slow = Mock(side_effect=httpx2.ReadTimeout("slow"))
    with pytest.raises(DeadlineExceededError, match=r"2.5 s"):
        call(slow, asynchronous, "predict", linears(1), "t4", timeout_s=2.5)
    with pytest.raises(DeadlineExceededError, match="what deadline_exceeded says"):
        call(lambda r: problem(504, "deadline_exceeded"), asynchronous, "predict", linears(1), "t4")


def test_the_service_is_told_how_long_an_answer_is_of_use(asynchronous: bool, waits: list[float]) -> None:
    handler = Mock(wraps=answered)
    call(handler, asynchronous, "predict", linears(1), "t4", timeout_s=1e6)
    assert 0.9e6 < float(handler.call_args[0][0].headers["x-request-timeout-s"]) <= 1e6


class Dripping(httpx2.SyncByteStream):
    def __iter__(self) -> Any:
        while True:
            time.sleep(0.02)
            yield b" "


def test_an_answer_that_drips_ends_too() -> None:
    with pytest.raises(DeadlineExceededError):
        call(lambda r: httpx2.Response(200, stream=Dripping()), False, "support", timeout_s=0.2)


@pytest.mark.parametrize(
    ("response", "kind", "says"),
    [
        (problem(409, "data_error"), DataError, "what data_error says"),
        (problem(401, "unauthorized"), ServiceError, "what unauthorized says"),
        (problem(500, "internal_error"), ServiceError, "what internal_error says"),
        (httpx2.Response(404, text="<html>"), ServiceError, "404"),
        (httpx2.Response(200, text="hello"), ServiceError, "no JSON"),
        (httpx2.Response(200, json=[1]), ServiceError, "results"),
        (httpx2.Response(200, json={"results": []}), ServiceError, "results"),
        (httpx2.Response(200, json={"results": [{"id": None}]}), ServiceError, "not that of"),
        (httpx2.Response(200, json={"results": [3]}), ServiceError, "not that of"),
        (httpx2.Response(302, headers={"location": "http://elsewhere.invalid"}), ServiceError, "302"),
    ],
)
def test_invalid_response_is_an_error(
    asynchronous: bool, response: httpx2.Response, kind: type[CdmppError], says: str
) -> None:
    def again(request: httpx2.Request) -> httpx2.Response:  # a response can be sent once
        return httpx2.Response(response.status_code, headers=response.headers, content=response.content)

    with pytest.raises(kind, match=says) as caught:
        call(again, asynchronous, "predict", linears(1), "t4")
    if isinstance(caught.value, ServiceError) and response.status_code != 200:
        assert caught.value.status == response.status_code


@pytest.mark.parametrize("url", ["", "service", "ftp://x", "http://", None])
def test_what_is_no_url(url: Any) -> None:
    with pytest.raises(ServiceError, match="not the URL"):
        PredictorClient(url)


def test_a_key_and_a_path_before(asynchronous: bool) -> None:
    handler = Mock(wraps=answered)
    mock = httpx2.MockTransport(handler)
    with PredictorClient(f"{URL}/behind/", api_key="secret", transport=mock, model="adapted-1") as client:
        client.predict(linears(1), "t4")
    (request,) = handler.call_args[0]
    assert str(request.url) == f"{URL}/behind/predict"
    assert request.headers["authorization"] == "Bearer secret"
    assert json.loads(request.content)["model"] == "adapted-1"


LIMITS: dict[str, Any] = {"components": {"schemas": {"PredictRequest": {"properties": {"items": {"maxItems": 3}}}}}}


def test_a_long_list_goes_in_parts_as_the_service_takes_it(asynchronous: bool) -> None:
    sizes: list[int] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/openapi.json":
            return httpx2.Response(200, json=LIMITS)
        items = json.loads(request.content)["items"]
        if len(items) > 3:
            return problem(422, "invalid_request", errors=[{"path": "items", "message": "too many"}])
        sizes.append(len(items))
        return answered(request)

    predictions = call(handler, asynchronous, "predict", linears(*range(1, 9)), "t4")
    assert [p.latency_s for p in predictions] == list(range(1, 9))
    assert sizes == [3, 3, 2]


def test_a_large_body_goes_in_parts(asynchronous: bool) -> None:
    sizes: list[int] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        if len(request.content) > 150_000:
            return problem(413, "body_too_large")
        sizes.append(len(request.content))
        return answered(request)

    predictions = call(handler, asynchronous, "predict", linears(*range(1, 3001)), "t4")
    assert [p.latency_s for p in predictions] == list(range(1, 3001))
    assert len(sizes) > 2


def test_what_a_busy_service_has_no_time_for_goes_in_halves(asynchronous: bool) -> None:
    sizes: list[int] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        sizes.append(len(json.loads(request.content)["items"]))
        return answered(request) if sizes[-1] <= 600 else problem(504, "deadline_exceeded")

    predictions = call(handler, asynchronous, "predict", linears(*range(1, 2001)), "t4")
    assert [p.latency_s for p in predictions] == list(range(1, 2001))
    assert sizes == [2000, 1000, 500, 500, 500, 500]
    with pytest.raises(DeadlineExceededError):
        call(lambda r: problem(504, "deadline_exceeded"), asynchronous, "predict", linears(*range(1, 500)), "t4")


def test_one_that_is_too_large_alone_is_refused(asynchronous: bool) -> None:
    with pytest.raises(ServiceError, match="body_too_large"):
        call(lambda r: problem(413, "body_too_large"), asynchronous, "predict", linears(1), "t4")


def test_features_go_in_parts_of_like_programs(asynchronous: bool, predictor: LatencyPredictor) -> None:
    texts = ("linear:m=4,n=5,k=6", "attention_prefill:batch=1,q_len=9,heads=4,kv_heads=2,head_dim=8")
    encoded = [encode_operator(parse_operator(text)) for text in texts]
    parts = [FeaturePart(encoded[i % 2], texts[i % 2].split(":")[0], "t4") for i in range(60)]
    queries = FeatureQueries.of(parts)
    rows: list[tuple[int, int]] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        assert request.headers["content-type"] == MEDIA_TYPE
        if len(request.content) > 140_000:
            return problem(413, "body_too_large")
        part = FeatureQueries.from_bytes(request.content)
        rows.append(part.leaves.shape[:2])
        return httpx2.Response(200, content=predictor.predict_features(part).to_bytes())

    predictions = call(handler, asynchronous, "predict_features", queries)
    np.testing.assert_array_equal(predictions.latency_s, predictor.predict_features(queries).latency_s)
    assert sum(count for count, _ in rows) == 60
    assert len(rows) > 1
    assert rows[0][1] < queries.leaves.shape[1], "small programs are padded to the largest"


def test_a_real_service_that_takes_little_at_once(serve: Serve, predictor: LatencyPredictor) -> None:
    texts = [f"linear:m={m},n=8,k=8" for m in range(1, 12)]
    parts = [FeaturePart(encode_operator(parse_operator(text)), "linear", "t4") for text in texts]
    queries = FeatureQueries.of(parts)
    url = serve(max_items=4)
    with PredictorClient(url) as client:
        predictions = client.predict_features(queries)
        np.testing.assert_array_equal(predictions.latency_s, predictor.predict_features(queries).latency_s)
    with PredictorClient(url) as client:
        answers = client.predict(texts, "t4")
        expected = predictor.predict(texts, "t4")
        assert [a.latency_s for a in answers] == [e.latency_s for e in expected]
        assert [registered.hash for registered in client.register(texts)] == [e.program_hash for e in expected]
        kept = client.observe([(answer, 1e-4) for answer in answers])
        assert len({registered.observation_id for registered in kept}) == len(texts)


def test_operations_side_by_side(url: str) -> None:
    async def run() -> list[list[Any]]:
        async with AsyncPredictorClient(url) as client:
            return await asyncio.gather(*(client.predict(linears(m), "t4") for m in range(1, 30)))

    names = [answers[0].name for answers in asyncio.run(run())]
    assert names == [f"linear:dtype=float32,m={m},n=1,k=1" for m in range(1, 30)]


def test_connections_are_reused(url: str) -> None:
    with PredictorClient(url) as client:
        for _ in range(3):
            client.predict(linears(1), "t4")
        pool = client._http._transport._pool
        assert len(pool.connections) == 1


def test_everything_else_of_a_real_service(url: str) -> None:
    with PredictorClient(url) as client:
        assert "linear" in client.support()["operators"]
        assert any(device["name"] == "t4" for device in client.devices())
        registered, wrong = client.register(["linear:m=31,n=32,k=33", {"tvm_json": "{"}])
        assert registered.error is None and wrong.error is not None and wrong.error.code == "invalid_program"
        (answer,) = client.predict([{"hash": registered.hash}], "t4")
        assert (answer.name, answer.program_hash) == (registered.name, registered.hash)
        unpredicted = {"program": "linear:m=31,n=32,k=33", "device": "l4", "latency_s": 2e-4}
        kept, bad, other = client.observe([(answer, 1e-4), ("nonsense", 1e-4), unpredicted])
        assert kept.observation_id and other.observation_id
        assert bad.error is not None and bad.error.code == "invalid_prediction_id"
        assert {row["device"] for row in client.observed()} == {"t4", "l4"}
        model = ROOT / "examples" / "small_resnet.onnx"
        totals = client.predict_onnx(model, ["t4", "l4"], protocol="eager", framework="pytorch")
        assert [device["device"] for device in totals["devices"]] == ["t4", "l4"]
        with pytest.raises(DataError, match="cannot read"):
            client.predict_onnx("no-such-file.onnx", ["t4"])


def test_the_client_loads_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys; from cdmpp import PredictorClient, AsyncPredictorClient, Predictor\n"
        "print([m for m in ('torch', 'onnxruntime', 'onnx', 'tvm', 'scipy', 'sklearn', 'pyarrow', 'fastapi') "
        "if m in sys.modules])"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_httpx2_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['httpx2'] = None\n"
        "import cdmpp\n"
        "try: cdmpp.PredictorClient\n"
        "except cdmpp.MissingDependencyError as error: print(error.hint)"
    )
    assert "'.[client]'" in run_python("-c", code).stdout
