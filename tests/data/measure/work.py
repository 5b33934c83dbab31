"""Functions that worker processes of the tests run, including harmful ones."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cdmpp.errors import MeasurementError, MissingDependencyError


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


def blocked_signals() -> list[int]:
    """Signals that were blocked when this process started."""
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def refuse() -> None:
    """As what a worker needs does where it is not installed."""
    raise MissingDependencyError("there is no engine", hint="install one")


def arrive(folder: str) -> None:
    """The first worker is ready at once, the next a second later."""
    try:
        Path(folder, "first").touch(exist_ok=False)
    except FileExistsError:
        time.sleep(1.0)
    Path(folder, str(os.getpid())).touch()


def compile_without_end(path: str) -> None:
    """Start a process, as a build starts a compiler, and wait for it."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        Path(path).write_text(str(child.pid))


def search_without(folder: str) -> None:
    """Prepare a search where a package of a folder hides the real one."""
    from cdmpp.data.measure.sampling import prepare_search

    sys.path.insert(0, folder)
    prepare_search("llvm")
