"""Old public names work for one release and warn."""

from __future__ import annotations

import pytest

import cdmpp
from cdmpp.plan.base.predict import predict_prices
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.requests.fields import PriceRequest
from cdmpp.programs.program import TensorProgram

QUERIES = [Query(TensorProgram.from_operator("softmax:rows=64,cols=256"), "t4")]


def test_question_is_query() -> None:
    with pytest.warns(DeprecationWarning, match=r"use cdmpp\.Query"):
        assert cdmpp.Question is Query
    with pytest.raises(AttributeError):
        _ = cdmpp.Questions


def test_predictor_predict_questions(predictor: LatencyPredictor) -> None:
    with pytest.warns(DeprecationWarning, match="use predict_queries"):
        assert predictor.predict_questions(QUERIES) == predictor.predict_queries(QUERIES)


def test_planners_accept_a_predictor_with_the_former_method(predictor: LatencyPredictor) -> None:
    class Former:
        model_id = predictor.model_id

        def predict_questions(self, queries: list[Query]) -> list[Prediction]:
            return predictor.predict_queries(queries)

    request = [PriceRequest("program", {"operator": "linear", "m": 8, "n": 8, "k": 8}, "t4")]
    with pytest.warns(DeprecationWarning, match="predict_queries"):
        assert predict_prices(request, Former()) == predict_prices(request, predictor)  # type: ignore[arg-type]
