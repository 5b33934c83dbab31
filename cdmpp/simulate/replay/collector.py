"""Pauses of the garbage collector while large graphs are read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause cyclic garbage collection, if it is on.

    Reading a graph makes hundreds of thousands of objects and no garbage. The collector, which runs again and again
    as objects are made, took three quarters of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
