"""Tables of operators in files: text (one operator per line), CSV and Parquet, read in slices."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from cdmpp.errors import CdmppError, DataError, MissingDependencyError, install_hint
from cdmpp.utils.files import check_columns, check_parquet, check_regular

#: Rows of a slice: long enough for the network's batches, short enough for progress and for many workers.
SLICE_ROWS = 4096
#: Characters of a cell and bytes of a line; longer ones are errors of their row. TVM JSON of a program fits.
MAX_CELL = 4 * 2**20
MAX_LINE = 2 * MAX_CELL
FORMS = "a .txt file (one operator per line), .csv or .parquet"


@dataclass(frozen=True)
class TableSlice:
    """Consecutive rows of a table."""

    #: Number of the first row, from 1.
    first: int
    rows: int
    #: Byte of the file (text, CSV), or row of the row group (Parquet), where the slice starts.
    offset: int
    #: Row group (Parquet).
    group: int = 0
    #: Share of the table that is read after this slice, 0 to 1.
    read: float = 1.0


@dataclass(frozen=True)
class TableRow:
    """One row."""

    #: From 1: the line of a text file, else the row without the header.
    number: int
    #: Cells by column: texts from a CSV, Python values from Parquet.
    cells: Mapping[str, Any] | CdmppError


class TableSource(Protocol):
    """A file of rows."""

    columns: Sequence[str]

    def slices(self, rows: int = SLICE_ROWS) -> Iterator[TableSlice]:
        """Slices of ``rows`` rows at most, in order; the file is scanned as they are consumed."""

    def read(self, part: TableSlice, columns: Sequence[str]) -> Iterator[TableRow]:
        """Rows of a slice with these columns. Slices may be read in any order."""


def is_table(path: str | Path) -> bool:
    """Whether the name of a file is that of a table."""
    return Path(path).suffix.lower() in _SOURCES


def open_table(path: str | Path) -> TableSource:
    """Open a table by the extension of its name.

    Raises DataError: the file is missing, empty or not of its extension's format, or its header repeats a column;
    MissingDependencyError: it is a Parquet file, and pyarrow is not installed.
    """
    path = Path(path)
    kind = _SOURCES.get(path.suffix.lower())
    if kind is None:
        raise DataError(f"{path}: files of this kind are not read as tables", hint=f"pass {FORMS}")
    try:
        check_regular(path)
        source: TableSource = kind(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}", hint=f"pass {FORMS}") from None
    check_columns(path, source.columns)
    return source


class TextTable:
    """A text file with one operator per line; empty lines and lines that start with ``#`` are left out."""

    def __init__(self, path: Path) -> None:
        self._path, self.columns = path, ["program"]
        self._bytes = path.stat().st_size

    def slices(self, rows: int = SLICE_ROWS) -> Iterator[TableSlice]:
        """See :class:`TableSource`."""
        with self._path.open("rb") as file:
            number, first, start = 0, 1, 0
            for number, _ in enumerate(_lines(file), 1):
                if number - first + 1 == rows:
                    end = file.tell()
                    yield TableSlice(first, rows, start, read=end / self._bytes)
                    first, start = number + 1, end
            if number >= first:
                yield TableSlice(first, number - first + 1, start)

    def read(self, part: TableSlice, columns: Sequence[str]) -> Iterator[TableRow]:
        """See :class:`TableSource`."""
        with self._path.open("rb") as file:
            file.seek(part.offset)
            for number, line in zip(range(part.first, part.first + part.rows), _lines(file), strict=False):
                text = line.strip()
                if text and not text.startswith("#"):
                    yield TableRow(number, {"program": text})


