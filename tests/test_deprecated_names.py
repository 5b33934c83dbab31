"""Old public names work for one release and warn."""

from __future__ import annotations

import asyncio

import pytest

import cdmpp
from cdmpp.predict.client import AsyncPredictorClient, PredictorClient
from cdmpp.predict.prediction import Prediction, Query
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


def test_client_predict_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[Prediction] = []
    monkeypatch.setattr(PredictorClient, "predict_queries", lambda self, queries, quantiles: expected)
    with PredictorClient("http://127.0.0.1:9") as client, pytest.warns(DeprecationWarning, match="use predict_queries"):
        assert client.predict_questions(QUERIES) is expected


def test_async_client_predict_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[Prediction] = []

    async def predict_queries(self: object, queries: object, quantiles: object) -> list[Prediction]:
        return expected

    monkeypatch.setattr(AsyncPredictorClient, "predict_queries", predict_queries)

    async def call() -> list[Prediction]:
        async with AsyncPredictorClient("http://127.0.0.1:9") as client:
            return await client.predict_questions(QUERIES)

    with pytest.warns(DeprecationWarning, match="use predict_queries"):
        assert asyncio.run(call()) is expected
