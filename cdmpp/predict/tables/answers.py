"""Answers of a table as CSV or Parquet."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from cdmpp.errors import DataError, MissingDependencyError, install_hint
from cdmpp.predict.prediction import Prediction
from cdmpp.utils.writing import check_output, replacing

Format = Literal["csv", "parquet"]
Write = Callable[[Any], object]
#: Rows of a row group of a Parquet file.
GROUP_ROWS = 65_536
_BEFORE = ("row", "name", "program_hash", "device", "backend", "protocol", "framework", "model_id")
_FIGURES = ("latency_s", "lower_s", "upper_s")
_AFTER = ("domain", "domain_score", "roofline_s", "domain_reason", "error_code", "error", "error_hint")
_NUMBERS = (*_FIGURES, "domain_score", "roofline_s")


def answer_columns(levels: Sequence[float]) -> list[str]:
    """Columns of the answers: the row's number in the table, and the fields of :class:`Prediction`."""
    return [*_BEFORE, *_FIGURES, *(f"quantile_{level:g}_s" for level in levels), *_AFTER]


def answer_row(number: int, p: Prediction, levels: Sequence[float]) -> tuple[Any, ...]:
    """Values of :func:`answer_columns`; None where there is none."""
    error = p.error
    return (
        number,
        p.name,
        p.program_hash,
        p.device,
        p.backend,
        p.protocol,
        p.framework,
        p.model_id,
        p.latency_s,
        p.lower_s,
        p.upper_s,
        *(p.quantiles.get(f"{level:g}") for level in levels),
        p.domain,
        p.domain_score,
        p.roofline_s,
        p.domain_reason,
        *((error.code, error.message, error.hint) if error is not None else (None, None, None)),
    )


def format_of(path: Path | None) -> Format:
    """Format of a file of answers by its extension; CSV for the standard output.

    Raises
    ------
    DataError
        The extension is another, or the file cannot be written.
    MissingDependencyError
        Parquet, and pyarrow is not installed.
    """
    if path is None or path.suffix.lower() == ".csv":
        kind: Format = "csv"
    elif path.suffix.lower() == ".parquet":
        kind = "parquet"
        _arrow()
    else:
        raise DataError(f"{path}: answers are not written in this format", hint="name a file .csv or .parquet")
    if path is not None:
        check_output(path)
    return kind


def encode(rows: Sequence[Sequence[Any]], levels: Sequence[float], kind: Format) -> Any:
    """Rows of :func:`answer_row` in a format: the text of a CSV without header, or an Arrow table."""
    if kind == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()
    pa, _ = _arrow()
    schema = _schema(levels)
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema)


@contextmanager
def writing(path: Path | None, levels: Sequence[float], kind: Format) -> Iterator[Write]:
    """A function that writes results of :func:`encode`, in order.

    The file appears under its name when the context ends without an error; until then it is written aside.

    Raises
    ------
    DataError
        The file cannot be written.
    """
    header = ",".join(answer_columns(levels)) + "\n"
    if path is None:
        sys.stdout.write(header)
        yield sys.stdout.write
        return
    with replacing(path) as aside:
        if kind == "csv":
            with aside.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file:
                file.write(header)
                yield file.write
        else:
            with _parquet_writer(aside, levels) as write:
                yield write


@contextmanager
def _parquet_writer(path: Path, levels: Sequence[float]) -> Iterator[Write]:
    """Collects tables to row groups of :data:`GROUP_ROWS`."""
    pa, pq = _arrow()
    waiting: list[Any] = []
    with pq.ParquetWriter(path, _schema(levels), compression="zstd") as file:

        def flush() -> None:
            if waiting:
                file.write_table(pa.concat_tables(waiting), row_group_size=GROUP_ROWS)
                waiting.clear()

        def write(table: Any) -> None:
            waiting.append(table)
            if sum(map(len, waiting)) >= GROUP_ROWS:
                flush()

        yield write
        flush()


def _schema(levels: Sequence[float]) -> Any:
    pa, _ = _arrow()

    def kind(name: str) -> Any:
        if name == "row":
            return pa.int64()
        return pa.float64() if name in _NUMBERS or name.startswith("quantile_") else pa.string()

    return pa.schema([pa.field(name, kind(name), nullable=name != "row") for name in answer_columns(levels)])


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingDependencyError("Parquet needs pyarrow", hint=install_hint("plan")) from None
    return pa, pq
