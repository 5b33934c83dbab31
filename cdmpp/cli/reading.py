"""Files that commands read: text and JSON, also from standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cdmpp.errors import DataError
from cdmpp.utils.files import MAX_REQUEST_BYTES, read_at_most, read_bytes


def read_text(path: Path) -> str:
    """The text of a file, or of standard input for ``-``.

    Raises
    ------
    DataError
        The file cannot be read, is no text, or is too large.
    """
    try:
        if str(path) != "-":
            return read_bytes(path, MAX_REQUEST_BYTES).decode()
        if sys.stdin is None:
            raise DataError("-: the standard input is closed", hint="give the path of a text file")
        return read_at_most(sys.stdin.buffer, MAX_REQUEST_BYTES).decode()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", hint="give the path of a text file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not text in UTF-8: {error.reason}", hint="give the path of a text file") from None


def read_json(path: Path) -> Any:
    """The JSON value of a file, or of standard input for ``-``.

    Raises
    ------
    DataError
        The file cannot be read, or is not JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}", hint="docs/planning.md has examples") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")
