"""Progress bars on stderr, only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cdmpp.cli.output import on_terminal
from cdmpp.cli.streams import progress_console

Advance = Callable[[float, int], None]


@contextmanager
def progress_bar(name: str, unit: str) -> Iterator[Advance]:
    """A function that shows progress: the share of the work, 0 to 1, and a number of finished units to add.

    Where stderr is not a terminal, it shows nothing.
    """
    if not on_terminal():
        yield lambda share, count: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn(name),
        BarColumn(),
        TextColumn(f"{{task.fields[finished]:,}} {unit}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=progress_console(), transient=True) as bar:
        task, finished = bar.add_task(name, total=1.0, finished=0), 0

        def advance(share: float, count: int) -> None:
            nonlocal finished
            finished += count
            bar.update(task, completed=share, finished=finished)

        yield advance


@contextmanager
def steps(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how far it is; the value is called after each step."""
    if not on_terminal():
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(console=progress_console(), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda: bars.advance(task)
