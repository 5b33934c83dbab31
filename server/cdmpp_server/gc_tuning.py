"""Python's search for cyclic garbage, made seldom while the service runs.

It stops every thread. By default it starts after 700 new containers and, now and then, looks at all there
are: the loaded model with its libraries, again and again, and each of the millions that a body of 16 MiB
can hold. What requests leave behind is nearly free of cycles and goes without it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: New containers before the first search, and how many searches before one that looks further back.
THRESHOLDS = (50_000, 10, 10)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Inside, what is loaded now is not looked at, and the rest seldom."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
