"""Waiting for what another thread or process does, however busy the machine is."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
#: Seconds after which a wait counts as failed; a test that passes never needs them.
PATIENCE_S = 600.0
#: Settings of services whose time limits play no part in a test. Planning processes start with the first plan.
PATIENT = {
    **{"CDMPP_DEADLINE_S": "600", "CDMPP_BODY_TIMEOUT_S": "600", "CDMPP_SANDBOX_TIMEOUT_S": "500"},
    "CDMPP_WARM_PLANS": "false",
}


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return when ``condition()`` is true; ``what`` names it in the error message."""
    pause_s, deadline = 0.02, time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} was not met within {PATIENCE_S:g} s"
        time.sleep(pause_s)
        # A condition may be a request to a service, which would have no time for anything else.
        pause_s = min(1.1 * pause_s, 0.2)


def run_python(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and further variables, and return when it has ended."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
    )


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie; needs /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def wait_until_async(condition: Callable[[], object]) -> None:
    """Let other tasks run until ``condition()`` is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps to the next timer as soon as no task can run. Not for work in threads."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._poll, self._selector.select = self._selector.select, self._select

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def _select(self, timeout: float | None = None) -> Any:
        events = self._poll(0)
        if not events and timeout is not None:
            self._now += timeout
        return events


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like :func:`asyncio.run`, with all waits on the clock at no cost."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
