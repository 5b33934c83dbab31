"""Files that commands read: text and JSON, also from standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cdmpp.errors import DataError


def read_text(path: Path) -> str:
    """The text of a file, or of standard input for ``-``.

    Raises
    ------
    DataError
        The file cannot be read, or is no text.
    """
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}", hint="give the path of a text file") from None


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
