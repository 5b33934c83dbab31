"""Memory bandwidth as a plain copy sees it, with as many pinned threads as programs will have."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

#: All arrays together are this much larger than the last cache, so that the copy is one of memory ...
CACHE_FACTOR = 4.0
#: ... but no larger than this share of the memory that is free, and not more than this.
MEMORY_SHARE = 0.25
MOST_BYTES = 2**32
LEAST_BYTES = 2**28
_PASSES = 9


def copy_bytes(cache_bytes: float | None) -> int:
    """Size of all arrays together."""
    wanted = max(LEAST_BYTES, CACHE_FACTOR * (cache_bytes or 0.0))
    if sys.platform == "linux":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        wanted = min(wanted, max(MEMORY_SHARE * free, LEAST_BYTES / 4))
    return int(min(wanted, MOST_BYTES))


def measure_copy(cores: Sequence[int], total_bytes: int) -> float:
    """Bytes read and written per second by one copying thread per core, as STREAM counts them.

    The best of some passes after one that is not counted, as STREAM reports it: whatever else the machine
    does makes a pass slower, never faster. A pass lasts from its first thread's start to its last one's end, by their
    own clocks: the calling thread may get no core meanwhile. numpy gives up the interpreter's lock while it copies.

    Parameters
    ----------
    cores : sequence of int
        One thread is pinned to each (on Linux; elsewhere the number counts alone).
    total_bytes : int
        Size of all arrays together.
    """
    count = max(total_bytes // (2 * len(cores) * 8), 1)
    barrier = threading.Barrier(len(cores) + 1)

    spans: list[tuple[float, float]] = []

    def work(core: int) -> None:
        try:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {core})  # of this thread alone
            source, target = np.ones(count), np.zeros(count)  # touched here, by the thread that copies them
            for _ in range(_PASSES + 1):
                barrier.wait()
                start = time.perf_counter()
                np.copyto(target, source)
                spans.append((start, time.perf_counter()))
                barrier.wait()
        except BaseException:
            barrier.abort()  # nobody waits for this thread
            raise

    rates: list[float] = []
    with ThreadPoolExecutor(len(cores)) as pool:
        workers = [pool.submit(work, core) for core in cores]
        try:
            for _ in range(_PASSES + 1):
                barrier.wait()
                barrier.wait()
                starts, ends = zip(*spans, strict=True)
                rates.append(2 * 8 * count * len(cores) / (max(ends) - min(starts)))
                spans.clear()
        except threading.BrokenBarrierError:
            pass  # a worker failed: its error is raised below
        except BaseException:
            barrier.abort()  # Ctrl-C: the workers would wait for this thread for ever
            raise
        failed = [error for error in (w.exception() for w in workers) if error]
    for error in sorted(failed, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return max(rates[1:])
