"""Chrome traces read one event at a time: a file of any size needs the memory of its longest event."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from cdmpp.errors import DataError
from cdmpp.utils.files import check_regular, open_gzip

_CHUNK = 1 << 20
#: Text of one event, or of one field beside the events, in characters.
_MOST_TEXT = 64 << 20
_GZIP = b"\x1f\x8b"
_BLANKS = re.compile(r"[\s\ufeff]*")
#: Kineto writes numbers and names that are not quite JSON (control characters, inf).
_DECODER = json.JSONDecoder(strict=False)
_HINT = "write it again with prof.export_chrome_trace(), and copy the whole file"


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, decompressed where it is gzip.

    Raises
    ------
    DataError
        The file cannot be read.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            head = file.read(2)
        return open_gzip(path) if head == _GZIP else path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}", hint="give the path of a trace") from None


def read_chrome(path: Path, header: Callable[[str, Any], None]) -> Iterator[dict[str, Any]]:
    """Yield the events of a Chrome trace: an object with ``traceEvents``, or a bare list.

    Parameters
    ----------
    path : Path
    header : callable
        Called with the name and value of each field beside the events, where it stands in the file.

    Raises
    ------
    DataError
        The file ends before its JSON does, is not JSON, or has no list of events.
    """
    with opened(path) as file:
        text = _Text(path, TextIOWrapper(file, encoding="utf-8", errors="replace"))
        first = text.peek()
        if first == "[":
            yield from _elements(text)
        elif first == "{":
            yield from _of_object(text, header)
        else:
            raise DataError(f"{path}: not a trace: it begins with {first!r}", hint="a Chrome trace is JSON")
        # What follows the events is of no interest.


def _of_object(text: _Text, header: Callable[[str, Any], None]) -> Iterator[dict[str, Any]]:
    text.skip("{")
    found = False
    while text.peek() != "}":
        name = text.value()
        text.skip(":")
        if name == "traceEvents":
            if text.peek() != "[":
                raise DataError(f"{text.path}: traceEvents is not a list", hint=_HINT)
            found = True
            yield from _elements(text)
        else:
            header(str(name), text.value())
        if text.peek() == ",":
            text.skip(",")
    if not found:
        raise DataError(
            f"{text.path}: JSON without traceEvents: not a profiler trace",
            hint="give a Chrome trace of torch.profiler, or a replay request (docs/replay.md)",
        )


def _elements(text: _Text) -> Iterator[dict[str, Any]]:
    text.skip("[")
    number = 0
    while (character := text.peek()) != "]":
        if character == ",":
            text.skip(",")
            continue
        value = text.value(f"event {number:,}")
        number += 1
        if not isinstance(value, dict):
            raise DataError(f"{text.path}: event {number - 1:,} is {str(value)[:40]!r}, not an object", hint=_HINT)
        yield value
    text.skip("]")


class _Text:
    """A window on the text of a file, from which JSON values are taken."""

    def __init__(self, path: Path, file: TextIOWrapper) -> None:
        self.path, self._file = path, file
        self._buffer, self._at, self._done = "", 0, 0
        self._ended = False

    def peek(self, wanted: str = "the next value") -> str:
        """The next character that is no space."""
        blanks = 0
        while True:
            end = _BLANKS.match(self._buffer, self._at).end()  # type: ignore[union-attr]  # it matches ""
            blanks += end - self._at
            self._at = end
            if end < len(self._buffer):
                return self._buffer[end]
            if blanks > _MOST_TEXT:
                raise DataError(f"{self.path}: not a trace: {blanks:,} blanks in a row", hint=_HINT)
            if not self._more():
                raise self._truncated(wanted)

    def skip(self, character: str) -> None:
        """Pass a character.

        Raises
        ------
        DataError
            Another one stands there.
        """
        if (there := self.peek(f"a {character!r}")) != character:
            raise DataError(
                f"{self.path}: not JSON: {there!r} at character {self._done + self._at:,}, expected {character!r}",
                hint=_HINT,
            )
        self._at += 1

    def value(self, wanted: str = "a value") -> Any:
        """The next JSON value."""
        self.peek(wanted)
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
                if end < len(self._buffer) or self._ended:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - 12
                if not cut or len(self._buffer) - self._at > _MOST_TEXT:
                    raise DataError(
                        f"{self.path}: not JSON: {error.msg} at character {self._done + error.pos:,}", hint=_HINT
                    ) from None
                if self._ended:
                    raise self._truncated(wanted) from None
            except RecursionError:
                raise DataError(f"{self.path}: not a trace: nested too deeply", hint=_HINT) from None
            self._more()

    def _more(self) -> bool:
        """Read on; False at the end of the file."""
        if self._ended:
            return False
        try:
            # At least as much again as is left, so that a long event is not decoded many times.
            read = self._file.read(max(_CHUNK, len(self._buffer) - self._at))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{self.path}: the gzip file is cut or damaged: {error}", hint=_HINT) from None
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}", hint=_HINT) from None
        self._ended = not read
        self._done += self._at
        self._buffer = self._buffer[self._at :] + read
        self._at = 0
        return bool(read)

    def _truncated(self, wanted: str) -> DataError:
        size = self._done + len(self._buffer)
        if not size:
            return DataError(f"{self.path}: the file is empty", hint=_HINT)
        return DataError(
            f"{self.path}: the file is cut: it ends after {size:,} characters, where {wanted} is not complete",
            hint=_HINT,
        )
