"""Ratios of functions that take turns in one run, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call; every round calls each function once.

    ``clock``: ``time.process_time`` for one thread on a shared core.
    """
    for _ in range(warm_up):
        for function in functions.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            started = clock()
            function()
            seconds[name].append(clock() - started)
    return seconds


def median_ratio(slow: list[float], fast: list[float]) -> float:
    """Median over the rounds of slow / fast."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))
