"""Lock of a folder, and errors of a full or damaged disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cdmpp.errors import DataError, MeasurementError

_FULL = "no space left on the disk of {}"
_MAKE_ROOM = "free some space and repeat the same command to resume"
#: Free space below which the disk counts as full: a failing linker removes its partial output.
_ROOM_BYTES = 16 * 2**20


def take_lock(path: Path) -> int:
    """Lock the folder until this process ends; the system releases the lock even after a kill."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise DataError(
            f"{path.parent} is in use by {owner}", hint="wait for it, stop it, or choose another --out"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


@contextmanager
def disk_errors(file: Path) -> Iterator[None]:
    """Convert errors of the disk to errors with a hint; earlier writes stay."""
    folder = file.parent
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error):
            raise _full(folder) from None
        raise DataError(f"{file}: {error}", hint="check that the disk is neither full nor read-only") from None
    except sqlite3.IntegrityError:
        raise  # a bug in this package, not a damaged file
    except sqlite3.DatabaseError as error:
        raise DataError(f"{file} is damaged: {error}", hint="move it away; records.parquet is not affected") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _full(folder) from None
        raise DataError(f"cannot write {folder}: {error.strerror or error}", hint="choose another --out") from None


def is_disk_full(folder: Path) -> bool:
    """Whether the disk of a folder, or of the compilers' temporary files, is full."""
    places = (folder, Path(tempfile.gettempdir()))
    return any(shutil.disk_usage(place).free < _ROOM_BYTES for place in places)


def disk_full_error(folder: Path) -> MeasurementError:
    """Error for a full disk during a build, which no program has caused."""
    return MeasurementError(_FULL.format(folder), hint=_MAKE_ROOM, transient=True)


def _full(folder: Path) -> DataError:
    return DataError(_FULL.format(folder), hint=_MAKE_ROOM)
