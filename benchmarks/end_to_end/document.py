"""Fills some of the generated parts of a document, and leaves the others as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cdmpp.errors import DataError


def put_parts(path: Path, parts: Mapping[str, str]) -> None:
    """Replace the text between ``<!-- generated:NAME -->`` and ``<!-- end -->``, for each name.

    Raises
    ------
    DataError
        The document does not have exactly one place for a part.
    """
    text = path.read_text(encoding="utf-8")
    for name, body in parts.items():
        mark = f"<!-- generated:{name} -->\n"
        pattern = re.compile(re.escape(mark) + r".*?<!-- end -->", flags=re.DOTALL)
        filled = f"{mark}\n{body}\n\n<!-- end -->"
        text, count = pattern.subn(lambda _, filled=filled: filled, text)  # type: ignore[misc]
        if count != 1:
            raise DataError(
                f"{path.name} has {count} places for the part {name!r}", hint="mark exactly one place per part"
            )
    path.write_text(text, encoding="utf-8")
