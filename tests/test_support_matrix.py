"""Coverage matrix of a model: operator and element types by device."""

import json
from pathlib import Path
from typing import Any

import pytest

from cdmpp.model.artifact.folder import ERROR_TABLE
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.domain.score import LABELS
from cdmpp.predict.prediction import Query
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.support import domain_on, selected, support_matrix
from cdmpp.programs.operators import lowered_operators, operator_types
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import PROTOCOLS
from tests.model.nn import synthetic
from tests.model.nn.synthetic import write_artifact

PROGRAMS = [
    "linear:m=512,n=4096,k=1024,dtype=bfloat16",
    "linear:m=512,n=4096,k=1024,dtype=float32",
    "bmm:batch=96,m=128,n=128,k=64,dtype=float16",
    "softmax:rows=4096,cols=1024,dtype=float32",
    "attention_decode:batch=8,past_len=2048,heads=32,kv_heads=8,head_dim=128,dtype=bfloat16",
    "sigmoid:rows=4096,cols=1024,dtype=float16",
]
DEVICES = ["t4", "a100-sxm4-80gb", "b200", "rtx-3090"]


def row_of(matrix: dict[str, Any], operator: str, dtype: str, **types: str | None) -> dict[str, Any]:
    wanted = {"operator": operator, "dtype": dtype, "weight_dtype": None, "scaling": None, **types}
    [row] = [row for row in matrix["rows"] if all(row[k] == v for k, v in wanted.items())]
    return row


def test_no_prediction_is_closer_to_training_than_its_cell(predictor: LatencyPredictor) -> None:
    matrix = support_matrix(predictor.artifact)
    asked = [(text, device, protocol) for text in PROGRAMS for device in DEVICES for protocol in PROTOCOLS]
    queries = [Query(TensorProgram.from_operator(text), device, protocol=p) for text, device, p in asked]
    seen = set()
    for (text, device, _), prediction in zip(asked, predictor.predict_queries(queries), strict=True):
        cell = domain_on(row_of(matrix, text.partition(":")[0], text.rpartition("=")[2]), device)
        assert prediction.domain is not None
        assert LABELS.index(prediction.domain) >= LABELS.index(cell), (text, device, cell)
        seen.add(cell)
    assert {"in", "near"} <= seen


def test_every_operator_and_every_combination_of_types_has_a_row(predictor: LatencyPredictor) -> None:
    matrix = support_matrix(predictor.artifact)
    assert {row["operator"] for row in matrix["rows"]} == set(operator_types())
    for operator, spec in lowered_operators().items():
        for dtype in spec.dtypes:
            rows = [row for row in matrix["rows"] if (row["operator"], row["dtype"]) == (operator, dtype)]
            assert rows or dtype in ("int4", "int8"), (operator, dtype)
    types = [(r["operator"], r["dtype"], r["weight_dtype"], r["scaling"]) for r in matrix["rows"]]
    assert len(types) == len(set(types))
    row_of(matrix, "linear", "bfloat16", weight_dtype="int4", scaling="block128")
    assert json.loads(json.dumps(matrix)) == matrix


@pytest.fixture
def with_types(tmp_path: Path) -> dict[str, Any]:
    """Matrix of a model whose error table has element types; its devices are those of the synthetic model."""
    write_artifact(tmp_path / "model")
    artifact = load_artifact(tmp_path / "model")
    first, second = artifact.devices[:2]
    linear = {"operator": "linear", "dtype": "float32", "weight_dtype": None, "scaling": None}
    quantised = {"operator": "linear", "dtype": "bfloat16", "weight_dtype": "int4", "scaling": "block128"}
    entries = [
        {**linear, "device": first, "rows": 900, "n": 100, "mape": 0.0512345, "median_ape": 0.03},
        {**linear, "device": second, "rows": 0, "n": 50, "mape": 0.2, "median_ape": 0.1},
        {**quantised, "device": first, "rows": 70},
    ]
    (tmp_path / "model" / ERROR_TABLE).write_text(json.dumps({"types": entries}), encoding="utf-8")
    return {"first": first, "second": second, **support_matrix(load_artifact(tmp_path / "model"))}


def test_counts_and_errors_come_from_the_error_table(with_types: dict[str, Any]) -> None:
    first, second = with_types["first"], with_types["second"]
    plain = row_of(with_types, "linear", "float32")
    assert with_types["errors_by"] == "types"
    assert plain["rows"] == {first: 900} and plain["mape"] == {first: 0.05123, second: 0.2}
    assert domain_on(plain, first) == "in"
    assert domain_on(plain, "h100-sxm") == plain["elsewhere"] == "near"
    quantised = row_of(with_types, "linear", "bfloat16", weight_dtype="int4", scaling="block128")
    assert quantised["rows"] == {first: 70} and quantised["mape"] == {}
    assert domain_on(row_of(with_types, "softmax", "float32"), first) == "out"


def test_model_without_error_table_has_domains_but_no_errors(tmp_path: Path) -> None:
    write_artifact(tmp_path)
    matrix = support_matrix(load_artifact(tmp_path))
    row = row_of(matrix, "linear", "float32")
    assert set(row["domain"].values()) == {"in"} and row["rows"] is None and row["mape"] == {}
    assert matrix["errors_by"] == "operator"
    scaled = row_of(matrix, "linear", "float8_e4m3", scaling="channel")
    assert "in" not in scaled["domain"].values()


def test_stand_ins_are_never_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "DEVICES", ("gfx942-tensile", "t4", "mi300x"))
    write_artifact(tmp_path)
    row = row_of(support_matrix(load_artifact(tmp_path)), "linear", "float32")
    assert domain_on(row, "gfx942-tensile") == "near" and domain_on(row, "t4") == "in"


def test_selection_keeps_one_operator_and_one_device(predictor: LatencyPredictor) -> None:
    whole = predictor.support()["matrix"]
    part = selected(whole, "linear", "t4")
    assert part["devices"] == ["t4"] and {row["operator"] for row in part["rows"]} == {"linear"}
    row = row_of(part, "linear", "float32")
    assert row["domain"] == {"t4": "in"} and set(row["mape"]) == {"t4"}
    assert row_of(whole, "linear", "float32")["domain"] != row["domain"]
    assert selected(whole) == whole


def test_support_cannot_be_changed_by_a_caller(predictor: LatencyPredictor) -> None:
    predictor.support()["matrix"]["rows"].clear()
    assert predictor.support()["matrix"]["rows"]


def test_collectives_are_in_where_their_model_has_measurements(predictor: LatencyPredictor) -> None:
    matrix = predictor.support()["matrix"]
    row = row_of(matrix, "all_reduce", "float16")
    assert domain_on(row, "h100-sxm") == "in" and domain_on(row, "rtx-3090") == "near"
    [measured, other] = [
        predictor.predict([f"all_reduce:bytes=16777216,ranks={ranks},library=nccl"], "h100-sxm", protocol="kernel")[0]
        for ranks in (8, 4096)
    ]
    assert measured.domain == "in" and other.domain != "in"
