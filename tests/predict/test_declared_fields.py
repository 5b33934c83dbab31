"""A field of a prediction is declared once: a class with one more has it in every output."""

import csv
import io
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from pydantic import Field

from cdmpp.predict import prediction as module
from cdmpp.predict.prediction import ErrorInfo, Prediction, Predictions, figure
from cdmpp.predict.tables import answers
from cdmpp_server.predict.render import answer_of
from cdmpp_server.predict.schema import result_model


@dataclass(frozen=True)
class WithEnergy(Prediction):
    """A prediction with one more field."""

    energy_j: float | None = figure("Energy of one run.", Annotated[float, Field(gt=0)], unit="J")


SETTINGS = ("softmax", "0" * 32, "t4", "library", "kernel", None, "base-0")
INTERVAL = {"latency_s": 1e-5, "lower_s": 9e-6, "upper_s": 2e-5, "quantiles": {"0.1": 9e-6, "0.9": 2e-5}}
FIGURES: dict[str, Any] = {**INTERVAL, "domain": "in", "domain_score": 0.1, "roofline_s": 5e-6}
GOOD = WithEnergy(*SETTINGS, **FIGURES, energy_j=0.25)
FAILED = WithEnergy(*SETTINGS, error=ErrorInfo("invalid_program", "no program"))


def test_new_field_is_in_json_and_absent_with_an_error() -> None:
    assert GOOD.to_dict()["energy_j"] == 0.25
    assert "energy_j" not in FAILED.to_dict()
    assert '"energy_j":0.25' in answer_of(GOOD, "", None).text


def test_new_field_is_a_column_with_its_unit() -> None:
    table = Predictions([GOOD, FAILED]).to_arrow()
    assert table.column("energy_j").to_pylist() == [0.25, None]
    assert table.schema.field("energy_j").metadata == {b"unit": b"J"}


def test_new_field_is_a_column_of_answered_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "Prediction", WithEnergy)
    rows = [answers.answer_row(0, GOOD, (0.1,)), answers.answer_row(1, FAILED, (0.1,))]
    text = ",".join(answers.answer_columns((0.1,))) + "\n" + answers.encode(rows, (0.1,), "csv")
    assert [row["energy_j"] for row in csv.DictReader(io.StringIO(text))] == ["0.25", ""]
    assert answers.encode(rows, (0.1,), "parquet").column("energy_j").to_pylist() == [0.25, None]


def test_new_field_is_in_the_schema_of_the_service() -> None:
    schema = result_model(WithEnergy).model_json_schema()
    assert schema["properties"]["energy_j"]["description"] == "Energy of one run."
    assert schema["properties"]["energy_j"]["exclusiveMinimum"] == 0
    assert "energy_j" in schema["required"]
    assert "domain_reason" not in schema["required"]


def test_every_field_but_the_error_is_declared() -> None:
    assert [*Prediction.declarations(), "error"] == [f.name for f in module.fields(Prediction)]
