"""Standard output and error of the commands: control characters are escaped, and a failed write is an error."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import TYPE_CHECKING, NoReturn

from cdmpp.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

#: Characters that change what a terminal shows: control characters except tab and newline, and text directions.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Text with control characters as escapes, such as ``\\x1b``: names in files from elsewhere may contain them."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class SafeStream(io.TextIOWrapper):
    """A standard stream that escapes control characters, and what its encoding lacks.

    A failed write raises DataError; later writes are discarded, so that the error is reported once. A closed pipe
    remains BrokenPipeError. ``unfiltered`` is the same stream with control characters, for progress bars.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=stream.line_buffering
        )
        self.unfiltered = stream

    def write(self, text: str, /) -> int:
        """Write text; returns its length."""
        try:
            super().write(escape_controls(text))
        except OSError as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            super().flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> NoReturn:
        if isinstance(error, BrokenPipeError):
            raise error
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        raise DataError(
            f"cannot write the output: {error.strerror}",
            hint="free space on the disk, or redirect the output elsewhere",
        ) from None


def protect_streams() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr``; closed ones fail on the first output, and are silent, respectively."""
    if sys.stdout is None:
        # Opened for reading, so that each write fails as on the closed descriptor.
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: SIM115  # for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))


def progress_console() -> Console:
    """A console on the standard error for progress bars, which control the terminal."""
    from rich.console import Console

    return Console(file=getattr(sys.stderr, "unfiltered", sys.stderr))
