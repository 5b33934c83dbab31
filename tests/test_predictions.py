"""Lists, sums and matrices of predictions: several devices in one call, HTML, Arrow, milliseconds, domains."""

import dataclasses
import json

import pyarrow as pa
import pytest

from cdmpp.devices import lookup
from cdmpp.errors import CdmppError, InvalidDeviceError, UnknownDeviceError
from cdmpp.model.domain.score import Label, label_of_total
from cdmpp.predict.prediction import ErrorInfo, Prediction, Predictions
from cdmpp.predict.prediction_matrix import Failed, PredictionMatrix
from cdmpp.predict.prediction_total import PredictionTotal
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.rendering import MAX_ROWS, html_table
from tests.waiting import run_python

PROGRAMS = ["linear:m=512,n=4096,k=1024,dtype=float16", "linear:m=0,n=1,k=1", "softmax:rows=4096,cols=512"]
SECONDS = ("latency_s", "lower_s", "upper_s", "quantiles", "roofline_s")


@pytest.fixture(scope="module")
def answers(predictor: LatencyPredictor) -> Predictions:
    return predictor.predict(PROGRAMS, ["a100-pcie-40gb", lookup("t4")])


def test_several_devices_equal_single_calls(predictor: LatencyPredictor) -> None:
    settings = {"protocol": "eager", "framework": "pytorch"}
    several = predictor.predict(PROGRAMS, ["a100-pcie-40gb", "t4"], **settings)
    single = [predictor.predict(PROGRAMS, device, **settings) for device in ("a100-pcie-40gb", "t4")]
    assert several == [prediction for row in zip(*single, strict=True) for prediction in row]  # program by program
    assert list(several.by_device().values()) == single and list(several.by_device()) == ["a100-pcie-40gb", "t4"]


def test_a_list_of_one_device_equals_the_device(predictor: LatencyPredictor) -> None:
    assert predictor.predict(PROGRAMS, ["t4"]) == predictor.predict(PROGRAMS, "t4")
    assert isinstance(predictor.predict(PROGRAMS, "t4"), list)
    assert json.dumps(predictor.predict([], ["t4", "l4"])) == "[]"


def test_an_empty_list_of_devices_is_refused(predictor: LatencyPredictor) -> None:
    with pytest.raises(InvalidDeviceError, match="empty"):
        predictor.predict(PROGRAMS, [])
    with pytest.raises(UnknownDeviceError, match="a101"):
        predictor.predict(PROGRAMS, ["t4", "a101"])


def test_milliseconds_are_a_thousand_times_the_seconds(answers: Predictions) -> None:
    assert answers.latency_ms == [None if p.latency_s is None else 1e3 * p.latency_s for p in answers]
    assert answers[0].latency_ms == answers.latency_ms[0] and answers[2].latency_ms is None
    total = PredictionTotal.of((p, 2) for p in answers)
    assert total.latency_ms == pytest.approx(2 * sum(ms for ms in answers.latency_ms if ms is not None))
    assert PredictionTotal.of([]).latency_ms is None


def test_arrow_has_the_attributes_with_their_units(answers: Predictions) -> None:
    table = answers.to_arrow()
    assert isinstance(table, pa.Table) and table.num_rows == 6
    attributes = [field.name for field in dataclasses.fields(Prediction) if field.name != "error"]
    assert table.column_names == [*attributes, "error_code", "error", "error_hint"]
    for name in table.column_names:
        field = table.schema.field(name)
        assert (field.metadata or {}).get(b"unit") == (b"s" if name in SECONDS else None), name
    assert table.schema.field("latency_s").type == pa.float64()
    assert table["latency_s"].to_pylist() == [p.latency_s for p in answers]
    assert dict(table["quantiles"][0].as_py()) == answers[0].quantiles
    assert table["error_code"].to_pylist() == [None, None, "invalid_program", "invalid_program", None, None]
    assert answers[0].to_arrow().equals(table.slice(0, 1))
    assert Predictions().to_arrow().schema == table.schema


def test_arrow_becomes_a_data_frame(answers: Predictions) -> None:
    frame = answers.to_arrow().to_pandas()
    wide = frame.dropna(subset="latency_s").pivot(index="name", columns="device", values="latency_s")
    assert wide.shape == (2, 2) and wide.loc[answers[0].name, "t4"] == answers[1].latency_s


def test_arrow_of_a_total_has_shares_and_units(answers: Predictions) -> None:
    total = PredictionTotal.of((p, 2) for p in answers)
    table = total.to_arrow()
    row = table.to_pylist()[0]
    assert row["latency_s"] == total.latency_s and row["failed"] == 4 and row["lower_bound"] is True
    assert sum(row[f"share_{label}"] for label in ("in", "near", "out")) == pytest.approx(1)
    assert table.schema.field("upper_s").metadata == {b"unit": b"s"}
    assert PredictionTotal.of([]).to_arrow().to_pylist()[0]["latency_s"] is None


def test_html_has_a_row_per_prediction_with_interval_and_domain(answers: Predictions) -> None:
    text = answers._repr_html_()
    assert text.count("<tr>") == 1 + len(answers)
    for answer in answers:
        assert answer.name in text and answer.device in text
    assert " – " in text and f">{answers[0].domain}<" in text and "interval 10 % – 90 %" in text
    assert "<script" not in text and "http" not in text
    assert answers[0]._repr_html_().count("<tr>") == 2
    assert Predictions()._repr_html_().count("<tr>") == 1


