"""Bounded reading of files from elsewhere: bytes, JSON, TOML, CSV and packed files.

Only regular files are opened. Size, nesting, rows and unpacked bytes have limits, so no file can block a command or
fill the memory.
"""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import lzma
import os
import re
import select
import stat
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeVar

from cdmpp.errors import CdmppError, DataError

_T = TypeVar("_T")

#: Most bytes of a request, a pool of programs or a tuning database. A replay of a million nodes has 0.2 GB of JSON.
MAX_REQUEST_BYTES = 512 * 2**20
#: Most bytes of a configuration.
MAX_CONFIG_BYTES = 4 * 2**20
#: Most bytes of a file of a model folder.
MAX_MODEL_BYTES = 4 * 2**30
#: Most bytes of a TOML file. Python's reader takes about a second for each MiB.
_MAX_TOML_BYTES = 2**20
#: Most levels of lists and objects in JSON and TOML.
MAX_DEPTH = 100
#: Most characters of a cell of a CSV file that is read whole.
MAX_CELL = 2**15
_MAX_KEY_PARTS = 32
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){32}""")
#: Most columns and rows of a table.
MAX_COLUMNS, MAX_ROWS = 4096, 10**8
#: Most bytes that a gzip file unpacks to: these, and so many for each of its bytes. Traces and tables have 10 to 30.
_UNPACKED_BYTES, _UNPACKED_RATIO = 64 * 2**20, 100
_CHUNK = 2**20
_PIPE_WAIT_MS = 1000


def open_file(path: str | PathLike[str], *, pipe: bool = False) -> io.BufferedReader:
    """Open a file; OSError, whose ``strerror`` is the reason, where it is not regular, before a read could block.

    ``pipe`` accepts a FIFO too. It is empty where no process opens it for writing within a second.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if pipe and stat.S_ISFIFO(mode):
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(_PIPE_WAIT_MS)
            os.set_blocking(descriptor, True)
        else:
            _check_mode(mode, path)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | PathLike[str], max_bytes: int, *, pipe: bool = False) -> bytes:
    """Content of a file; OSError as :func:`open_file`, or where it has more than ``max_bytes``."""
    with open_file(path, pipe=pipe) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise _too_large(max_bytes)
        return read_at_most(file, max_bytes)


def read_text(path: str | PathLike[str], max_bytes: int, *, pipe: bool = False) -> str:
    """Text of a UTF-8 file; errors as :func:`read_bytes`, and UnicodeDecodeError."""
    return read_bytes(path, max_bytes, pipe=pipe).decode()


def parse_json(text: str | bytes, **options: Any) -> Any:
    """A JSON value; ValueError where it is not JSON, or is nested deeper than :data:`MAX_DEPTH`."""
    try:
        return _checked_depth(json.loads(text, **options))
    except RecursionError:
        raise _too_deep() from None


def parse_toml(text: bytes) -> dict[str, Any]:
    """The tables of a TOML document; ValueError where it is none, is nested too deeply, or has a very long dotted key.

    Reading such a key takes quadratic time.
    """
    document = text.decode("utf-8-sig")
    if _LONG_KEY.search(document):
        raise ValueError(f"a dotted key has more than {_MAX_KEY_PARTS} parts")
    try:
        table: dict[str, Any] = _checked_depth(tomllib.loads(document))
    except RecursionError:
        raise _too_deep() from None
    return table


