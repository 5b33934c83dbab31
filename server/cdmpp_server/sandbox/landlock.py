"""Landlock on Linux: an unprivileged process permanently restricts its files, connections and signals.

A reading worker can read the code that it imports and nothing else: no settings file, no database, no key.
It cannot write files, open connections or trace the service's process.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
#: Number of file rights (bits 0 and up) by the first Landlock version that has them.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
#: First versions that restrict TCP (bind and connect), and abstract sockets and signals.
_TCP_SINCE, _SCOPES_SINCE = 4, 6


def confine_files(readable: Iterable[str]) -> bool:
    """Forbid every file access except reading beneath ``readable``; forbid TCP, and signals to other processes.

    Call it before any thread is started: it applies to this thread and to the threads that it starts.

    Parameters
    ----------
    readable : iterable of str
        Folders; missing ones are skipped.

    Returns
    -------
    bool
        False if the system has no Landlock; nothing is restricted then.

    Raises
    ------
    OSError
        The system has Landlock and refuses the call.
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
