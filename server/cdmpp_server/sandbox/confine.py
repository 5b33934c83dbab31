"""What a reading worker may not do: applied by the process to itself."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

from cdmpp_server.sandbox.landlock import confine_files

#: Pipes to the service, and a few for imports that happen late.
MAX_OPEN_FILES = 32
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """End this process by a signal when the service's ends, also after kill -9 of the service (on Linux).

    Elsewhere the end of the pipe tells an idle worker, and each job's alarm one that is busy.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)


def code_folders() -> list[str]:
    """Where imports come from: the interpreter, its packages, the system's libraries and this project.

    And what the system says of the process itself.
    """
    import cdmpp
    import cdmpp_server

    packages = [folder for package in (cdmpp, cdmpp_server) for folder in package.__path__]
    sites = [entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/proc/self"]
    return [sys.prefix, sys.base_prefix, *sites, *packages, *system]


def keep_to_code() -> bool:
    """Give up all files but :func:`code_folders`, and connections; False where the system cannot do it.

    Before anything is imported that starts threads.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    return confine_files(code_folders())


def confine(memory_bytes: int) -> bool:
    """Limit memory and files of this process for good.

    Parameters
    ----------
    memory_bytes : int
        Address space beyond what is mapped now: libraries are not counted, whatever is read is.

    Returns
    -------
    bool
        Whether memory could be limited (not where the system does not tell how much is mapped).
    """
    # No core file with somebody's program in it, no file written.
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ):
        resource.setrlimit(limit, (value, value))
    return limit_memory(memory_bytes)


def limit_memory(memory_bytes: int) -> bool:
    """Limit the address space to this much beyond what is mapped now; False where that is not known."""
    mapped = _mapped_bytes()
    if mapped is None:
        return False
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
    return True


def _mapped_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
