"""Programs x devices with errors in place."""

from __future__ import annotations

from cdmpp.errors import CdmppError
from cdmpp.predict.prediction_matrix import Failed, PredictionMatrix

WRONG = Failed("wrong", CdmppError("no such thing"))


def test_results_are_in_order_with_errors_in_place() -> None:
    matrix = PredictionMatrix(["a", WRONG, "b"], ["x", WRONG])
    assert matrix.pairs() == [("a", "x"), ("b", "x")]

    def failed(row: str | Failed, column: str | Failed) -> str:
        return f"{row.name if isinstance(row, Failed) else row} {column.name if isinstance(column, Failed) else column}"

    results = matrix.results((f"{row}{column}" for row, column in matrix.pairs()), failed)
    assert results == [["ax", "a wrong"], ["wrong x", "wrong wrong"], ["bx", "b wrong"]]


def test_empty_matrix_has_no_pairs() -> None:
    matrix: PredictionMatrix[str, str] = PredictionMatrix([], ["x"])
    assert matrix.pairs() == [] and matrix.results([], lambda row, column: 0) == []
