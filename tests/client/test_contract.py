"""One suite for everything that predicts: a model in this process, and both clients of a real server."""

import asyncio
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.client import AsyncPredictorClient, PredictorClient
from cdmpp.devices import lookup
from cdmpp.errors import DataError, InfeasibleError, InvalidDeviceError, InvalidProgramError, UnknownDeviceError
from cdmpp.features.encode import EncodedProgram, encode_operator, encode_tvm_json
from cdmpp.llm import estimate
from cdmpp.predict.bulk import FeaturePart, FeatureQueries
from cdmpp.predict.curves import Template, predict_curve
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.operators import parse_operator
from cdmpp.programs.program import TensorProgram
from tests.features.test_hostile_json import concrete

LINEAR = "linear:m=512,n=4096,k=1024,dtype=float16"
NORM = "rmsnorm:rows=1024,cols=4096,dtype=bfloat16"
SOFTMAX = {"operator": "softmax", "rows": 77, "cols": 1000}
TVM_JSON = json.dumps(concrete("linear:m=4,n=8,k=16"))
LLAMA = Path(__file__).parents[2] / "examples" / "llm" / "llama-3.1-8b.json"
MINE = lookup("t4").model_copy(update={"name": "mine", "mem_bandwidth_bytes_per_s": 2.17e11})


class Waiting:
    """An async client whose methods wait, on one event loop."""

    def __init__(self, client: AsyncPredictorClient, runner: asyncio.Runner) -> None:
        self._client, self._runner = client, runner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def wait(*arguments: Any, **options: Any) -> Any:
            return self._runner.run(method(*arguments, **options))

        return wait() if name == "model_id" else wait


@pytest.fixture(scope="module", params=["in this process", "sync", "async"])
def implementation(request: pytest.FixtureRequest, predictor: LatencyPredictor, url: str) -> Iterator[Predictor]:
    if request.param == "sync":
        with PredictorClient(url) as client:
            yield client
    elif request.param == "async":
        with asyncio.Runner() as runner:
            client = AsyncPredictorClient(url)
            yield Waiting(client, runner)
            runner.run(client.close())
    else:
        yield predictor


def plain(predictions: list[Prediction]) -> list[dict[str, Any]]:
    return [{k: v for k, v in p.to_dict().items() if k != "prediction_id"} for p in predictions]


def test_the_model_has_a_name(implementation: Predictor, predictor: LatencyPredictor) -> None:
    assert implementation.model_id == predictor.model_id


def test_programs_on_a_device(implementation: Predictor, predictor: LatencyPredictor) -> None:
    programs = [
        NORM,
        SOFTMAX,
        parse_operator("add:rows=7,cols=9"),
        TensorProgram.from_operator(LINEAR, "tvm"),
        {"tvm_json": TVM_JSON},
        TensorProgram.from_tvm_json(TVM_JSON, name="mine"),
    ]
    for device, more in (
        ("intel-xeon-amx-2t-avx2", {}),
        ("t4", {}),
        ("Tesla T4", {"protocol": "eager", "framework": "pytorch", "quantiles": (0.05, 0.5, 0.95)}),
        (MINE, {"protocol": "graph", "implementation": "composed"}),
        (MINE.model_dump(mode="json"), {}),
    ):
        predictions = implementation.predict(programs, device, **more)
        here = predictor.predict(programs, device, **more)
        assert plain(predictions[:4]) == plain(here[:4])
        assert [(p.latency_s, p.error) for p in predictions[4:]] == [(p.latency_s, p.error) for p in here[4:]]
        assert [p.error for p in predictions[:4]] == [None] * 4
        # A GPU cannot run TIR without thread bindings.
        refused = device != "intel-xeon-amx-2t-avx2"
        assert [p.error is not None and "thread bindings" in p.error.message for p in predictions[4:]] == [refused] * 2
    assert implementation.predict([], "t4") == []


