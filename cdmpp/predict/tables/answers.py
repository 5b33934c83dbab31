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
from cdmpp.predict.prediction import ERROR_COLUMNS, Prediction, is_number
from cdmpp.utils.writing import check_output, replacing

Format = Literal["csv", "parquet"]
Write = Callable[[Any], object]
#: Rows of a row group of a Parquet file.
GROUP_ROWS = 65_536


def answer_columns(levels: Sequence[float]) -> list[str]:
    """Columns of the answers: the row's number in the table, and the fields of :class:`Prediction`."""
    return list(_types(levels))


def answer_row(number: int, p: Prediction, levels: Sequence[float]) -> tuple[Any, ...]:
    """Values of :func:`answer_columns`; None where there is none."""
    values: list[Any] = [number]
    for name in p.declarations():
        if name == "quantiles":
            values += (p.quantiles.get(f"{level:g}") for level in levels)
        else:
            values.append(getattr(p, name))
    return (*values, *(p.error and getattr(p.error, attribute) for attribute in ERROR_COLUMNS.values()))


def _types(levels: Sequence[float]) -> dict[str, str]:
    """Arrow types of the columns by name."""
    types = {"row": "int64"}
    for name, declaration in Prediction.declarations().items():
        if name == "quantiles":
            types |= {f"quantile_{level:g}_s": "double" for level in levels}
        else:
            types[name] = "double" if is_number(declaration) else "string"
    return types | dict.fromkeys(ERROR_COLUMNS, "string")


def format_of(path: Path | None) -> Format:
    """Format of a file of answers by its extension; CSV for the standard output.

    Raises DataError: the extension is another, or the file cannot be written; MissingDependencyError: the
    format is Parquet, and pyarrow is not installed.
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

    Raises DataError: the file cannot be written.
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
    types = _types(levels)
    return pa.schema([pa.field(n, pa.type_for_alias(kind), nullable=n != "row") for n, kind in types.items()])


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingDependencyError("Parquet needs pyarrow", hint=install_hint("plan")) from None
    return pa, pq
