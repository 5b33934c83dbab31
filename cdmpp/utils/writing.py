"""Output files: regular files are replaced atomically, streams such as FIFOs are written to."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from cdmpp.errors import DataError

#: The disk or the user's share of it is full.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFBLK: "a block device", stat.S_IFSOCK: "a socket"}


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """A temporary file to write, whose content gets to ``path`` at the end; it is removed if anything fails.

    A new or regular file is replaced atomically and keeps its permissions. The content of a symbolic link's target is
    replaced, not the link. A FIFO, a character device, and a file that is open as standard output get the bytes.

    Raises DataError: the file cannot be written; a previous file at ``path`` is kept. The hint names a full disk.
    """
    target = Path(path)
    info = check_output(target)
    try:
        if info is not None and _is_stream(info):
            with tempfile.TemporaryDirectory() as folder:
                aside = Path(folder) / target.name
                yield aside
                _copy(aside, target, info)
            return
        followed = Path(os.path.realpath(target))
        aside = followed.with_name(f".{followed.name}.{os.getpid()}.part")
        try:
            yield aside
            if info is not None:
                shutil.copymode(followed, aside)
            aside.replace(followed)
        finally:
            with suppress(OSError):
                aside.unlink()
    except OSError as error:
        hint = "make room on its disk" if error.errno in _FULL else "check the folder"
        raise _cannot_write(target, error.strerror or str(error), hint) from None


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write a UTF-8 text; see :func:`replacing`."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def check_output(path: str | PathLike[str]) -> os.stat_result | None:
    """Refuse a path that :func:`replacing` cannot write, before the work starts.

    Returns the status of the file; None: there is none yet.
    Raises DataError: the path names a folder, a block device or a socket, or its folder does not exist.
    """
    target = Path(path)
    try:
        info = target.stat()
    except FileNotFoundError:
        if not Path(os.path.realpath(target)).parent.is_dir():
            raise _cannot_write(target, "the folder does not exist", "create it, or name another") from None
        return None
    except OSError as error:
        raise _cannot_write(target, error.strerror or str(error), "name another file") from None
    kind = _KINDS.get(stat.S_IFMT(info.st_mode))
    if kind is not None:
        raise _cannot_write(target, f"it is {kind}", "name a regular file, a FIFO or a character device")
    return info


def check_new_folder(folder: Path) -> None:
    """Raise a :class:`DataError` unless there is no such path yet, or it is an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} already exists and is not empty", hint="choose a new folder for --out")


def make_folder(folder: Path) -> None:
    """Create a folder for the output of a command; a :class:`DataError` says why it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error.strerror or str(error), "choose another --out") from None


def _is_stream(info: os.stat_result) -> bool:
    return not stat.S_ISREG(info.st_mode) or _standard_stream(info) is not None


def _standard_stream(info: os.stat_result) -> int | None:
    """The descriptor of standard output or standard error that is this file, such as /dev/stdout."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(info, os.fstat(descriptor)):
                return descriptor
    return None


def _copy(source: Path, target: Path, info: os.stat_result) -> None:
    """Write a whole file to a stream."""
    descriptor = _standard_stream(info)
    if descriptor is not None:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # the content follows what is printed before
    place = target if descriptor is None else descriptor
    with source.open("rb") as read, open(place, "wb", closefd=descriptor is None) as write:
        shutil.copyfileobj(read, write)


def _cannot_write(path: Path, why: str, hint: str) -> DataError:
    return DataError(f"cannot write {path}: {why}", hint=hint)
