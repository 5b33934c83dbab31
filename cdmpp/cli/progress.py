"""Progress of commands on stderr: bars on a terminal; elsewhere lines of text, or nothing."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from cdmpp.cli.output import on_terminal
from cdmpp.cli.streams import progress_console


class Show(Protocol):
    """Shows how far a piece of work is."""

    def __call__(self, name: str, done: float, total: float, note: str = "") -> None:
        """``name`` identifies the piece; ``done`` of ``total`` units are finished. A total of 1.0 is a share."""


@contextmanager
def progress_display(*, lines: bool = False, transient: bool = True) -> Iterator[Show]:
    """Yield a function that shows progress.

    ``lines``: where stderr is not a terminal: whether to write lines of text, or nothing. ``transient``: whether bars
    disappear at the end.
    """
    if not on_terminal():
        yield ProgressLines(sys.stderr) if lines else lambda name, done, total, note="": None
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[note]}"))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    console = progress_console()
    with Progress(*columns, *times, console=console, transient=transient, speed_estimate_period=120) as bars:
        tasks: dict[str, Any] = {}

        def show(name: str, done: float, total: float, note: str = "") -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, note="")
            count = "" if total == 1.0 else f"{done:,} of {total:,}"
            bars.update(tasks[name], completed=done, total=total, note=", ".join(filter(None, (count, note))))

        yield show


class ProgressLines:
    """Progress as lines of text: at the beginning of a piece of work, one per interval, and at its end.

    ``every_s``: shortest time between two lines, in seconds. ``clock``: returns seconds.
    """

    def __init__(self, stream: TextIO, every_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._every_s, self._clock = stream, every_s, clock
        self._name, self._first, self._started_s, self._printed_s = "", 0.0, 0.0, -math.inf

    def __call__(self, name: str, done: float, total: float, note: str = "") -> None:
        """Print a line if one is due."""
        now_s = self._clock()
        if name != self._name:  # units that an earlier call has finished say nothing about the speed
            self._name, self._first, self._started_s, self._printed_s = name, done, now_s, -math.inf
        if now_s < self._printed_s + self._every_s and done < total:
            return
        self._printed_s = now_s
        line = ", ".join(filter(None, (f"{name} {done:,} of {total:,}", note)))
        if self._first < done < total:
            left_s = (now_s - self._started_s) / (done - self._first) * (total - done)
            line += f", about {max(1, round(left_s / 60))} min left"
        print(line, file=self._stream, flush=True)


@contextmanager
def progress_bar(name: str, unit: str) -> Iterator[Callable[[float, int], None]]:
    """Yield a function that takes the share of the work, 0 to 1, and a number of finished units to add."""
    finished = 0
    with progress_display() as show:

        def advance(share: float, count: int) -> None:
            nonlocal finished
            finished += count
            show(name, share, 1.0, f"{finished:,} {unit}")

        yield advance


@contextmanager
def steps(name: str, total: int) -> Iterator[Callable[..., None]]:
    """Yield a function that is called after each step, or with a number of steps."""
    done = 0
    with progress_display() as show:

        def advance(count: int = 1) -> None:
            nonlocal done
            done += count
            show(name, done, total)

        advance(0)
        yield advance
