"""Number of files and connections that a process may have open."""

from __future__ import annotations

import sys
from contextlib import suppress


def descriptor_limit() -> int:
    """Number of files that this process may open."""
    if sys.platform == "win32":
        return 2**31
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files as the system allows."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The system may refuse even its own hard limit; the present limit then stays.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
