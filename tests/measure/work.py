"""Functions that worker processes of the tests run: what a program might do to its worker."""

from __future__ import annotations

import ctypes
import os
import time

from cdmpp.errors import MeasurementError


def double(value: int) -> int:
    return 2 * value


def process() -> int:
    return os.getpid()


def variable(name: str) -> str:
    return os.environ.get(name, "")


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def crash() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(3)


def hang() -> None:
    time.sleep(600)


def eat(size: int) -> int:
    return len(bytearray(size))


def complain(transient: bool) -> None:
    raise MeasurementError("the board is away", hint="wait", transient=transient)


def fail() -> None:
    raise ValueError("Traceback\n  File x\nInternalError: something deep\n  ^^^")


def mark(path: str, seconds: float) -> None:
    """Write who works, then work."""
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(seconds)


def shout(text: str) -> None:
    """As native code does: past Python's streams."""
    os.write(2, text.encode())
