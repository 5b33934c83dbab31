"""Bounded reading of files from elsewhere: endless and unpacked content cannot fill the memory."""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import IO

from cdmpp.errors import DataError

#: Most bytes of a request, a pool of programs or a tuning database. A replay of a million nodes has 0.2 GB of JSON.
MAX_REQUEST_BYTES = 512 * 2**20
#: Most bytes of a configuration.
MAX_CONFIG_BYTES = 4 * 2**20
#: Most columns of a table.
MAX_COLUMNS = 4096
#: Most bytes that a gzip file unpacks to: these, and so many for each of its bytes. Traces and tables have 10 to 30.
_UNPACKED_BYTES, _UNPACKED_RATIO = 64 * 2**20, 100
_CHUNK = 2**20


def read_bytes(path: str | PathLike[str], max_bytes: int) -> bytes:
    """Content of a file or pipe.

    Raises
    ------
    OSError
        The file cannot be read, is a device, or has more than ``max_bytes``; ``strerror`` is the reason.
    """
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISFIFO(info.st_mode) or file.isatty()):
            raise OSError(errno.EINVAL, "it is a device, not a file", os.fspath(path))
        if stat.S_ISREG(info.st_mode) and info.st_size > max_bytes:
            raise _too_large(max_bytes)
        return read_at_most(file, max_bytes)


def read_text(path: str | PathLike[str], max_bytes: int) -> str:
    """Text of a UTF-8 file; errors as :func:`read_bytes`, and UnicodeDecodeError."""
    return read_bytes(path, max_bytes).decode()


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
    mode = os.stat(path).st_mode
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

    Raises
    ------
    DataError
        There are more than :data:`MAX_COLUMNS`, or two columns of one name.
    """
    check_width(path, len(names))
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path} has two columns called {twice[0]!r}", hint="rename or drop one")


def open_gzip(path: Path) -> io.BufferedReader:
    """The unpacked bytes of a gzip file; reading raises OSError where they are far more than the file's."""
    limit = _UNPACKED_BYTES + _UNPACKED_RATIO * path.stat().st_size
    return io.BufferedReader(_Bounded(gzip.GzipFile(path), limit), _CHUNK)


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
            raise OSError(errno.EFBIG, f"it unpacks to more than {self._max:,} bytes, as no trace or table does")
        return count

    def close(self) -> None:
        """See :class:`io.RawIOBase`."""
        self._stream.close()
        super().close()


def _too_large(max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes, the most that are read")
