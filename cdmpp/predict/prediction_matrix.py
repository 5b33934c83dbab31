"""Every program on every device, with the faulty ones in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cdmpp.errors import CdmppError

Row = TypeVar("Row")
Column = TypeVar("Column")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failed:
    """A row or column that cannot be predicted: its name as given, and the reason."""

    name: str
    error: CdmppError


class PredictionMatrix(Generic[Row, Column]):
    """Rows combined with columns, for example programs with devices; a :class:`Failed` cannot be predicted.

    >>> matrix = PredictionMatrix(["linear:m=1,n=1,k=1", Failed("wrong", CdmppError("no operator"))], ["t4", "l4"])
    >>> matrix.pairs()
    [('linear:m=1,n=1,k=1', 't4'), ('linear:m=1,n=1,k=1', 'l4')]
    >>> matrix.results([1e-6, 2e-6], lambda row, column: None)
    [[1e-06, 2e-06], [None, None]]
    """

    def __init__(self, rows: Sequence[Row | Failed], columns: Sequence[Column | Failed]) -> None:
        self._rows, self._columns = rows, columns

    def pairs(self) -> list[tuple[Row, Column]]:
        """The pairs to predict, row by row."""
        columns = [column for column in self._columns if not isinstance(column, Failed)]
        return [(row, column) for row in self._rows if not isinstance(row, Failed) for column in columns]

    def results(
        self, results: Iterable[Result], failed: Callable[[Row | Failed, Column | Failed], Result]
    ) -> list[list[Result]]:
        """One list of results per row.

        ``results``: one result for each of :meth:`pairs`, in that order. ``failed``: makes the result of a pair of
        which at least one is :class:`Failed`.
        """
        remaining = iter(results)
        return [
            [
                failed(row, column) if isinstance(row, Failed) or isinstance(column, Failed) else next(remaining)
                for column in self._columns
            ]
            for row in self._rows
        ]
