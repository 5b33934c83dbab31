"""Inputs of commands: text and JSON of files or standard input, and ``--dim`` of ONNX models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from cdmpp.errors import DataError
from cdmpp.utils.files import MAX_REQUEST_BYTES, parse_json, read_at_most, read_bytes


def read_text(path: Path) -> str:
    """The text of a file, or of standard input for ``-``.

    Raises DataError: the file cannot be read, is no text, or is too large.
    """
    try:
        if str(path) != "-":
            return read_bytes(path, MAX_REQUEST_BYTES, pipe=True).decode()
        if sys.stdin is None:
            raise DataError("-: the standard input is closed", hint="give the path of a text file")
        return read_at_most(sys.stdin.buffer, MAX_REQUEST_BYTES).decode()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror or error}", hint="give the path of a text file"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not text in UTF-8: {error.reason}", hint="give the path of a text file") from None


def read_json(path: Path) -> Any:
    """The JSON value of a file, or of standard input for ``-``.

    Raises DataError: the file cannot be read, or is not JSON.
    """
    text = read_text(path)
    try:
        return parse_json(text, parse_constant=_refuse)
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}", hint="docs/planning.md has examples") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """``--dim batch=4`` as a mapping."""
    sizes: dict[str, int] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            size = int(value)
        except ValueError:
            size = 0
        if not name or not equals or size < 1:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE, VALUE from 1", param_hint="--dim")
        sizes[name] = size
    return sizes
