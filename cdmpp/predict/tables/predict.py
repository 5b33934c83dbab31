"""Prediction of a table, slice by slice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdmpp.errors import UnknownDeviceError
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import DEFAULT_QUANTILES, ErrorInfo, Query
from cdmpp.predict.tables.answers import Format, answer_row, encode, format_of, writing
from cdmpp.predict.tables.rows import FailedRow, RowReader, TableOptions
from cdmpp.predict.tables.sources import SLICE_ROWS, TableRow, TableSlice, open_table


@dataclass(frozen=True)
class TableTask:
    """What to predict of a table, and how to encode the answers; can be sent to other processes."""

    path: Path
    options: TableOptions
    #: Quantile levels.
    levels: tuple[float, ...] = DEFAULT_QUANTILES
    kind: Format = "csv"


@dataclass(frozen=True)
class AnsweredSlice:
    """Encoded answers of a slice."""

    #: As :func:`cdmpp.predict.tables.answers.encode`.
    body: Any
    #: Rows of the table, answers (one per row and device), and answers with an error.
    rows: int
    answers: int
    failed: int
    #: Row and error of the first failed answer.
    first_error: tuple[int, ErrorInfo] | None
    #: Share of the table that is read, 0 to 1.
    read: float


@dataclass
class TableSummary:
    """Counts of a finished table, as in :class:`AnsweredSlice`."""

    rows: int = 0
    answers: int = 0
    failed: int = 0
    first_error: tuple[int, ErrorInfo] | None = field(default=None)

    def add(self, part: AnsweredSlice) -> None:
        """Count a slice."""
        self.rows += part.rows
        self.answers += part.answers
        self.failed += part.failed
        self.first_error = self.first_error or part.first_error


class SlicePredictor:
    """Predicts slices of one table.

    ``predictor``: a local model, or the client of a service.
    Raises DataError: as :func:`cdmpp.predict.tables.sources.open_table` and
    :class:`cdmpp.predict.tables.rows.RowReader`.
    """

    def __init__(self, task: TableTask, predictor: Predictor) -> None:
        self._task, self._predictor = task, predictor
        self.source = open_table(task.path)
        self.reader = RowReader(self.source.columns, task.options)

    def __call__(self, part: TableSlice) -> AnsweredSlice:
        """Predict a slice.

        Raises UnknownDeviceError: a device of the task is not known; one that a row names is an error of its row.
        """
        return self.answer(part, self.read(part))

    def read(self, part: TableSlice) -> list[TableRow]:
        """Rows of a slice; not for several threads at once."""
        return list(self.source.read(part, self.reader.used))

    def answer(self, part: TableSlice, rows: list[TableRow]) -> AnsweredSlice:
        """Predict the rows of a slice; see :meth:`__call__`."""
        queries = [(row.number, query) for row in rows for query in self.reader.queries(row)]
        valid_queries = [query for _, query in queries if isinstance(query, Query)]
        predictions = iter(self._predictor.predict_queries(valid_queries, self._task.levels) if valid_queries else [])
        model_id = self._predictor.model_id
        answers, errors = [], []
        for number, query in queries:
            if isinstance(query, FailedRow):
                prediction = query.prediction(self._task.options, model_id)
            else:
                prediction = next(predictions)
            if (error := prediction.error) is not None:
                if error.code == UnknownDeviceError.code and self._task.options.devices:
                    raise UnknownDeviceError(error.message, hint=error.hint)
                errors.append((number, error))
            answers.append(answer_row(number, prediction, self._task.levels))
        body = encode(answers, self._task.levels, self._task.kind)
        return AnsweredSlice(body, len(rows), len(answers), len(errors), errors[0] if errors else None, part.read)


def predict_slices(predict: SlicePredictor, at_once: int = 1, rows: int = SLICE_ROWS) -> Iterator[AnsweredSlice]:
    """Answers of all slices in order, ``at_once`` of them computed at the same time (requests to a service)."""
    slices = predict.source.slices(rows)
    if at_once == 1:
        yield from map(predict, slices)
        return
    running: deque[Future[AnsweredSlice]] = deque()
    pool = ThreadPoolExecutor(at_once)
    try:
        for part in slices:
            running.append(pool.submit(predict.answer, part, predict.read(part)))
            if len(running) == at_once:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def write_answers(
    task: TableTask,
    parts: Iterable[AnsweredSlice],
    out: Path | None,
    progress: Callable[[AnsweredSlice], None] | None = None,
) -> TableSummary:
    """Write answers to a file, or to the standard output where ``out`` is None.

    Raises DataError: the file cannot be written. It is there only when every slice was answered.
    """
    format_of(out)
    summary = TableSummary()
    with writing(out, task.levels, task.kind) as write:
        for part in parts:
            write(part.body)
            summary.add(part)
            if progress is not None:
                progress(part)
    return summary
