"""Check whether the machine gives a core its full speed at this moment.

On a shared host a virtual core loses a quarter to a half of its speed for tenths of a second, while another tenant
works on the same physical core. Small matrix products of constant size show it within a millisecond. They do not show
contention for the last cache or for memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

#: Side of the matrices, products in one sample (some 30 us), and samples in one check, of which the median counts.
_SIDE, _PRODUCTS, _SAMPLES = 64, 4, 9
#: A core that slept has lower clocks for about this long; threads of a parallel program spin for less.
_WARM_S = 0.002
#: Time in which the full speed of each core is found at first.
_FIRST_S = 1.0


class QuietCheck:
    """Waits until the cores run at full speed.

    Parameters
    ----------
    cores : sequence of int
        Cores that the timed program uses; the calling thread is pinned to the first one and returns to it.
    tolerance : float
        Relative excess over the fastest check of a core up to which it runs at full speed.
    patience_s : float
        Longest time to wait for one program and to repeat its runs.
    """

    def __init__(self, cores: Sequence[int], tolerance: float, patience_s: float) -> None:
        self._cores, self._tolerance, self._patience_s = tuple(cores), tolerance, patience_s
        rng = np.random.default_rng(0)
        self._a, self._b = (rng.random((_SIDE, _SIDE), dtype=np.float32) for _ in range(2))
        self._out = np.empty_like(self._a)
        self._best_s = dict.fromkeys(self._cores, float("inf"))
        self._left_s = patience_s
        end = time.perf_counter() + _FIRST_S
        while time.perf_counter() < end:
            self.is_quiet()

    def begin(self) -> None:
        """Begin a program, with its full patience."""
        self._left_s = self._patience_s

    @property
    def has_patience(self) -> bool:
        """Whether waiting time is left for the present program."""
        return self._left_s > 0

    def spend(self, seconds: float) -> None:
        """Take repeated runs from the patience for the present program."""
        self._left_s -= seconds

    def is_quiet(self) -> bool:
        """Whether every core runs at full speed now."""
        quiet = True
        for core in reversed(self._cores):  # ends on the first one
            if len(self._cores) > 1:
                os.sched_setaffinity(0, {core})
                self._warm()
            seconds = float(np.median([self._sample_s() for _ in range(_SAMPLES)]))
            self._best_s[core] = min(self._best_s[core], seconds)
            quiet = quiet and seconds <= self._best_s[core] * (1 + self._tolerance)
        return quiet

    def wait(self) -> None:
        """Wait until the cores are quiet or the patience ends."""
        started = time.perf_counter()
        self._warm()
        while not self.is_quiet() and time.perf_counter() - started < self._left_s:
            pass
        self._left_s -= time.perf_counter() - started

    def _warm(self) -> None:
        end = time.perf_counter() + _WARM_S
        while time.perf_counter() < end:
            self._sample_s()

    def _sample_s(self) -> float:
        started = time.perf_counter()
        for _ in range(_PRODUCTS):
            np.dot(self._a, self._b, out=self._out)
        return time.perf_counter() - started
