"""Old public names work for one release and warn; former import paths give the present modules."""

from __future__ import annotations

from importlib import import_module

import pytest

import cdmpp
from cdmpp import former_paths
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


def test_former_import_paths_give_the_present_modules() -> None:
    for former, present in former_paths._PRESENT.items():
        assert import_module(f"cdmpp.{former}") is import_module(f"cdmpp.{present}")