def parse_number(value: Any) -> float:
    """A number or its text; ValueError or TypeError for anything else: booleans, and digits with underscores."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


_DECIMAL = re.compile(r"^(\d+),(\d+)$")


def parse_csv(text: bytes, max_rows: int) -> list[list[str]]:
    """Rows of a CSV document with stripped cells, without blank rows; ValueError where it is none or has too much.

    The separator is the comma, semicolon or tab that the first line has most; without the comma, decimals may have it.
    """
    rows: list[list[str]] = []
    document = io.StringIO(text.decode("utf-8-sig"), newline="")
    separator = max(",;\t", key=document.readline().count)
    document.seek(0)
    try:
        for row in csv.reader(document, delimiter=separator, skipinitialspace=True):
            cells = [cell.strip() for cell in row]
            if len(cells) > MAX_COLUMNS:
                raise ValueError(f"row {len(rows):,} has more than {MAX_COLUMNS:,} cells")
            if any(len(cell) > MAX_CELL for cell in cells):
                raise ValueError(f"row {len(rows):,} has a cell of more than {MAX_CELL:,} characters")
            if any(cells):
                rows.append(cells if separator == "," else [_DECIMAL.sub(r"\1.\2", cell) for cell in cells])
            if len(rows) > max_rows + 1:
                raise ValueError(f"it has more than {max_rows:,} rows")
    except csv.Error as error:
        raise ValueError(f"row {len(rows):,}: {error}") from None
    return rows


def parse_table(text: bytes, max_rows: int) -> list[dict[str, str]]:
    """Rows of a CSV document by the names of its header in lower case; a short row lacks its last columns.

    ValueError as :func:`parse_csv`, and where the header repeats a column or a row is longer than it.
    """
    header, *rows = parse_csv(text, max_rows) or [[]]
    header = [name.lower() for name in header]
    if repeated := [name for name, count in Counter(header).items() if count > 1]:
        raise ValueError(f"the header repeats column {repeated[0][:80]!r}")
    for number, row in enumerate(rows, 1):
        if len(row) > len(header):
            raise ValueError(f"row {number}: it has more cells than the header")
    return [dict(zip(header, row, strict=False)) for row in rows]


def read_json(
    path: str | PathLike[str], hint: str, *, max_bytes: int = MAX_CONFIG_BYTES, error: type[CdmppError] = DataError
) -> Any:
    """The value of a JSON file; ``error`` with ``hint`` if it cannot be read, or :func:`parse_json` refuses it."""
    return parse_file(path, parse_json, "JSON", hint, max_bytes=max_bytes, error=error)


def read_toml(path: str | PathLike[str], hint: str, *, error: type[CdmppError] = DataError) -> dict[str, Any]:
    """The tables of a TOML file; ``error`` with ``hint`` if it cannot be read, or :func:`parse_toml` refuses it."""
    return parse_file(path, parse_toml, "TOML", hint, max_bytes=_MAX_TOML_BYTES, error=error)


def parse_file(
    path: str | PathLike[str],
    parse: Callable[[bytes], _T],
    form: str,
    hint: str,
    *,
    max_bytes: int = MAX_CONFIG_BYTES,
    error: type[CdmppError] = DataError,
) -> _T:
    """What ``parse`` makes of a file; ``error`` where it cannot be read, or where ``parse`` raises ValueError.

    ``form`` is the name of the format in the message.
    """
    shown = os.fspath(path)[:200]
    try:
        return parse(read_bytes(path, max_bytes))
    except CdmppError:
        raise
    except OSError as reason:
        raise error(f"{shown}: cannot be read: {reason.strerror or reason}", hint=hint) from None
    except ValueError as reason:  # covers UnicodeDecodeError, and a null character in the path
        raise error(f"{shown}: not {form}: {reason}", hint=hint) from None


def read_at_most(stream: IO[bytes], max_bytes: int) -> bytes:
    """The rest of a stream; OSError where it has more than ``max_bytes``."""
    content = io.BytesIO()
    while chunk := stream.read(_CHUNK):
        if content.tell() + len(chunk) > max_bytes:
            raise _too_large(max_bytes)
        content.write(chunk)
    return content.getvalue()


def check_regular(path: str | PathLike[str]) -> None:
    """Raise OSError for a path that is no regular file: it could be endless, and cannot be read twice."""
    _check_mode(os.stat(path).st_mode, path)


def _check_mode(mode: int, path: str | PathLike[str]) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", os.fspath(path))


def check_width(path: Path, columns: int) -> None:
    """Refuse more columns than :data:`MAX_COLUMNS` with a DataError."""
    if columns > MAX_COLUMNS:
        raise DataError(
            f"{path} has more than {MAX_COLUMNS:,} columns, the most that are read",
            hint="leave out those that are not needed, or check the separators and line ends",
        )


def check_columns(path: Path, names: Sequence[str]) -> None:
    """Refuse a header.

    Raises DataError: there are more than :data:`MAX_COLUMNS`, or two columns of one name.
    """
    check_width(path, len(names))
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path} has two columns called {twice[0]!r}", hint="rename or drop one")


def open_gzip(path: Path) -> io.BufferedReader:
    """The unpacked bytes of a gzip file; reading raises OSError where they are far more than the file's."""
    return io.BufferedReader(_Bounded(gzip.GzipFile(path), _max_unpacked(path.stat().st_size)), _CHUNK)


