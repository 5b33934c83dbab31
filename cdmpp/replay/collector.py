"""Large graphs without the garbage collector looking through them again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause cyclic garbage collection, if it is on.

    Reading a graph makes objects by the hundred thousand and no garbage: the collector, which runs whenever
    so many are new, took three quarters of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