def test_invalid_program_becomes_an_error_answer(implementation: Predictor, predictor: LatencyPredictor) -> None:
    forms = ("linear:m=0,n=1,k=1", LINEAR, {"operator": "lstm"}, {"operator": "softmax"}, {"nonsense": 1}, "relu")
    programs = [*forms, {"tvm_json": "{}"}, TensorProgram.from_tvm_json("not json")]
    predictions = implementation.predict(programs, "t4")
    assert plain(predictions) == plain(predictor.predict(programs, "t4"))
    assert [p.error is None for p in predictions] == [False, True, *[False] * 6]


def test_queries_of_all_kinds(implementation: Predictor, predictor: LatencyPredictor) -> None:
    linear = TensorProgram.from_operator(LINEAR)
    queries = [
        Query(linear, device, protocol, framework)
        for device in ("t4", MINE, "l4")
        for protocol, framework in (("kernel", None), ("eager", "pytorch"), ("nonsense", None), ("graph", "x"))
    ]
    norm = TensorProgram.from_operator(NORM)
    queries += [Query(norm, "t4", "kernel", None, name) for name in (None, "composed", "tuned", "unfused")]
    queries += [Query(TensorProgram.from_tvm_json("[]"), "t4"), Query(linear, "no-such-gpu")]
    predictions = implementation.predict_queries(queries, (0.25, 0.75))
    assert plain(predictions) == plain(predictor.predict_queries(queries, (0.25, 0.75)))
    codes = {p.error.code for p in predictions if p.error is not None}
    assert codes == {"unknown_device", "data_error", "invalid_program"}


def test_invalid_query_is_an_error_of_this_query_only(implementation: Any) -> None:
    program = TensorProgram.from_operator(LINEAR)
    invalid = {
        "invalid_device": [Query(program, device) for device in (None, 5, ["t4"], {"name": "x"})],
        "invalid_program": [Query(form, "t4") for form in (None, LINEAR)],
        "data_error": [
            *(Query(program, "t4", protocol) for protocol in (None, "wall", ["kernel"])),
            *(Query(program, "t4", "kernel", framework) for framework in (5, "jax")),
            *(Query(program, "t4", "kernel", None, other) for other in (5, "unfused")),
        ],
    }
    queries = [query for several in invalid.values() for query in several]
    good = Query(program, "t4")
    first, *failed, last = implementation.predict_queries([good, *queries, good])
    assert first.latency_s == last.latency_s and first.error is None
    assert [prediction.error.code for prediction in failed] == [code for code in invalid for _ in invalid[code]]


def test_what_is_refused_as_a_whole(implementation: Predictor) -> None:
    with pytest.raises(UnknownDeviceError, match="no-such-gpu"):
        implementation.predict([LINEAR], "no-such-gpu")
    with pytest.raises(InvalidDeviceError):
        implementation.predict([LINEAR], {"name": "half"})
    with pytest.raises(InvalidDeviceError):
        implementation.predict([LINEAR], 3)
    wrong = {"quantiles": (0.999,), "protocol": "nonsense", "framework": "nonsense", "implementation": "unfused"}
    for name, value in wrong.items():
        with pytest.raises(DataError):
            implementation.predict([LINEAR], "t4", **{name: value})
    with pytest.raises(DataError):
        implementation.predict(LINEAR, "t4")
    with pytest.raises(DataError):
        implementation.predict_queries([], (2.0,))


def test_features_in_bulk(implementation: Any, predictor: LatencyPredictor) -> None:
    parts = [
        FeaturePart(encode_operator(parse_operator(text)), text.split(":")[0], device, protocol="eager")
        for text in (LINEAR, "softmax:rows=3,cols=4", "avg_pool2d:n=1,c=8,h=9,w=9,kh=3,kw=3")
        for device in ("t4", MINE)
    ]
    queries = FeatureQueries.of(parts, quantiles=(0.1, 0.6))
    predictions, expected = implementation.predict_features(queries), predictor.predict_features(queries)
    assert (predictions.model_id, predictions.levels) == (expected.model_id, expected.levels)
    for name in ("latency_s", "lower_s", "upper_s", "quantiles", "domain", "domain_score", "roofline_s"):
        np.testing.assert_array_equal(getattr(predictions, name), getattr(expected, name))
    empty = implementation.predict_features(FeatureQueries.of([], quantiles=(0.1, 0.6)))
    assert (len(empty), empty.levels, empty.model_id) == (0, (0.1, 0.6), predictor.model_id)
    unknown = FeatureQueries.of([FeaturePart(parts[0].encoded, "linear", "no-such-gpu")])
    with pytest.raises(UnknownDeviceError):
        implementation.predict_features(unknown)


