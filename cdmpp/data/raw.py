"""Raw tables on disk (Parquet, CSV, gzipped CSV) and their columns as arrays."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.arrow import pa, pa_csv, pc, pq
from cdmpp.data.labels import Labels, Mask
from cdmpp.errors import DataError
from cdmpp.utils.files import check_columns, check_parquet, check_width, open_file, open_gzip

#: Column that holds latencies -> how many of its units are a second.
LATENCY_UNITS = {"latency_us": 1e6, "latency_ms": 1e3, "latency_s": 1.0}
#: Bytes in which the header of a CSV ends.
_HEADER_BYTES = 2**20


@dataclass(frozen=True)
class IntColumn:
    """Whole numbers; ``missing`` and ``invalid`` (not whole, too large) rows hold 0."""

    values: NDArray[np.int64]
    missing: Mask
    invalid: Mask

    @classmethod
    def constant(cls, value: int, rows: int) -> IntColumn:
        """One value for every row."""
        no = np.zeros(rows, dtype=np.bool_)
        return cls(np.full(rows, value, dtype=np.int64), no, no)

    def times(self, other: IntColumn) -> IntColumn:
        """Product; missing or invalid where either is."""
        return self._with(other, self.values * other.values)

    def plus(self, other: IntColumn) -> IntColumn:
        """Sum; missing or invalid where either is."""
        return self._with(other, self.values + other.values)

    def minus(self, other: IntColumn) -> IntColumn:
        """Difference; missing or invalid where either is."""
        return self._with(other, self.values - other.values)

    def shard(self, ranks: IntColumn) -> IntColumn:
        """Share of one of so many ranks, rounded up; invalid where there is no rank."""
        share = self._with(ranks, -(-self.values // np.maximum(ranks.values, 1)))
        return IntColumn(share.values, share.missing, share.invalid | (~ranks.missing & (ranks.values < 1)))

    def _with(self, other: IntColumn, values: NDArray[np.int64]) -> IntColumn:
        return IntColumn(values, self.missing | other.missing, self.invalid | other.invalid)


@dataclass(frozen=True)
class RawTable:
    """Columns of one file, converted on access."""

    table: Any  # pyarrow.Table
    path: Path

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def columns(self) -> list[str]:
        """Column names."""
        return list(self.table.column_names)

    def labels(self, name: str, default: str = "") -> Labels:
        """A text column; ``default`` where the column is absent, "" where a cell is null."""
        if name not in self.columns:
            return Labels.constant(default, len(self))
        codes, names = _encoded(self.table.column(name))
        return Labels(np.where(codes < 0, len(names), codes).astype(np.int32), (*map(str, names), ""))

    def ints(self, name: str) -> IntColumn:
        """A column of whole numbers; every row is missing where the column is absent."""
        rows = len(self)
        none = np.zeros(rows, dtype=np.bool_)
        if name not in self.columns:
            return IntColumn(np.zeros(rows, dtype=np.int64), ~none, none)
        column = self.table.column(name)
        if pa.types.is_integer(column.type) and column.type != pa.uint64():
            missing = _numpy(pc.is_null(column))
            return IntColumn(_numpy(pc.fill_null(column, 0)).astype(np.int64), missing, none)
        if pa.types.is_floating(column.type):
            return _whole(_numpy(pc.fill_null(column, math.nan)).astype(np.float64), none)
        codes, names = _encoded(column)
        numbers = np.array([*map(_number, names), math.nan], dtype=np.float64)
        wrong = np.array([*(math.isnan(v) for v in numbers[:-1]), False], dtype=np.bool_)
        return _whole(numbers[codes], wrong[codes])

    def floats(self, name: str) -> NDArray[np.float64]:
        """A column of numbers; NaN where a cell is null or no number."""
        column = self.table.column(name)
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            return _numpy(pc.fill_null(column.cast(pa.float64()), math.nan)).astype(np.float64)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            try:
                return _numpy(pc.fill_null(column.cast(pa.float64()), math.nan))
            except pa.ArrowInvalid:
                pass  # some cell is no number: convert one by one
        codes, names = _encoded(column)
        return np.array([*map(_number, names), math.nan], dtype=np.float64)[codes]

    def latency_s(self) -> NDArray[np.float64]:
        """Seconds from ``latency_us``, ``latency_ms`` or ``latency_s``; NaN for missing values."""
        for name, per_second in LATENCY_UNITS.items():
            if name in self.columns:
                return self.floats(name) / per_second
        return np.full(len(self), math.nan)

    def bools(self, name: str) -> Mask | None:
        """A column of truth values (null is false), or None where it is absent."""
        if name not in self.columns:
            return None
        truths = {"true", "1", "1.0", "yes"}
        codes, names = _encoded(self.table.column(name))
        table = np.array([*(str(n).lower() in truths for n in names), False], dtype=np.bool_)
        return table[codes]


def read_columns(path: Path) -> list[str]:
    """Column names of a table on disk."""
    try:
        if _is_parquet(path):
            check_parquet(path)
            names = list(pq.read_schema(path).names)
        else:
            with _csv_stream(path) as stream:
                # Before pyarrow, which takes minutes for a hundred thousand columns.
                check_width(path, 1 + stream.read(_HEADER_BYTES).partition(b"\n")[0].count(b","))
            with _csv_stream(path) as stream:
                names = list(pa_csv.open_csv(stream).schema.names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    check_columns(path, names)
    return names


def read_raw(path: Path, columns: Collection[str]) -> RawTable:
    """Read those of ``columns`` that the file has; everything else is left on disk."""
    wanted = [name for name in read_columns(path) if name in columns]
    try:
        if _is_parquet(path):
            return RawTable(pq.read_table(path, columns=wanted), path)
        # As text: pyarrow guesses types from the first block alone, and a column may be empty there.
        options = pa_csv.ConvertOptions(
            include_columns=wanted, column_types=dict.fromkeys(wanted, pa.string()), strings_can_be_null=True
        )
        with _csv_stream(path) as stream:
            return RawTable(pa_csv.read_csv(stream, convert_options=options), path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _is_parquet(path: Path) -> bool:
    try:
        with open_file(path) as file:
            start = file.read(4)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", hint="check the path and its permissions"
        ) from None
    if not start:
        raise DataError(f"{path} is empty", hint="a table is Parquet, CSV or gzipped CSV")
    return start == b"PAR1"


def _csv_stream(path: Path) -> Any:
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return pa.PythonFile(open_gzip(path)) if zipped else pa.OSFile(str(path), "rb")


def _unreadable(path: Path, error: Exception) -> DataError:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    reason = text.splitlines()[0]
    hint = "a table is Parquet, CSV or gzipped CSV"
    if "Expected" in reason and "columns" in reason:
        hint = 'a cell with commas in it stands in quotes: "linear:m=512,n=4096,k=1024",12.5'
    return DataError(f"{path} is no readable table: {reason}", hint=hint)


def _encoded(column: Any) -> tuple[NDArray[np.int64], list[Any]]:
    """Codes (-1 for null) and distinct values of a column of any type."""
    try:
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
    except pa.ArrowException:
        raise DataError(f"a column of type {column.type} is neither text nor numbers") from None
    # Chunk by chunk: pyarrow cannot unify dictionaries of more than 2 GiB of text.
    index: dict[Any, int] = {}
    codes = [np.zeros(0, dtype=np.int64)]
    for chunk in column.chunks:
        # A null inside the dictionary is a null cell.
        remap = [-1 if name is None else index.setdefault(name, len(index)) for name in chunk.dictionary.to_pylist()]
        local = _numpy(pc.fill_null(chunk.indices.cast(pa.int64()), -1))
        codes.append(np.array([*remap, -1], dtype=np.int64)[local])
    return np.concatenate(codes), list(index)


def _numpy(array: Any) -> NDArray[Any]:
    options = {} if isinstance(array, pa.ChunkedArray) else {"zero_copy_only": False}
    result: NDArray[Any] = array.to_numpy(**options)
    return result


def _number(value: Any) -> float:
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _whole(numbers: NDArray[np.float64], wrong: Mask) -> IntColumn:
    missing = np.isnan(numbers) & ~wrong
    whole = np.isfinite(numbers) & (np.abs(numbers) < 2.0**53)
    whole &= np.where(whole, numbers, 0.5) == np.floor(np.where(whole, numbers, 0.0))
    values = np.where(whole, numbers, 0.0).astype(np.int64)
    return IntColumn(values, missing, ~whole & ~missing)
