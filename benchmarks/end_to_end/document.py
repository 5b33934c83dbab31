"""Puts tables into the marked parts of a document that has other marked parts too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cdmpp.errors import DataError


def put_parts(path: Path, parts: Mapping[str, str]) -> None:
    """Replace what stands between ``<!-- generated:NAME -->`` and ``<!-- end -->``, for each name.

    Raises
    ------
    DataError
        The document has no place for a part, or several.
    """
    text = path.read_text(encoding="utf-8")
    for name, body in parts.items():
        mark = f"<!-- generated:{name} -->\n"
        pattern = re.compile(re.escape(mark) + r".*?<!-- end -->", flags=re.DOTALL)
        filled = f"{mark}\n{body}\n\n<!-- end -->"
        text, found = pattern.subn(lambda _, filled=filled: filled, text)  # type: ignore[misc]
        if found != 1:
            raise DataError(f"{path.name}: {found} places for the part {name!r}", hint="there is one of each")
    path.write_text(text, encoding="utf-8")
