"""Infrequent cyclic garbage collection while the service runs.

A collection stops every thread. By default Python starts one after 700 new containers, and some of them
scan all containers: the loaded model and its libraries, and the millions that a body of 16 MiB can hold.
Requests leave almost no reference cycles, so reference counting frees nearly all of their memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Collection thresholds of the three generations, as in ``gc.set_threshold``.
THRESHOLDS = (50_000, 10, 10)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Exclude the objects that exist now from collection, and collect the others less often."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