def test_html_escapes_all_text(answers: Predictions) -> None:
    evil = "<script>alert('1 & 2')</script>"
    fields = ("name", "device", "domain_reason", "framework", "implementation", "model_id", "protocol")
    bad = dataclasses.replace(answers[0], **dict.fromkeys(fields, evil))
    failed = Prediction(evil, None, evil, "library", evil, evil, evil, error=ErrorInfo("code", evil, evil))
    for text in (bad._repr_html_(), failed._repr_html_(), html_table([evil], [[evil]], caption=evil, notes=[evil])):
        assert "<script" not in text and "&lt;script&gt;" in text and "1 &amp; 2" in text


def test_html_of_a_total_says_at_least_for_a_lower_bound(answers: Predictions) -> None:
    assert "at least " in PredictionTotal.of((p, 1) for p in answers)._repr_html_()
    assert "at least " not in PredictionTotal.of((p, 1) for p in answers[:1])._repr_html_()
    assert "of the time" in PredictionTotal.of((p, 1) for p in answers[:1])._repr_html_()


def test_html_of_a_long_list_counts_the_rows_it_leaves_out() -> None:
    text = html_table(["x"], [["1"]] * (MAX_ROWS + 1234))
    assert text.count("<tr>") == 1 + MAX_ROWS and "1,234 further rows" in text


def test_html_needs_no_pyarrow() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from cdmpp.predict.prediction import *; from cdmpp.errors import *\n"
        "p = Predictions([Prediction('a', None, 't4', 'library', 'kernel', None, 'm', 1e-3, 1e-3, 2e-3)])\n"
        "assert '1.00 ms' in p._repr_html_()\n"
        "try: p.to_arrow()\nexcept MissingDependencyError as error: print(error.hint)"
    )
    done = run_python("-c", code)
    assert "plan" in done.stdout, done.stderr


def prediction(latency_s: float, domain: Label) -> Prediction:
    query = ("p", "0" * 32, "t4", "library", "kernel", None, "m")
    return Prediction(*query, latency_s, 0.9 * latency_s, 1.2 * latency_s, {}, domain, 1.0)


FAILED = Prediction("p", None, "t4", "library", "kernel", None, "m", error=ErrorInfo("c", "m"))


def test_domain_is_weighted_by_time_and_not_by_programs() -> None:
    counted = [(prediction(0.031, "in"), 3), (prediction(0.005, "near"), 1), *[(prediction(0.001, "out"), 1)] * 2]
    total = PredictionTotal.of(counted)
    assert total.latency_s == pytest.approx(0.1)
    assert (total.lower_s, total.upper_s) == (pytest.approx(0.09), pytest.approx(0.12))
    assert total.domain_shares == pytest.approx({"in": 0.93, "near": 0.05, "out": 0.02})
    assert total.domain == "in"
    assert total.domain_text() == "93 % of the time in, 5 % near, 2 % out"
    assert (total.programs, total.launches, total.failed, total.lower_bound) == (4, 6, 0, False)


@pytest.mark.parametrize(
    ("shares", "label"),
    [
        ((1, 0, 0), "in"),
        ((0.9, 0, 0.1), "in"),
        ((0.89, 0.01, 0.1), "near"),
        ((0, 1, 0), "near"),
        ((0.8, 0.09, 0.11), "out"),
        ((0, 0, 1), "out"),
    ],
)
def test_domain_label_of_a_total(shares: tuple[float, float, float], label: str) -> None:
    assert label_of_total(dict(zip(("in", "near", "out"), shares, strict=True))) == label


def test_small_shares_are_neither_hidden_nor_rounded_up_to_all() -> None:
    total = PredictionTotal.of([(prediction(1.0, "in"), 1), (prediction(0.001, "out"), 1)])
    assert total.domain_text() == "> 99 % of the time in, < 1 % out"


def test_left_out_programs_make_the_total_a_lower_bound() -> None:
    some = PredictionTotal.of([(prediction(1.0, "in"), 2), (FAILED, 3), (None, 1)])
    assert (some.latency_s, some.failed, some.lower_bound) == (2.0, 4, True)
    assert PredictionTotal.of([(prediction(1.0, "in"), 1)], left_out=True).lower_bound
    none = PredictionTotal.of([(FAILED, 1)])
    assert (none.latency_s, none.domain, none.domain_shares, none.lower_bound) == (None, None, None, True)


WRONG = Failed("wrong", CdmppError("no such thing"))


def test_results_are_in_order_with_errors_in_place() -> None:
    matrix = PredictionMatrix(["a", WRONG, "b"], ["x", WRONG])
    assert matrix.pairs() == [("a", "x"), ("b", "x")]

    def name(row: str | Failed, column: str | Failed) -> str:
        return f"{row.name if isinstance(row, Failed) else row} {column.name if isinstance(column, Failed) else column}"

    results = matrix.results((f"{row}{column}" for row, column in matrix.pairs()), name)
    assert results == [["ax", "a wrong"], ["wrong x", "wrong wrong"], ["bx", "b wrong"]]


def test_empty_matrix_has_no_pairs() -> None:
    matrix: PredictionMatrix[str, str] = PredictionMatrix([], ["x"])
    assert matrix.pairs() == [] and matrix.results([], lambda row, column: 0) == []
