"""Writing of exported plans."""

from __future__ import annotations

from os import PathLike

from cdmpp.plan.formats.formats import Exported
from cdmpp.utils.writing import replacing


def write_export(exported: Exported, path: str | PathLike[str]) -> None:
    """Write an exported plan; the file is replaced atomically.

    Raises
    ------
    DataError
        The file cannot be written; a previous file is kept.
    """
    with replacing(path) as aside:
        aside.write_text(exported.text, encoding="utf-8", newline="")
