"""Old public names work for one release and warn."""

from __future__ import annotations

import pytest

import cdmpp
from cdmpp.predict.prediction import Query
from cdmpp.predict.predictor import LatencyPredictor
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
