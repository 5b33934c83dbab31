"""Restrictions that a reading worker applies to its own process: memory, files, connections and signals.

Landlock on Linux restricts an unprivileged process permanently. A worker can read the code that it imports and nothing
else: no settings file, no database, no key. It cannot write files, open connections or trace the service's process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
#: Number of file rights (bits 0 and up) by the first Landlock version that has them.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
#: First versions that restrict TCP (bind and connect), and abstract sockets and signals.
_TCP_SINCE, _SCOPES_SINCE = 4, 6


def confine_files(readable: Iterable[str]) -> bool:
    """Forbid every file access except reading beneath ``readable``; forbid TCP, and signals to other processes.

    Call it before any thread is started: it applies to this thread and to the threads that it starts. Folders that are
    missing are skipped. Returns False if the system has no Landlock; nothing is restricted then.
    Raises OSError: the system has Landlock and refuses the call.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    if version < 1:  # an old kernel, or switched off
        return False
    files = (1 << max(bits for since, bits in _FILE_RIGHTS.items() if since <= version)) - 1
    fields = [files]
    if version >= _TCP_SINCE:
        fields.append(0b11)
    if version >= _SCOPES_SINCE:
        fields.append(0b11)
    rules = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = _checked(libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0))
    try:
        for folder in sorted(set(map(os.path.realpath, readable))):
            if os.path.isdir(folder):
                _allow(libc, ruleset, folder)
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


def _allow(libc: ctypes.CDLL, ruleset: int, folder: str) -> None:
    parent = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        # struct landlock_path_beneath_attr is packed.
        rule = struct.pack("=Qi", _READ_FILE | _READ_DIR, parent)
        _checked(libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(parent)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result


#: Enough for the pipes to the service and for late imports.
MAX_OPEN_FILES = 32
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the service ends, even by kill -9 (Linux only).

    On other systems an idle worker ends at the end of its pipe, and a busy one at its job's alarm.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)


def code_folders() -> list[str]:
    """Return the folders that imports need: interpreter, packages, system libraries and this project.

    ``/proc/self`` is included, because the worker reads the size of its mapped memory.
    """
    import cdmpp
    import cdmpp_server

    packages = [folder for package in (cdmpp, cdmpp_server) for folder in package.__path__]
    sites = [entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/proc/self"]
    return [sys.prefix, sys.base_prefix, *sites, *packages, *system]


def keep_to_code() -> bool:
    """Restrict files to :func:`code_folders` and forbid connections; False if the system has no support.

    Call it before an import that starts threads.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    return confine_files(code_folders())


def confine(memory_bytes: int, max_open_files: int = MAX_OPEN_FILES, *, writes: bool = False) -> bool:
    """Limit memory and files of this process permanently.

    ``memory_bytes``: address space beyond what is mapped now, so that the libraries do not count. ``writes``: whether
    the process may write files. Returns whether memory is limited: False if the size of the mapped memory is unknown.
    """
    # No core file, which could contain a client's program.
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: max_open_files}
    for limit, value in limits.items() if writes else {**limits, resource.RLIMIT_FSIZE: 0}.items():
        resource.setrlimit(limit, (value, value))
    mapped = _mapped_bytes()
    if mapped is None:
        return False
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
    return True


def give_way(role: str) -> None:
    """Lower the priority of this process below that of the service.

    Searches of waiting clients (``inline``) have priority over those of ``jobs``.
    """
    os.nice(5 if role == "inline" else 15)
    if hasattr(os, "SCHED_BATCH"):  # Linux; SCHED_IDLE would never run on a busy machine
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if role == "jobs" and hasattr(os, "sched_setaffinity"):
        # A thread that wakes up may have to wait until one of a lower priority has ended its time slice. So jobs
        # leave one core free, whatever the number of their threads.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[1:] or cores)


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
