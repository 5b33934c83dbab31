"""Files that are written aside and then renamed, so that no half file is ever seen."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from cdmpp.errors import DataError

#: The disk is full, or what one may use of it.
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """The file to write in place of ``path``: renamed to it at the end, removed if anything fails.

    Raises
    ------
    DataError
        The file cannot be written; a previous file at ``path`` is kept. The hint names a full disk.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield aside
        aside.replace(target)
    except OSError as error:
        hint = "make room on its disk" if error.errno in _FULL else "check the folder"
        raise DataError(f"cannot write {target}: {error.strerror or error}", hint=hint) from None
    finally:
        with suppress(OSError):
            aside.unlink()
