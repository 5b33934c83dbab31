"""Accuracy metrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]

METRICS = ("n", "mape", "median_ape", "within_10", "within_20", "kendall_tau", "coverage")


def measure(
    predicted: Float, measured: Float, lower: Float | None = None, upper: Float | None = None
) -> dict[str, Any]:
    """Error of predicted against measured latencies, all in one unit.

    Parameters
    ----------
    predicted, measured : float64 array, (rows,)
    lower, upper : float64 array, optional
        The 80 % interval; without it ``coverage`` is None.

    Returns
    -------
    dict
        ``n``; ``mape`` and ``median_ape`` (mean and median of |predicted / measured - 1|), ``within_10``
        and ``within_20`` (shares of rows), ``coverage`` (share of rows inside the interval): fractions, not
        per cent; ``kendall_tau`` (tau-b). None where there are too few rows to say.
    """
    n = len(measured)
    if not n:
        return {"n": 0, **dict.fromkeys(METRICS[1:])}
    error = np.abs(predicted / measured - 1)
    covered = None
    if lower is not None and upper is not None:
        covered = float(((measured >= lower) & (measured <= upper)).mean())
    return {
        "n": n,
        "mape": float(error.mean()),
        "median_ape": float(np.median(error)),
        "within_10": float((error <= 0.1).mean()),
        "within_20": float((error <= 0.2).mean()),
        "kendall_tau": kendall_tau(predicted, measured),
        "coverage": covered,
    }


def kendall_tau(predicted: Float, measured: Float) -> float | None:
    """Kendall's tau-b, O(n log n); None for fewer than two rows or when one side is constant.

    Equal to ``scipy.stats.kendalltau``, without its p-value and without scipy.
    """
    rows = len(measured)
    if rows < 2:
        return None
    x, y = _ranks(predicted), _ranks(measured)
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    both = x * (int(y.max()) + 1) + y
    ties_x, ties_y, ties_both = (_tied_pairs(values) for values in (x, y, both))
    pairs = rows * (rows - 1) // 2
    if ties_x == pairs or ties_y == pairs:
        return None
    # Rows are sorted by x, then y: each inversion of y is a discordant pair.
    agreement = pairs - ties_x - ties_y + ties_both - 2 * _inversions(y)
    tau = agreement / math.sqrt(pairs - ties_x) / math.sqrt(pairs - ties_y)
    return min(1.0, max(-1.0, tau))


def _ranks(values: Float) -> NDArray[np.int64]:
    """Dense ranks: 0 for the smallest, equal values share one."""
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _tied_pairs(ranks: NDArray[np.int64]) -> int:
    """Pairs of equal elements."""
    counts = np.unique(ranks, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())


def _inversions(ranks: NDArray[np.int64]) -> int:
    """Pairs in the wrong order, bit by bit: the highest bit in which two ranks differ decides.

    Elements that agree in all higher bits form a group, in their original order. Within a group, each element with
    the bit set is discordant with every later one without it.
    """
    found, place = 0, np.arange(len(ranks))
    for bit in reversed(range(int(ranks.max()).bit_length())):
        high = (ranks >> bit) & 1
        starts = np.flatnonzero(np.diff(ranks >> (bit + 1), prepend=-1))
        sizes = np.diff(starts, append=len(ranks))
        start, zeros = (np.repeat(v, sizes) for v in (starts, sizes - np.add.reduceat(high, starts)))
        ones_before = np.cumsum(high) - high
        ones_before -= ones_before[start]
        found += int(ones_before[high == 0].sum())
        # Within each group, elements without the bit come first; the order is otherwise kept.
        split = np.empty_like(ranks)
        split[np.where(high, start + zeros + ones_before, place - ones_before)] = ranks
        ranks = split
    return found
