"""Monotone least squares along one axis, by pooling adjacent violators."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def pool_adjacent_violators(values: Array, weights: Array | None = None) -> Array:
    """Nearest non-decreasing sequence by (weighted) least squares, (n,).

    ``weights``, (n,): positive; default: 1 each.
    """
    means: list[float] = []
    totals: list[float] = []
    lengths: list[int] = []
    for value, weight in zip(values.tolist(), [1] * len(values) if weights is None else weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while means and means[-1] > mean:
            before = totals.pop()
            mean = (means.pop() * before + mean * total) / (before + total)
            total, length = total + before, length + lengths.pop()
        means.append(mean)
        totals.append(total)
        lengths.append(length)
    return np.repeat(np.array(means), lengths)
