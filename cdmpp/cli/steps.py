"""A bar of steps on a terminal; nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cdmpp.cli.output import on_terminal
from cdmpp.cli.streams import progress_console


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