class CsvTable:
    """A CSV file with a header; empty lines are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = path.stat().st_size
        with path.open("rb") as file:
            header = next(_records(_lines(file)), None)
            self._start = file.tell()
        if not isinstance(header, list):
            raise DataError(f"{path}: the file has no header", hint="the first line names the columns")
        self.columns = [name.strip() for name in header]

    def slices(self, rows: int = SLICE_ROWS) -> Iterator[TableSlice]:
        """See :class:`TableSource`."""
        with self._path.open("rb") as file:
            file.seek(self._start)
            number, first, start = 0, 1, self._start
            for number, _ in enumerate(_records(_lines(file)), 1):
                if number - first + 1 == rows:
                    end = file.tell()
                    yield TableSlice(first, rows, start, read=end / self._bytes)
                    first, start = number + 1, end
            if number >= first:
                yield TableSlice(first, number - first + 1, start)

    def read(self, part: TableSlice, columns: Sequence[str]) -> Iterator[TableRow]:
        """See :class:`TableSource`."""
        positions = [(self.columns.index(name), name) for name in columns]
        width = len(self.columns)
        with self._path.open("rb") as file:
            file.seek(part.offset)
            records = _records(_lines(file))
            for number, cells in zip(range(part.first, part.first + part.rows), records, strict=False):
                if isinstance(cells, CdmppError):
                    yield TableRow(number, cells)
                elif len(cells) == width:
                    yield TableRow(number, {name: cells[at] for at, name in positions})
                elif width == 1:  # only a program can have commas here, so its quotes may be left out
                    yield TableRow(number, {self.columns[0]: ",".join(cells)})
                else:
                    message = f"the row has {len(cells)} cells, the header has {width}"
                    yield TableRow(number, DataError(message, hint='quote texts with commas: "linear:m=1,n=2,k=3"'))


class ParquetTable:
    """A Parquet file."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise MissingDependencyError("a Parquet table needs pyarrow", hint=install_hint("plan")) from None
        try:
            check_parquet(path)
            self._file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise DataError(f"{path}: not a Parquet file: {error}", hint=f"pass {FORMS}") from None
        self.columns: list[str] = list(self._file.schema_arrow.names)
        self._next: tuple[Any, Iterator[Any]] | None = None

    def slices(self, rows: int = SLICE_ROWS) -> Iterator[TableSlice]:
        """See :class:`TableSource`."""
        metadata, first = self._file.metadata, 1
        for group in range(metadata.num_row_groups):
            length = metadata.row_group(group).num_rows
            for offset in range(0, length, rows):
                count = min(rows, length - offset)
                read = (first - 1 + count) / metadata.num_rows
                yield TableSlice(first, count, offset, group, read)
                first += count

    def read(self, part: TableSlice, columns: Sequence[str]) -> Iterator[TableRow]:
        """See :class:`TableSource`."""
        for number, cells in enumerate(self._batch(part, columns).to_pylist(), part.first):
            yield TableRow(number, cells)

    def _batch(self, part: TableSlice, columns: Sequence[str]) -> Any:
        """The slice as an Arrow table; slices that are read in order are decoded once."""
        import pyarrow as pa

        at = (part.group, part.offset, tuple(columns))
        if self._next is None or self._next[0] != at:
            batches = self._file.iter_batches(part.rows, row_groups=[part.group], columns=list(columns))
            skipped = 0
            while skipped < part.offset:
                skipped += next(batches).num_rows
            self._next = (at, batches)
            if skipped > part.offset:  # the last slice of a group, which is shorter than the others
                self._next = None
                group = self._file.read_row_group(part.group, list(columns))
                return group.slice(part.offset, part.rows)
        batches = self._next[1]
        table = pa.Table.from_batches([next(batches)])
        while table.num_rows < part.rows:
            table = pa.concat_tables([table, pa.Table.from_batches([next(batches)])])
        self._next = ((part.group, part.offset + part.rows, tuple(columns)), batches)
        return table


_SOURCES: dict[str, Any] = {".txt": TextTable, ".csv": CsvTable, ".parquet": ParquetTable}


def _lines(file: BinaryIO) -> Iterator[str]:
    """Lines of a file; of longer ones than :data:`MAX_LINE` bytes the rest is skipped."""
    while line := file.readline(MAX_LINE):
        rest = line
        while len(rest) == MAX_LINE and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE)
        # Spreadsheets start a file with a byte-order mark.
        yield line.decode("utf-8", errors="replace").removeprefix("\ufeff")


def _records(lines: Iterable[str]) -> Iterator[list[str] | DataError]:
    """Records of a CSV that are not empty; an error stands for a record that cannot be read."""
    csv.field_size_limit(MAX_CELL)
    reader = csv.reader(lines)
    while True:
        try:
            if record := next(reader):
                yield record
        except StopIteration:
            return
        except csv.Error as error:
            yield DataError(f"the row is not CSV: {error}", hint="check its quotes")