def read_xz(path: Path, max_bytes: int) -> bytes:
    """The unpacked bytes of an xz file; OSError where they are more than ``max_bytes``, LZMAError for other files."""
    with open_file(path) as file, lzma.open(file) as stream:
        return read_at_most(stream, max_bytes)


def check_parquet(path: str | PathLike[str]) -> None:
    """Raise OSError where a Parquet file is not regular or unpacks to far more than its bytes; else as pyarrow."""
    import pyarrow.parquet as pq

    check_regular(path)
    metadata = pq.read_metadata(path)
    groups = range(metadata.num_row_groups)
    check_unpacked(sum(metadata.row_group(i).total_byte_size for i in groups), os.stat(path).st_size)
    if metadata.num_rows > MAX_ROWS:
        raise OSError(errno.EFBIG, f"it has more than {MAX_ROWS:,} rows")


def check_unpacked(unpacked_bytes: int, packed_bytes: int) -> None:
    """Raise OSError where content unpacks to far more than its packed bytes."""
    if unpacked_bytes > (limit := _max_unpacked(packed_bytes)):
        raise _unpacks(limit)


def open_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    """A member to read in pieces, of the stated size at most; ValueError where a piece could unpack to any size."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.flag_bits & 1:
        raise ValueError(f"{member.filename[:200]} is encrypted, or not packed by deflate")
    return archive.open(member)


def read_npz(content: bytes) -> dict[str, Any]:
    """The arrays of an npz file; OSError, ValueError or BadZipFile where it is damaged, or unpacks to far too much."""
    import numpy as np

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        check_unpacked(sum(member.file_size for member in archive.infolist()), len(content))
        for member in archive.infolist():
            with open_member(archive, member) as stream:
                if stream.read(6) != b"\x93NUMPY":  # numpy would unpack all of it, whatever size it states
                    raise ValueError(f"{member.filename[:200]} is no array")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)
    except MemoryError:
        raise ValueError("an array states an impossible size") from None


def _max_unpacked(packed_bytes: int) -> int:
    return _UNPACKED_BYTES + _UNPACKED_RATIO * packed_bytes


class _Bounded(io.RawIOBase):
    """A stream that fails after a number of bytes."""

    def __init__(self, stream: gzip.GzipFile, max_bytes: int) -> None:
        self._stream, self._max, self._left = stream, max_bytes, max_bytes

    def readable(self) -> bool:
        """See :class:`io.RawIOBase`."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """See :class:`io.RawIOBase`."""
        count = self._stream.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise _unpacks(self._max)
        return count

    def close(self) -> None:
        """See :class:`io.RawIOBase`."""
        self._stream.close()
        super().close()


def _checked_depth(value: Any) -> Any:
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        items = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _too_large(max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes, the most that are read")


def _unpacks(max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it unpacks to more than {max_bytes:,} bytes, as no trace or table does")
