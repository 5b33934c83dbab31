"""Writing of exported plans."""

from __future__ import annotations

from os import PathLike

from cdmpp.data.writing import replacing
from cdmpp.exports.formats import Exported


def write_export(exported: Exported, path: str | PathLike[str]) -> None:
    """Write an exported plan; the file is replaced atomically.

    Raises
    ------
    DataError
        The file cannot be written; a previous file is kept.
    """
    with replacing(path) as aside:
        aside.write_text(exported.text, encoding="utf-8", newline="")
