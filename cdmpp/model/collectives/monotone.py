"""Monotone fit of a curve: weighted least squares, by pooling adjacent violators."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def rising(values: Array, weights: Array) -> Array:
    """The nearest values that do not fall; unchanged where they rise already.

    Parameters
    ----------
    values, weights : (n,)
        ``weights`` are positive.
    """
    if (np.diff(values) >= 0).all():
        return values
    blocks: list[list[float]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1.0
        while blocks and blocks[-1][0] >= mean:
            before, its, its_length = blocks.pop()
            mean = (mean * total + before * its) / (total + its)
            total, length = total + its, length + its_length
        blocks.append([mean, total, length])
    fitted = np.concatenate([np.full(int(length), mean) for mean, _, length in blocks])
    return np.maximum.accumulate(fitted)
