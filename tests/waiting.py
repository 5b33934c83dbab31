"""Waiting for what another thread or process does, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

#: Seconds after which a wait counts as failed; a test that passes never needs them.
PATIENCE_S = 600.0


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return when ``condition()`` is true; ``what`` names it in the error message."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} was not met within {PATIENCE_S:g} s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie; needs /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