@pytest.mark.slow
def test_estimate_of_a_language_model(implementation: Predictor, predictor: LatencyPredictor) -> None:
    options: dict[str, Any] = {"tp": 2, "batch": 4, "input": 64, "output": 4, "weights": "fp8"}
    expected = estimate(LLAMA, "h100-sxm", predictor=predictor, **options)
    # Through the interface, and where there is one by the service's own endpoint.
    assert estimate(LLAMA, "h100-sxm", predictor=implementation, **options) == expected
    if hasattr(implementation, "llm"):
        assert implementation.llm(LLAMA, "h100-sxm", **options) == expected.to_dict()
        mine, unknown = implementation.llm(json.loads(LLAMA.read_text()), [MINE, "no-such-gpu"], **options)
        assert (mine["device"], unknown["error"]["code"]) == ("mine", "unknown_device")
        rows = [{"batch": n, "input": 64, "output": 8, "total_s": s} for n, s in ((1, 0.3), (16, 0.4))]
        fitted = implementation.llm_calibrate(LLAMA, "h100-sxm", rows)["profile"]
        assert implementation.llm(LLAMA, "h100-sxm", engine=fitted)["engine"] == fitted["name"]
        with pytest.raises(InfeasibleError, match="at least 2 devices"):
            implementation.llm(LLAMA, "t4")
        with pytest.raises(UnknownDeviceError):
            implementation.llm(LLAMA, "no-such-gpu")


def test_a_curve(implementation: Predictor, predictor: LatencyPredictor) -> None:
    axes = {"batch": [1, 2, 4], "dtype": ["float16"]}
    for programs, more in (
        ("linear:m=batch*16,n=64,k=64", {}),
        ({"operator": "linear", "m": "batch", "n": 4, "k": 4}, {"monotone": [], "protocol": "graph"}),
        ([Template.parse("linear:m=batch,n=8,k=8", 3)], {"quantiles": (0.2, 0.3)}),
        ("rmsnorm:rows=batch*512,cols=4096", {"implementation": "composed"}),
    ):
        devices = ["t4", MINE, "no-such-gpu"]
        # Through the interface, and where there is one by the service's own endpoint.
        expected = predict_curve(predictor, programs, axes, devices, **more)
        assert predict_curve(implementation, programs, axes, devices, **more) == expected
        if hasattr(implementation, "curve"):
            assert implementation.curve(programs, axes, devices, **more) == expected
    if hasattr(implementation, "curve"):
        with pytest.raises(DataError, match="not used"):
            implementation.curve("linear:m=1,n=1,k=1", {"x": [1]}, ["t4"])
        with pytest.raises(InvalidProgramError):
            implementation.curve("linear:m=x**2,n=1,k=1", {"x": [1]}, ["t4"])


def test_features_do_not_travel_as_json(url: str) -> None:
    encoded = EncodedProgram("main", "0" * 32, "tvm", "tir", encode_tvm_json(TVM_JSON, schedule=True))
    with PredictorClient(url) as client:
        alone, other = client.predict_queries([Query(encoded, "t4"), Query(TensorProgram.from_operator(LINEAR), "t4")])
    assert alone.error is not None and "predict_features" in alone.error.hint
    assert other.error is None


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        members = {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}
        return {n: list(inspect.signature(m).parameters) for n, m in members.items() if callable(m)}

    theirs = methods(AsyncPredictorClient)
    assert theirs.pop("model_id") == ["self"]
    assert methods(PredictorClient) == theirs
