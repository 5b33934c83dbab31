"""Evaluation of tables: the predictor's own figures, every row accounted for, no forbidden inputs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.data.load import load_table
from cdmpp.data.records import Measurement, from_measurements
from cdmpp.data.table import MeasurementTable
from cdmpp.devices import known, lookup
from cdmpp.errors import UnknownDeviceError
from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.programs.operators import parse_operator
from cdmpp.programs.program import TensorProgram
from cdmpp.train.evaluation import query_batches
from cdmpp.train.evaluation.metrics import METRICS, measure
from cdmpp.train.evaluation.tables import evaluate
from tests.train.evaluation.conftest import Columns, vidur_columns

pytestmark = pytest.mark.slow

Save = Callable[..., Path]


def by_hand(predictor: LatencyPredictor, table: MeasurementTable) -> dict[str, Any]:
    """The figures over all rows, row by row through the public interface."""
    queries = []
    for row in range(len(table)):
        key = int(table.program_key[row])
        if key >= table.tvm.first_key and table.tvm.texts:
            text = table.tvm.texts[key - table.tvm.first_key]
            program = TensorProgram.from_tvm_json(text, table.backend[row])  # type: ignore[arg-type]
        else:
            fields = table.program_fields(key)
            program = TensorProgram.from_operator(fields, table.backend[row])  # type: ignore[arg-type]
        framework = table.framework[row] or None
        queries.append(Query(program, lookup(table.device[row]), table.protocol[row], framework))  # type: ignore[arg-type]
    answers = predictor.predict_queries(queries)
    point, low, high = (np.array([getattr(a, n) for a in answers]) for n in ("latency_s", "lower_s", "upper_s"))
    return measure(point, table.latency_s, low, high)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (None if value is None else pytest.approx(value, rel=1e-5)), name


def test_figures_are_the_predictors(predictor: LatencyPredictor, columns: Columns, save: Save) -> None:
    table = load_table(save(columns))
    result = evaluate(predictor, [table])
    assert_same(result["overall"], by_hand(predictor, table))
    assert result["unsupported"] == []
    for group in result["groups"]:
        rows = np.ones(len(table), dtype=bool)
        by = {"source": table.source, "device": table.device_name, "op": table.op, "dtype": table.element_types}
        for name, labels in by.items():
            rows &= labels.is_(group[name])
        assert_same({m: group[m] for m in METRICS}, by_hand(predictor, table.select(rows)))


def test_layout_of_the_result(predictor: LatencyPredictor, columns: Columns, save: Save) -> None:
    result = evaluate(predictor.artifact, [load_table(save(columns))])
    assert result.keys() == {"overall", "groups", "parts", "unsupported"}
    assert tuple(result["overall"]) == METRICS
    keys = [(g["source"], g["device"], g["op"], g["dtype"]) for g in result["groups"]]
    assert keys == sorted(set(keys))
    assert all(tuple(g) == ("source", "device", "op", "dtype", *METRICS) for g in result["groups"])
    assert sum(g["n"] for g in result["groups"]) == result["overall"]["n"] == len(columns["op"])
    assert set(columns["op"]) == {g["op"] for g in result["groups"]}
    json.dumps(result, allow_nan=False)


def test_types_of_one_operator_are_groups(predictor: LatencyPredictor, save: Save) -> None:
    types = {"fp8": "float8_e4m3+channel", "fp8_block": "float8_e4m3+block128", "int8_wo": "bfloat16+int8+channel"}
    columns: Columns = {name: [64] * len(types) for name in ("m", "n", "k")}
    columns |= {name: [value] * len(types) for name, value in (("op", "linear"), ("device", "NVIDIA H200"))}
    columns |= {"framework": ["vllm"] * len(types), "dtype": list(types), "latency_us": [9.0] * len(types)}
    result = evaluate(predictor, [load_table(save(columns))])
    assert [group["dtype"] for group in result["groups"]] == sorted(types.values())


def test_small_chunks_change_nothing(
    predictor: LatencyPredictor, columns: Columns, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(columns)
    whole = evaluate(predictor, [load_table(path)])
    monkeypatch.setattr(query_batches, "CHUNK_PROGRAMS", 3)
    assert_same(evaluate(predictor, [load_table(path)])["overall"], whole["overall"])


def test_several_tables_are_one(predictor: LatencyPredictor, save: Save) -> None:
    columns = vidur_columns()
    whole = evaluate(predictor, [load_table(save(columns))])
    halves = [save({k: v[i::2] for k, v in columns.items()}, f"half{i}.parquet") for i in range(2)]
    parts = evaluate(predictor, (load_table(path) for path in halves))
    assert_same(parts["overall"], whole["overall"])
    for found, expected in zip(parts["groups"], whole["groups"], strict=True):
        assert_same({m: found[m] for m in METRICS}, {m: expected[m] for m in METRICS})


FORBIDDEN = {
    "mean_us": 1.0,
    "min_us": 2.0,
    "std_us": 3.0,
    "n_rep": 4,
    "split": "train",
    "kernel_name": "sgemm",
    "n_kernels": 5,
    "kernel_source": "flash",
    "best_solver": "winograd",
    "n_solvers": 6,
}


def test_optional_columns_are_never_inputs(predictor: LatencyPredictor, columns: Columns, save: Save) -> None:
    rows = len(columns["op"])
    bare = evaluate(predictor, [load_table(save(columns))])
    more = {**columns, **{name: [value] * rows for name, value in FORBIDDEN.items()}}
    assert evaluate(predictor, [load_table(save(more, "more.parquet"))]) == bare


def test_every_row_is_predicted_or_counted(predictor: LatencyPredictor, save: Save) -> None:
    columns = vidur_columns()
    columns["device"][0] = "NVIDIA Foo 9000"
    columns["op"][1] = "fft"
    columns["m"][2] = None
    columns["m"][3] = -5
    columns["latency_us"][4] = None
    columns["latency_us"][5] = 0.0
    columns["latency_us"][6] = float("inf")
    columns["dtype"][7] = "float8"
    columns["latency_us"][8] = 1e-300
    result = evaluate(predictor, [load_table(save(columns))])
    assert result["overall"]["n"] == len(columns["op"]) - 9
    lost = {(u["op"], u["device"]): u["reason"] for u in result["unsupported"]}
    assert lost[(columns["op"][0], "NVIDIA Foo 9000")] == "unknown_device"
    reasons = [u["reason"] for u in result["unsupported"]]
    assert sorted(set(reasons)) == [
        "invalid_size",
        "latency_not_believable",
        "latency_not_positive",
        "missing_size",
        "no_latency",
        "unknown_device",
        "unknown_dtype",
        "unknown_operator",
    ]
    assert sum(u["n"] for u in result["unsupported"]) == 9
    assert all(tuple(u) == ("source", "device", "op", "reason", "n") for u in result["unsupported"])


def test_nothing_left_gives_nulls(predictor: LatencyPredictor, save: Save) -> None:
    columns = {k: v[:2] for k, v in vidur_columns().items()}
    columns["device"] = ["NVIDIA Foo 9000"] * 2
    result = evaluate(predictor, [load_table(save(columns))])
    assert result["overall"] == {"n": 0, **dict.fromkeys(METRICS[1:])}
    assert result["groups"] == []
    empty = {"overall": result["overall"], "groups": [], "parts": None, "unsupported": []}
    assert evaluate(predictor, []) == empty


def test_chosen_devices(predictor: LatencyPredictor, save: Save) -> None:
    columns = vidur_columns()
    columns["latency_us"][columns["device"].index("NVIDIA A40")] = None
    table = load_table(save(columns))
    result = evaluate(predictor, [table], devices=["NVIDIA A40"])
    assert {g["device"] for g in result["groups"]} == {"NVIDIA A40"}
    assert evaluate(predictor, [table], devices=["a40"]) == result
    assert result["overall"]["n"] == columns["device"].count("NVIDIA A40") - 1
    assert [u["n"] for u in result["unsupported"]] == [1]
    with pytest.raises(UnknownDeviceError):
        evaluate(predictor, [table], devices=["foo"])


def test_a_device_that_was_not_trained_on(predictor: LatencyPredictor, save: Save) -> None:
    assert "l4" not in predictor.artifact.devices
    columns = vidur_columns()
    columns["device"] = ["l4"] * len(columns["op"])
    table = load_table(save(columns))
    assert_same(evaluate(predictor, [table])["overall"], by_hand(predictor, table))


def test_every_known_device(predictor: LatencyPredictor) -> None:
    fields = json.dumps(parse_operator("linear:m=64,n=128,k=32,dtype=float16").canonical())
    rows = [Measurement(fields, "operator", spec.name, 1e-6 * (i + 3)) for i, spec in enumerate(known())]
    table = from_measurements(rows)
    assert_same(evaluate(predictor, [table])["overall"], by_hand(predictor, table))


def records() -> list[Measurement]:
    operators = ["softmax:rows=512,cols=64", "linear:m=64,n=128,k=32,dtype=float16", "relu:rows=7,cols=9"]
    return [
        Measurement(json.dumps(parse_operator(text).canonical()), "operator", device, 1e-5 * (i + 1), protocol=protocol)
        for i, text in enumerate(operators)
        for device in ("t4", "a40")
        for protocol in ("kernel", "eager")
    ]


def test_project_records(predictor: LatencyPredictor) -> None:
    table = from_measurements(records())
    result = evaluate(predictor, [table])
    assert result["overall"]["n"] == 12
    assert_same(result["overall"], by_hand(predictor, table))


@pytest.mark.tvm
def test_tvm_programs_and_their_cache(
    predictor: LatencyPredictor, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cdmpp.programs.lowering import lower, to_json

    texts = [to_json(lower(parse_operator(t))) for t in ("softmax:rows=512,cols=64", "linear:m=64,n=128,k=32")]
    rows = [
        Measurement(text, "tvm_json", device, 1e-4, program_hash=f"p{i}", backend="tvm")
        for i, text in enumerate(texts)
        for device in ("iphone-7", "intel-xeon-amx-2t-avx2")
    ]
    broken = Measurement('{"nodes": [], "root_index": 0}', "tvm_json", "t4", 1e-4, program_hash="x", backend="tvm")
    unbound = Measurement(texts[0], "tvm_json", "t4", 1e-4, program_hash="p0", backend="tvm")
    table = from_measurements([*rows, *records(), broken, unbound])
    result = evaluate(predictor, [table])
    assert result["overall"]["n"] == 16
    assert all(u["n"] == 1 and u["reason"].startswith("invalid_program") for u in result["unsupported"])
    assert sum("outside of thread bindings" in u["reason"] for u in result["unsupported"]) == 1
    assert_same(result["overall"], by_hand(predictor, table.select(np.arange(16))))
    stored = [path for path in own_cache.rglob("*") if path.is_file()]
    assert len(stored) == 2
    # One entry damaged: only that program is encoded again, and the result stays what it was.
    stored[0].write_bytes(stored[0].read_bytes()[:-1] + b"?")
    encoded = []

    def encode(text: str, **options: Any) -> Any:
        encoded.append(text)
        return original(text, **options)

    original = query_batches.encode_tvm_json
    monkeypatch.setattr(query_batches, "encode_tvm_json", encode)
    assert evaluate(predictor, [table]) == result
    assert len([text for text in encoded if text in texts]) == 1
